"""Files of records: formats, folders and patterns, broken lines, what is skipped and cut, and the kept tokens."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep.mlx_lm import Jsonl, _jsonl
from support.commands import faststep
from support.language_models import new_folder, write_data, write_lines

ROWS = [{"text": f"a step {number}"} for number in range(6)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    around = tmp_path_factory.mktemp("models")
    write_data(around)
    return new_folder(around / "llama")


def tokens(file: Any, folder: Path, **options: Any) -> list[list[int]]:
    return [each["tokens"].tolist() for each in Jsonl(file, folder, cache=False, **options)]


def test_formats(folder: Path, tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ROWS)
    expected = tokens(lines, folder)
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=2))
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf\r\n" + lines.read_bytes().replace(b"\n", b"\r\n"))
    (tmp_path / "lines.json").write_bytes(lines.read_bytes())
    for name in ("a.jsonl", "a.json"):
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress((tmp_path / name).read_bytes()))
    for name in ("a.json", "bom.jsonl", "lines.json", "a.jsonl.gz", "a.json.gz"):
        assert tokens(tmp_path / name, folder) == expected, name
    (tmp_path / "wide.jsonl").write_bytes(lines.read_text().encode("utf-16"))
    with pytest.raises(ValueError, match=r"wide.jsonl: expected UTF-8, got UTF-16"):
        tokens(tmp_path / "wide.jsonl", folder)
    (tmp_path / "torn.jsonl.gz").write_bytes((tmp_path / "a.jsonl.gz").read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"^file: .*torn.jsonl.gz cannot be read: "):
        tokens(tmp_path / "torn.jsonl.gz", folder)


def test_parquet(folder: Path, tmp_path: Path) -> None:
    """Keys that a row has not are None in its columns, and are left out."""
    arrow = pytest.importorskip("pyarrow", reason="the extra parquet")
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = [
        {"messages": [{"role": "user", "content": "Hi", "name": "A"}, {"role": "assistant", "content": "Yes."}]},
        {"messages": [{"role": "user", "content": "No"}, {"role": "assistant", "content": "So."}]},
    ]
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert tokens(tmp_path / "a.parquet", folder) == tokens(write_lines(tmp_path / "a.jsonl", rows), folder)
    parquet.write_table(arrow.Table.from_pylist([*rows, {"messages": []}]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b.parquet, row 3: messages: expected an answer"):
        tokens(tmp_path / "b.parquet", folder)
    (tmp_path / "c.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ValueError, match=r"^file: .*c.parquet cannot be read: "):
        tokens(tmp_path / "c.parquet", folder)


def test_folders_and_patterns(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    write_lines(data / "train.jsonl", ROWS[:3])
    write_lines(data / "valid.jsonl", ROWS[3:4])
    assert len(tokens(data, folder, split="train")) == 3
    assert len(tokens(data, folder, split="valid")) == 1
    assert len(tokens(data / "*.jsonl", folder)) == 4
    assert len(tokens([data / "train.jsonl", data / "v*.jsonl"], folder)) == 4
    for arguments, message in (
        ((data, folder), "has files for train, valid: choose one by split: train"),
        ((tmp_path / "none*.jsonl", folder), "expected a file of JSON lines, found none at"),
    ):
        with pytest.raises(ValueError, match=message):
            tokens(*arguments)
    with pytest.raises(ValueError, match=r"expected test.jsonl in .*data, found none"):
        tokens(data, folder, split="test")
    shards = tmp_path / "shards"
    for number in range(2):
        (shards / str(number)).mkdir(parents=True)
        write_lines(shards / str(number) / "part.jsonl", ROWS[3 * number : 3 * number + 3])
    assert tokens(shards, folder) == tokens(write_lines(tmp_path / "all.jsonl", ROWS), folder)


BROKEN = ['{"text": "cut off', '{"text": null}', '{"text": "bad \\ud83d half"}', "[]", '{"text": ""}']


def test_all_broken_lines_are_told_at_once(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("".join(f"{line}\n" for line in ['{"text": "good"}', *BROKEN, '{"text": "pair \\ud83d\\ude00"}']))
    with pytest.raises(ValueError, match="file: 5 lines cannot be trained on; broken: skip leaves") as error:
        tokens(file, folder)
    told = str(error.value).splitlines()
    assert [line.strip().removeprefix(f"{file}:")[0] for line in told[1:]] == ["2", "3", "4", "5", "6"]
    assert "\\ud83d in a text is half of a surrogate pair" in told[3]
    samples = Jsonl(file, folder, broken="skip", cache=False)
    assert len(samples) == 2
    (left_out,) = samples.summary["left_out"]
    assert left_out.startswith(f"5 broken: skipped (broken: skip), the first: {file}:2: no JSON in this line: ")
    file.write_text("{\n" * 5000)
    with pytest.raises(ValueError, match="file: 1024 lines or more cannot be trained on"):
        tokens(file, folder)
    with pytest.raises(ValueError, match="found none; 5,000 broken: skipped"):
        tokens(file, folder, broken="skip")


def test_records_and_complaints_keep_their_order(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records are encoded some at a time, while the next ones are read."""
    monkeypatch.setattr(_jsonl, "_TOGETHER", 2)
    assert tokens(write_lines(tmp_path / "a.jsonl", ROWS), folder) == [
        tokens(write_lines(tmp_path / f"{number}.jsonl", [row]), folder)[0] for number, row in enumerate(ROWS)
    ]
    bad = [{"text": "one two three " * 100}, {"txt": "b"}, {"text": "fine"}, {"text": ""}, [1]]
    with pytest.raises(ValueError, match="file: 4 lines cannot be trained on") as error:
        tokens(write_lines(tmp_path / "b.jsonl", bad), folder)
    assert [line.strip().removeprefix(f"{tmp_path / 'b.jsonl'}:")[0] for line in str(error.value).splitlines()[1:]] == [
        *"1245"
    ]


def test_what_is_too_long_is_counted(folder: Path, tmp_path: Path) -> None:
    chats = [[["Hi " * 60, "Yes."]] * 3, [["Hi", "a b c " * 30]] * 2, [["Hi", "Yes."]] * 4]
    records = [
        {"messages": [{"role": "user", "content": each[0]}, {"role": "assistant", "content": each[1]}]}
        for kind in chats
        for each in kind
    ]
    file = write_lines(tmp_path / "a.jsonl", records)
    cut = Jsonl(file, folder, max_length=40, longer="cut", cache=False)
    assert len(cut) == 6
    assert cut.summary["left_out"] == [
        f"3 with nothing left to learn from within 40 tokens: skipped (longer: cut), the first: {file}:1",
        f"2 longer than 40 tokens: cut (longer: cut), the first: {file}:4",
    ]
    skipped = Jsonl(file, folder, max_length=40, longer="skip", cache=False)
    assert len(skipped) == 4
    assert skipped.summary["left_out"] == [f"5 longer than 40 tokens: skipped (longer: skip), the first: {file}:1"]
    lengths = [len(each["tokens"]) for each in cut]
    summary = cut.summary
    assert (summary["samples"], summary["tokens"]) == (6, sum(lengths))
    assert summary["trained_tokens"] == sum(int((each["targets"] != -100).sum()) for each in cut)
    assert (summary["shortest"], summary["longest"]) == (min(lengths), max(lengths)) == (cut.lengths.min(), 40)
    assert sum(summary["histogram"]["counts"]) == 6


def test_a_training_says_what_it_is_given(folder: Path, tmp_path: Path) -> None:
    write_lines(tmp_path / "a.jsonl", [*ROWS, {"text": "one two three " * 100}])
    write_lines(tmp_path / "b.jsonl", [{"text": "one two"}, {"text": "three"}])
    config = {
        "run": str(tmp_path / "run"),
        "model": {"use": "mlx_lm", "path": str(folder)},
        "loss": {"use": "next_token"},
        "data": {
            "train": {"use": "jsonl", "file": "a.jsonl", "tokenizer": str(folder), "longer": "skip"},
            "validation": {"use": "jsonl", "file": "b.jsonl", "tokenizer": str(folder)},
            "collate": {"use": "pad"},
            "batch_size": 2,
        },
        "optimizer": {"use": "AdamW", "learning_rate": 1e-3},
        "train": {"steps": 2},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    shown = faststep("train", tmp_path / "config.yaml").stdout
    assert "train: 6 samples, " in shown
    assert f"warning at step 0: train: 1 longer than 128 tokens: skipped (longer: skip), the first: {tmp_path}" in (
        shown.replace("\n    ", " ")
    )
    assert "in validations a batch of few tokens counts as much as one of many: step.weighted" in (
        shown.replace("\n    ", " ")
    )
    faststep("report", tmp_path / "run")
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Lengths of samples, train" in page
    assert "train: 6 samples, " in page


def test_tokens_are_kept_where_encoding_takes_long(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those that were encoded, and others where the file, the tokenizer or an option is another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_jsonl, "_LONG", 0.0)
    file = write_lines(tmp_path / "a.jsonl", [*ROWS, {"text": "one two three " * 100}])
    first = Jsonl(file, folder, longer="skip")
    kept = [*(tmp_path / "cache").rglob("*.npz")]
    assert len(kept) == 1
    monkeypatch.setattr(Jsonl, "_encode", None)  # not to be called
    again = Jsonl(file, folder, longer="skip")
    assert again.summary == first.summary
    for one, two in zip(first, again, strict=True):
        for name in ("tokens", "targets"):
            assert np.array_equal(one[name], two[name])
            assert one[name].dtype == two[name].dtype == np.int32
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_jsonl, "_LONG", 0.0)
    Jsonl(file, folder, longer="cut")
    write_lines(file, ROWS)
    assert len(Jsonl(file, folder, longer="skip")) == 6
    assert len([*(tmp_path / "cache").rglob("*.npz")]) == 3
    kept[0].write_bytes(b"torn")
    write_lines(file, [*ROWS, {"text": "one two three " * 100}])
    assert Jsonl(file, folder, longer="skip").summary == first.summary
