"""`profile`: a recording of a step's stages, and the operations of one of its batches."""

from __future__ import annotations

import contextlib
import html
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from faststep._profile._labels import Labels
from faststep._profile._recording import DATA, LOOP, Held, Operation, Recording, Span
from faststep._profile._text import text_of
from faststep._profile._trace import write_chrome
from faststep._step import Step


class Profile(Recording):
    """The recording of a block of code that calls a step; complete when the block has ended. See `Recording`."""

    def __init__(self, step: Step) -> None:
        super().__init__()
        self._step, self._core = step, step._program.core
        self._waits: list[tuple[float, float]] = []
        self._began = 0.0

    @property
    def loss_fn(self) -> Any:
        """The loss function of the step, which says how a dict is passed to `measure`."""
        return self._step.loss_fn

    def data(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of a loop, so that the time of waiting for them is told apart from that of the loop.

        Args:
            batches: What the loop iterates over.

        Yields:
            The same batches.
        """
        iterator = iter(batches)
        while True:
            began = time.perf_counter()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self._waits.append((began - self._began, time.perf_counter() - self._began))
            yield batch

    def measure(self, *batch: Any, **named: Any) -> None:
        """Measure the operations of a step on a batch: one by one, three times; and the memory in use while each runs.

        On CUDA the device times them, by events between them. Elsewhere each is evaluated to its end. Nothing of model,
        optimizer and random state changes.

        Args:
            *batch: As for a step.
            **named: As for a step.

        Raises:
            TypeError: As a step does.
            ValueError: As a step does.
            RuntimeError: As a step does.
        """
        step = self._step
        call = step._program.call(step.model, step.optimizer, step.loss_fn, batch, named)
        with Labels(step.model):
            found = self._core.measure(call, step.accumulate)
        self.operations = [Operation(*each[:6], Held(*[*each[6], each[7]])) for each in found]

    def save(self, path: str | Path) -> None:
        """Write the recording as a trace that Perfetto and Chrome (about:tracing) show: stages, operations, memory.

        The operations that were measured follow the loop, with the memory of each kind while they run.

        Args:
            path: A JSON file, which must not be there yet.

        Raises:
            FileExistsError: It is there.
        """
        write_chrome(Path(path), self)

    def __str__(self) -> str:
        """Return the tables: stages, traces, operations, memory."""
        return text_of(self)

    def _repr_html_(self) -> str:
        """Show the tables in a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _start(self) -> None:
        self._before = self._step.stats
        self._began = time.perf_counter()
        self._core.begin_recording()

    def _stop(self) -> None:
        self.seconds = time.perf_counter() - self._began
        events = self._core.end_recording()
        after = self._step.stats
        self.steps = after.steps - self._before.steps
        made = after.traced - self._before.traced
        self.traces = [(each.cause, each.seconds) for each in after.traces[-made:]] if made else []
        self.bytes = after.bytes
        self.spans = list(_spans(events, self.seconds, self._waits))


def _spans(events: list[tuple[str, float, int]], end: float, waits: list[tuple[float, float]]) -> Iterator[Span]:
    """Yield the stretches of time, from the beginnings of stages; those between two calls are split by the waits."""
    active = events[0][2] if events else 0
    events = [("idle", 0.0, active), *events]
    before = "idle"
    for (stage, began, active), following in zip(events, [*events[1:], ("", end, 0)], strict=True):
        ended = min(following[1], end)
        before, after = stage, before
        if stage != "idle":
            objects = "look" if after == "idle" else "show"
            yield Span(objects if stage == "objects" else stage, began, ended, active)
            continue
        for begins, ends in (wait for wait in waits if began <= wait[0] < ended):
            if begins > began:
                yield Span(LOOP, began, begins, active)
            began = min(ends, ended)
            yield Span(DATA, begins, began, active)
        if ended > began:
            yield Span(LOOP, began, ended, active)


@contextlib.contextmanager
def profile(step: Step) -> Iterator[Profile]:
    """Record where the time of a step's calls goes, and of the loop around them.

    A call costs some microseconds more meanwhile. On a GPU "evaluation" is the time in which the host encodes work; the
    device computes after it, and "wait" is where a step waits for it.

    Args:
        step: The step.

    Yields:
        The recording, complete after the block.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
        >>> from faststep import Step, profile
        >>> model, x = nn.Linear(64, 64), mx.ones((32, 64))
        >>> step = Step(model, optim.Adam(1e-3), lambda model, x: mx.square(model(x)).mean())
        >>> with profile(step) as found:
        ...     for batch in found.data([x] * 5):
        ...         loss = step(batch).loss
        >>> found.measure(x)
        >>> found.steps, "data" in found.stages(), any("Add" in each.name for each in found.operations)
        (5, True, True)
    """
    found = Profile(step)
    found._start()
    try:
        yield found
    finally:
        found._stop()
