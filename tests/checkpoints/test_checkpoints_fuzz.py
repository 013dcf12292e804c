"""Any bytes in any file of a checkpoint: never a crash, never a partial load, always one error.

`FASTSTEP_FUZZ=100000` sets how many inputs are tried; 2,000 otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.checkpointing import everything
from support.damage import seal

INPUTS = int(os.environ.get("FASTSTEP_FUZZ", "2000"))
TENSORS = ["model.safetensors", "optimizer.safetensors", "step.safetensors"]
FILES = [*TENSORS, "training.json", "manifest.json"]
Change = Callable[[bytes], bytes]

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=20),
    st.sampled_from(["F32", "BF16", "C64", "BOOL", "U64", "F8_E4M3", "", "..", "/", "\x00", 2**31, 2**63, 2**64]),
)  # fmt: skip
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
places = st.integers(0, 10**6)


def flipped(at: int, bits: int) -> Change:
    def change(contents: bytes) -> bytes:
        changed = bytearray(contents)
        if changed:
            changed[at % len(changed)] ^= bits
        return bytes(changed)

    return change


def put(at: int, part: bytes, instead: int) -> Change:
    return lambda contents: contents[: (p := at % (len(contents) + 1))] + part + contents[p + instead :]


def descend(tree: Any, path: list[int], value: Any) -> Any:
    """Put a value at a place of a JSON tree."""
    if path and isinstance(tree, dict) and tree:
        key = sorted(tree)[path[0] % len(tree)]
        return tree | {key: descend(tree[key], path[1:], value)}
    if path and isinstance(tree, list) and tree:
        at = path[0] % len(tree)
        return [*tree[:at], descend(tree[at], path[1:], value), *tree[at + 1 :]]
    return value


def renamed(tree: Any, path: list[int], name: str) -> Any:
    """Give a key of a JSON object another name, or another one's."""
    if not isinstance(tree, dict) or not tree:
        return tree
    key = sorted(tree)[path[0] % len(tree)]
    if len(path) > 1 and isinstance(tree[key], dict):
        return tree | {key: renamed(tree[key], path[1:], name)}
    return {name if other == key else other: value for other, value in tree.items()}


def in_json(change: Callable[[Any], Any]) -> Change:
    """Change the JSON of a file: all of it, or the header of a safetensors file."""

    def change_bytes(contents: bytes) -> bytes:
        if contents[:1] == b"{":
            return json.dumps(change(json.loads(contents))).encode()
        length = int.from_bytes(contents[:8], "little")
        text = json.dumps(change(json.loads(contents[8 : 8 + length]))).encode()
        return len(text).to_bytes(8, "little") + text + contents[8 + length :]

    return change_bytes


paths = st.lists(st.integers(0, 50), min_size=1, max_size=4)
changes = st.one_of(
    st.builds(flipped, places, st.integers(1, 255)),
    st.builds(lambda size: lambda contents: contents[: size % (len(contents) + 1)], places),
    st.builds(put, places, st.binary(max_size=40), st.integers(0, 40)),
    st.builds(lambda contents: lambda _: contents, st.binary(max_size=200)),
    st.builds(lambda length: lambda contents: length + contents[8:], st.binary(min_size=8, max_size=8)),
    st.builds(lambda path, value: in_json(lambda tree: descend(tree, path, value)), paths, values),
    st.builds(lambda path, name: in_json(lambda tree: renamed(tree, path, name)), paths, st.text(max_size=10)),
)


def new_step() -> Step:
    mx.random.seed(5)
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.1), nn.Linear(3, 1))
    model.layers[0].set_dtype(mx.bfloat16)
    optimizer = optim.MultiOptimizer([optim.Adam(1e-3), optim.SGD(0.1)], [lambda _, array: array.ndim == 2])
    return Step(model, optimizer, lambda model, x: model(x).sum(), ema_decay=0.5, accumulate=2, compile=False)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    step = new_step()
    for _ in range(3):
        step(mx.ones((1, 2)))
    with Checkpoints(tmp_path_factory.mktemp("fuzz") / "original") as checkpoints:
        return checkpoints.save(step, number=1, numbers={"epoch": 1}, metric=0.5)


@pytest.fixture(scope="module")
def step() -> Step:
    return new_step()


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    memory = Path("/dev/shm")  # where files of short life cost no disk
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.filterwarnings("ignore::faststep.checkpoints.CheckpointWarning")
@settings(max_examples=INPUTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.sampled_from(FILES), changes), min_size=1, max_size=3), st.booleans())
def test_any_bytes(original: Path, step: Step, folder: Path, damages: list[tuple[str, Change]], sealed: bool) -> None:
    path = folder / original.name
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(original, path)
    for name, change in damages:
        contents = (path / name).read_bytes()
        try:
            changed = change(contents)
        except (ValueError, TypeError):  # a second change of JSON that is none any more
            continue
        (path / name).write_bytes(changed)
    if sealed:
        try:
            seal(path)
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
            pass
    look(path)
    before = everything(step)
    try:
        found = Checkpoints(folder).restore(step)
    except CheckpointError:
        found = None
    if found is None:
        assert everything(step) == before
    else:
        complete(path, step)
        Checkpoints(original.parent).restore(step)
        assert everything(step).keys() == before.keys()


def look(path: Path) -> None:
    """List, verify, export: errors of one kind only."""
    found = Checkpoint.at(path)
    try:
        found.verify()
    except CheckpointError:
        pass
    else:
        assert found.problem is None
    file = path.parent / ".export.safetensors"
    try:
        found.export(file, average=True)
    except CheckpointError:
        pass
    file.unlink(missing_ok=True)


def complete(path: Path, step: Step) -> None:
    """Compare a step with what MLX itself reads of the files: all of it is there."""
    restored = everything(step)
    for name in ("model", "optimizer"):
        loaded: Any = mx.load(str(path / f"{name}.safetensors"))
        wanted = {key: (str(array.dtype), array.shape, memoryview(array).tobytes()) for key, array in loaded.items()}
        assert restored[name] == wanted
