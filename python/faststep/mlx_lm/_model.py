"""A causal language model of mlx-lm as the losses and the trainer take it: with packed rows, and texts to go on with.

Its class becomes a subclass of its own: what mlx-lm does with it stays as it is, parameters keep their names.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import mlx.core as mx
import mlx.nn as nn

from faststep._optional import need
from faststep.mlx_lm._folder import EXTRA
from faststep.mlx_lm._segments import Segments, check_packable
from faststep.mlx_lm._tokens import begins


@dataclass(frozen=True)
class Origin:
    """The origin of a model.

    Attributes:
        folder: Its folder.
        config: Its config, with the quantization that it has now.
        tokenizer: Its tokenizer, as mlx-lm wraps it.
        adapters: What `adapter_config.json` says of its adapters; None where it has none.
    """

    folder: Path
    config: dict[str, Any]
    tokenizer: Any
    adapters: dict[str, Any] | None = None


class LanguageModel(nn.Module):
    """A model of mlx-lm with additions: its origin, rows of several documents, and texts."""

    origin: ClassVar[Origin]

    def __call__(
        self,
        inputs: mx.array,
        *args: Any,
        segments: mx.array | None = None,
        positions: mx.array | None = None,
        **named: Any,
    ) -> mx.array:
        """Map tokens, integers [batch, seq], to logits, floating point [batch, seq, vocabulary].

        With `segments`, integers [batch, seq] as `faststep.data.Pack` gives them, tokens see those of their own number
        only. Its `positions` are not needed: rotary ones are relative, other models are refused.
        """
        if segments is None:
            return super().__call__(inputs, *args, **named)  # type: ignore[no-any-return]
        check_packable(self)
        caches = [Segments(segments)] * len(self.layers)
        return super().__call__(inputs, *args, cache=caches, **named)  # type: ignore[no-any-return]

    def complete(self, prompt: str, count: int, temperature: float = 0.0) -> str:
        """Let the model go on with a text.

        Args:
            prompt: The beginning.
            count: How many tokens at most; it ends sooner where the model does.
            temperature: What the logits are divided by; 0: always the likeliest token.

        Returns:
            The text that was added.
        """
        steps, tokenizer = need("mlx_lm.generate", EXTRA), self.origin.tokenizer
        sampler = need("mlx_lm.sample_utils", EXTRA).make_sampler(temp=temperature)
        tokens: list[int] = []
        for token, _ in steps.generate_step(
            mx.array(tokenizer.encode(prompt, add_special_tokens=not begins(tokenizer, prompt))),
            self,
            max_tokens=count,
            sampler=sampler,
        ):
            if int(token) in tokenizer.eos_token_ids:
                break
            tokens.append(int(token))
        return str(tokenizer.decode(tokens))


def as_language_model(model: nn.Module, origin: Origin) -> LanguageModel:
    """Give a model of mlx-lm what `LanguageModel` has, and its origin; its class changes, nothing else."""
    kind: Any = next(each for each in type(model).__mro__ if not issubclass(each, LanguageModel))
    body = {"origin": origin, "__module__": kind.__module__, "__doc__": kind.__doc__}
    model.__class__ = type(kind.__name__, (LanguageModel, kind), body)
    assert isinstance(model, LanguageModel)
    return model
