"""`diagnose`: the ladder on the user's own model and data, each rung in a process of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._step import Step, is_installed, whole_number
from faststep.doctor._diagnosis import Diagnosis
from faststep.doctor._inside import Inside
from faststep.doctor._judge import judge
from faststep.doctor._machine import memory
from faststep.doctor._rungs import BY_NAME, JOB, RUNGS, Rung, climb
from faststep.doctor._subject import Subject
from faststep.doctor._watch import Measured, watch

Tell = Callable[[Measured, bool], None]  # a rung, and whether it is done
_SHARE = 0.9  # of the free memory that a rung may have
_STOPS = {"no-data", "loss-from-item", "loss-shape", "all-frozen", "channels-first"}
_STOPS |= {"labels-out-of-range", "tokens-out-of-range"}
_BEGIN = 600.0  # seconds until a rung begins: the program is loaded anew, the config is built
_calls = 0


def diagnose(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Callable[..., Any],
    batches: Iterable[Any],
    *,
    own_step: Callable[..., Any] | None = None,
    validation: Iterable[Any] | None = None,
    run: str | Path | None = None,
    timeout: float = 120.0,
    steps: int = 40,
    seconds: float = 4.0,
    rungs: Sequence[str] | None = None,
    isolate: bool | None = None,
    progress: bool = True,
    **options: Any,
) -> Diagnosis:
    """Find out which part of a training hangs, leaks, fails or slows, and say what to do about it.

    The parts are tried one by one, from the data alone up to the native step and what is around it: data, whether
    batches are evaluated, the loss, what the numbers say, the loss again and again, its gradient, the update without
    evaluation, joint evaluation, with cache clearing, compiled, the native step, new shapes, prefetch, accumulation,
    validation, checkpoints. Each is watched by its clock and its memory.

    Call it in your training script, in place of the loop:

        faststep.diagnose(model, optimizer, loss_fn, batches, own_step=train_step)

    **Processes.** MLX does not survive a fork, and models, losses and loaders that cannot be pickled are common. So
    each rung runs the script itself again, in a process of its own, up to this call, and goes on with that rung there:
    the objects are the same that your training has. What the script does before the call happens for each rung; put
    what must not below `if __name__ == "__main__":`, or behind the call. In a notebook, in an interpreter, and below a
    test runner, there is no script to run again: then the rungs run in this process, and a second thread watches. A
    rung that hangs in Python code is interrupted; one that hangs in native code is told with its stacks, and the
    process has to be ended by hand. Model, optimizer and random states are put back behind each.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_fn: What `Step` takes.
        batches: Batches: tuples, dicts or arrays, as for `check`.
        own_step: Your own step, `own_step(*batch)`: one more rung, which shows what it leaves unevaluated.
        validation: Batches of the validation rung; None: some of `batches`.
        run: The folder of the run: checkpoints are tried on its disk.
        timeout: Seconds without a step after which a rung hangs.
        steps: Steps of a rung at most.
        seconds: Seconds of a rung: no new step begins then, but for the first three.
        rungs: Names of rungs; None: all.
        isolate: Each rung in a process of its own. None: where that is possible.
        progress: Write a line to stderr for each rung.
        **options: Options of `Step`.

    Returns:
        The findings; `print` shows them, `.html(path)` writes a page.

    Raises:
        ValueError: An option is out of its range, or there is no such rung.
        RuntimeError: `isolate=True` where there is no script to run again.
    """
    global _calls
    _calls += 1
    chosen = _chosen(rungs, own_step is not None)
    options = dict(options)
    accumulate = options.pop("accumulate", 1)
    subject = Subject(model, optimizer, loss_fn, batches, validation, options, own_step, Path(run) if run else None)
    if (file := os.environ.get(JOB)) is not None:  # this process is there for one rung
        job = json.loads(Path(file).read_text(encoding="utf-8"))
        if job.get("call") != _calls:
            return Diagnosis((), ())
        climb(subject, job)
        os._exit(0)
    Step(model, optimizer, loss_fn, accumulate=accumulate, **options)  # checks the options
    whole_number("steps", steps, 1)
    command = script()
    if isolate and command is None:
        raise RuntimeError("isolate: expected a script that can be run again, got an interpreter, a notebook or a test")
    tell = _line if progress else _nothing
    job = {"steps": steps, "seconds": seconds}
    if isolate is False or command is None:
        return ladder(chosen, Inside(subject, job, timeout), tell)
    return ladder(chosen, Processes(command, {**job, "call": _calls}, timeout), tell)


def diagnose_config(
    config: str | Path,
    overrides: Sequence[str] = (),
    *,
    timeout: float = 120.0,
    steps: int = 40,
    seconds: float = 4.0,
    rungs: Sequence[str] | None = None,
    tell: Tell | None = None,
) -> Diagnosis:
    """Diagnose the training that a config describes; see `diagnose`.

    Raises:
        ConfigError: Something in the config is wrong.
    """
    from faststep.config import load

    load(config, overrides)
    command = [sys.executable, "-m", "faststep.doctor._child"]
    job = {"config": str(config), "overrides": list(overrides), "steps": steps, "seconds": seconds}
    return ladder(_chosen(rungs, own=False), Processes(command, job, timeout), tell or _nothing)


def _chosen(names: Sequence[str] | None, own: bool) -> list[Rung]:
    if unknown := sorted(set(names or ()) - BY_NAME.keys()):
        raise ValueError(f"rungs: expected names among {', '.join(BY_NAME)}, got {', '.join(unknown)}")
    return [each for each in RUNGS if (names is None or each.name in names) and (own or each.name != "own")]


def script() -> list[str] | None:
    """Return the command that runs this program again; None where there is none that is the user's."""
    main = sys.modules.get("__main__")
    file = getattr(main, "__file__", None)
    if file is None or not Path(file).is_file() or hasattr(sys, "ps1"):
        return None
    if Path(file).resolve().is_relative_to(Path(sys.prefix).resolve()) or is_installed(file):
        return None  # a tool's own program, such as a test runner
    return [sys.executable, *sys.orig_argv[1:]]


class Processes:
    """Rungs in processes of their own."""

    notes: tuple[str, ...] = ()

    def __init__(self, command: Sequence[str], job: dict[str, Any], timeout: float) -> None:
        self._command, self._job, self._timeout = command, job, timeout

    def climb(self, rung: Rung, measured: Measured, tell: Tell) -> None:
        """Climb a rung."""
        with tempfile.TemporaryDirectory(prefix="faststep-doctor-") as folder:
            place = Path(folder)
            files = {name: str(place / name) for name in ("events", "stacks")}
            job = {**self._job, "rung": rung.name, **files}
            (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
            environment = os.environ | {JOB: str(place / "job.json"), "PYTHONUNBUFFERED": "1"}
            known = memory()
            with (place / "output").open("wb") as output:
                process = subprocess.Popen(
                    self._command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                limits = max(_BEGIN, self._timeout), self._timeout
                most = _SHARE * known[0] if known else None
                watch(process, measured, job, limits=limits, memory=most, tell=lambda each: tell(each, False))
            if "folder" in measured.facts:
                shutil.rmtree(measured.facts["folder"]["path"], ignore_errors=True)
            said = (place / "output").read_text(encoding="utf-8", errors="replace")
            if measured.error is not None and not measured.error["trace"]:
                last = [line for line in said.splitlines() if line.strip()][-20:]
                measured.error["trace"] = "\n".join(last)
                measured.error["message"] += f": {last[-1]}" if last else ""


def ladder(rungs: Sequence[Rung], way: Processes | Inside, tell: Tell) -> Diagnosis:
    """Climb the rungs until one fails on which all others stand."""
    done: list[Measured] = []
    stopped = False
    for rung in rungs:
        measured = Measured(rung.name, rung.title)
        done.append(measured)
        if stopped:
            measured.status = "skipped"
            continue
        tell(measured, False)
        way.climb(rung, measured, tell)
        names = {each.name for each in measured.findings if each.level == "failure"}
        broken = measured.status in ("hangs", "error")
        stopped = bool(names & _STOPS) or (rung.stops and (broken or "lazy-batch" in names))
        stopped = stopped or (rung.name == "numbers" and any(each.status == "error" for each in done))
        stopped = stopped or (rung.name == "forward" and measured.status == "hangs")
        tell(measured, True)
    findings = judge(done)
    return Diagnosis(tuple(findings), tuple(done), way.notes)


def _line(rung: Measured, done: bool) -> None:
    if done:
        found = ", ".join(dict.fromkeys(each.name for each in rung.findings if each.level != "note"))
        text = f"{rung.title:<26} {rung.status:<8} {len(rung.steps):>4} steps in {rung.seconds:5.1f} s  {found}"
        print(text.rstrip(), file=sys.stderr, flush=True)


def _nothing(rung: Measured, done: bool) -> None:
    pass
