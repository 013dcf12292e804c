"""Samples of text during training."""

from __future__ import annotations

from typing import Any

from faststep.training._trainer import Callback, Trainer


class Samples(Callback):
    """A callback that lets a language model go on with prompts after each validation, and logs the texts as events.

    The model is one with `complete(prompt, count, temperature)`, as those of `mlx_lm` have it, or one of bytes with
    `generate(tokens, count, temperature)`, as `faststep.recipes.GPT`. It has the average of the weights, where there
    is one, and the random numbers that are drawn have no part in the training.

    Args:
        prompts: What the texts begin with.
        count: How many tokens (bytes) are generated for each.
        temperature: What the logits are divided by; 0: always the likeliest one.
    """

    def __init__(self, prompts: list[str], count: int = 100, temperature: float = 0.8) -> None:
        for name, value, least in (("prompts", len(prompts), 1), ("count", count, 1), ("temperature", temperature, 0)):
            if value < least:
                raise ValueError(f"{name}: expected {least} or more, got {value}")
        self._prompts = list(prompts)
        self._count, self._temperature = count, temperature

    def on_start(self, trainer: Trainer) -> None:
        """Refuse a model that generates nothing.

        Raises:
            TypeError: It has no such method.
        """
        if not any(hasattr(trainer.step.model, each) for each in ("complete", "generate")):
            name = type(trainer.step.model).__name__
            raise TypeError(f"samples: expected a model with generate(tokens, count, temperature), got {name}")

    def on_validation(self, trainer: Trainer, loss: float, best: bool) -> None:
        """Generate and log."""
        for prompt in self._prompts:
            trainer.log({"sample": f"{prompt}|{self._text(trainer.step.model, prompt)}"})

    def _text(self, model: Any, prompt: str) -> str:
        if hasattr(model, "complete"):
            return str(model.complete(prompt, self._count, self._temperature))
        found = model.generate(list(prompt.encode()), self._count, self._temperature)
        return bytes(each % 256 for each in found).decode(errors="replace")
