"""Texts to mask and texts with labels: what a tokenizer makes of them, their masks, and bad files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep import Step, recipes
from faststep.data import Loader, Pack, Pad
from mlx.optimizers import AdamW
from support.texts import SPECIAL, TEXTS, write_tokenizer
from tokenizers import Tokenizer

PAD, CLS, SEP, MASK = range(4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def masked(folder: Path, **options: Any) -> recipes.MaskedText:
    return recipes.MaskedText(folder, **{"files": list(TEXTS), "split": "all", "length": 32} | options)


def epoch(data: recipes.MaskedText, number: int) -> list[dict[str, np.ndarray]]:
    data.set_epoch(number)
    return [data[i] for i in range(len(data))]


def same(one: list[dict[str, np.ndarray]], other: list[dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(one, other, strict=True))


def test_the_text_is_all_there_and_a_third_of_it_is_masked(folder: Path) -> None:
    data = masked(folder)
    items = epoch(data, 1)
    assert all(each["tokens"][0] == CLS and each["tokens"][-1] == SEP for each in items)
    assert max(len(each["tokens"]) for each in items) == 32 == data.longest
    targets = np.concatenate([each["targets"] for each in items])
    tokens = np.concatenate([each["tokens"] for each in items])
    hidden = targets >= 0
    assert hidden.sum() / (len(tokens) - 2 * len(items)) == pytest.approx(0.3, abs=0.01)
    assert (tokens[hidden] == MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert (tokens[hidden] == targets[hidden]).mean() == pytest.approx(0.1, abs=0.02)
    plain = Tokenizer.from_file(str(folder / "tokenizer.json"))
    plain.no_truncation()
    plain.no_padding()
    whole = [id for file in TEXTS for id in plain.encode(file.read_text(encoding="utf-8")).ids]
    restored = np.where(hidden, targets, tokens)
    assert restored[(restored != CLS) & (restored != SEP)].tolist() == whole


def test_masks_are_others_in_each_epoch_and_the_same_again(folder: Path) -> None:
    data = masked(folder)
    first, second = epoch(data, 1), epoch(data, 2)
    assert not same(first, second)
    assert same(first, epoch(masked(folder), 1))
    assert not same(first, epoch(masked(folder, seed=1), 1))


def test_held_out_masks_stay(folder: Path) -> None:
    held = {"split": "held_out", "every": 2}
    assert same(epoch(masked(folder, **held), 1), epoch(masked(folder, **held), 5))
    assert len(masked(folder, **held)) < len(masked(folder, split="train", every=2)) + len(masked(folder, **held))


def test_masks_come_from_workers_as_without_them(folder: Path) -> None:
    def batches(workers: int) -> list[dict[str, mx.array]]:
        loader = Loader(masked(folder), batch_size=8, shuffle=True, seed=3, collate=Pad(multiple=32), workers=workers)
        return [batch for _ in range(2) for batch in loader]

    for one, other in zip(batches(0), batches(4), strict=True):
        assert all(mx.array_equal(one[key], other[key]).item() for key in one)


CONFIG = {
    "vocab_size": 400,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
    "local_attention": 8,
}


@pytest.mark.parametrize("batch_size", [1, 2, 7, 16, 64])
@pytest.mark.parametrize("collate", [Pad(multiple=32), Pack(length=64, targets=False)], ids=["pad", "pack"])
def test_all_batch_sizes_train_with_prefetch(folder: Path, batch_size: int, collate: Any) -> None:
    model = recipes.modernbert(config=CONFIG)
    step = Step(model, AdamW(1e-3), recipes.masked_lm(), max_grad_norm=1.0)
    loader = Loader(masked(folder), batch_size=batch_size, shuffle=True, seed=0, collate=collate, workers=2, prefetch=4)
    for number, batch in zip(range(3), loader, strict=False):
        out = step(**batch)
        assert batch["tokens"].shape[0] == batch_size, number
        assert out.loss.item() == pytest.approx(np.log(400), rel=0.2)
        assert out.grad_norm is not None
        assert out.grad_norm.item() > 0.05
        assert not out.skipped
    assert len(step.stats.traces) == 1


def write(folder: Path, text: str, name: str = "data.jsonl") -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_labels_by_name_by_number_and_from_tables(folder: Path, tmp_path: Path) -> None:
    rows = write(tmp_path, '{"text": "a step", "label": "b"}\n\n{"text": "' + "long " * 99 + '", "label": "a"}\n')
    data = recipes.LabelledText(folder, rows, ["a", "b"], length=10)
    assert [int(data[i]["labels"]) for i in range(len(data))] == [1, 0]
    assert [len(data[i]["tokens"]) for i in range(2)] == [len(data[0]["tokens"]), 10]
    assert data[1]["tokens"][[0, -1]].tolist() == [CLS, SEP]
    table = write(tmp_path, "said\tmood\nthe model\t2\nthe loss\t0\n", "data.tsv")
    data = recipes.LabelledText(folder, table, text="said", label="mood")
    assert (data.classes, data.vocabulary) == (3, 400)
    assert [int(data[i]["labels"]) for i in range(2)] == [2, 0]


BAD_FILES = {
    "broken line": ('{"text": "a", "label": 0}\n{"text": "b", "label"\n', r"data\.jsonl:2: expected a JSON object: "),
    "no object": ("[1]\n", r"data\.jsonl:1: expected a JSON object, got list"),
    "no column": ('{"text": "a"}\n', r"data\.jsonl:1: expected a column 'label'; there are text"),
    "no text": ('{"text": 3, "label": 0}\n', r"data\.jsonl:1: expected text in the column 'text'"),
    "named label": ('{"text": "a", "label": "x"}\n', r"data\.jsonl:1: expected a number as label, .* got 'x'"),
    "empty": ("\n", r"file: expected texts, .*data\.jsonl has none"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_told_with_its_line(case: str, folder: Path, tmp_path: Path) -> None:
    text, message = BAD_FILES[case]
    with pytest.raises(ValueError, match=message):
        recipes.LabelledText(folder, write(tmp_path, text))


def test_bad_arguments(folder: Path, tmp_path: Path) -> None:
    rows = write(tmp_path, '{"text": "a", "label": "c"}\n')
    with pytest.raises(ValueError, match=r"data\.jsonl:1: expected a label of a, b, got 'c'"):
        recipes.LabelledText(folder, rows, ["a", "b"])
    with pytest.raises(ValueError, match=r"file: expected one of \.jsonl, \.csv, \.tsv, got .*data\.txt"):
        recipes.LabelledText(folder, tmp_path / "data.txt")
    with pytest.raises(ValueError, match=r"length: expected a number from 3 on, got 2"):
        masked(folder, length=2)
    with pytest.raises(ValueError, match=r"probability: expected a number above 0 and at most 1, got 0"):
        masked(folder, probability=0)
    with pytest.raises(ValueError, match=r"tokenizer: expected a tokenizer\.json, or a folder with one"):
        masked(tmp_path)
    with pytest.raises(ValueError, match=r"tokenizer: .* cannot be read"):
        recipes.MaskedText(write(tmp_path, "{}", "tokenizer.json"))
    with pytest.raises(ValueError, match=r"files: expected text, got files without any"):
        masked(folder, files=write(tmp_path, "", "empty.txt"))
    assert SPECIAL[MASK] == "[MASK]"
