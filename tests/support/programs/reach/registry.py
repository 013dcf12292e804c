"""What a program of the registry is, how it gets there, and the usual ways to write one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

Place = Literal["closure", "object", "model", "process", "iterator", "optimizer"]
Loss = Callable[..., Any]
PLACES: tuple[Place, ...] = ("closure", "object", "model", "process", "iterator", "optimizer")
# variants in which some programs have no meaning
WINDOWS = ("windows", "bad batches in windows")
BAD_BATCHES = ("bad batches", "bad batches in windows", "bad batches that raise")


class Around:
    """What a run may use and leave as it is: a patch of attributes, a folder, and what is closed behind it."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder, self.opened = patch, folder, ExitStack()

    @staticmethod
    @contextmanager
    def begun() -> Iterator[Around]:
        """Give one, and put everything back behind it."""
        with TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            around = Around(patch, Path(folder))
            with around.opened:
                yield around


def rows_of_normals(number: int, rows: int = 3, columns: int = 4) -> mx.array:
    """Draw the batch of a call, equal each time."""
    return mx.random.normal((rows, columns), key=mx.random.key(number))


def nothing() -> None:
    """See nothing."""


def no_change(number: int) -> None:
    """Change nothing."""


@dataclass
class Made:
    """A program, made for one run.

    Attributes:
        loss_fn: Is given the model and the batch of a call.
        seen: Returns all that Python sees of what the program keeps; arrays may be among it.
        between: Is what the user does before a call of this number.
        model: What is trained.
        optimizer: What updates it.
        batch: Returns the arguments of a call of this number.
        rows: Numbers of rows of the batches, in turns, where `batch` is not given.
        loss: Returns the loss function of a call, where each call has another one.
        others: Further parts, each with a model, an optimizer and a loss: the parts are called in turns.
        calls: How many calls are compared.
    """

    loss_fn: Loss
    seen: Callable[[], Any] = nothing
    between: Callable[[int], object] = no_change
    model: nn.Module = field(default_factory=lambda: nn.Linear(4, 2))
    optimizer: Any = field(default_factory=lambda: optim.SGD(0.05))
    batch: Callable[[int], tuple[Any, ...]] | None = None
    rows: Sequence[int] = (3,)
    loss: Callable[[int], Loss] | None = None
    others: Sequence[Made] = ()
    calls: int = 12

    def arguments(self, number: int) -> tuple[Any, ...]:
        """Return the batch of a call."""
        if self.batch is not None:
            return self.batch(number)
        return (rows_of_normals(number, self.rows[number % len(self.rows)]),)

    def part(self, number: int) -> Made:
        """Return which part a call is of."""
        parts = [self, *self.others]
        return parts[number % len(parts)]


Make = Callable[[], Made] | Callable[[Around], Made]


@dataclass(frozen=True)
class Program:
    """A program by its name.

    Attributes:
        name: What it is called.
        place: Where it reads, changes or keeps something.
        make: Makes it, equal each time; it may be given what surrounds the run.
        near: How far the numbers of the two may be apart, as a share.
        without: The variants in which it has no meaning.
    """

    name: str
    place: Place
    make: Make
    near: float = 2e-5
    without: tuple[str, ...] = ()

    def new(self, around: Around) -> Made:
        """Make it."""
        make: Any = self.make
        made: Made = make(around) if inspect.signature(make).parameters else make()
        return made


PROGRAMS: dict[tuple[Place, str], Program] = {}


def add(place: Place, name: str, make: Make, **more: Any) -> None:
    """Add a program."""
    assert (place, name) not in PROGRAMS, f"there are two programs {name!r} of the {place}"
    PROGRAMS[place, name] = Program(name, place, make, **more)


def program(place: Place, **more: Any) -> Callable[[Make], Make]:
    """Add a program by the name of the function that makes it."""

    def added(make: Any) -> Any:
        add(place, make.__name__.replace("_", " "), make, **more)
        return make

    return added


def squares(model: Any, x: mx.array) -> mx.array:
    """Return the mean square of what a model gives."""
    return mx.square(model(x)).mean()


def scaled(scale: Callable[[], Any]) -> Loss:
    """Return a loss that is multiplied by a number of this call."""
    return lambda model, x: squares(model, x) * scale()


class Box:
    """An object with a number, or an array."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def set(self, value: Any) -> Callable[[], None]:
        """Return a change to another value."""
        return lambda: setattr(self, "value", value)


def one_batch(number: int) -> tuple[mx.array]:
    """Return the same batch at each call."""
    return (rows_of_normals(3, 8),)


class Net(nn.Module):
    """A model that counts its calls, and does something as it counts."""

    def __init__(self, act: Callable[[Any, mx.array], object]) -> None:
        super().__init__()
        self.encoder, self.head = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), nn.Linear(4, 2)
        self.spare = (nn.Linear(4, 2),)
        self.steps, self._done, self._act = 0, set[Any](), (act,)

    def __call__(self, x: mx.array) -> mx.array:
        """Give what the head gives."""
        self.steps += 1
        self._act[0](self, x)
        out: mx.array = self.head(self.encoder(x))
        return out * 0.5 if "warm-up" in self._done else out


Changes = Sequence[Callable[[], object]]


def changed(loss_fn: Loss, changes: Changes, seen: Callable[[], Any] = nothing, **more: Any) -> Made:
    """Return a program with two calls before and behind each change."""

    def between(number: int) -> None:
        if number and number % 2 == 0:
            changes[number // 2 - 1]()

    given = {"batch": one_batch, "optimizer": optim.SGD(0.1), "calls": 2 + 2 * len(changes)}
    return Made(loss_fn, seen, between, **(given | more))


Changing = tuple[Loss, Changes]
Build = Callable[[], Changing] | Callable[[pytest.MonkeyPatch], Changing]


def made_of(build: Build, **more: Any) -> Make:
    """Make a program of a loss and the changes between its calls."""

    def make(around: Around) -> Made:
        given: Any = build
        return changed(*(given(around.patch) if inspect.signature(given).parameters else given()), **more)

    return make


def changing(place: Place, **more: Any) -> Callable[[Build], Build]:
    """Add a program by the function that returns its loss and the changes between its calls."""

    def added(build: Any) -> Any:
        add(place, build.__name__.replace("_", " "), made_of(build), **more)
        return build

    return added
