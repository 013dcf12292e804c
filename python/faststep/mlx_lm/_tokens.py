"""Records of a dataset as tokens: texts, prompts with completions, and chats through the tokenizer's template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from faststep.mlx_lm._chat import Renderer, Span, TrainOn
from faststep.mlx_lm._layouts import Chat, Pair, laid_out

IGNORED = -100
_LAST = 4  # tokens of a chat, one of which is to be a token of the end


class Draft(NamedTuple):
    """A text that is to be tokens.

    Attributes:
        text: The text.
        spans: What of it is trained on; None: all.
        before: What stands before it, tokens of its own that are not trained on.
        plain: Whether it is no chat: the tokenizer's first token comes before it, and the token of the end behind it.
        notes: What there is to tell of it.
    """

    text: str
    spans: list[Span] | None = None
    before: str = ""
    plain: bool = True
    notes: tuple[str, ...] = ()


class Sample(NamedTuple):
    """Tokens, and which of them are trained on: int32 and bool [length]; and what there is to tell of them."""

    tokens: np.ndarray[Any, Any]
    trained: np.ndarray[Any, Any]
    notes: tuple[str, ...] = ()


class Encoder:
    """Encoder of records into tokens.

    Args:
        tokenizer: A tokenizer, as mlx-lm wraps it.
        train_on: What of a chat is trained on.
        template: Arguments of the chat template.
        keys: Names of a record's own in place of ours.
    """

    def __init__(self, tokenizer: Any, train_on: TrainOn, template: Mapping[str, Any], keys: Mapping[str, str]) -> None:
        self._tokenizer, self._train_on, self._keys = tokenizer, train_on, keys
        self._render = Renderer(tokenizer, train_on, template)
        self._templated = bool(tokenizer.has_chat_template)
        self._end: int | None = tokenizer.eos_token_id
        self._ends = frozenset(tokenizer.eos_token_ids)

    def drafts(self, record: Mapping[str, Any]) -> list[Draft]:
        """Return the texts of a record: one, or one for each answer of a chat that stands in no other's text.

        Raises:
            ValueError: The record is none that is known, a value of it is no text, or a chat has no answer.
        """
        found = laid_out(record, self._keys, self._templated)
        if isinstance(found, Chat):
            return [Draft(each.text, each.spans, plain=False, notes=each.notes) for each in self._render(found)]
        if isinstance(found, Pair):
            masked = self._train_on != "all"
            return [Draft(found.completion, before=found.prompt) if masked else Draft(found.prompt + found.completion)]
        return [Draft(found.text)]

    def encode(self, drafts: Sequence[Draft]) -> list[Sample]:
        """Return the tokens of texts; many at once are encoded in parallel."""
        alone = [each.plain and not each.before and not begins(self._tokenizer, each.text) for each in drafts]
        made: dict[int, tuple[list[int], Any]] = {}
        for special in (False, True):
            numbers = [i for i, each in enumerate(alone) if each == special]
            texts = [drafts[i].text for i in numbers]
            made |= zip(numbers, self._encoded(texts, special), strict=True)
        return [self._sample(draft, *made[i]) for i, draft in enumerate(drafts)]

    def _encoded(self, texts: list[str], special: bool) -> list[tuple[list[int], Any]]:
        """Return tokens of texts, each with what tells the place of a character, where the tokenizer knows it."""
        if not texts:
            return []
        plain = self._tokenizer._tokenizer
        if not plain.is_fast:
            return [(list(plain.encode(each, add_special_tokens=special)), None) for each in texts]
        found = plain(texts, add_special_tokens=special, return_attention_mask=False, return_token_type_ids=False)
        return list(zip(found["input_ids"], found.encodings, strict=True))

    def _sample(self, draft: Draft, tokens: list[int], places: Any) -> Sample:
        trained = np.ones(len(tokens), dtype=bool)
        if draft.spans is not None:
            trained[:] = False
            for span in draft.spans:
                trained[self._first(draft.text, tokens, places, span) : self._at(draft.text, places, span.stop)] = True
        notes = draft.notes if draft.plain or self._ends.intersection(tokens[-_LAST:]) else (*draft.notes, "unended")
        if draft.plain and self._end is not None and not self._is_ended(draft.text, tokens):
            tokens, trained = [*tokens, self._end], np.append(trained, True)
        if draft.before:
            before, _ = self._encoded([draft.before], not begins(self._tokenizer, draft.before))[0]
            before = before[:-1] if before[-1:] == [self._end] else before  # of tokenizers that end every text
            tokens, trained = [*before, *tokens], np.append(np.zeros(len(before), dtype=bool), trained)
        return Sample(np.array(tokens, dtype=np.int32), trained, notes)

    def _is_ended(self, text: str, tokens: list[int]) -> bool:
        """Return whether a text has the token of the end, with nothing but space behind it."""
        return tokens[-1:] == [self._end] or text.rstrip().endswith(self._tokenizer.eos_token)

    def _first(self, text: str, tokens: list[int], places: Any, span: Span) -> int:
        """Return the number of the first token of a span."""
        if places is None:
            before = self._tokenizer.encode(text[: span.start], add_special_tokens=False)
            pairs = zip(before, tokens, strict=False)
            return next((i for i, (one, other) in enumerate(pairs) if one != other), len(before))
        at = self._at(text, places, span.start)
        over = text[span.start : places.token_to_chars(at - 1)[1]] if at else ""  # of a token that begins before it
        return at - 1 if over and (not span.strict or over.strip()) else at

    def _at(self, text: str, places: Any, start: int) -> int:
        """Return the number of the first token that begins at a character or behind it."""
        if places is None:
            return len(self._tokenizer.encode(text[:start], add_special_tokens=False))
        number = next((n for at in range(start, len(text)) if (n := places.char_to_token(at)) is not None), len(places))
        return number + (number < len(places) and places.token_to_chars(number)[0] < start)


def begins(tokenizer: Any, text: str) -> bool:
    """Return whether a text has the tokenizer's first token written in it, so that it is not to be added again."""
    return bool(tokenizer.bos_token) and text.startswith(tokenizer.bos_token)
