"""The environment, line by line, in child processes where something native is loaded. Standard library only."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from faststep.doctor import _machine
from faststep.doctor._line import Line, size, write

_PROBE = Path(__file__).with_name("_probe.py")
_SECONDS = 300.0  # for a child: on a GPU the first kernels are compiled for a minute
_LEAST_SPEED = 10.0  # GFLOP/s of a CPU with OpenBLAS; MLX's own BLAS has a few
_STAGES = {
    "load_mlx": "import of MLX",
    "load_faststep": "import of faststep",
    "speed": "matrix product",
    "kernel": "compiling a kernel",
    "step": "training step",
}
Facts = dict[str, dict[str, Any]]


def environment(*, as_json: bool = False) -> int:
    """Print what is found about the environment; return the exit code: 0 healthy, 1 with a failure."""
    found: list[Line] = []
    for line in lines():
        found.append(line)
        if not as_json:
            write([line], sys.stdout)
            sys.stdout.flush()
    failed = sum(line.level == "failure" for line in found)
    if as_json:
        print(json.dumps({"healthy": not failed, "lines": [line.plain() for line in found]}, indent=1))
    else:
        warned = sum(line.level == "warning" for line in found)
        print(f"\n{_counted(failed, 'failure')}, {_counted(warned, 'warning')}")
    return 1 if failed else 0


def _counted(count: int, what: str) -> str:
    return f"{count or 'no'} {what}{'' if count == 1 else 's'}"


def lines() -> Iterator[Line]:
    """Yield the lines, each when it is known."""
    known = list[Line]()
    absent: Line | None = None
    for line in _machine.lines():
        known.append(line)
        if line.name == "libraries" and line.level == "warning":
            absent = line
        else:
            yield line
    facts, ended = _probe()
    if absent is not None:
        brought = facts.get("load_mlx", {}).get("computed") and facts["load_mlx"]["device"] != "cpu"
        yield Line(absent.name, "ok", "brought by the system, not by packages") if brought else absent
    yield from _loading(facts)
    yield from _computing(facts)
    if (failure := _failure(facts, ended)) is not None:
        told = {line.name for line in known if line.level == "failure"}
        remedy = "see the failure above" if told & {"packages", "back end", "CUDA"} else failure.remedy
        yield Line(failure.name, failure.level, failure.text, remedy)


def _probe(*arguments: str, **variables: str) -> tuple[Facts, str]:
    """Run the child; return the facts by stage, and how it ended where that was no good."""
    environment = {name: value for name, value in os.environ.items() if name != "FASTSTEP_TUNING"} | variables
    command = [sys.executable, str(_PROBE), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=_SECONDS)
        said, ended = done.stdout, _ending(done.returncode, done.stderr)
    except subprocess.TimeoutExpired as error:
        said = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        ended = f"hung for {_SECONDS:.0f} s"
    facts: Facts = {}
    for line in said.splitlines():
        if line.startswith("{"):
            fact = json.loads(line)
            facts.setdefault(fact.pop("stage"), {}).update(fact)
    return facts, ended


def _ending(status: int, stderr: str) -> str:
    if status == 0:
        return ""
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    return f"ended by signal {-status}" if status < 0 else f"exit code {status}: {last}"


def _failure(facts: Facts, ended: str) -> Line | None:
    """Return the stage at which the child failed, died or hung."""
    stage = list(facts)[-1] if facts else "load_mlx"
    error = facts.get(stage, {}).get("error")
    if error is None and not ended:
        return None
    reason = error or ended
    return Line(_STAGES[stage], "failure", reason.partition("\n")[0], _remedy(stage, reason))


def _remedy(stage: str, reason: str) -> str:
    """Return what to do about a child that failed."""
    if mend := re.search(r"(?:To mend it: |Install one of them: )(.+)", reason):
        return mend[1]
    if library := re.search(r"(lib\S+\.so\S*): cannot open shared object", reason):
        return f"{library[1]} is missing: install the package that brings it, or the back end again: " + _again()
    if match := re.search(r"No module named '([\w.]+)'", reason):
        return f"pip install {match[1].partition('.')[0]}"
    if stage == "load_faststep":
        return "install the package again, built for this MLX: pip install --force-reinstall mlx-faststep"
    if stage == "kernel":
        return "install a C++ compiler (g++), or train without compilation: Step(..., compile=False)"
    return "install MLX again: " + _again()


def _again() -> str:
    names = [name for name in ("mlx", *_machine.BACK_ENDS) if _machine.installed(name)]
    return (
        f"pip install --force-reinstall {' '.join(f'{name}=={_machine.installed(name)}' for name in names or ['mlx'])}"
    )


def _loading(facts: Facts) -> Iterator[Line]:
    mlx = facts.get("load_mlx", {})
    if "device" in mlx:
        info = mlx["info"]
        name = info.get("device_name") or info.get("architecture") or ""
        total = info.get("memory_size") or info.get("total_memory") or 0
        text = f"{mlx['version']} computes on {mlx['device']}: {name}" + (f", {size(total)}" if total else "")
        if mlx["computed"]:
            yield Line("MLX", "ok", text)
        else:
            yield Line("MLX", "failure", f"{text}, but 2 * (0 + 1 + 2 + 3) is not 12", _again())
    ours = facts.get("load_faststep", {})
    if "version" in ours:
        yield Line("faststep", "ok", f"{ours['version']}, extension module loaded")
    for text in ours.get("warnings", ()):
        what, _, remedy = text.rpartition(": ")
        yield Line("faststep", "warning", what or text, remedy)


def _computing(facts: Facts) -> Iterator[Line]:
    speed = facts.get("speed", {})
    if "gigaflops" in speed:
        yield _blas(speed, facts["load_mlx"]["device"] == "cpu")
    kernel = facts.get("kernel", {})
    if "seconds" in kernel:
        text = f"a compiled kernel runs ({kernel['seconds']:.2f} s with the compilation)"
        if (line := _machine.no_compiler(is_needed=kernel["needs_compiler"])) is not None:
            yield line
            text = f"a fused kernel runs ({kernel['seconds']:.2f} s)"
        yield (
            Line("compile", "ok", text)
            if kernel["right"]
            else Line("compile", "failure", "a fused kernel gives wrong numbers", f"delete {_machine.kernel_folder()}")
        )
    step = facts.get("step", {})
    if "difference" in step:
        text = f"one native step and one of plain MLX differ by {step['difference']:.1e}"
        if step["difference"] < 1e-4:
            yield Line("step", "ok", text)
        else:
            yield Line(
                "step", "failure", text, "please report this, with this output; Step(..., compile=False) until then"
            )


def _blas(speed: dict[str, Any], on_cpu: bool) -> Line:
    found = f"{speed['gigaflops']:,.0f} GFLOP/s (float32, 1024 x 1024)"
    if not on_cpu:
        return Line("products", "ok", found)
    if not _machine.LINUX:
        return Line("BLAS", "ok", found)
    library, threads = speed["library"], speed["threads"]
    if library is None:
        remedy = "unset FASTSTEP_BLAS" if os.environ.get("FASTSTEP_BLAS") == "0" else 'pip install "mlx-faststep[cpu]"'
        return Line("BLAS", "warning", f"MLX's own: {found}", remedy + ", which brings OpenBLAS")
    text = f"{Path(library).name}: {found}"
    if threads > 1:
        alone, _ = _probe("--speed", OPENBLAS_NUM_THREADS="1")
        text += f" with {threads} threads, {alone.get('speed', {}).get('gigaflops', float('nan')):,.0f} with one"
        if alone.get("speed", {}).get("gigaflops", 0.0) > 1.2 * speed["gigaflops"]:
            remedy = "the machine is busy, or has fewer cores than it says: set OPENBLAS_NUM_THREADS=1"
            return Line("BLAS", "warning", text, remedy)
    if speed["gigaflops"] < _LEAST_SPEED:
        return Line("BLAS", "warning", text, "the machine is busy, or slow: run this again when it is idle")
    return Line("BLAS", "ok", text)
