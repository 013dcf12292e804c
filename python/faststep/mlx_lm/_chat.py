"""Chats through a tokenizer's chat template, and which part of the text that it writes is trained on."""

from __future__ import annotations

import bisect
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

from faststep._optional import need
from faststep.mlx_lm._folder import EXTRA
from faststep.mlx_lm._layouts import Chat, Message

TrainOn = Literal["last", "assistant", "all"]

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_OPENING = "<[|"  # which a generation prompt's token and another one may both begin with
_TAIL = 20  # characters of an answer by which it is found again


class Span(NamedTuple):
    """A part of a text that is trained on, in characters.

    Attributes:
        start: Where it begins.
        stop: Where it ends.
        strict: Whether a token that begins before it, and has nothing but space of it, is none of it: the prompt ends
            in that token.
    """

    start: int
    stop: int
    strict: bool


class Rendered(NamedTuple):
    """A chat as the template writes it.

    Attributes:
        text: The text.
        spans: What of it is trained on; None: all.
        notes: What there is to tell of it: "thoughts", "tools" and "messages" that the template has left out, "special"
            tokens that were written in a message.
    """

    text: str
    spans: list[Span] | None
    notes: tuple[str, ...] = ()


class Renderer:
    """Writer of chats.

    An answer begins where the text of the messages before it, with the generation prompt behind, parts from the text
    that has the answer too: a generation prompt may open a thought that the answer has not. Where the template itself
    marks what the model generates (`{% generation %}`), these marks count.

    Args:
        tokenizer: A tokenizer, as mlx-lm wraps it.
        train_on: "last": the last answer. "assistant": each. "all": all of the text.
        arguments: Of the template, such as `enable_thinking`.
    """

    def __init__(self, tokenizer: Any, train_on: TrainOn, arguments: Mapping[str, Any]) -> None:
        self._tokenizer, self._train_on, self._arguments = tokenizer, train_on, dict(arguments)
        self._forms = list(_FORMS)  # the one that fitted last comes first
        self._special = _special(tokenizer)

    def __call__(self, chat: Chat) -> list[Rendered]:
        """Write a chat: once, or for each answer that the template writes otherwise when others follow.

        Raises:
            ValueError: There is no template, it refuses the chat or leaves out the answer, or nothing has a weight.
        """
        if not self._templates():
            raise ValueError(
                "a chat needs a chat template, and the tokenizer has none: add chat_template.jinja to its folder, or "
                "give prompt and completion"
            )
        answers = self._answers(chat)
        problems: list[str] = []
        for form in list(self._forms):
            messages = [form(each) for each in chat.messages]
            if problems and messages == chat.messages:
                continue
            try:
                found = self._written(messages, chat, answers)
            except Exception as error:  # what a template raises is its own
                problems.append(f"the chat template refuses it: {error}")
                continue
            problem = _lost(chat, messages, found, answers)
            if problem is None:
                self._forms.remove(form)
                self._forms.insert(0, form)
                return found
            problems.append(problem)
        raise ValueError(problems[0])

    def _templates(self) -> bool:
        return bool(getattr(self._tokenizer, "has_chat_template", self._tokenizer.chat_template is not None))

    def _answers(self, chat: Chat) -> list[int]:
        """Return the numbers of the answers that are trained on."""
        if chat.given or self._train_on != "last":
            answers = chat.answers
        else:
            answers = [i for i in chat.answers if i == len(chat.messages) - 1]
        if not answers and self._train_on != "all":
            raise ValueError("no answer in it has a weight")
        return answers

    def _written(self, messages: list[Message], chat: Chat, answers: list[int]) -> list[Rendered]:
        """Write a chat, of which these answers are trained on."""
        if self._train_on == "all":
            return [self._noted(self._render(messages, chat.tools), None, chat)]
        written = [i for i, each in enumerate(messages) if each["role"] == "assistant"]
        if self._has_marks() and answers == written[-len(answers) :]:
            text, marks = self._marked(messages, chat.tools)
            start = self._start(messages, answers[0], text, chat.tools).start if answers != written else 0
            return [self._noted(text, [Span(a, b, False) for a, b in marks if b > start], chat)]
        *earlier, last = self._by_prompts(messages, answers, chat.tools)
        return [*(Rendered(*each) for each in earlier), self._noted(*last, chat)]

    def _by_prompts(self, messages: list[Message], answers: list[int], tools: Any) -> list[tuple[str, list[Span]]]:
        """Write a text with all answers; those that stand in it otherwise than as the last ones have their own."""
        texts: list[tuple[str, list[Span]]] = []
        for i in reversed(answers):
            text = self._render(messages[: i + 1], tools)
            span = self._start(messages, i, text, tools)
            whole = text, text.removesuffix(self._tokenizer.eos_token or "")
            for longer, spans in texts:
                if stop := next((len(each) for each in whole if longer.startswith(each)), 0):
                    spans.insert(0, span._replace(stop=stop))
                    break
            else:
                texts.append((text, [span]))
        return texts[::-1]

    def _start(self, messages: list[Message], number: int, text: str, tools: Any) -> Span:
        """Find the answer in the text that ends with it."""
        before = messages[:number]
        try:
            prompt = self._render(before, tools, prompt=True)
        except Exception:  # nothing comes before it, or nothing that the template takes without an answer
            other = "x" if str(messages[number].get("content", "")).startswith("y") else "y"
            prompt = self._render([*before, {"role": "assistant", "content": other}], tools)
            return Span(_common(prompt, text), len(text), False)
        start = _common(prompt, text)
        if start == len(prompt):
            return Span(start, len(text), True)
        plain = self._render(before, tools)
        if start < len(plain) and not text.startswith(plain):  # it writes other messages otherwise too
            length = bisect.bisect(range(1, len(plain) + 1), 0, key=lambda size: plain[-size:] not in text)
            start = text.rfind(plain[len(plain) - length :]) + length
            start += _common(prompt.removeprefix(plain), text[start:])
        return Span(len(text[:start].rstrip(_OPENING)), len(text), False)

    def _noted(self, text: str, spans: list[Span] | None, chat: Chat) -> Rendered:
        """Note what the template has left out and a model could do without, the last answer's thoughts among it."""
        last = chat.messages[-1]
        inside = last.get("content", "").rpartition("</think>")[0].rpartition("<think>")[2]
        thought = next((last[key] for key in _THOUGHTS if isinstance(last.get(key), str)), inside)
        names = [each["function"]["name"] for each in chat.tools or () if isinstance(each.get("function"), dict)]
        asked = [each.get("content", "") for each in chat.messages if each["role"] != "assistant"]
        told = {
            "thoughts": thought.strip() and not _has(text, thought),
            "tools": any(name not in text for name in names),
            "messages": not all(_has(text, each) for each in asked),
            "special": self._special and any(self._special.search(each.get("content", "")) for each in chat.messages),
        }
        return Rendered(text, spans, tuple(name for name, true in told.items() if true))

    def _render(self, messages: list[Message], tools: Any, *, prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **self._arguments
            )
        )

    def _has_marks(self) -> bool:
        template = self._tokenizer.chat_template
        return isinstance(template, str) and _MARKS.search(template) is not None

    def _marked(self, messages: list[Message], tools: Any) -> tuple[str, list[tuple[int, int]]]:
        """Write a chat, and what the template marks in it."""
        render = need("transformers.utils.chat_template_utils", EXTRA).render_jinja_template
        known = {"enable_thinking": self._tokenizer.has_thinking}  # as mlx-lm gives it
        texts, marks = render(
            conversations=[messages],
            tools=tools,
            chat_template=self._tokenizer.chat_template,
            return_assistant_tokens_mask=True,
            **{**self._tokenizer.special_tokens_map, **known, **self._arguments},
        )
        return texts[0], [tuple(each) for each in marks[0]]


_THOUGHTS = ("reasoning_content", "thinking", "reasoning")


def _special(tokenizer: Any) -> re.Pattern[str] | None:
    """Return what finds the special tokens of a tokenizer in a text; None where it has none."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    names = {*tokenizer.all_special_tokens, *(each.content for each in added if each.special)}
    names -= {"<think>", "</think>"}  # which an answer may have
    return re.compile("|".join(map(re.escape, sorted(names)))) if names else None


def _common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common."""
    return bisect.bisect(range(1, len(one) + 1), 0, key=lambda size: not other.startswith(one[:size]))


def _lost(chat: Chat, messages: list[Message], found: list[Rendered], answers: list[int]) -> str | None:
    """Say what of a chat is not in its texts, or stands there as Python writes it; None where nothing is lost.

    Args:
        chat: The chat.
        messages: Its messages in the form that was given to the template.
        found: What it has written.
        answers: The numbers of the answers that are trained on.
    """
    text, trained = found[-1].text, "".join(map(_trained, found))
    if not all(_has(trained, chat.messages[i].get("content", "").rpartition("</think>")[2]) for i in answers):
        return "the chat template leaves out the answer, or writes it otherwise than it is"
    apart = [messages[i].get("reasoning_content", "") for i in answers if "reasoning_content" not in chat.messages[i]]
    if any(_is_opened(chat.messages[i].get("content", ""), text) for i in answers) or not all(
        _has(text, each) for each in apart
    ):
        return "the chat template writes an empty thought before that of the answer, and takes none of its own"
    for i, message in enumerate(messages):
        for call in message.get("tool_calls", ()):
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            if name not in (trained if i in answers else text):
                return f"the chat template writes no tool calls, and the chat calls {name!r}"
            if arguments and _is_written(arguments, text):
                return "the chat template writes the arguments of tool calls as Python does, or twice as JSON"
    parts = [each["content"] for each in messages if isinstance(each.get("content"), list)]
    if any(str(each) in text for each in parts):
        return "the chat template writes a list of parts as Python does"
    return None


def _is_opened(content: str, text: str) -> bool:
    """Return whether an answer with a thought has another one before it, which the template has written."""
    own = content.strip()[:_TAIL]
    return "</think>" in content and re.search(rf"<think>\s*</think>\s*{re.escape(own)}", text) is not None


def _trained(found: Rendered) -> str:
    return found.text if found.spans is None else "".join(found.text[each.start : each.stop] for each in found.spans)


def _has(text: str, content: str) -> bool:
    tail = content.strip()[-_TAIL:]
    return tail in text or json.dumps(tail)[1:-1] in text or json.dumps(tail, ensure_ascii=False)[1:-1] in text


def _is_written(arguments: Any, text: str) -> bool:
    """Return whether a text has arguments as no model is to write them."""
    if isinstance(arguments, str):
        return json.dumps(arguments) in text or json.dumps(arguments, ensure_ascii=False) in text
    return "'" in str(arguments) and str(arguments) in text


def _form(parts: bool, as_text: bool, empty: bool, apart: bool) -> Callable[[Message], Message]:
    """Return what gives a message another form, which some templates need.

    Args:
        parts: Its content as a list of one part.
        as_text: The arguments of its tool calls as JSON text.
        empty: An empty content where it has none.
        apart: The thought that its content begins with as its `reasoning_content`.
    """

    def changed(message: Message) -> Message:
        made = dict(message)
        if apart and "</think>" in made.get("content", "") and "reasoning_content" not in made:
            thought, _, answer = made["content"].partition("</think>")
            made |= {"reasoning_content": thought.rpartition("<think>")[2].strip("\n"), "content": answer.lstrip("\n")}
        if empty:
            made.setdefault("content", "")
        if parts and "content" in made:
            made["content"] = [{"type": "text", "text": made["content"]}] if made["content"] else []
        if as_text and "tool_calls" in made:
            made["tool_calls"] = list(_calls_as_text(made["tool_calls"]))
        return made

    return changed


def _calls_as_text(calls: list[Any]) -> Iterator[Any]:
    for call in calls:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        yield {**call, "function": {**call["function"], "arguments": arguments}}


_FORMS = [_form(*each) for each in itertools.product((False, True), repeat=4)]
