"""Damaged checkpoints are told from valid ones, named, and passed over; nothing of one is ever taken."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints, CheckpointWarning
from support.checkpointing import everything, step_of, train
from support.damage import change_header, change_json, change_manifest, flip, seal

TENSORS = ["model.safetensors", "optimizer.safetensors", "step.safetensors"]
FILES = [*TENSORS, "training.json", "manifest.json"]
Damage = Callable[[Path], object]


def header(change: Callable[[dict[str, Any]], object], name: str = "model.safetensors") -> Damage:
    return lambda path: change_header(path / name, change)


def entry(name: str, value: Any) -> Damage:
    return header(lambda header: header["first.weight"].update({name: value}))


def manifest(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda path: change_manifest(path, change)


def rewritten(name: str, contents: bytes, sealed: bool = True) -> Damage:
    def damage(path: Path) -> None:
        (path / name).write_bytes(contents)
        if sealed:
            seal(path)

    return damage


def lengthened(path: Path) -> None:
    with (path / "model.safetensors").open("ab") as file:
        file.write(b"more")
    seal(path)


def replaced_by_link(path: Path) -> None:
    (path / "model.safetensors").rename(path.parent.parent / "elsewhere.safetensors")
    (path / "model.safetensors").symlink_to(path.parent.parent / "elsewhere.safetensors")


def replaced_by_pipe(path: Path) -> None:
    (path / "model.safetensors").unlink()
    os.mkfifo(path / "model.safetensors")


def outside(name: str) -> Damage:
    def change(contents: dict[str, Any]) -> None:
        contents["files"][name] = contents["files"].pop("model.safetensors")

    return manifest(change)


DAMAGES: dict[str, tuple[Damage, str]] = {
    **{
        f"no {name}": (lambda path, name=name: (path / name).unlink(), f"{name}: expected a file, found none")
        for name in FILES
    },
    **{f"empty {name}": (lambda path, name=name: (path / name).write_bytes(b""), name) for name in FILES},
    **{
        f"truncated {name}": (lambda path, name=name: os.truncate(path / name, (path / name).stat().st_size - 1), name)
        for name in FILES
    },
    **{
        f"{at} {name}": (lambda path, name=name, at=at: flip(path / name, at), name)
        for name in FILES
        for at in (0, 300, 1000)
    },
    "longer": (lambda path: os.truncate(path / "model.safetensors", 10**6), "bytes, found 1000000"),
    "longer, sealed": (lengthened, "bytes of tensors, as its header says, found"),
    "link": (replaced_by_link, "model.safetensors: expected a file, found none that can be read"),
    "pipe": (replaced_by_pipe, "model.safetensors: expected a file, found something else"),
    "folder": (
        lambda path: ((path / "step.safetensors").unlink(), (path / "step.safetensors").mkdir()),
        "something else",
    ),
    "garbage, sealed": (
        rewritten("model.safetensors", b"garbage" * 9),
        "expected a safetensors header within 63 bytes",
    ),
    "short, sealed": (rewritten("model.safetensors", b"1234"), "expected a safetensors header within 4 bytes"),
    "no header": (rewritten("step.safetensors", bytes(8)), "expected JSON, found"),
    "huge header": (rewritten("model.safetensors", b"\xff" * 7 + b"\x7f{}"), "expected a safetensors header"),
    "deep header": (rewritten("model.safetensors", (200_000).to_bytes(8, "little") + b"[" * 200_000), "expected JSON"),
    "list header": (rewritten("model.safetensors", (2).to_bytes(8, "little") + b"[]"), "expected a JSON object"),
    "dtype": (entry("dtype", "F8_E9"), "'first.weight': expected a dtype of BOOL"),
    "other dtype": (entry("dtype", "F16"), "'first.weight': expected the bytes of F16"),
    "dtype list": (entry("dtype", []), "'first.weight': expected a dtype"),
    "shape": (entry("shape", [-32, -32]), "'first.weight': expected a shape"),
    "huge shape": (entry("shape", [2**40, 2**40]), "'first.weight': expected a shape"),
    "long shape": (entry("shape", [1] * 40), "'first.weight': expected a shape"),
    "overflowing shape": (
        entry("shape", [2**31 - 1, 2**31 - 1, 2**31 - 1]),
        "'first.weight': expected the bytes of F32",
    ),
    "true": (entry("shape", [True, 1024]), "'first.weight': expected a shape"),
    "text": (entry("shape", "32"), "'first.weight': expected a shape"),
    "floats": (entry("data_offsets", [0.0, 4096.0]), "'first.weight': expected two offsets"),
    "one offset": (entry("data_offsets", [0]), "'first.weight': expected two offsets"),
    "shifted": (entry("data_offsets", [1 << 40, (1 << 40) + 4096]), "expected its bytes to begin at"),
    "overlap": (
        header(lambda header: header["norm.bias"].update(data_offsets=header["norm.weight"]["data_offsets"])),
        "expected its bytes to begin at",
    ),
    "no entry": (header(lambda header: header.update({"first.weight": None})), "'first.weight': expected a dtype"),
    "gap": (header(lambda header: header.pop("first.weight")), "expected"),
    "metadata": (header(lambda header: header.update(__metadata__={"a": 1})), "expected texts in the metadata"),
    "metadata list": (header(lambda header: header.update(__metadata__=[])), "expected texts in the metadata"),
    "garbage json": (rewritten("training.json", b"\xff\xfe{"), "training.json: expected JSON, found"),
    "other json": (rewritten("training.json", b"{}"), "training.json: expected a JSON object 'numbers'"),
    "deep json": (rewritten("training.json", b'{"numbers":' + b"[" * 100_000), "training.json: expected JSON"),
    "garbage manifest": (rewritten("manifest.json", b"no", sealed=False), "manifest.json: expected JSON"),
    "manifest list": (rewritten("manifest.json", b"[1]", sealed=False), "manifest.json: expected a JSON object"),
    "huge manifest": (rewritten("manifest.json", b" " * (1 << 21), sealed=False), "manifest.json: expected at most"),
    "version": (manifest(lambda m: m.update(version=2)), "expected version 1 of the format, found 2"),
    "number": (manifest(lambda m: m.update(number=7)), "expected the number 5 of its folder, found 7"),
    "metric": (manifest(lambda m: m.update(metric="low")), "expected a metric and a time"),
    "size": (
        manifest(lambda m: m["files"]["model.safetensors"].update(bytes=10)),
        "model.safetensors: expected 10 bytes",
    ),
    "size text": (manifest(lambda m: m["files"]["model.safetensors"].update(bytes="10")), "expected bytes and sha256"),
    "hash": (manifest(lambda m: m["files"]["model.safetensors"].update(sha256="0" * 64)), "expected SHA-256 0000"),
    "no files": (manifest(lambda m: m.pop("files")), "expected the files model.safetensors"),
    "traversal": (outside("../../../etc/passwd"), "expected the files model.safetensors"),
    "absolute": (outside("/etc/passwd"), "expected the files model.safetensors"),
    "one file more": (
        manifest(lambda m: m["files"].update({"../x": {"bytes": 0, "sha256": ""}})),
        "expected the files",
    ),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two checkpoints, 3 and 5."""
    step = step_of(ema_decay=0.9, accumulate=2)
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        train(step, range(3))
        checkpoints.save(step, number=3, numbers={"at": 3})
        train(step, range(3, 5))
        checkpoints.save(step, number=5, numbers={"at": 5})
    return checkpoints.folder


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_one_is_reported_and_passed_over(name: str, folder: Path) -> None:
    damage, words = DAMAGES[name]
    wanted = step_of(ema_decay=0.9, accumulate=2)
    assert Checkpoints(folder).restore(wanted).number == 5
    damage(folder / "step-00000005")
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.at(folder / "step-00000005").verify()
    assert words in str(caught.value)
    assert str(folder / "step-00000005") in str(caught.value)
    step = step_of(ema_decay=0.9, accumulate=2)
    with pytest.warns(CheckpointWarning, match="passed over a damaged checkpoint: .*step-00000005"):
        found = Checkpoints(folder).restore(step)
    assert found is not None
    assert (found.number, found.numbers) == (3, {"at": 3})
    fresh = step_of(ema_decay=0.9, accumulate=2)
    train(fresh, range(3))
    assert everything(step) == everything(fresh)


@pytest.mark.parametrize("name", DAMAGES)
def test_the_only_one_damaged_changes_nothing(name: str, folder: Path) -> None:
    for file in (folder / "step-00000003").iterdir():
        file.unlink()
    DAMAGES[name][0](folder / "step-00000005")
    step = step_of(ema_decay=0.9, accumulate=2, seed=3)
    train(step, range(3))
    before, told = everything(step), []
    assert Checkpoints(folder, on_damaged=told.append).restore(step) is None
    assert everything(step) == before
    assert [each.number for each in told] == [5, 3]
    assert DAMAGES[name][1] in told[0].problem


def test_damaged_ones_stay_and_do_not_count_as_kept(folder: Path) -> None:
    flip(folder / "step-00000005" / "manifest.json", 500)
    with Checkpoints(folder, keep_last=2) as checkpoints:
        for number in (6, 7, 8):
            checkpoints.save(step_of(), number=number)
    listed = checkpoints.list()
    assert [each.number for each in listed] == [5, 7, 8]
    assert [each.problem is None for each in listed] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.update(random={"python": 1}), "expected states of `random` and `numpy.random`"),
        (lambda t: t["random"]["python"].__setitem__(1, [1] * 3), "expected states of `random` and `numpy.random`"),
        (lambda t: t["random"]["numpy"]["state"].update(pos=10**6), "expected states of `random` and `numpy.random`"),
        (lambda t: t["random"]["numpy"]["state"].update(key=["a"]), "expected states of `random` and `numpy.random`"),
        (lambda t: t["values"].update(more=1), r"optimizer: expected the values \[\], found \['more'\]"),
    ],
)
def test_a_training_json_that_lies_changes_nothing(
    change: Callable[[dict[str, Any]], object], words: str, folder: Path
) -> None:
    change_json(folder / "step-00000005" / "training.json", change)
    step = step_of(ema_decay=0.9, accumulate=2)
    train(step, range(2))
    before = everything(step)
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(folder).restore(step)
    assert everything(step) == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h["__metadata__"].pop("random"), "expected whole numbers and `random`"),
        (lambda h: h["__metadata__"].update(random="-1"), "expected a seed of 64 bits"),
        (lambda h: h["__metadata__"].update(steps="many"), "expected whole numbers"),
        (lambda h: h["__metadata__"].update(more="1"), "expected the keys of Step.state"),
        (lambda h: h["__metadata__"].update(steps="-3"), "steps: expected a number from 0 on"),
        (lambda h: h.update(other=h.pop("ema.first.bias")), "expected the keys of Step.state"),
        (lambda h: h["window.first.weight"].update(shape=[16, 64]), r"expected shape \(32, 32\), got \(16, 64\)"),
    ],
)
def test_a_step_state_that_lies_changes_nothing(
    change: Callable[[dict[str, Any]], object], words: str, folder: Path
) -> None:
    change_header(folder / "step-00000005" / "step.safetensors", change)
    step = step_of(ema_decay=0.9, accumulate=2)
    train(step, range(3))
    before = everything(step)
    with pytest.raises(CheckpointError, match=words):
        Checkpoints(folder).restore(step)
    assert everything(step) == before
    assert json.loads((folder / "step-00000005" / "manifest.json").read_text())["number"] == 5
