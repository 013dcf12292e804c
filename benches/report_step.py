"""The report of ``step.py``, ``matmul.py``, ``threads.py`` and ``quantized.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markdown import megabytes, spread, table
from ways import BOUND, COMPILED, FAST

STEP = """One training step, computed in several ways: AdamW, gradients clipped to norm 1.0, then parameters, optimizer
state and random state are evaluated. The ways take turns, in rotating order, on the same batches from the same
weights. `fast_step` has its default options, so it checks each step for NaN and infinity, and replays a step: on CUDA
as one graph (not in samples before 2026-11-23), on a CPU as a list of tasks where that is faster (not in samples before
2026-11-30).

Times are milliseconds a step: the median, and the quartiles over the rounds in brackets. A ratio is a way's time over
`fast_step`'s in the same round: above 1, `fast_step` is faster. Peak memory is MLX's own (`mx.get_peak_memory`), of
each way alone in a process, after the first steps.

On a CPU all ways use this package's OpenBLAS, and its kernels where MLX compiles. The ways with MLX's own kernels run
in another process (`FASTSTEP_KERNELS=0`), in the same rounds.
"""
OPTIMIZERS = """The [same step](step.md) with each of MLX's optimizers, at their defaults: SGD with momentum 0.9;
Muon for the matrices between embeddings and output, with AdamW for the rest.
"""
OWN_OPTIMIZERS = """The [same step](step.md) with optimizers of one's own whose `update` has to be called each time:
AdamW that counts its updates in Python, descent with momentum whose rate is a number in Python, Lion that appends to a
list. `mx.compile` of the whole step calls none of them again: counts and rates stay as they were at the first step. The
other way compiles loss and clipped gradients, and calls the update behind them.
"""
CLIENTS = """Small whole programs, modelled on published ones (`tests/support/programs`): agents, adversaries,
teachers, language models, graphs. `original` is the way in which the published program takes its steps, with
`mx.compile` or without. The time is that of a round: a step of every model, and what the program does between the
steps, such as averaging a target network.

The numbers are compared with those of the plain loop over the first 24 rounds, from the same seeds. The column shows
the largest difference, as a share of the largest value, of the losses and of the parameters of all models. Peak
memory is that of compiled steps (where `mx.compile` takes the arguments) and of `fast_step`, each alone in a process.
"""
MATMUL = """`faststep` gives MLX another BLAS on CPUs, OpenBLAS. The table compares both, for float32 [n, n] @ [n,
n].
"""
THREADS = """`fast_step` with matrix products computed by one thread, by OpenBLAS's own threads, and by this
package's threads, which are the default. Each way has a process of its own. They take turns, first while nothing else
computes, then beside busy processes, one for each core. A ratio is a way's time over that of one thread in the same
round: below 1, it is faster.
"""
REACH = """A tiny step (a layer of 4 weights) whose loss has more and more objects in its closure. `fast_step`
compares all of them before each step, to see whether anything has changed. Arrays that the model holds beside its
parameters are compared too. "ns a slot" is the difference to the loss with an empty closure, in the same round, over
the number of objects.
"""
VARYING = """The loss is divided by a temperature that changes at every step. As an attribute of an object or of the
model, it costs a call of the loss each time, and a comparison of its graph. As an `mx.array` it is an input of the
trace, like an argument of a compiled step. AdamW, with clipping; the smallest model has SGD without clipping.
"""
QUANTIZED = """A training step with quantized weights, on a CPU. All ways take turns in one process.
"""


def step(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out time, ratio and memory of each way in one case."""
    head = ["way", "ms a step", "time over fast_step's", "peak memory, MB", "without clipping, MB"]
    return [f"### {result['title']}", "", *table(head, (row(result, way) for way in result["ms"])), *notes(result)]


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
    lines += jax_notes(result["JAX"]) if "JAX" in result else []
    return lines + (torch_notes(result["PyTorch"]) if "PyTorch" in result else [])


def jax_notes(peer: dict[str, Any]) -> list[str]:
    """Say what JAX's numbers rest on."""
    return [
        f"JAX {peer['version']} runs in a process of its own, in the same rounds, while this one waits: the whole step "
        "in one `jax.jit`, with donated parameters and moments. Initial weights, batches and the update are the same, "
        "and the first losses agree.",
        "",
    ]


def torch_notes(peer: dict[str, Any]) -> list[str]:
    """Say what PyTorch's numbers rest on."""
    precision = peer["matmul precision"]
    return [
        f"PyTorch {peer['version']} runs in a process of its own, in the same rounds, while this one waits. Shapes, "
        "initial weights and batches are the same, and the first losses agree. It has fused AdamW with bias correction "
        "(MLX's default is none) and `clip_grad_norm_`; model and loss are compiled. Its peak memory is "
        "`torch.cuda.max_memory_allocated` over the first steps, with compilation and capture. Products of float32 "
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
    return [f"### {result['title']}", "", *table(head, rows)]


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
    return [f"### {result['title']}", "", *table(head, rows)]


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
    return [f"### {result['title']}", "", *table(["way", "ms a step", f"{plain}'s time over it"], rows)]


def quantized(result: dict[str, Any], _plot: Path) -> list[str]:
    """Lay out the times of each way over quantized weights."""
    rows = ([way, spread(ms), spread(over(result["ms"], way))] for way, ms in result["ms"].items())
    gap = f"Largest difference of the losses of a third step: {result['largest loss difference']:.1e}."
    head = ["way", "ms a step", "time over fast_step's"]
    return [f"### {result['title']}", "", *table(head, rows), gap, ""]
