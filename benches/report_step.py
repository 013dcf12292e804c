"""The report of ``step.py``, ``matmul.py``, ``threads.py`` and ``quantized.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown import megabytes, spread, table
from ways import BOUND, COMPILED, FAST

STEP = """All ways take their turns in rotating order, on the same batches from the same weights: AdamW, gradients
clipped to norm 1.0, parameters, optimizer state and random state evaluated; `fast_step` with its defaults, so that a
step that is not finite would be left out, and on CUDA replayed as one CUDA graph (samples before 2026-11-23: not yet).
Times are milliseconds a step: the median, and in brackets the quartiles over the rounds. A ratio is a way's time over
`fast_step`'s in the same round: above 1, `fast_step` is faster. Peak memory is MLX's own (`mx.get_peak_memory`), each
way alone in a process, once the first steps are done. On a CPU all ways have our OpenBLAS, and the kernels that MLX's
compilation makes as `faststep` has them made, for the processor; those with MLX's own kernels are in another process
(`FASTSTEP_KERNELS=0`), which takes its turns in the same rounds.
"""
OPTIMIZERS = """As above, with MLX's optimizers at their defaults (SGD with momentum 0.9; Muon for the matrices between
embeddings and output, AdamW for the rest).
"""
CLIENTS = """Small programs after the shapes of published ones (`tests/support/programs`), whole: agents, adversaries,
teachers, language models, graphs. `original` is the way in which the published ones take their steps, with
`mx.compile` or without; the time is that of a round: a step of every model, and what the program does between them,
such as averaging a target. The numbers are compared with those of the plain loop, over the first 24 rounds from the
same seeds: the largest difference as a share of the largest value, of losses and of the parameters of all models. Peak
memory is that of compiled steps (where `mx.compile` takes the arguments) and of `fast_step`, each alone in a process.
"""
MATMUL = "`faststep` gives MLX's CPU another BLAS, OpenBLAS. What that is worth, for float32 [n, n] @ [n, n]:\n"
THREADS = """`fast_step` as above, by who computes the matrix products, each way in a process of its own: one thread,
OpenBLAS's own threads, and ours, which are the default. They take their turns while nothing else computes, and again
beside a process on each core that never stops. A ratio is a way's time over that of one thread in the same round: below
1, it is faster.
"""
REACH = """A tiny step (a layer of 4 weights), by what its loss reaches in its closure: all of that is looked at
before each step. Arrays that the model holds beside its parameters are looked at too, so that they compare. A slot's
nanoseconds are the difference to the loss that reaches nothing, in the same round, over the number of slots.
"""
VARYING = """The loss is divided by a temperature, an attribute of an object, which is another number at each step:
the loss is called once for each and its graph compared; so it is for an attribute of the model. An `mx.array` in its
place is an input of the trace, as an argument of a compiled step is. AdamW and clipping as above; the smallest model
has SGD without.
"""
QUANTIZED = """Products with quantized weights, on a CPU. All ways take their turns in one process.
"""


def step(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out time, ratio and memory of each way in one case."""
    head = ["way", "ms a step", "time over fast_step's", "peak memory, MB", "without clipping, MB"]
    return [f"#### {result['title']}", "", *table(head, (row(result, way) for way in result["ms"])), *notes(result)]


def row(result: dict[str, Any], way: str) -> list[str]:
    """Lay out one way."""
    ratios = over(result["ms"], way)
    peaks = {**result["memory"], **result.get("PyTorch", {}).get("ways", {})}
    memory = [megabytes(peaks.get(way, {}).get(name)) for name in ("peak", "peak without clipping")]
    return [way, spread(result["ms"][way]), "" if way == FAST else spread(ratios), *memory]


def notes(result: dict[str, Any]) -> list[str]:
    """Say what the table's numbers rest on."""
    apart = result.get("loss differences from float32")
    what = "of the first losses from those of gradients in float32" if apart else "between the first losses"
    each = "; " + ", ".join(f"{way} {gap:.1e}" for way, gap in apart.items()) if apart else ""
    lines = [
        f"Rounds: {len(result['ms'][FAST])}, steps of each way in a round: {result['steps in a block']}; parameters "
        f"{megabytes(result['parameters'])} MB; largest difference {what} "
        f"{result['largest loss difference']:.1e}{each} ({BOUND}: compiled gradients, no update).",
        "",
    ]
    return lines + (torch_notes(result["PyTorch"]) if "PyTorch" in result else [])


def torch_notes(peer: dict[str, Any]) -> list[str]:
    """Say what PyTorch's numbers rest on."""
    precision = peer["matmul precision"]
    return [
        f"PyTorch {peer['version']}: a process of its own, which takes its turns in the same rounds while this one "
        "waits. The same shapes, initial weights and batches, the first losses agree; fused AdamW, with its bias "
        "correction, which MLX's has only when told; `clip_grad_norm_`; compiled are model and loss. Its peak is "
        "`torch.cuda.max_memory_allocated` over the first steps, compilation and capture included. Products of float32 "
        f"on a GPU are {'' if precision == 'high' else 'not '}in TF32 on both sides: MLX_ENABLE_TF32, and "
        f'`torch.set_float32_matmul_precision("{precision}")`.',
        "",
    ]


def optimizers(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times of each optimizer in one case."""
    ways = list(next(iter(result["ms"].values())))
    head = ["optimizer", *(f"{way}, ms" for way in ways), *(f"{way} over {FAST}" for way in ways if way != FAST)]
    rows = [
        [name, *(spread(times[way]) for way in ways), *(spread(over(times, way)) for way in ways if way != FAST)]
        for name, times in result["ms"].items()
    ]
    return [f"#### {result['title']}", "", *table(head, rows)]


def clients(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out a line for each program."""
    head = ["program", "original", "original, ms", f"{FAST}, ms", "original over fast_step", "losses differ by"]
    head += ["parameters by", "peak, compiled, MB", "fast_step, MB"]
    return table(head, (program_row(program) for program in result.values()))


def program_row(program: dict[str, Any]) -> list[str]:
    """Lay out one program."""
    times, memory = program["ms"], program["memory"]
    (original,) = (way for way in times if way != FAST)
    row = [program["title"], original, spread(times[original]), spread(times[FAST]), spread(over(times, original))]
    row += [f"{program['differences'][what]:.0e}" for what in ("losses", "parameters")]
    return row + [megabytes(memory.get(way)) for way in (COMPILED, FAST)]


def over(times: dict[str, list[float]], way: str, other: str = FAST) -> list[float]:
    """Return a way's time over another's, by round."""
    return [a / b for a, b in zip(times[way], times[other], strict=True)]


def matmul(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out what our BLAS does for a product."""
    fastest = min(by["ms"] for by in result.values())
    rows = ([way, f"{by['ms']:.1f}", f"{by['ms'] / fastest:.1f}", f"{by['error']:.1e}"] for way, by in result.items())
    return table(["float32 product", "ms", "time over the fastest", "largest error, relative"], rows)


def threads(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times of each way, and their ratios to one thread's, quiet and busy."""
    machines = ("quiet", "busy")
    head = ["products by", *(f"{name}{what}" for name in machines for what in (", ms", ", over one thread"))]
    first = next(iter(result["quiet"]))
    rows = []
    for way in result["quiet"]:
        cells = [(result[name][way], over(result[name], way, first)) for name in machines]
        rows.append([way, *(spread(values) for pair in cells for values in pair)])
    return [f"#### {result['title']}", "", *table(head, rows)]


def reach(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times by what the loss reaches, and what a slot costs."""
    (nothing, base), *ways = result["ms"].items()
    rows = [[nothing, spread([1e3 * ms for ms in base]), ""]]
    for way, times in ways:
        slots = int(way.split()[-1])
        each = [1e6 * (ms - alone) / slots for ms, alone in zip(times, base, strict=True)]
        rows.append([way, spread([1e3 * ms for ms in times]), spread(each)])
    return table(["reached", "us a step", "ns a slot"], rows)


def varying(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times of each way with a number that changes."""
    plain = next(iter(result["ms"]))
    rows = ([way, spread(ms), spread(over(result["ms"], plain, way))] for way, ms in result["ms"].items())
    return [f"#### {result['title']}", "", *table(["way", "ms a step", f"{plain}'s time over it"], rows)]


def quantized(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times of each way over quantized weights."""
    rows = ([way, spread(ms), spread(over(result["ms"], way))] for way, ms in result["ms"].items())
    gap = f"Largest difference of the losses of a third step: {result['largest loss difference']:.1e}."
    head = ["way", "ms a step", "time over fast_step's"]
    return [f"#### {result['title']}", "", *table(head, rows), gap, ""]
