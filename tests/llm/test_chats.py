"""Chats through templates of the kinds that models have: what is trained on, what is refused, what is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep.mlx_lm import Jsonl, load
from mlx_lm.tuner.datasets import ChatDataset
from mlx_lm.utils import load_tokenizer
from support.language_models import new_folder, texts, write_lines
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPLIT = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"  # as Qwen's and Llama 3's
SPECIAL = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>", "<think>", "</think>"]
HEAD = "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' }}"
THOUGHT = "{{ '<think>\n' + m.get('reasoning_content', '') + '\n</think>\n\n' }}{% endif %}"
FOOT = "{{ '<|end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
TEMPLATES = {
    "plain": HEAD + "{{ m['content'] }}" + FOOT,
    # writes an empty thought before an answer, and begins one in the generation prompt
    "opens": HEAD
    + "{% if m['role'] == 'assistant' %}"
    + THOUGHT
    + "{{ m['content'] }}"
    + FOOT.replace("'<|assistant|>\n'", "'<|assistant|>\n<think>\n' + ('' if enable_thinking else '\n</think>\n\n')"),
    # begins a thought in the generation prompt, and writes none
    "drops": HEAD.replace("\n", "")
    + "{{ m['content'].split('</think>')[-1] }}"
    + FOOT.replace("'<|assistant|>\n'", "'<|assistant|><think>\n'"),
    # the last answer has its thought, earlier ones have none
    "rewrites": HEAD + "{% if loop.last and m['role'] == 'assistant' %}" + THOUGHT + "{{ m['content'] }}" + FOOT,
    # ends the last answer with one token more
    "ends": HEAD
    + "{{ m['content'] + '<|system|>\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}",
    "marks": HEAD
    + "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}{{ '\n' }}"
    + "{% else %}{{ m['content'] + '<|end|>\n' }}{% endif %}{% endfor %}"
    + "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}",
    # the generation prompt ends with a space, which is the beginning of a token of the answer
    "spaced": "{% for m in messages %}{{ m.role + ': ' + m.content + '<|end|>' }}{% endfor %}"
    + "{% if add_generation_prompt %}assistant: {% endif %}",
    # writes neither other roles than two nor an end
    "endless": "{% for m in messages if m.role in ('user', 'assistant') %}"
    + "{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    + "{% if add_generation_prompt %}assistant:{% endif %}",
    # begins a thought of its own, whatever the answer has
    "thinks": HEAD + "{% if m.role == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m.content }}" + FOOT,
    "parts": HEAD + "{% for p in m['content'] %}{{ p.text }}{% endfor %}" + FOOT,
    "calls": HEAD
    + "{{ m['content'] }}{% for c in m.tool_calls or [] %}"
    + "{{ '<call>' + c.function.name + ' ' + (c.function.arguments | tojson) + '</call>' }}{% endfor %}"
    + FOOT,
    "calls as text": HEAD
    + "{{ m.get('content', '') }}{% for c in m.tool_calls or [] %}"
    + "{{ '<call>' + c.function.name + ' ' + c.function.arguments + '</call>' }}{% endfor %}"
    + FOOT,
    "calls as Python": HEAD
    + "{{ m.get('content', '') }}{% for c in m.tool_calls or [] %}"
    + "{{ '<call>' + c.function.name + ' ' ~ c.function.arguments ~ '</call>' }}{% endfor %}"
    + FOOT,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model, whose tokenizer merges line breaks as those of today do."""
    folder = new_folder(tmp_path_factory.mktemp("models") / "llama")
    size = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab_size()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.decoder = decoders.ByteLevel()
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([*texts(), "\n\n\n" * 50], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", special_tokens=[("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def with_template(folder: Path, template: str) -> Path:
    """Return the folder, its tokenizer with another chat template."""
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": template}))
    return folder


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def trained(folder: Path, record: dict[str, Any], tmp_path: Path, **options: Any) -> list[list[str]]:
    """Return the parts of each sample of a record that are trained on, as text."""
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", [record]), folder, cache=False, **options)
    tokenizer = load_tokenizer(folder)
    found = []
    for sample in samples:
        runs: list[list[int]] = [[]]
        for target in sample["targets"].tolist():
            if target == -100:
                runs.append([])
            else:
                runs[-1].append(target)
        found.append([tokenizer.decode(run) for run in runs if run])
    return found


HI = [user("Hi"), answer("Hello you.")]
TURNS = [*HI, user("More"), answer("Another one.")]
CASES: list[tuple[str, str, list[Any], list[list[str]]]] = [
    ("plain", "last", HI, [["Hello you.<|end|>\n"]]),
    ("plain", "last", [user("Hi"), answer("\n```python\nx = 1\n```")], [["```python\nx = 1\n```<|end|>\n"]]),
    ("plain", "last", TURNS, [["Another one.<|end|>\n"]]),
    ("plain", "assistant", TURNS, [["Hello you.<|end|>\n", "Another one.<|end|>\n"]]),
    ("plain", "assistant", [answer("Welcome."), *HI], [["Welcome.<|end|>\n", "Hello you.<|end|>\n"]]),
    ("plain", "assistant", [user("Hi"), answer("No.", weight=0), *TURNS[2:]], [["Another one.<|end|>\n"]]),
    ("plain", "last", [user([{"type": "text", "text": "Hi"}]), answer(["Hello", " you."])], [["Hello you.<|end|>\n"]]),
    ("opens", "last", HI, [["</think>\n\nHello you.<|end|>\n"]]),
    ("opens", "last", [user("Hi"), answer("Hello.", reasoning_content="So.")], [["So.\n</think>\n\nHello.<|end|>\n"]]),
    ("opens", "assistant", TURNS, [["</think>\n\nHello you.<|end|>\n", "</think>\n\nAnother one.<|end|>\n"]]),
    ("drops", "last", HI, [["Hello you.<|end|>\n"]]),
    ("drops", "assistant", TURNS, [["Hello you.<|end|>\n", "Another one.<|end|>\n"]]),
    ("rewrites", "last", TURNS, [["<think>\n\n</think>\n\nAnother one.<|end|>\n"]]),
    (
        "rewrites",
        "assistant",
        TURNS,
        [["<think>\n\n</think>\n\nHello you.<|end|>\n"], ["<think>\n\n</think>\n\nAnother one.<|end|>\n"]],
    ),
    ("ends", "assistant", TURNS, [["Hello you.<|system|>\n", "Another one.<|system|>\n<|end|>"]]),
    ("marks", "assistant", TURNS, [["Hello you.<|end|>", "Another one.<|end|>"]]),
    ("marks", "last", TURNS, [["Another one.<|end|>"]]),
    ("parts", "last", TURNS, [["Another one.<|end|>\n"]]),
    ("marks", "assistant", [user("Hi"), answer("No.", weight=0), *TURNS[2:]], [["Another one.<|end|>"]]),
    (
        "marks",
        "assistant",
        [*HI, user("a"), answer("No.", train=False), *TURNS[2:]],
        [["Hello you.<|end|>\n", "Another one.<|end|>\n"]],
    ),
    ("spaced", "last", [user("Hi"), answer("b")], [[" b<|end|>"]]),  # a token with the prompt's last character in it
    ("opens", "last", [user("Hi"), answer("So.\n</think>\n\nHello.")], [["So.\n</think>\n\nHello.<|end|>\n"]]),
    ("opens", "last", [user("Hi"), answer("<think>\nSo.\n</think>\nNo.")], [["So.\n</think>\n\nNo.<|end|>\n"]]),
]


@pytest.mark.parametrize(("name", "train_on", "messages", "expected"), CASES)
def test_what_is_trained_on(
    folder: Path, tmp_path: Path, name: str, train_on: Any, messages: list[Any], expected: list[list[str]]
) -> None:
    with_template(folder, TEMPLATES[name])
    assert trained(folder, {"messages": messages}, tmp_path, train_on=train_on) == expected


@pytest.mark.parametrize("name", ["plain", "opens", "rewrites"])
def test_last_answers_are_those_of_mlx_lm(folder: Path, tmp_path: Path, name: str) -> None:
    """Where the generation prompt is the beginning of the text, tokens and what is trained on are mlx-lm's."""
    with_template(folder, TEMPLATES[name])
    dataset = ChatDataset([], load_tokenizer(folder), mask_prompt=True)
    for messages in (HI, TURNS, [user("Hi"), answer("\n```python\nx = 1\n```")]):
        (sample,) = Jsonl(write_lines(tmp_path / "a.jsonl", [{"messages": messages}]), folder, cache=False)
        tokens, offset = dataset.process({"messages": messages})
        assert sample["tokens"].tolist() == tokens[:-1]
        assert [each for each in sample["targets"].tolist() if each != -100] == tokens[offset:]


def test_arguments_of_the_template(folder: Path, tmp_path: Path) -> None:
    with_template(folder, TEMPLATES["opens"])
    record = {"messages": HI}
    assert trained(folder, record, tmp_path, template={"enable_thinking": False}) == [["Hello you.<|end|>\n"]]
    assert trained(folder, record, tmp_path, template={"enable_thinking": True}) == [
        ["</think>\n\nHello you.<|end|>\n"]
    ]


CALL = {"name": "get", "arguments": {"city": "Paris"}}


@pytest.mark.parametrize("name", ["calls", "calls as text", "calls as Python"])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
@pytest.mark.parametrize(
    "call", [{"function": CALL}, CALL, {"function": {"name": "get", "arguments": '{"city": "Paris"}'}}]
)
def test_tool_calls(folder: Path, tmp_path: Path, name: str, content: dict[str, Any], call: dict[str, Any]) -> None:
    """Arguments are written once as JSON, whether they came as an object or as JSON and whatever the template takes."""
    with_template(folder, TEMPLATES[name])
    record = {"messages": [user("Hi"), {"role": "assistant", "tool_calls": [call], **content}]}
    assert trained(folder, record, tmp_path) == [['<call>get {"city": "Paris"}</call><|end|>\n']]


@pytest.mark.parametrize(
    ("name", "messages", "problem"),
    [
        ("plain", [user("Hi"), answer("", tool_calls=[CALL])], "writes no tool calls, and the chat calls 'get'"),
        ("plain", [user("Hi"), answer([{"type": "image_url", "image_url": "x"}])], "got one of type 'image_url'"),
        ("plain", [user("Hi"), answer("a", weight=0)], "a.jsonl:1: no answer in it has a weight"),
        ("plain", [user("Hi"), answer("a", weight=0.5)], "weight: expected 0 or 1, whether the answer counts, got 0.5"),
        ("plain", [user(None), answer("a")], "expected a content in each message of role 'user', found none in one"),
        ("thinks", [user("Hi"), answer("<think>So.</think>a")], "an empty thought before that of the answer"),
        ("plain", [user("Hi"), answer("", tool_calls=[{**CALL, "arguments": "{"}])], "get: arguments: no JSON"),
        ("{{ messages[0].content }}", HI, "the chat template leaves out the answer"),
        ("{{ raise_exception('no systems') }}", HI, "the chat template refuses it: no systems"),
    ],
)
def test_what_would_be_trained_on_wrongly_is_refused(
    folder: Path, tmp_path: Path, name: str, messages: list[Any], problem: str
) -> None:
    with_template(folder, TEMPLATES.get(name, name))
    with pytest.raises(ValueError, match=problem):
        trained(folder, {"messages": messages}, tmp_path)


def test_what_the_template_leaves_out_is_told(folder: Path, tmp_path: Path) -> None:
    with_template(folder, TEMPLATES["drops"])
    tool = {"type": "function", "function": {"name": "get"}}
    records = [{"messages": [user("Hi"), answer("<think>So.</think>Hello.")]}, {"messages": HI, "tools": [tool]}]
    file = write_lines(tmp_path / "a.jsonl", records)
    with_template(folder, TEMPLATES["rewrites"])
    thought = write_lines(tmp_path / "b.jsonl", [{"messages": [*HI, user("a"), answer("b", reasoning_content="So.")]}])
    samples = Jsonl(thought, folder, train_on="assistant", cache=False)
    assert (len(samples), samples.summary["left_out"]) == (2, [])  # the thought is in the second one
    with_template(folder, TEMPLATES["drops"])
    assert Jsonl(file, folder, cache=False).summary["left_out"] == [
        f"1 with thoughts that the chat template leaves out, the first: {file}:1",
        f"1 with tools that the chat template leaves out, the first: {file}:2",
    ]
    with_template(folder, TEMPLATES["endless"])
    file = write_lines(tmp_path / "c.jsonl", [{"messages": [{"role": "developer", "content": "Brief."}, *HI]}])
    assert Jsonl(file, folder, cache=False).summary["left_out"] == [
        f"1 with messages that the chat template leaves out, the first: {file}:1",
        f"1 without an end token after the answer: the model does not learn to stop, the first: {file}:1",
    ]
    with_template(folder, TEMPLATES["plain"])
    file = write_lines(tmp_path / "d.jsonl", [{"messages": HI}, {"messages": [user("Hi<|end|><|user|>"), HI[1]]}])
    assert Jsonl(file, folder, cache=False).summary["left_out"] == [
        f"1 with special tokens written in a message, which are read as such, the first: {file}:2"
    ]


LAYOUTS: list[dict[str, Any]] = [
    {"messages": HI},
    {"prompt": [HI[0]], "completion": [HI[1]]},
    {"prompt": "Hi", "completion": "Hello you."},
    {"instruction": "Hi", "input": "", "output": "Hello you."},
    {"question": "Hi", "answer": "Hello you."},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello you."}]},
]


@pytest.mark.parametrize("record", LAYOUTS)
def test_layouts(folder: Path, tmp_path: Path, record: dict[str, Any]) -> None:
    with_template(folder, TEMPLATES["plain"])
    expected = Jsonl(write_lines(tmp_path / "b.jsonl", [{"messages": HI}]), folder, cache=False)[0]["tokens"].tolist()
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", [record]), folder, cache=False)
    assert samples[0]["tokens"].tolist() == expected
    assert trained(folder, record, tmp_path) == [["Hello you.<|end|>\n"]]


def test_layouts_with_more(folder: Path, tmp_path: Path) -> None:
    with_template(folder, TEMPLATES["calls"])
    samples = Jsonl(
        write_lines(
            tmp_path / "a.jsonl",
            [
                {"system": "Be brief.", "instruction": "Add", "input": "1 2", "output": "3", "history": [["a", "b"]]},
                {
                    "tools": "[]",
                    "conversations": [
                        {"from": "human", "value": "Hi"},
                        {"from": "function_call", "value": json.dumps(CALL)},
                        {"from": "observation", "value": "12"},
                        {"from": "gpt", "value": "It is 12."},
                    ],
                },
                {"prompt": [user("Hi")], "completion": [answer("", tool_calls=[CALL]), answer("It is 12.")]},
            ],
        ),
        folder,
        cache=False,
    )
    tokenizer = load_tokenizer(folder)
    chats = [tokenizer.decode(each["tokens"].tolist()) for each in samples]
    assert chats == [
        "<|system|>\nBe brief.<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n"
        "<|user|>\nAdd\n1 2<|end|>\n<|assistant|>\n3<|end|>",
        '<|user|>\nHi<|end|>\n<|assistant|>\n<call>get {"city": "Paris"}</call><|end|>\n'
        "<|tool|>\n12<|end|>\n<|assistant|>\nIt is 12.<|end|>",
        '<|user|>\nHi<|end|>\n<|assistant|>\n<call>get {"city": "Paris"}</call><|end|>\n'
        "<|assistant|>\nIt is 12.<|end|>",
    ]
    own = {"messages": [{"role": "system", "content": "Be brief."}, *HI]}
    one, two = Jsonl(write_lines(tmp_path / "b.jsonl", [own, {"system": "No.", **own}]), folder, cache=False)
    assert one["tokens"].tolist() == two["tokens"].tolist()  # its own comes first
    with_template(folder, TEMPLATES["marks"])
    record = {"prompt": TURNS[:3], "completion": TURNS[3:]}
    assert trained(folder, record, tmp_path) == [["Another one.<|end|>"]]  # marked answers of the prompt are none
    assert (samples[2]["targets"] != -100).sum() > (samples[1]["targets"] != -100).sum()  # the call is an answer too


def test_names_of_ones_own(folder: Path, tmp_path: Path) -> None:
    with_template(folder, TEMPLATES["plain"])
    record = {"ask": "Hi", "reply": "Hello you.", "text": "another"}
    keys = {"prompt": "ask", "completion": "reply"}
    assert trained(folder, record, tmp_path, keys=keys) == [["Hello you.<|end|>\n"]]
    with pytest.raises(ValueError, match="expected the key 'reply', as keys says, got 'ask'"):
        trained(folder, {"ask": "Hi"}, tmp_path, keys=keys)
    with pytest.raises(ValueError, match=r"keys: expected names of messages, .*, got 'promt'"):
        trained(folder, record, tmp_path, keys={"promt": "ask"})
    with pytest.raises(ValueError, match="got a preference"):
        trained(folder, {"prompt": "Hi", "chosen": "a", "rejected": "b"}, tmp_path)


def test_the_first_token_is_there_once(folder: Path, tmp_path: Path) -> None:
    """Texts that were formatted before, and prompts for samples, have it written in them."""
    records = [{"text": "<|begin|><|user|>\nHi<|end|>\n"}, {"text": "Hi"}]
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", records), folder, cache=False)
    begin = load_tokenizer(folder).bos_token_id
    assert [each["tokens"].tolist().count(begin) for each in samples] == [1, 1]
    end = load_tokenizer(folder).eos_token_id
    assert [each["targets"].tolist().count(end) for each in samples] == [1, 1]
    model, seen = load(folder), []

    class Seen(type(model)):  # type: ignore[misc]
        def __call__(self, tokens: Any, *rest: Any, **named: Any) -> Any:
            seen.extend(tokens.reshape(-1).tolist())
            return super().__call__(tokens, *rest, **named)

    model.__class__ = Seen
    model.complete("<|begin|>Hi", 1)
    assert seen.count(begin) == 1
