"""The verdict on each rung beside those below it: hangs, errs, grows, changes the numbers, is slow."""

from __future__ import annotations

from collections.abc import Iterator

from faststep.doctor._finding import Finding
from faststep.doctor._growth import LEAST_ACTIVE, Growth, growth
from faststep.doctor._lazy import CODE, REMEDY
from faststep.doctor._subject import TAKEN
from faststep.doctor._watch import Measured

_HANGS = {
    "data": (
        "the data block: a lock, a queue that nobody fills, a worker that has died, a network without a time limit. "
        "Read the stacks, and give what waits there a time limit",
        "Loader(source, batch_size=32)   # workers=0 first",
    ),
    "evaluated": (REMEDY, CODE),
    "unevaluated": (
        "evaluate parameters and optimizer state together after every update",
        "mx.eval(loss, model.state, optimizer.state)",
    ),
    "prefetch": (
        "the data cannot be read in another thread: make batches in the thread that trains, or let no item wait for it",
        "Loader(source, batch_size=32, workers=0)",
    ),
    "checkpoint": ("the disk does not answer: let `run` be a folder on a local disk", "run: /local/runs"),
}
_ANY = (
    "the stacks show where it waits: a lock in the loss, a read of a value that never comes, a loop without an end",
    "faulthandler.dump_traceback_later(60)   # in your own loop: the stacks after a minute",
)
_LEAST_PROCESS = 30e3  # bytes a step of the process, whose memory comes in pages and arenas
_LEAST_WHOLE = 10e6  # bytes in all, of the process
_SLOWER = {  # rung: the one beside which it is slow, how many times, what to do
    "clearing": None,
    "compiled": ("joint", 2.0, "compilation does not help this model: turn it off", "Step(..., compile=False)"),
    "native": ("joint", 1.5, "please report it; until then plain MLX is faster here", "faststep check config.yaml"),
    "prefetch": ("native", 4.0, "making batches takes the cores that the step needs: fewer workers", "workers=1"),
    "accumulation": ("native", 4.0, "please report it", "faststep check config.yaml"),
}
_LEAST_MS = 20.0  # by which a rung is slower, before it is told


def judge(rungs: list[Measured]) -> list[Finding]:
    """Return what is wrong, in the order of the rungs; each rung's status is set by it."""
    known = {each.name: each for each in rungs}
    found: list[Finding] = []
    for each in rungs:
        found += each.findings
        found += _of(each, known)
    return list(dict.fromkeys(found))


def _of(rung: Measured, known: dict[str, Measured]) -> Iterator[Finding]:
    if rung.name == "prefetch" and rung.status in ("hangs", "error"):
        yield _one_thread(rung)
        rung.status = "skipped"
    elif rung.status == "hangs":
        yield _hang(rung)
    elif rung.status == "error":
        yield from _error(rung, known)
    elif "memory" in rung.facts:
        yield _too_much(rung)
    else:
        judged = [*_grows(rung, known), *_changes(rung, known), *_slow(rung, known)]
        for status, finding in judged[:1]:
            rung.status = status
            yield finding


def _hang(rung: Measured) -> Finding:
    remedy, code = _HANGS.get(rung.name, _ANY)
    if not rung.begun:
        remedy, code = "it hangs before the rung begins: while the program is loaded or the config is built", _ANY[1]
    at = f" ({rung.at})" if rung.at else ""
    place = f", at {rung.place}" if rung.place else ""
    return Finding("hangs", "failure", f"{rung.title} hangs{at}{place}", remedy, code)


def _one_thread(rung: Measured) -> Finding:
    """Say that the data cannot be made in another thread: no fault where the rungs before took them in their own."""
    message = str((rung.error or {}).get("message", "")).partition("\n")[0]
    reason = f"a worker hangs, at {rung.place}" if rung.status == "hangs" else message
    text = f"the data have to be made in the thread that trains: {reason}"
    remedy = "nothing is wrong without a worker; change it if training waits for data: prefetching helps then"
    return Finding("one-thread", "note", text, remedy, _HANGS["prefetch"][1])


def _error(rung: Measured, known: dict[str, Measured]) -> Iterator[Finding]:
    error = rung.error or {}
    message = str(error.get("message", ""))
    if "There is no Stream" in message or "still waits to be computed on another thread" in message:
        text = f"{rung.title}: a lazy array of another thread: {message.partition(chr(10))[0]}"
        yield Finding("lazy-batch", "failure", text, REMEDY, CODE)
        return
    if "array without a primitive" in message:
        place = f", at {error['place']}" if error.get("place") else ""
        text = f"{rung.title}: a compiled function leaves arrays of its trace behind, which have no values{place}"
        remedy = "tell mx.compile all that the function changes: model, optimizer, random state"
        code = "state = [model.state, optimizer.state, mx.random.state]\nmx.compile(step, inputs=state, outputs=state)"
        yield Finding("compiled-state", "failure", text, remedy, code)
        return
    named = {each.name for each in (known["numbers"].findings if "numbers" in known else ())}
    if rung.name == "forward" and named & {"channels-first", "labels-out-of-range", "tokens-out-of-range"}:
        return  # what the numbers say is the reason
    same = rung.name != "forward" and "forward" in known and (known["forward"].error or {}).get("message") == message
    if same:
        return
    kind = f"{error['error']}: " if error.get("error") else ""
    place = f", at {error['place']}" if error.get("place") else ""
    at = f" ({rung.at})" if rung.at and not rung.steps else ""
    text = f"{rung.title} fails{at}: {kind}{message.partition(chr(10))[0]}{place}"
    remedy = "correct the line that it names; the traceback is in the report (--html, --json)"
    yield Finding("error", "failure", text, remedy)


def _too_much(rung: Measured) -> Finding:
    taken, limit = rung.facts["memory"]["bytes"], rung.facts["memory"]["limit"]
    size = f"{taken / 1e9:.1f} GB after {len(rung.steps)} steps, of {limit / 1e9:.1f} GB"
    text = f"{rung.title} takes all memory: {size}; it was ended"
    remedy = "plan the memory of a step before it runs; smaller batches with accumulation, or gradient checkpointing"
    return Finding("memory", "failure", text, remedy, "print(step.memory_plan(*batch))")


def _growth_of(rung: Measured) -> tuple[str, Growth] | None:
    if rung.name in ("unevaluated", "shapes", "checkpoint", "forward", "numbers"):
        return None  # where memory has a reason to grow, or nothing is repeated
    skipped = TAKEN if rung.name == "data" else 0
    active, process = growth(rung.column("active")[skipped:]), growth(rung.column("process")[skipped:])
    ahead = rung.facts.get("ahead", {}).get("bytes", 0)  # batches that wait: a worker that was late catches up
    if active is not None and active.is_real(LEAST_ACTIVE) and active.whole > ahead:
        return "MLX's memory", active
    real = process is not None and process.is_real(_LEAST_PROCESS) and process.whole > _LEAST_WHOLE
    if real and process is not None and rung.name != "data":  # files that are mapped count for the process
        return "the process's memory", process
    return None


def _grows(rung: Measured, known: dict[str, Measured]) -> Iterator[tuple[str, Finding]]:
    found = _growth_of(rung)
    if found is None:
        return
    what, line = found
    text = f"{rung.title}: {what} grows by {line}"
    remedy, code = _REMEDIES.get(rung.name, _REMEDIES[""])
    cleared = known.get("clearing")
    if rung.name == "joint" and cleared is not None and _growth_of(cleared) is None:
        remedy, code = "the cache grows: limit it, or clear it at intervals", "Step(..., clear_cache_every=50)"
    if any(each.name in ("lazy-metric", "update-unevaluated", "compiles-every-step") for each in rung.findings):
        rung.status = "grows"
        return  # the reason is told
    yield "grows", Finding("grows", "warning", text, remedy, code)


_REMEDIES = {
    "data": (
        "the data keep their batches: look for a list, a cache or a generator that holds batches",
        "del batch   # after its step",
    ),
    "own": (
        "your step keeps arrays: evaluate parameters and optimizer state together, keep numbers and not arrays",
        "mx.eval(loss, model.state, optimizer.state); total += loss.item()",
    ),
    "": (
        "something keeps arrays from step to step: look for lists, sums and caches that the loss or the model fill",
        "total += loss.item()   # a number, not an array",
    ),
}


_UNSEEN = (
    "look for what mx.compile cannot see: Python's random, a counter, an array that changes behind its back; "
    "fast_step and Step call a loss that reads such things"
)
_GOES_ON = "look for what goes on from run to run: a counter, random numbers without a seed; else please report it"


def _changes(rung: Measured, known: dict[str, Measured]) -> Iterator[tuple[str, Finding]]:
    """Compare the first losses with those of the joint evaluation."""
    plain = known.get("joint")
    if plain is None or rung is plain or rung.name not in ("clearing", "compiled", "native"):
        return
    if plain.facts.get("begin") != rung.facts.get("begin"):
        return  # other weights or other batches: nothing is seeded
    for number, (ours, theirs) in enumerate(zip(rung.steps[:5], plain.steps[:5], strict=False), start=1):
        a, b = ours.get("loss"), theirs.get("loss")
        if not isinstance(a, int | float) or not isinstance(b, int | float):
            return
        if abs(a - b) > 1e-5 + 2e-2 * max(abs(a), abs(b)):
            text = f"{rung.title} gives other numbers: loss {a:.6g} at step {number}, plain MLX has {b:.6g}"
            remedy = _UNSEEN if rung.name == "compiled" else _GOES_ON
            yield (
                "numbers",
                Finding("numbers", "warning", text, remedy, "faststep.check(model, optimizer, loss_fn, batches)"),
            )
            return


def _slow(rung: Measured, known: dict[str, Measured]) -> Iterator[tuple[str, Finding]]:
    now = rung.fast
    native = known["native"].milliseconds if "native" in known else None
    if rung.name == "data" and now is not None and native is not None and now > max(native, 5.0):
        text = f"a batch takes {now:.0f} ms to make, and a step {native:.0f} ms: training waits for data"
        remedy = "make batches ahead in threads, and look at what the collate does for each sample"
        yield (
            "slow",
            Finding("slow-data", "warning", text, remedy, "Loader(source, batch_size=32, workers=2, prefetch=4)"),
        )
    below = _SLOWER.get(rung.name)
    if below is None or now is None or (before := known.get(below[0])) is None or before.milliseconds is None:
        return
    _, factor, remedy, code = below
    if rung.name == "prefetch" and (alone := known["data"].milliseconds) is not None:
        now -= alone
    if now > factor * before.milliseconds and now - before.milliseconds > _LEAST_MS:
        text = f"{rung.title} takes {now:.0f} ms a step, {before.title} {before.milliseconds:.0f} ms"
        yield "slow", Finding("slow", "warning", text, remedy, code)
