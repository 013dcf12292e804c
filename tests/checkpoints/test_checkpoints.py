"""Saving, keeping, finding, restoring, exporting; and what is refused."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.checkpoints import Checkpoint, CheckpointError, Checkpoints, CheckpointWarning
from mlx.utils import tree_flatten
from support.checkpointing import STEPS, arrays_of, everything, quantize, step_of, train
from support.continuation import load, read

FILES = {"model.safetensors", "optimizer.safetensors", "step.safetensors", "training.json", "manifest.json"}


class Position:
    """The least that a loader has."""

    def __init__(self, position: int = 0, of: str = "letters") -> None:
        self.position, self.of = position, of

    @property
    def state(self) -> dict[str, Any]:
        return {"position": self.position, "of": self.of}

    def load_state(self, state: dict[str, Any]) -> None:
        if state["of"] != self.of:
            raise ValueError(f"expected the state of a loader of {self.of}, got one of {state['of']}")
        self.position = state["position"]


def numbers_in(folder: Path) -> list[int]:
    return [each.number for each in Checkpoints(folder).list()]


def test_what_is_saved_is_found(tmp_path: Path) -> None:
    step, loader = step_of(), Position(3)
    train(step, range(2))
    numbers = {"step": 2, "epoch": 0, "best": None, "config": {"rate": 1e-3, "names": ["ä", "\U0001f600"]}}
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        path = checkpoints.save(step, loader, number=2, numbers=numbers, metric=0.25)
    assert {file.name for file in path.iterdir()} == FILES
    (listed,) = checkpoints.list()
    found = checkpoints.restore(step_of(), loader := Position())
    assert listed == found
    assert found is not None
    assert (found.path, found.number, found.metric, found.numbers) == (path, 2, 0.25, numbers)
    assert found.problem is None
    assert loader.position == 3
    assert found.bytes == sum(file.stat().st_size for file in path.iterdir() if file.name != "manifest.json")
    assert time.time() - 600 < found.time <= time.time()
    training = json.loads((path / "training.json").read_text())
    assert training["versions"].keys() == {"faststep", "mlx", "numpy", "python"}
    found.verify()


def test_nothing_is_made_before_the_first_save(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "nowhere")
    assert checkpoints.list() == []
    assert checkpoints.restore(step_of()) is None
    checkpoints.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("background", [True, False])
def test_the_last_and_the_best_are_kept(background: bool, tmp_path: Path) -> None:
    step = step_of()
    metrics = [5.0, 1.0, 4.0, 1.0, 3.0, None, float("nan"), float("inf"), 2.0]
    with Checkpoints(tmp_path, keep_last=2, keep_best=2, background=background) as checkpoints:
        for number, metric in enumerate(metrics):
            checkpoints.save(step, number=number, metric=metric)
    assert numbers_in(tmp_path) == [1, 3, 7, 8]
    with Checkpoints(tmp_path, keep_last=1, keep_best=1, best="max") as checkpoints:
        checkpoints.save(step, number=9, metric=0.0)
    assert numbers_in(tmp_path) == [8, 9]
    with Checkpoints(tmp_path, keep_last=None, keep_best=0) as checkpoints:
        for number in range(10, 15):
            checkpoints.save(step, number=number)
    assert numbers_in(tmp_path) == [8, *range(9, 15)]


def test_of_equally_good_ones_the_first_is_kept_and_found(tmp_path: Path) -> None:
    step = step_of()
    with Checkpoints(tmp_path, keep_last=1, keep_best=1, best="max") as checkpoints:
        for number, metric in enumerate([0.5, 0.9, 0.9, 0.9, 0.2]):
            checkpoints.save(step, number=number, metric=metric)
        checkpoints.wait()
        assert numbers_in(tmp_path) == [1, 4]
        assert not checkpoints.would_keep(0.9)
        found = checkpoints.restore(step_of(), which="best")
    assert found is not None
    assert found.number == 1


def test_one_of_the_same_number_is_replaced(tmp_path: Path) -> None:
    step = step_of()
    with Checkpoints(tmp_path) as checkpoints:
        for numbers in ({"a": 1}, {"b": 2}):
            train(step, range(1))
            checkpoints.save(step, number=4, numbers=numbers)
        wanted = everything(step)
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == ["step-00000004"]
    fresh = step_of()
    assert checkpoints.restore(fresh).numbers == {"b": 2}
    assert everything(fresh) == wanted


def test_an_older_number_than_what_is_there_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step_of(), number=7)
        checkpoints.wait()
        with pytest.raises(CheckpointError, match="from 7 on, which there is already, got 3: restore before you go on"):
            checkpoints.save(step_of(), number=3)
        (tmp_path / "step-00000007" / "manifest.json").unlink()
        checkpoints.save(step_of(), number=3)  # what is damaged would not be restored
    assert numbers_in(tmp_path) == [3, 7]


def test_a_folder_with_something_else_is_not_written_to(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("ten years of work")
    with pytest.raises(CheckpointError, match=r"got 'thesis.tex' in it: choose another folder"):
        Checkpoints(tmp_path).save(step_of(), number=1)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(CheckpointError, match="expected a folder"):
        Checkpoints(tmp_path / "thesis.tex").save(step_of(), number=1)
    with pytest.raises(CheckpointError, match="expected a folder"):
        Checkpoints(tmp_path / "thesis.tex").list()


def test_nothing_of_the_users_is_removed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "manifest.json").write_text("mine")
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder, keep_last=1, keep_best=0) as checkpoints:
        first = checkpoints.save(step_of(), number=1)
        checkpoints.wait()
        (first / "notes.txt").write_text("the good one")
        (folder / ".hidden").write_text("mine")
        (folder / ".step-00000001.partial").symlink_to(elsewhere)
        (folder / ".step-00000002.removed").mkdir()
        (folder / ".step-00000002.removed" / "mine").write_text("mine")
        checkpoints.save(step_of(), number=3)
        checkpoints.save(step_of(), number=4)
        checkpoints.wait()
        (folder / "step-00000004" / "notes.txt").write_text("this one too")
        checkpoints.save(step_of(), number=4)
        with pytest.raises(CheckpointError, match="not written: expected only a checkpoint there, got something else"):
            checkpoints.wait()
    assert numbers_in(folder) == [1, 4]
    checkpoints.list()[0].verify()
    assert (first / "notes.txt").read_text() == "the good one"
    assert (elsewhere / "manifest.json").read_text() == "mine"
    assert (folder / ".step-00000002.removed" / "mine").exists()


def test_a_link_in_place_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "a") as checkpoints:
        checkpoints.save(step_of(), number=1)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "step-00000002").symlink_to(tmp_path / "a" / "step-00000001")
    (listed,) = Checkpoints(tmp_path / "b").list()
    assert listed.problem is not None
    assert "found a link" in listed.problem
    with pytest.raises(CheckpointError, match="in it: choose another folder"):
        Checkpoints(tmp_path / "b").save(step_of(), number=3)
    with pytest.warns(CheckpointWarning, match="found a link"):
        assert Checkpoints(tmp_path / "b").restore(step_of()) is None


def test_what_only_has_the_name_of_a_checkpoint_is_listed_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "step-00000001").write_text("a file")
    (tmp_path / "step-00000002").symlink_to(tmp_path / "nowhere")
    listed = Checkpoints(tmp_path).list()
    assert [each.number for each in listed] == [1, 2]
    assert all("expected the folder of a checkpoint" in str(each.problem) for each in listed)
    with pytest.warns(CheckpointWarning, match="step-0000000[12]"):
        assert Checkpoints(tmp_path).restore(step_of()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"keep_last": 0}, "keep_last: expected a number from 1 on or None, got 0"),
        ({"keep_best": -1}, "keep_best: expected a number from 0 on, got -1"),
        ({"best": "largest"}, "best: expected"),
    ],
)
def test_options_are_checked(arguments: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        Checkpoints(tmp_path, **arguments)


class WithFloat64(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with mx.stream(mx.cpu):
            self.weight = mx.zeros((2,)).astype(mx.float64)


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (lambda c, s: c.save(s, number=1, numbers={"a": mx.array(1)}), "numbers: expected plain JSON values"),
        (lambda c, s: c.save(s, Position(position=b"1"), number=1), "loader: expected plain JSON values"),  # type: ignore[arg-type]
        (lambda c, s: c.save(s, number=-1), "number: expected one from 0 to"),
        (
            lambda c, s: c.save(Step(WithFloat64(), optim.SGD(0.1), lambda model: model.weight.sum()), number=1),
            "model: weight: expected a dtype that MLX reads from safetensors .*, got mlx.core.float64",
        ),
    ],
)
def test_what_cannot_be_saved_is_refused_at_once(
    save: Callable[[Checkpoints, Step], Path], message: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(step_of(), number=0)
    with pytest.raises(CheckpointError, match=message):
        save(checkpoints, step_of())
    checkpoints.close()
    assert numbers_in(tmp_path) == [0]


def test_a_model_that_shows_its_average_is_neither_saved_nor_restored(tmp_path: Path) -> None:
    step, checkpoints = step_of(ema_decay=0.5), Checkpoints(tmp_path)
    checkpoints.save(step, number=1)
    with step.average():
        with pytest.raises(CheckpointError, match="the model shows its average"):
            checkpoints.save(step, number=2)
        with pytest.raises(CheckpointError, match="the model shows its average"):
            checkpoints.restore(step)


class Wider(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(2, 2) for _ in range(20)]


def with_another(change: Callable[[nn.Module], object]) -> Callable[[], tuple[Step, Position]]:
    return lambda: (step_of(change=change), Position())


MISMATCHES: dict[str, tuple[Callable[[], tuple[Step, Any]], list[str]]] = {
    "shape": (
        with_another(lambda model: setattr(model, "first", nn.Linear(16, 32))),
        ["expected the checkpoint of this model", "first.weight: expected float32 [32, 16], found float32 [32, 32]"],
    ),
    "dtype": (
        with_another(lambda model: model.layers[0].set_dtype(mx.bfloat16)),
        ["layers.0.weight: expected bfloat16 [32, 32], found float32 [32, 32]", "layers.0.bias: expected bfloat16"],
    ),
    "missing": (
        with_another(lambda model: setattr(model, "more", nn.Linear(2, 2))),
        ["missing: more.weight", "missing: more.bias"],
    ),
    "unknown": (with_another(lambda model: delattr(model, "shift")), ["unknown: 'shift'"]),
    "quantized": (with_another(quantize), ["missing: first.scales", "first.weight: expected uint32 [32, 4], found"]),
    "many": (
        lambda: (Step(Wider(), optim.SGD(0.1), lambda model: mx.array(0.0)), Position()),
        ["missing: layers.1.weight", "missing: layers.6.weight", " more"],
    ),
    "optimizer": (
        lambda: (step_of(lambda: optim.SGD(0.1, momentum=0.9)), Position()),
        ["expected the checkpoint of this optimizer", "unknown: 'first.weight.m'"],
    ),
    "loader": (lambda: (step_of(), Position(of="numbers")), ["expected the state of a loader of numbers"]),
}


@pytest.mark.parametrize("name", MISMATCHES)
@pytest.mark.parametrize("used", [False, True])
def test_a_checkpoint_of_something_else_changes_nothing(name: str, used: bool, tmp_path: Path) -> None:
    make, words = MISMATCHES[name]
    saved = step_of()
    train(saved, range(3))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, Position(7), number=3)
    step, loader = make()
    if used and name not in ("many", "unknown", "shape"):
        train(step, range(5, 7))
    before = everything(step)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.restore(step, loader)
    for word in words:
        assert word in str(caught.value)
    assert "step-00000003" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 12
    assert everything(step) == before
    assert loader.position == 0


class Failing(Position):
    def load_state(self, state: dict[str, Any]) -> None:
        super().load_state(state)
        self.stop()

    def stop(self) -> None:
        self.stop = lambda: None  # type: ignore[method-assign]
        raise OSError("the data is gone")


def test_an_error_in_the_middle_of_a_restore_takes_everything_back(tmp_path: Path) -> None:
    saved = step_of(ema_decay=0.9)
    train(saved, range(3))
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(saved, Position(7), number=3)
    step, loader = step_of(ema_decay=0.9, seed=8), Failing()
    train(step, range(2))
    before = everything(step)
    with pytest.raises(CheckpointError, match="the data is gone"):
        checkpoints.restore(step, loader)
    assert everything(step) == before
    assert loader.position == 0
    losses = train(step, range(2, 5))
    other = step_of(ema_decay=0.9, seed=8)
    train(other, range(2))
    assert losses == train(other, range(2, 5))


def test_a_loader_whose_state_was_not_saved_is_an_error(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step_of(), number=1)
        with pytest.raises(CheckpointError, match="expected the state of a loader, found none"):
            checkpoints.restore(step_of(), Position())


@pytest.mark.parametrize("name", ["plain", "masters", "quantized", "frozen"])
def test_exported_weights_are_loaded_by_the_model(name: str, tmp_path: Path) -> None:
    step = STEPS[name]()
    train(step, range(3))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(step, number=3)
    file = checkpoints.list()[0].export(tmp_path / "weights.safetensors")
    model = STEPS[name]().model
    model.load_weights(str(file))
    assert arrays_of(model.parameters()) == arrays_of(step.model.parameters())
    with pytest.raises(CheckpointError, match="nothing is written over it"):
        checkpoints.list()[0].export(file)
    with pytest.raises(CheckpointError, match=r"ends in .safetensors"):
        checkpoints.list()[0].export(tmp_path / "weights.npz")
    with pytest.raises(CheckpointError, match="not written: No such file"):
        checkpoints.list()[0].export(tmp_path / "no" / "weights.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "weights.safetensors"]


@pytest.mark.parametrize("name", ["masters", "frozen"])
def test_the_exported_average_is_what_the_step_shows(name: str, tmp_path: Path) -> None:
    step = STEPS[name]()
    train(step, range(4))
    with Checkpoints(tmp_path / "checkpoints") as checkpoints:
        checkpoints.save(step, number=4)
    file = checkpoints.list()[0].export(tmp_path / "average.safetensors", average=True)
    model = STEPS[name]().model
    model.load_weights(str(file))
    with step.average() as shown:
        assert arrays_of(model.parameters()) == arrays_of(shown.parameters())


def test_without_an_average_none_is_exported(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(step_of(), number=1)
    with pytest.raises(CheckpointError, match="expected a moving average, found none"):
        Checkpoint.at(path).export(tmp_path / "average.safetensors", average=True)


@pytest.mark.parametrize("name", STEPS)
def test_mlx_reads_the_files_and_they_are_those_of_rust(name: str, tmp_path: Path) -> None:
    step = STEPS[name]()
    train(step, range(4))
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(step, number=4)
    other = STEPS[name]()
    load(path, other)  # as the test of runs that go on in Rust does
    mine, theirs = everything(step), everything(other)
    for part in ("model", "optimizer", "step", "mlx"):
        assert mine[part] == theirs[part]
    arrays = read(path / "model.safetensors")[0]
    assert arrays.keys() == dict(tree_flatten(step.model.parameters())).keys()


def test_views_empty_arrays_and_every_dtype_come_back(tmp_path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = mx.ones((2, 3))
            bits = mx.random.randint(0, 256, (4, 6, 8)).astype(mx.uint8)
            kinds = [mx.uint8, mx.int8, mx.uint16, mx.int16, mx.uint32, mx.int32, mx.uint64, mx.int64]
            kinds += [mx.float16, mx.bfloat16, mx.float32, mx.complex64]
            self.odd = {str(kind).split(".")[1]: bits.view(kind) for kind in kinds} | {"bool": bits > 100}
            self.odd |= {"transposed": mx.arange(12.0).reshape(3, 4).T, "strided": mx.arange(9)[::2]}
            self.odd |= {"broadcast": mx.broadcast_to(mx.array(1.5), (3, 2)), "empty": mx.zeros((0, 3))}
            self.odd |= {"half": mx.arange(12).reshape(3, 4).T.astype(mx.bfloat16).T, "scalar": mx.array(3)}
            self.odd["part"] = mx.arange(100)[20:30]
            self.freeze(keys=["odd"])

    def make(seed: int) -> Step:
        mx.random.seed(seed)
        return Step(Odd(), optim.SGD(0.1), lambda model: model.weight.sum())

    step = make(1)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=1)
    checkpoints.restore(other := make(2))
    assert arrays_of(other.model.parameters()) == arrays_of(step.model.parameters())


def test_lazy_parameters_are_evaluated_before_another_thread_reads_them(tmp_path: Path) -> None:
    model = nn.Linear(64, 64)  # its weights are lazy
    step = Step(model, optim.Adam(1e-3), lambda model: model.weight.sum())
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=1)
    (found,) = checkpoints.list()
    found.verify()
    assert found.problem is None


def test_a_user_optimizers_own_values_come_back(tmp_path: Path) -> None:
    class Counting(optim.SGD):
        def __init__(self) -> None:
            super().__init__(0.1)
            self.state["names"] = {"count": 0, "label": "none", "nothing": None}

    def make() -> Step:
        return Step(nn.Linear(2, 2), Counting(), lambda model: model.weight.sum(), compile=False)

    step = make()
    step.optimizer.state["names"] |= {"count": 3, "label": "three"}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=1)
    checkpoints.restore(other := make())
    assert other.optimizer.state["names"] == {"count": 3, "label": "three", "nothing": None}


def test_save_returns_before_the_writing_is_done_and_the_next_waits(tmp_path: Path) -> None:
    step = step_of()
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step, number=0)
        checkpoints.wait()
        lock = threading.Event()
        write, held = Path.rename, []

        def rename(self: Path, target: Path) -> Path:
            held.append(lock.wait(60))
            return write(self, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "rename", rename)
            checkpoints.save(step, number=1)
            assert numbers_in(tmp_path) == [0]  # not there yet, and save has returned
            threading.Timer(0.2, lock.set).start()
            checkpoints.save(step, number=2)  # waits for the first
            assert numbers_in(tmp_path)[:2] == [0, 1]
            checkpoints.wait()
    assert numbers_in(tmp_path) == [0, 1, 2]
    assert [each.path.name for each in checkpoints.take_written()] == [
        "step-00000000",
        "step-00000001",
        "step-00000002",
    ]
    assert checkpoints.take_written() == []


def test_checkpoint_at(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        path = checkpoints.save(step_of(), number=123456789)
    assert Checkpoint.at(str(path)) == checkpoints.list()[0]
    for wrong in (tmp_path, tmp_path / "step-00000001", tmp_path / "step-000000001"):
        with pytest.raises(CheckpointError, match="expected the folder of a checkpoint"):
            Checkpoint.at(wrong)


def test_numpy_generators_of_another_kind_are_named(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(step_of(), number=1)
    before = np.random.get_bit_generator()
    try:
        np.random.set_bit_generator(np.random.PCG64(1))
        with pytest.raises(CheckpointError, match=r"numpy\.random is of PCG64, the state of MT19937"):
            checkpoints.restore(step_of())
        with Checkpoints(tmp_path / "other") as others:
            others.save(step_of(), number=1)
            wanted = np.random.standard_normal(3).tolist()
            others.restore(step_of())
            assert np.random.standard_normal(3).tolist() == wanted
    finally:
        np.random.set_bit_generator(before)
