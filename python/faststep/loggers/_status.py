"""The status of a training by its records so far, in fields to be shown."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from faststep._records import (
    REASONS,
    Record,
    clock,
    count,
    figure,
    monitored,
    number,
    quantity,
    share,
    size,
    span,
)

PARTS = ("data", "step", "validation", "checkpoint", "other")  # phases of a training
DATA_BOUND = 0.2  # the share of a step's time, waited for data, from which on it is said
UNEVEN = 0.8  # the share of the slowest rank's time that the others take, below which it is named
Field = tuple[str, str, str]  # label, value, and "good", "bad", "warning" or ""


@dataclass
class Status:
    """The status of a training.

    Attributes:
        start: The last `start` record; empty before it.
        interval: The last `interval` record.
        validation: The last `validation` record.
        values: The last values of the user's own, by name.
        best: The best value of what is monitored so far, and its step.
        checkpoint: The last `checkpoint` record.
        losses: The last intervals' losses.
        seconds: Where the time has gone, summed over the intervals.
        rank_seconds: What each rank took outside of exchanges, by rank, when that was last told; empty before.
        peak: The largest peak of memory, in bytes.
        step: The last step that a record named.
        records: How many records there were.
        told: When the last interval came, in seconds of `time.monotonic`.
        began: When the training began.
    """

    start: Record = field(default_factory=dict)
    interval: Record = field(default_factory=dict)
    validation: Record = field(default_factory=dict)
    values: dict[str, float] = field(default_factory=dict)
    best: tuple[float, int] | None = None
    checkpoint_written: Record = field(default_factory=dict)
    losses: deque[float] = field(default_factory=lambda: deque(maxlen=32))
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    rank_seconds: dict[str, float] = field(default_factory=dict)
    peak: float = 0.0
    step: int = 0
    records: int = 0
    told: float = field(default_factory=time.monotonic)
    began: float = field(default_factory=time.monotonic)

    def take(self, record: Record) -> None:
        """Take in a record."""
        kind = record["kind"]
        if kind != "event":
            self.step = int(record.get("step") or 0)
        if kind in ("start", "interval", "validation", "checkpoint_written"):
            setattr(self, kind, record)
        if kind == "interval":
            self._sum(record)
        elif kind == "validation" and record.get("best"):
            self.best = number(record.get("value", record.get("loss"))), self.step
        elif kind == "values":
            self.values |= record.get("values") or {}
        self.records += 1

    def _sum(self, record: Record) -> None:
        self.told = time.monotonic()
        if record.get("loss") is not None:
            self.losses.append(number(record["loss"]))
        for part, seconds in (record.get("seconds") or {}).items():
            self.seconds[part] = self.seconds.get(part, 0.0) + number(seconds)
        if record.get("rank_seconds"):
            self.rank_seconds = {rank: number(each) for rank, each in record["rank_seconds"].items()}
        self.peak = max(self.peak, number((record.get("memory") or {}).get("peak") or 0))

    @property
    def elapsed(self) -> float:
        """Seconds since this process began to train."""
        return time.monotonic() - self.began

    @property
    def eta(self) -> float | None:
        """Seconds to the end, counted down from what the last interval said."""
        eta = self.interval.get("eta")
        return None if eta is None else max(0.0, number(eta) - (time.monotonic() - self.told))

    @property
    def total(self) -> int | None:
        """The number of steps at the end, where it is known."""
        if (steps := self.start.get("steps")) is not None:
            return int(steps)
        epochs, batches = self.start.get("epochs"), self.start.get("batches_per_epoch")
        if epochs is None or batches is None:
            return None
        return int(epochs) * -(-int(batches) // int(self.start.get("accumulate") or 1))

    @property
    def position(self) -> str:
        """`40/800`."""
        return count(self.step) + (f"/{count(self.total)}" if self.total is not None else "")

    @property
    def epoch(self) -> str:
        """`epoch 2/10`, counted from one; empty where it is unknown."""
        epoch, epochs = self.interval.get("epoch"), self.start.get("epochs")
        if epoch is None:
            return ""
        return f"epoch {count(epoch)}/{count(epochs)}" if epochs else f"epoch {count(epoch)}"

    @property
    def waiting(self) -> float:
        """The share of the last steps' time that was waited for data."""
        seconds = {part: number(each) for part, each in (self.interval.get("seconds") or {}).items()}
        whole = sum(seconds.get(part, 0.0) for part in ("data", "step", "other"))
        return seconds.get("data", 0.0) / whole if whole > 0 else 0.0

    @property
    def data_bound(self) -> str:
        """The note for steps that wait for data much of their time, with a remedy; empty otherwise."""
        if self.waiting < DATA_BOUND:
            return ""
        workers = self.start.get("workers")
        remedy = {None: "", 0: "; workers=0, try 4"}.get(workers, f"; workers={workers}, try more, or cheaper items")
        return f"data-bound: {share(self.waiting)} of the step{remedy}"

    @property
    def notes(self) -> dict[str, str]:
        """The notes about what slows the training, by "data" or the rank that does."""
        return ({"data": self.data_bound} if self.data_bound else {}) | self._slowest()

    def _slowest(self) -> dict[str, str]:
        seconds = self.rank_seconds
        rank = max(seconds, key=lambda each: seconds[each], default="")
        others = [each for name, each in seconds.items() if name != rank]
        if not others or (part := sum(others) / len(others) / seconds[rank]) >= UNEVEN:
            return {}
        return {rank: f"rank {rank} is the slowest: between exchanges the others take {share(part)} of its time"}

    def groups(self) -> dict[str, list[Field]]:
        """Return the fields of the last interval, by the line that they belong to; what is unknown is left out."""
        groups = {"train": self._train(), "valid": self._valid(), "values": self._values(), "speed": self._speed()}
        groups |= {"time": self._time(), "memory": self._memory()}
        return {name: fields for name, fields in groups.items() if fields}

    def _train(self) -> list[Field]:
        said, skipped = self.interval, self.interval.get("skipped")
        return _known(
            ("loss", figure(said.get("loss")), ""),
            *((str(name), figure(value), "") for name, value in (said.get("metrics") or {}).items()),
            ("grad norm", figure(said.get("grad_norm")), ""),
            ("learning rate", figure(said.get("learning_rate")), ""),
            ("update ratio", figure(said.get("update_ratio")), ""),
            ("skipped", count(skipped), "warning" if skipped else ""),
        )

    def _valid(self) -> list[Field]:
        said, best = self.validation, self.best
        good, what = "good" if said.get("best") else "", monitored(said)
        values = {"loss": said.get("loss"), **(said.get("metrics") or {})}
        fields = [(str(name), figure(value), good if name == what else "") for name, value in values.items()]
        if best is not None:
            word = "best" if what == "loss" else f"best {what}"
            fields.append((word, f"{figure(best[0])} at step {count(best[1])}", ""))
        return _known(*fields)

    def _values(self) -> list[Field]:
        return _known(*((str(name), figure(value), "") for name, value in self.values.items()))

    def _speed(self) -> list[Field]:
        said = self.interval
        rate, padding = said.get("steps_per_second"), said.get("padding")
        return _known(
            ("steps/s", quantity(rate), ""),
            ("samples/s", quantity(said.get("samples_per_second")), ""),
            ("tokens/s", quantity(said.get("tokens_per_second")), ""),
            ("a step", span(1 / number(rate)) if rate and number(rate) > 0 else "-", ""),
            ("padding efficiency", share(padding), ""),
            ("traces", count(said.get("traces")), ""),
        )

    def _time(self) -> list[Field]:
        seconds = {part: number(each) for part, each in (self.interval.get("seconds") or {}).items()}
        whole = sum(seconds.values())
        if whole <= 0:
            return []
        bad = "warning" if self.data_bound else ""
        return [(part, share(each / whole), bad if part == "data" else "") for part, each in seconds.items()]

    def _memory(self) -> list[Field]:
        memory = self.interval.get("memory") or {}
        return _known(*((name, size(memory.get(name)), "") for name in ("active", "cache", "peak", "process")))


def _known(*fields: Field) -> list[Field]:
    return [each for each in fields if each[1] != "-"]


def summary(status: Status, end: Record) -> list[tuple[str, str]]:
    """Return the closing summary: what, and how it was."""
    reason = str(end.get("reason", "done"))
    spent = {part: each for part, each in status.seconds.items() if each > 0}
    whole = sum(spent.values())
    best = status.best or ((number(end["best"]), None) if end.get("best") is not None else None)
    at = f" at step {count(best[1])}" if best and best[1] is not None else ""
    what = monitored(end)
    metrics = status.interval.get("metrics") or {}
    rows = [
        ("ended", REASONS.get(reason, reason)),
        ("steps", f"{status.position} in {clock(end.get('seconds', status.elapsed))}"),
        ("loss", figure(end.get("loss"))),
        *((str(name), figure(value)) for name, value in metrics.items()),
        ("best validation" if what == "loss" else f"best validation {what}", f"{figure(best[0])}{at}" if best else "-"),
        ("time", ", ".join(f"{part} {share(each / whole)}" for part, each in spent.items()) or "-"),
        ("peak memory", size(status.peak or None)),
        ("skipped", count(status.interval.get("skipped"))),
        ("traces", count(status.interval.get("traces"))),
        ("checkpoint", str(status.checkpoint_written.get("path", "-"))),
    ]
    return [row for row in rows if row[1] != "-"]
