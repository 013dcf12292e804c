"""The tables of a recording."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from faststep._profile._recording import Held, Operation, Recording

_MOST = 10  # rows of a table
_NAME, _KIND, _FIRST = 44, 36, 64  # characters: of a name, of one before an output, and of the column
_MS, _MIB = 1e3, 2.0**20
_LEAST = 1e-5  # seconds from which a rate means something
_MEANING = {
    "your loop": "between two calls of the step",
    "data": "waiting for the next batch",
    "look": "taking over what the user's objects hold",
    "show": "giving the results to the user's objects",
    "trace": "calling the loss function",
    "build": "building the graph of a trace again",
    "first evaluation": "kernels are compiled",
    "evaluation": "handing work to the device",
    "wait": "for the device",
    "collective": "exchanging arrays with other ranks",
}


def text_of(recording: Recording) -> str:
    """Return the tables of stages, traces, operations and memory."""
    parts = [_stages(recording), _traces(recording), _operations(recording.operations), _memory(recording)]
    return "\n\n".join("\n".join(part) for part in map(list, parts) if part)


def _stages(recording: Recording) -> Iterator[str]:
    steps = max(recording.steps, 1)
    yield f"{recording.steps} steps in {recording.seconds:.3f} s, {recording.seconds / steps * _MS:.3f} ms each"
    yield f"  {'stage':<18}{'ms a step':>11}{'share':>8}"
    for stage, seconds in recording.stages().items():
        share = seconds / recording.seconds if recording.seconds else 0.0
        yield f"  {stage:<18}{seconds / steps * _MS:>11.3f}{share:>8.1%}  {_MEANING.get(stage, '')}"


def _traces(recording: Recording) -> Iterator[str]:
    if recording.traces:
        yield f"{len(recording.traces)} traces were made"
        for cause, seconds in recording.traces[:_MOST]:
            yield f"  {seconds:>8.3f} s  {cause}"


def _operations(operations: Sequence[Operation]) -> Iterator[str]:
    if not operations:
        return
    total = sum(each.seconds for each in operations)
    yield f"{len(operations)} operations of one step, each alone: {total * _MS:.3f} ms, {_clock(operations)}"
    for title, key in (("kind", _kind), ("kind and output", _kind_and_output), ("module", _module)):
        yield f"  {title:<{_FIRST}}{'times':>7}{'ms':>10}{'share':>8}{'MiB':>10}{'GB/s':>8}"
        groups: dict[str, list[Operation]] = {}
        for each in operations:
            groups.setdefault(key(each), []).append(each)
        rows = sorted(groups.items(), key=lambda row: -sum(each.seconds for each in row[1]))
        for name, group in rows[:_MOST]:
            yield _row(name, group, total)
        if len(rows) > _MOST:
            yield _row(f"{len(rows) - _MOST} more", [each for _, group in rows[_MOST:] for each in group], total)


def _clock(operations: Sequence[Operation]) -> str:
    timed = sum(each.by_events for each in operations)
    if not timed:
        return "each evaluated to its end"
    waited = len(operations) - timed
    return "timed by the device" + (f", {waited} of them by waiting for it" if waited else "")


def _row(name: str, group: Sequence[Operation], total: float) -> str:
    seconds, size = sum(each.seconds for each in group), sum(each.bytes for each in group)
    share = seconds / total if total else 0.0
    rate = f"{size / seconds / 1e9:.1f}" if seconds > _LEAST else "-"
    name = f"  {name:<{_FIRST}}"
    return f"{name}{len(group):>7}{seconds * _MS:>10.3f}{share:>8.1%}{size / _MIB:>10.2f}{rate:>8}"


def _kind(operation: Operation) -> str:
    return _cut(operation.name)


def _kind_and_output(operation: Operation) -> str:
    return f"{_cut(operation.name)[:_KIND]} {operation.output}"


def _module(operation: Operation) -> str:
    return operation.module or "(others)"


def _cut(name: str) -> str:
    return name if len(name) <= _NAME else name[: _NAME - 3] + "..."


def _memory(recording: Recording) -> Iterator[str]:
    held = {name: size for name, size in recording.bytes.items() if size}
    yield "held between steps: " + ", ".join(f"{name} {size / _MIB:.2f} MiB" for name, size in held.items())
    if recording.spans:
        most = max(recording.spans, key=lambda span: span.active)
        yield f"most in use when a stage began: {most.active / _MIB:.2f} MiB, at {most.stage}"
    peak = recording.peak()
    if peak is not None:
        yield f"most in use in a step, by the memory plan: {peak.held.in_use / _MIB:.2f} MiB, at {_place(peak)}"
        yield f"  {'kind':<18}{'MiB then':>11}{'share':>8}{'its peak':>11}  at"
        for kind in sorted(Held._fields, key=lambda kind: -getattr(peak.held, kind)):
            yield from _kind_of_memory(recording, kind, peak)


def _kind_of_memory(recording: Recording, kind: str, peak: Operation) -> Iterator[str]:
    most = max(recording.operations, key=lambda each: getattr(each.held, kind))
    then, own = getattr(peak.held, kind), getattr(most.held, kind)
    if own:
        share = "-" if kind == "cache" else f"{then / peak.held.in_use:.1%}"
        flat = min(getattr(each.held, kind) for each in recording.operations) > 0.9 * own
        place = "all the time" if flat else _place(most)
        yield f"  {kind:<18}{then / _MIB:>11.2f}{share:>8}{own / _MIB:>11.2f}  {place}"


def _place(operation: Operation) -> str:
    return f"{_cut(operation.name)} of {_module(operation)}"
