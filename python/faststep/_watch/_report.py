"""Report of a stage that outlasts its limit: the stage, the batch, memory, and the stacks of all threads."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from types import CodeType, FrameType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx.utils import tree_flatten

from faststep._watch._memory import available, memory

_GIB = 2.0**30
_RANK = ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


class _Stage(NamedTuple):
    text: str
    remedy: str


_STAGES = {
    "data": _Stage(
        "waiting for the next batch",
        "the stacks below show where the data's threads stand: a lock, a file system or a network that does not "
        "answer, a worker that waits for another. Run the data alone: `for batch in loader: pass`",
    ),
    "objects": _Stage(
        "looking at the model, the optimizer and what the loss refers to",
        "a property or a __getattr__ of one of these objects may wait: see the stack below",
    ),
    "trace": _Stage(
        "calling the loss function",
        "the stack below ends in it: it waits or loops there",
    ),
    "build": _Stage("building the step's graph", "the graph may be very large: see the number of operations"),
    "first evaluation": _Stage(
        "evaluating a step for the first time, for which kernels are compiled",
        "on a new machine compiling may take minutes, once: look whether a compiler runs (g++, NVRTC). If none does, "
        "the device is busy or the batch is too large: try a smaller one",
    ),
    "evaluation": _Stage(
        "handing work to the device",
        "the graph may be very large, see the number of operations, or memory is short and MLX waits for the device: "
        "see below. Step.memory_plan(batch) says what a step needs",
    ),
    "wait": _Stage(
        "waiting for the device",
        "look at the memory below and at what else runs on the device: a machine that swaps, or a device in use by "
        "another process, takes a hundred times as long. Step.memory_plan(batch) says what a step needs",
    ),
    "collective": _Stage(
        "exchanging arrays with other ranks",
        "compare the reports of all ranks: one of them has ended, is at another step, or has had fewer batches. If all "
        "of them wait here at the same step, the network between them does not answer",
    ),
    "validation": _Stage("validating", "the stack below shows whether data, loss or device is waited for"),
    "checkpoint": _Stage(
        "writing a checkpoint",
        "the disk does not take it: look at its space and its speed (a network file system?)",
    ),
    "other": _Stage(
        "between two stages: in callbacks, loggers or the display",
        "the stack below shows which of them waits, for a network perhaps",
    ),
}


def hang_report(stage: str, seconds: float, facts: Mapping[str, str], entry: CodeType | None = None) -> str:
    """Return the text of a report.

    Args:
        stage: The stage of a step or of a training.
        seconds: How long it lasts.
        facts: More lines, by name: the number of the step, the size of its graph.
        entry: The code of a function whose caller passes it a batch as `batch` and `named`: its arguments are shown.

    Returns:
        Some dozen lines.
    """
    known = _STAGES.get(stage, _Stage(stage, "see the stacks below"))
    lines = [f"no progress for {seconds:.0f} s: {known.text}", f"  what to do: {known.remedy}"]
    frames = sys._current_frames()
    batch = next(filter(None, (_batch(frame, entry) for frame in frames.values())), None)
    facts = {**facts, **({"batch": batch} if batch else {}), **_machine()}
    lines += [f"  {name}: {text}" for name, text in facts.items()]
    return "\n".join([*lines, *_stacks(frames)]) + "\n"


def _machine() -> dict[str, str]:
    used, free = memory(), available()
    text = ", ".join(f"{name} {size / _GIB:.2f} GiB" for name, size in used.items())
    facts = {"memory": text + ("" if free is None else f"; available in the machine {free / _GIB:.2f} GiB")}
    facts["load"] = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} processors"
    rank = next((f"{os.environ[name]} ({name})" for name in _RANK if name in os.environ), None)
    return facts | ({"rank": rank} if rank else {})


def _batch(frame: FrameType | None, entry: CodeType | None) -> str | None:
    """Return the shapes of the arguments of the call under way, where a thread is in one."""
    while frame is not None and frame.f_code is not entry:
        frame = frame.f_back
    if frame is None:
        return None
    values = frame.f_locals
    return ", ".join(_leaves([values.get("batch", ()), values.get("named", {})])) or "no arrays"


def _leaves(values: list[Any]) -> Iterator[str]:
    for value in values:
        leaves: Any = tree_flatten(value)
        for path, leaf in leaves:
            if isinstance(leaf, mx.array):
                yield f"{path} {str(leaf.dtype).removeprefix('mlx.core.')} {list(leaf.shape)}"


def _stacks(frames: Mapping[int, FrameType]) -> Iterator[str]:
    names = {each.ident: each.name for each in threading.enumerate()}
    mine = threading.get_ident()
    order = sorted(frames, key=lambda ident: ident != threading.main_thread().ident)
    for ident in order:
        if ident != mine:
            yield f"\nthread {names.get(ident, ident)}, most recent call last:"
            yield "".join(traceback.format_stack(frames[ident])).rstrip()
