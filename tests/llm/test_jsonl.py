"""JSON lines as tokens and targets: beside mlx-lm's datasets, through collates and losses, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep import Step
from faststep.data import Loader, Pack, Pad
from faststep.mlx_lm import Jsonl, load
from faststep.recipes import next_token
from mlx_lm.tuner import trainer
from mlx_lm.tuner.datasets import ChatDataset, CompletionsDataset, TextDataset
from mlx_lm.utils import load_tokenizer
from support.commands import faststep
from support.language_models import new_folder, new_model, texts, write_data, write_lines

CHAT = [{"role": "user", "content": "What is a step?"}, {"role": "assistant", "content": "Gradients, then an update."}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small model, and data beside it."""
    around = tmp_path_factory.mktemp("models")
    write_data(around)
    return new_folder(around / "llama")


def counted(sample: dict[str, np.ndarray]) -> list[int]:
    """Return the targets that count."""
    return [each for each in sample["targets"].tolist() if each != -100]


@pytest.mark.parametrize("masked", [False, True])
def test_tokens_are_those_of_mlx_lm(folder: Path, tmp_path: Path, masked: bool) -> None:
    tokenizer = load_tokenizer(folder)
    pair = {"prompt": "What is a step?", "completion": "Gradients, then an update."}
    long = [CHAT[0], {"role": "assistant", "content": "Ask me."}, *CHAT]
    expected = [
        TextDataset([], tokenizer).process({"text": texts()[0][:200]}),
        CompletionsDataset([], tokenizer, "prompt", "completion", masked).process(pair),
        ChatDataset([], tokenizer, mask_prompt=masked).process({"messages": CHAT}),
        ChatDataset([], tokenizer, mask_prompt=masked).process({"messages": long}),
    ]
    records = [{"text": texts()[0][:200]}, pair, {"messages": CHAT}, {"messages": long}]
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", records), folder, train_on="last" if masked else "all")
    assert len(samples) == 4
    for sample, (tokens, offset) in zip(samples, expected, strict=True):
        assert sample["tokens"].tolist() == tokens[:-1]
        assert counted(sample) == tokens[max(1, offset) :]
        assert sample["tokens"].dtype == sample["targets"].dtype == np.int32
    assert counted(samples[1]) == counted(samples[2])
    assert masked == (len(counted(samples[2])) < len(samples[2]["tokens"]))


def test_prompts_without_a_template(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(folder, plain)
    file = plain / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "chat_template": None}))
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", [{"prompt": "One, two,", "completion": " three."}]), plain)
    tokenizer = load_tokenizer(plain)
    assert tokenizer.decode(samples[0]["tokens"].tolist()) == "One, two, three."
    assert counted(samples[0]) == [*tokenizer.encode(" three."), tokenizer.eos_token_id]
    with pytest.raises(ValueError, match=r"a.jsonl:1: a chat needs a chat template, and the tokenizer has none"):
        Jsonl(write_lines(tmp_path / "a.jsonl", [{"messages": CHAT}]), plain)


def test_lengths(folder: Path, tmp_path: Path) -> None:
    file = write_lines(tmp_path / "a.jsonl", [{"text": "one two three " * 100}, {"text": "a step"}])
    with pytest.raises(ValueError, match=r"a.jsonl:1: \d+ tokens, more than the 128 of the model or of max_length"):
        Jsonl(file, folder)
    assert len(Jsonl(file, folder, longer="cut")[0]["tokens"]) == 128
    assert [len(each["tokens"]) for each in Jsonl(file, folder, longer="cut", max_length=4)] == [4, 2]
    assert len(Jsonl(file, folder, longer="skip")) == 1
    with pytest.raises(
        ValueError, match=r"found none; 2 longer than 1 tokens: skipped .longer: skip., the first: .*a.jsonl:1"
    ):
        Jsonl(file, folder, longer="skip", max_length=1)
    write_lines(file, [{"messages": [{"role": "user", "content": "one two three " * 9}, CHAT[1]]}])
    with pytest.raises(
        ValueError,
        match=r"found none; 1 with nothing left to learn from within 8 tokens: skipped .longer: cut.*a.jsonl:1",
    ):
        Jsonl(file, folder, longer="cut", max_length=8)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', "a.jsonl:2: no JSON in this line: Expecting"),
        ("\xff", "a.jsonl:2: no JSON in this line"),
        ("[1]", "a.jsonl:2: expected an object, {...}, got list"),
        ('{"txt": "a"}', "a.jsonl:2: expected the keys text, prompt and completion, or messages, got 'txt'"),
        ('{"text": 3}', "a.jsonl:2: text: expected text, got int"),
        ('{"prompt": "a", "completion": null}', "a.jsonl:2: completion: expected text, got NoneType"),
        ('{"messages": "a"}', "a.jsonl:2: messages: expected a list of objects with role and content"),
        ('{"messages": []}', "a.jsonl:2: messages: expected an answer"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "a last message of role 'assistant', got one of 'user'"),
        ('{"messages": [{"role": "assistant", "content": ""}]}', "expected an answer with content, got an empty one"),
        ('{"text": ""}', "a.jsonl:2: expected tokens to train on, found none"),
    ],
)
def test_broken_lines_are_told_by_their_number(folder: Path, tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "a step"}\n' + line.encode("latin-1") + b"\n\n")
    with pytest.raises(ValueError, match=r"^file: ") as error:
        Jsonl(file, folder)
    assert message in str(error.value)


def test_other_refusals(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    for arguments, message in (
        ({"file": tmp_path / "none.jsonl"}, "file: expected a file of JSON lines, found none at"),
        ({"file": tmp_path / "empty.jsonl"}, "file: expected samples in .*, found none"),
        ({"tokenizer": tmp_path / "none"}, "tokenizer: expected a model's folder"),
        ({"max_length": 0}, "max_length: expected a number from 1 on"),
    ):
        with pytest.raises(ValueError, match=message):
            Jsonl(**{"file": folder.parent / "text.jsonl", "tokenizer": folder, **arguments})


def test_packed_rows_give_what_documents_give_alone(folder: Path) -> None:
    samples = Jsonl(folder.parent / "chat.jsonl", folder)
    model, loss = load(folder), next_token(weighted=True)
    expected = averaged(loss, model, samples)
    for collate, size in ((Pad(multiple=16, window=2), 4), (Pack(length=96), 4)):
        found = [loss(model, **batch) for batch in Loader(samples, batch_size=size, collate=collate)]
        assert total(found) == pytest.approx(expected, rel=1e-5)
    kinds: list[tuple[str, dict[str, Any]]] = [("qwen3", {}), ("gemma3_text", {}), ("phi3", {}), ("mixtral", {})]
    for kind, changed in kinds:
        model = load_of(kind, folder, **changed)
        expected = averaged(loss, model, samples)
        found = [loss(model, **batch) for batch in Loader(samples, batch_size=4, collate=Pack(length=96))]
        assert total(found) == pytest.approx(expected, rel=1e-5), kind
    with pytest.raises(ValueError, match="collate: 'mamba2' carries a state from token to token"):
        loss(load_of("mamba2", folder), **next(iter(Loader(samples, batch_size=4, collate=Pack(length=96)))))


def load_of(kind: str, folder: Path, **changed: Any) -> Any:
    from faststep.mlx_lm._model import Origin, as_language_model

    return as_language_model(new_model(kind, vocab_size=512, **changed), Origin(folder, {}, None))


def averaged(loss: Any, model: nn.Module, samples: Sequence[dict[str, np.ndarray]]) -> float:
    """Return the mean loss of the tokens of samples, each alone."""
    return total([loss(model, **{key: mx.array(each)[None] for key, each in sample.items()}) for sample in samples])


def total(found: list[tuple[mx.array, mx.array]]) -> float:
    pairs = [(float(mean), float(weight)) for mean, weight in found]
    return sum(mean * weight for mean, weight in pairs) / sum(weight for _, weight in pairs)


@pytest.mark.parametrize("masked", [False, True])
def test_batches_and_losses_are_those_of_mlx_lm(folder: Path, tmp_path: Path, masked: bool) -> None:
    """Of the same chats: tokens, trained tokens and loss; mlx-lm's own loss counts a token of padding for each more."""
    records = [json.loads(line) for line in (folder.parent / "chat.jsonl").read_text().splitlines()[:12]]
    data = trainer.CacheDataset(ChatDataset(records, load_tokenizer(folder), mask_prompt=masked))
    samples = Jsonl(write_lines(tmp_path / "a.jsonl", records), folder, train_on="last" if masked else "all")
    model, tokens = load(folder), 0
    np.random.seed(0)
    for batch, lengths in trainer.iterate_batches(data, 4, 128):
        rows = np.array(batch)
        found = [i for row in rows for i, each in enumerate(data) if row[: len(each[0])].tolist() == each[0]]
        (ours,) = Loader([samples[i] for i in found], batch_size=4, collate=Pad(multiple=32))
        for row, i in zip(rows, found, strict=True):
            assert row[: len(samples[i]["tokens"])].tolist() == samples[i]["tokens"].tolist()
        theirs = trainer.default_loss(model, batch, lengths - mx.array([0, 1]))
        mine = next_token(weighted=True)(model, **ours)
        assert [float(each) for each in mine] == pytest.approx([float(each) for each in theirs], rel=1e-5)
        assert int(trainer.default_loss(model, batch, lengths)[1]) == int(theirs[1]) + 4
        tokens += int(theirs[1])
    assert tokens == samples.summary["trained_tokens"]


def test_windows_are_averaged_by_tokens(folder: Path) -> None:
    """Two batches, accumulated, make the update that one batch of both makes, which no mean of means does."""

    def trained(size: int, accumulate: int) -> nn.Module:
        model = load(folder)
        samples = sorted(Jsonl(folder.parent / "chat.jsonl", folder), key=lambda each: len(each["tokens"]))[-4:]
        step = Step(model, optim.SGD(0.1), next_token(weighted=True), weighted=True, accumulate=accumulate)
        for batch in Loader(samples, batch_size=size, collate=Pad(multiple=128)):
            step(**batch)
        assert step.stats.updates == 1
        return model

    one, two = trained(4, 1), trained(2, 2)
    weights = [model.model.layers[0].mlp.up_proj.weight for model in (one, two)]
    assert mx.allclose(*weights, rtol=1e-5, atol=1e-7)
    assert not mx.allclose(weights[0], load(folder).model.layers[0].mlp.up_proj.weight, rtol=1e-5, atol=1e-7)


def test_a_command_names_the_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a step"}\n{"text": \n')
    config = {
        "run": str(tmp_path / "run"),
        "model": {"use": "mlx_lm", "path": str(folder)},
        "loss": {"use": "next_token"},
        "data": {"train": {"use": "jsonl", "file": "a.jsonl", "tokenizer": str(folder)}, "collate": {"use": "pad"}},
        "optimizer": {"use": "AdamW", "learning_rate": 1e-3},
        "train": {"steps": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    done = faststep("train", tmp_path / "config.yaml", status=2)
    assert f"data.train.file: {tmp_path / 'a.jsonl'}:2: no JSON in this line" in done.stderr
    assert not (tmp_path / "run").exists()
