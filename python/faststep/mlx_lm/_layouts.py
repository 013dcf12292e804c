"""The layouts of records: texts, prompts with completions, chats; Alpaca's, ShareGPT's and others are one of these."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Record = Mapping[str, Any]

KEYS = ("messages", "prompt", "completion", "text", "tools")  # what `keys` may rename
_PAIRS = (
    ("prompt", "completion"),
    ("instruction", "output"),
    ("instruction", "response"),
    ("question", "answer"),
    ("query", "response"),
    ("prompt", "response"),
)
_CONTEXTS = ("input", "context")  # what stands beside an instruction
_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
_ASKING = ("system", "developer", "user")
_WEIGHTS = ("weight", "train", "training", "trainable", "loss", "loss_mask")  # of an answer, by which it counts or not
_TEXT_PARTS = ("text", "input_text", "output_text")


@dataclass(frozen=True)
class Text:
    """A text, all of which is trained on."""

    text: str


@dataclass(frozen=True)
class Pair:
    """A prompt and its completion, as they are."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class Chat:
    """Messages, checked.

    Attributes:
        messages: At least one.
        tools: What the template is told of them.
        answers: The numbers of the answers that may be trained on.
        given: Whether all of these are the answer: the record itself parts it from the prompt.
    """

    messages: list[Message]
    tools: Any
    answers: list[int]
    given: bool = False


def laid_out(record: Record, keys: Mapping[str, str], templated: bool) -> Text | Pair | Chat:
    """Return what a record is.

    Args:
        record: The record.
        keys: The record's own names of `messages`, `prompt`, `completion`, `text` and `tools`, where they are others.
        templated: Whether the tokenizer has a chat template, through which prompts and completions go then.

    Raises:
        ValueError: It is none of the known layouts, or a value in it is not what it should be.
    """
    record = _renamed(record, keys)
    for name in ("messages", "conversations"):
        if isinstance(record.get(name), list):
            return _chat(_messages(record, name), _tools(record))
    if "messages" in record:
        raise ValueError("messages: expected a list of objects with role and content")
    if "text" in record and not {"prompt", "completion"} <= record.keys():
        return Text(_text(record, "text"))
    for prompt, completion in _PAIRS:
        if prompt in record and completion in record:
            return _pair(record, prompt, completion, templated)
    raise ValueError(_unknown(record))


def _renamed(record: Record, keys: Mapping[str, str]) -> Record:
    """Return a record with our names in place of its own."""
    if missing := [name for name in keys.values() if name not in record and name != keys.get("tools")]:
        there = ", ".join(map(repr, record)) or "none"
        raise ValueError(f"expected the key {missing[0]!r}, as keys says, got {there}")
    return {name: record[own] for name, own in keys.items() if own in record} if keys else record


def _unknown(record: Record) -> str:
    there = ", ".join(map(repr, record)) or "none"
    if "chosen" in record and "rejected" in record:
        return (
            "expected a text, a completion or a chat, got a preference (chosen, rejected): see examples/preference.py"
        )
    if "input_ids" in record:
        return "expected texts, got tokens (input_ids): they need no jsonl, give them to a Loader as they are"
    others = ", ".join(" and ".join(pair) for pair in _PAIRS[1:4])
    return (
        f"expected the keys text, prompt and completion, or messages, got {there}; {others} and conversations are "
        "known too, and `keys` tells other names: {prompt: ask, completion: reply}"
    )


def _text(record: Record, key: str) -> str:
    if not isinstance(record[key], str):
        raise ValueError(f"{key}: expected text, got {type(record[key]).__name__}")
    return str(record[key])


def _pair(record: Record, prompt: str, completion: str, templated: bool) -> Pair | Chat:
    """Return a prompt with its completion, as a chat where there is a template for it."""
    if isinstance(record[prompt], list) and isinstance(record[completion], list):
        before, after = (_normal(record[key], key) for key in (prompt, completion))
        return _chat(before + after, _tools(record), first=len(before))
    asked = _text(record, prompt)
    context = next((record[name] for name in _CONTEXTS if record.get(name)), None) if prompt == "instruction" else None
    if context is not None:
        asked = f"{asked}\n{context}"
    answer, tools = _text(record, completion), _tools(record)
    if not templated and tools is None and (prompt, completion) == _PAIRS[0]:
        return Pair(asked, answer)
    system = record.get("system")
    messages = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    for turn in record.get("history") or ():
        messages += [{"role": "user", "content": turn[0]}, {"role": "assistant", "content": turn[1]}]
    messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return _chat(messages, tools)


def _tools(record: Record) -> Any:
    tools = record.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise ValueError(f"tools: expected a list, or JSON of one: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise ValueError(f"tools: expected a list, got {type(tools).__name__}")
    return tools or None


def _messages(record: Record, name: str) -> list[Message]:
    """Return the messages of a chat; ShareGPT's `from` and `value` are `role` and `content`."""
    messages, system = _normal(record[name], name), record.get("system")
    if isinstance(system, str) and system and not (messages and messages[0]["role"] == "system"):
        return [{"role": "system", "content": system}, *messages]
    return messages


def _normal(messages: list[Any], name: str) -> list[Message]:
    return [_message(each, name) for each in messages]


def _message(message: Any, name: str) -> Message:
    """Return a message with role and content, its parts joined and the arguments of its calls as objects."""
    if isinstance(message, dict) and "from" in message and "value" in message:
        message = _of_share_gpt(message)
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ValueError(f"{name}: expected a list of objects with role and content")
    made = {key: each for key, each in message.items() if each is not None}
    made["role"] = _ROLES.get(made["role"], made["role"])
    if made["role"] in _ASKING and "content" not in made:
        raise ValueError(f"{name}: expected a content in each message of role {made['role']!r}, found none in one")
    if "content" in made:
        made["content"] = _content(made["content"])
    if odd := [key for key in _WEIGHTS if made.get(key, 1) not in (0, 1)]:
        raise ValueError(f"{name}: {odd[0]}: expected 0 or 1, whether the answer counts, got {made[odd[0]]!r}")
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [_call(each) for each in calls]
    return made


def _of_share_gpt(message: dict[str, Any]) -> dict[str, Any]:
    role, value = message["from"], message["value"]
    if role != "function_call":
        return {"role": role, "content": value}
    try:
        calls = json.loads(value) if isinstance(value, str) else value
    except ValueError as error:
        raise ValueError(f"conversations: expected JSON of a function_call: {error}") from None
    return {"role": role, "content": "", "tool_calls": calls if isinstance(calls, list) else [calls]}


def _content(content: Any) -> str:
    """Return a content as text; parts that are texts are joined."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ValueError(f"content: expected text or a list of parts, got {type(content).__name__}")
    return "".join(map(_part, content))


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
        raise ValueError(
            f"content: expected parts of text, got one of type {kind!r}, which a language model has none of"
        )
    return str(part["text"])


def _call(call: Any) -> dict[str, Any]:
    """Return a tool call whose arguments are an object."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("tool_calls: expected objects {function: {name, arguments}}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise ValueError(f"tool_calls: {function['name']}: arguments: no JSON: {error}") from None
    about = {key: each for key, each in call.items() if key not in ("function", "name", "arguments")}
    return {"type": "function", **about, "function": {"name": function["name"], "arguments": arguments}}


def _chat(messages: list[Message], tools: Any, first: int = 0) -> Chat:
    """Check that there is an answer; `first` is the first message that may be one."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant":
        found = f"one of {last['role']!r}" if last else "none"
        raise ValueError(
            f"messages: expected an answer, a last message of role 'assistant', got {found}: add it, or drop it"
        )
    answers = [i for i, each in enumerate(messages) if each["role"] == "assistant" and i >= first]
    if not (last.get("content") or last.get("tool_calls")):
        raise ValueError("messages: expected an answer with content, got an empty one")
    return Chat(messages, tools, [i for i in answers if not _is_left_out(messages[i])], first > 0)


def _is_left_out(message: Message) -> bool:
    """Return whether an answer is not to be trained on: it is empty, or says so, as OpenAI's `weight: 0` does."""
    counts = all(message.get(key, 1) for key in _WEIGHTS)
    return not counts or not (message.get("content") or message.get("tool_calls"))
