"""Records of a dataset as tokens: texts, prompts with completions, and chats through the tokenizer's template."""

from __future__ import annotations

from typing import Any


class Encoder:
    """Encoder of records into tokens.

    Args:
        tokenizer: A tokenizer, as mlx-lm wraps it.
        mask_prompt: Whether prompts are told from answers.
    """

    def __init__(self, tokenizer: Any, mask_prompt: bool) -> None:
        self._tokenizer, self._mask_prompt = tokenizer, mask_prompt
        self._end: int | None = tokenizer.eos_token_id

    def __call__(self, record: dict[str, Any]) -> tuple[list[int], int]:
        """Return the tokens of a record, and how many of them, from the first on, are not trained on.

        Raises:
            ValueError: The record is none that is known, a value of it is no text, or a chat has no answer.
        """
        if "messages" in record:
            return self._chat(_checked_messages(record["messages"]), record.get("tools"))
        if "prompt" in record and "completion" in record:
            return self._completion(_text(record, "prompt"), _text(record, "completion"), record.get("tools"))
        if "text" in record:
            return self._ended(list(self._tokenizer.encode(_text(record, "text")))), 0
        there = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"expected the keys text, prompt and completion, or messages, got {there}")

    def _completion(self, prompt: str, completion: str, tools: Any) -> tuple[list[int], int]:
        if self._tokenizer.chat_template is not None or tools:
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
            return self._chat(messages, tools)
        before = list(self._tokenizer.encode(prompt))
        if before and before[-1] == self._end:  # of tokenizers that end every text
            before.pop()
        tokens = before + list(self._tokenizer.encode(completion, add_special_tokens=False))
        return self._ended(tokens), len(before) if self._mask_prompt else 0

    def _chat(self, messages: list[dict[str, Any]], tools: Any) -> tuple[list[int], int]:
        tokens = self._rendered(messages, tools, False)
        if not self._mask_prompt:
            return tokens, 0
        prompt = self._rendered(messages[:-1], tools, True)
        if tokens[: len(prompt)] != prompt:
            raise ValueError(
                "the chat template writes a prompt otherwise once its answer is there, so that it cannot be masked: "
                "set mask_prompt to false"
            )
        return tokens, len(prompt)

    def _rendered(self, messages: list[dict[str, Any]], tools: Any, answers: bool) -> list[int]:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "a chat needs a chat template, and the tokenizer has none: add chat_template.jinja to its folder, or "
                "give prompt and completion"
            )
        try:
            found = self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=answers, return_dict=False
            )
        except Exception as error:  # what a template raises is its own
            raise ValueError(f"the chat template refuses it: {error}") from error
        return list(found)

    def _ended(self, tokens: list[int]) -> list[int]:
        return tokens if self._end is None or tokens[-1:] == [self._end] else [*tokens, self._end]


def _text(record: dict[str, Any], key: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{key}: expected text, got {type(record[key]).__name__}")
    return str(record[key])


def _checked_messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ValueError("messages: expected a list of objects with role and content")
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        found = f"one of {last['role']!r}" if last else "none"
        raise ValueError(
            f"messages: expected an answer, a last message of role 'assistant', got {found}: add it, or drop it"
        )
    if not (last.get("content") or last.get("tool_calls")):
        raise ValueError("messages: expected an answer with content, got an empty one")
    return messages
