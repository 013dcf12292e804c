"""The reader of a run's log."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from faststep._optional import need
from faststep._records import flat, monitored, number

Numbers = npt.NDArray[np.float64]
Record = Mapping[str, Any]
NAME = "log.jsonl"
# Kinds that a resume supersedes.
TABLES = ("step", "interval", "validation", "values", "checkpoint", "checkpoint_written")
TEXTS = ("kind", "path", "monitor")  # their values that are no numbers


class LogError(ValueError):
    """A log that cannot be read; the message says where and why."""


@dataclass(frozen=True)
class Table:
    """The records of one kind, as columns.

    Attributes:
        step: int64 [records], ascending.
        elapsed: float64 [records], seconds of training before it; the time between a kill and its resume is left out.
        columns: float64 [records] by name, NaN where a value is unknown; what is a dict in the record is
            `name.inner`, as in `memory.active`.
        records: The records themselves.
    """

    step: npt.NDArray[np.int64]
    elapsed: Numbers
    columns: Mapping[str, Numbers]
    records: tuple[Record, ...]

    def __len__(self) -> int:
        return len(self.step)

    def __getitem__(self, name: str) -> Numbers:
        """Return a column; NaN where no record has it."""
        column = self.columns.get(name)
        return np.full(len(self), math.nan) if column is None else column

    def __contains__(self, name: object) -> bool:
        """Return whether a record has a column of that name."""
        return name in self.columns

    def to_pandas(self) -> Any:
        """Return the columns, with `step` and `elapsed`, as a `pandas.DataFrame`.

        Raises:
            ImportError: pandas is not installed.
        """
        return need("pandas", None).DataFrame(self._whole())

    def to_polars(self) -> Any:
        """Return the columns, with `step` and `elapsed`, as a `polars.DataFrame`.

        Raises:
            ImportError: polars is not installed.
        """
        return need("polars", None).DataFrame(self._whole())

    def _whole(self) -> dict[str, npt.NDArray[Any]]:
        return {**self.columns, "step": self.step, "elapsed": self.elapsed}

    def where(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """Return the records that are chosen, bool [records]."""
        columns = {name: column[chosen] for name, column in self.columns.items()}
        records = tuple(each for each, taken in zip(self.records, chosen, strict=True) if taken)
        return Table(self.step[chosen], self.elapsed[chosen], columns, records)

    def known(self, name: str) -> bool:
        """Return whether any record has a finite value of it."""
        return bool(np.isfinite(self[name]).any())

    def group(self, name: str) -> dict[str, Numbers]:
        """Return the columns `name.inner` by `inner`."""
        return {each[len(name) + 1 :]: column for each, column in self.columns.items() if each.startswith(f"{name}.")}


@dataclass(frozen=True)
class Log:
    """The contents of a run's log.

    Attributes:
        path: The file.
        starts: The `start` records: the first start and every resume.
        steps: The steps; `steps["loss"]` and so on.
        intervals: What was measured every so often.
        validations: The validations.
        values: The values of the user's own; `values["values.NAME"]`.
        checkpoints: The checkpoints.
        written: The checkpoints that were written, when they were.
        events: The events, those of superseded steps too.
        end: The `end` record, None when the run was killed or goes on.
        last: When the last record was written, in Unix seconds.
        superseded: How many records a resume has superseded; they are in no table.
        torn: The numbers of the lines at which a process was killed; they are passed over.
    """

    path: Path
    starts: tuple[Record, ...]
    steps: Table
    intervals: Table
    validations: Table
    values: Table
    checkpoints: Table
    written: Table
    events: tuple[Record, ...]
    end: Record | None
    last: float
    superseded: int
    torn: tuple[int, ...]

    @property
    def config(self) -> dict[str, Any]:
        """The config of the last start."""
        return dict(self.starts[-1].get("config") or {}) if self.starts else {}

    @property
    def metrics(self) -> list[str]:
        """The names of the metrics, those of validations too."""
        tables = (self.steps, self.intervals, self.validations)
        return list(dict.fromkeys(name for table in tables for name in table.group("metrics")))

    @property
    def best(self) -> tuple[str, float, int] | None:
        """The last validation that was the best so far: what is monitored, its value and its step; None: none was."""
        for record in reversed(self.validations.records):
            if record.get("best"):
                return monitored(record), number(record.get("value", record.get("loss"))), int(record["step"])
        return None

    @property
    def resumes(self) -> list[int]:
        """The steps at which the run was resumed."""
        return [int(each["step"]) for each in self.starts[1:]]

    @property
    def seconds(self) -> float:
        """Seconds of training."""
        tables = (self.steps, self.intervals, self.validations, self.checkpoints)
        return max((float(each.elapsed[-1]) for each in tables if len(each)), default=0.0)


@dataclass
class _Line:
    number: int
    record: dict[str, Any]
    values: dict[str, Any]  # the same, flat
    elapsed: float


def read_log(run: str | Path) -> Log:
    """Read the log of a run.

    Steps that were taken again after a resume are there once, as they were taken last; a line at which a process was
    killed is passed over.

    Args:
        run: The run's folder, or its `log.jsonl`.

    Returns:
        The records, those with numbers as columns.

    Raises:
        FileNotFoundError: There is no log.
        LogError: A line is no record; the message names file and line.

    Example:
        >>> import tempfile, pathlib
        >>> from faststep.loggers import JsonLines
        >>> run = pathlib.Path(tempfile.mkdtemp())
        >>> logger = JsonLines(run / "log.jsonl")
        >>> for step in (1, 2):
        ...     logger.log({"kind": "step", "time": step, "step": step, "loss": 1 / step})
        >>> log = read_log(run)
        >>> log.steps.step, log.steps["loss"]
        (array([1, 2]), array([1. , 0.5]))
    """
    path = Path(run)
    path = path / NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected the log of a run (a folder with {NAME}), got nothing")
    torn: list[int] = []
    lines = list(_lines(path, torn))
    kept = _kept(lines)
    tables = {kind: _table(path, [line for line in kept if line.record["kind"] == kind]) for kind in TABLES}
    bounds = [line.record for line in kept if line.record["kind"] in ("start", "end")]
    return Log(
        path,
        starts=tuple(each for each in bounds if each["kind"] == "start"),
        steps=tables["step"],
        intervals=tables["interval"],
        validations=tables["validation"],
        values=tables["values"],
        checkpoints=tables["checkpoint"],
        written=tables["checkpoint_written"],
        events=tuple(line.record for line in kept if line.record["kind"] == "event"),
        end=bounds[-1] if bounds and bounds[-1]["kind"] == "end" else None,
        last=lines[-1].record["time"] if lines else math.nan,
        superseded=len(lines) - len(kept),
        torn=tuple(torn),
    )


def _lines(path: Path, torn: list[int]) -> Iterator[_Line]:
    """Parse the lines; what is no record is a torn line when a start or the end of the file follows."""
    bad: LogError | None = None
    offset = began = latest = 0.0
    with path.open("rb") as file:
        for place, text in enumerate(file, 1):
            try:
                record, values = _record(f"{path}:{place}", text)
            except LogError as error:
                bad = bad or error
                torn.append(place)
                continue
            if bad is not None and record["kind"] != "start":
                raise bad
            bad = None
            if record["kind"] == "start" or place == 1:
                latest = latest if record.get("resumed") else 0.0
                offset, began = latest, record["time"]
            elapsed = max(offset, offset + record["time"] - began)  # a step's own time, which is told later
            latest = max(latest, elapsed)
            yield _Line(place, record, values, elapsed)


def _record(where: str, text: bytes) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parse a line; return the record, and the same flat."""
    try:
        record = json.loads(text)
        values = flat(record) if isinstance(record, dict) else {}
    except (ValueError, RecursionError) as error:
        raise LogError(f"{where}: expected a record in JSON, got {_short(text)} ({error})") from None
    if not isinstance(record, dict):
        raise LogError(f"{where}: expected a record, a JSON object, got {_short(text)}")
    expected = {
        "kind": ("a string", isinstance(record.get("kind"), str)),
        "step": ("a whole number from 0 on", type(record.get("step")) is int and 0 <= record["step"] < 2**63),
        "time": ("a number", type(record.get("time")) in (int, float) and abs(record["time"]) < 1e15),
    }
    for key, (what, holds) in expected.items():
        if not holds:
            raise LogError(f"{where}: expected {what} as {key!r}, got {record.get(key)!r}")
    return record, values


def _short(text: bytes) -> str:
    shown = text.decode(errors="replace").rstrip("\n")
    return repr(shown if len(shown) <= 60 else f"{shown[:60]}...")


def _kept(lines: Sequence[_Line]) -> list[_Line]:
    """Leave out what a later start supersedes: everything, or with a resume the steps after its own."""
    kept: list[_Line] = []
    for line in lines:
        record = line.record
        if record["kind"] == "start":
            at = record["step"] if record.get("resumed") else None
            kept = [each for each in kept if at is not None and not _superseded(each.record, at)]
        kept.append(line)
    return kept


def _superseded(record: Record, at: int) -> bool:
    return record["kind"] in TABLES and record["step"] > at


def _table(path: Path, lines: Sequence[_Line]) -> Table:
    names = dict.fromkeys(name for line in lines for name in line.values if name not in TEXTS)
    columns = {name: _column(path, lines, name) for name in names}
    step = np.array([line.record["step"] for line in lines], np.int64)
    elapsed = np.maximum.accumulate(np.array([line.elapsed for line in lines], np.float64))
    return Table(step, elapsed, columns, tuple(line.record for line in lines))


def _column(path: Path, lines: Sequence[_Line], name: str) -> Numbers:
    try:  # None is NaN to numpy, and the strings for what is not finite are numbers
        column = np.array([line.values.get(name) for line in lines], np.float64)
        if column.ndim == 1:
            return column
    except (ValueError, TypeError, OverflowError):
        pass  # which one it is takes longer to find out
    for line in lines:
        try:
            number(line.values.get(name))
        except (ValueError, TypeError, OverflowError):
            break
    got = line.values.get(name)
    raise LogError(f"{path}:{line.number}: expected a number or null as {name!r}, got {got!r}")
