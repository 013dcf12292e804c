"""`diagnose`: the ladder on the user's own model and data, in processes that a hang cannot take along."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TextIO

import mlx.nn as nn
from mlx.optimizers import Optimizer

from faststep._records import span
from faststep._step import Step, is_installed, whole_number
from faststep.doctor._diagnosis import Diagnosis
from faststep.doctor._inside import Inside
from faststep.doctor._jobs import PIPE, asked, serve
from faststep.doctor._judge import judge
from faststep.doctor._machine import age, memory
from faststep.doctor._rungs import BY_NAME, RUNGS, Rung
from faststep.doctor._subject import Subject
from faststep.doctor._watch import Measured, end, resident, watch

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
    """Find out which part of a training hangs, leaks, fails or is slow, and say what to do about it.

    The parts are tried one by one, from the data alone up to the native step and what is around it: data, whether
    batches are evaluated, the loss, what the numbers say, the loss again and again, its gradient, the update without
    evaluation, joint evaluation, with cache clearing, compiled, the native step, new shapes, prefetch, accumulation,
    validation, checkpoints. Time and memory of each are watched.

    Call it in your training script, in place of the loop:

        faststep.diagnose(model, optimizer, loss_fn, batches, own_step=train_step)

    **Processes.** MLX does not survive a fork, and models, losses and loaders that cannot be pickled are common. So
    the script itself runs again in another process, up to this call, and the rungs run there, each from the same
    weights, with the objects of your training. After a rung that hangs or dies the script runs once more. Put code that
    must not run twice below `if __name__ == "__main__":`, or after the call. In a notebook, an interpreter or a test
    runner there is no script to run again: then the rungs run in this process, and a second thread watches. A rung that
    hangs in Python code is interrupted. For one that hangs in native code the stacks are shown, and the process has to
    be ended by hand. Model, optimizer and random states are restored after each rung.

    Args:
        model: The model.
        optimizer: The optimizer.
        loss_fn: What `Step` takes.
        batches: Batches: tuples, dicts or arrays, as for `check`.
        own_step: Your own step, `own_step(*batch)`: one more rung compares it with plain MLX, and shows what it leaves
            unevaluated.
        validation: Batches of the validation rung; None: some of `batches`.
        run: The folder of the run: checkpoints are tried on its disk.
        timeout: Seconds without a step after which a rung counts as hanging.
        steps: The largest number of steps of a rung.
        seconds: How long a rung may take: after that no new step begins, except the first three.
        rungs: Names of rungs; None: all.
        isolate: True: each rung in a process of its own, which runs the script. False: all in this process. None: all
            in one other process, if possible.
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
    if (job_of := asked()) is not None:  # this process is there for rungs
        pipe, call = job_of
        if call != _calls:
            return Diagnosis((), ())
        serve(pipe, lambda job: subject)
    Step(model, optimizer, loss_fn, accumulate=accumulate, **options)  # checks the options
    whole_number("steps", steps, 1)
    command = script()
    if isolate and command is None:
        raise RuntimeError("isolate: expected a script that can be run again, got an interpreter, a notebook or a test")
    tell = _line if progress else _nothing
    job = {"steps": steps, "seconds": seconds}
    if isolate is False or command is None:
        return ladder(chosen, Inside(subject, job, timeout), tell)
    if progress:
        print(_preamble(age(), len(chosen), isolate), file=sys.stderr, flush=True)
    with Processes(command, job, timeout, _calls, each=bool(isolate)) as processes:
        return ladder(chosen, processes, tell)


def _preamble(seconds: float, rungs: int, isolate: bool | None) -> str:
    """Return what the part of the program before the call costs."""
    if isolate:
        again = f"for each of {rungs} rungs, {span(seconds * rungs)} in all; isolate=None runs it once"
    else:
        again = "once, and once more after a rung that hangs or dies"
    return f"the program took {span(seconds)} to come here and runs again {again}; isolate=False: not at all"


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
    with Processes(command, job, timeout) as processes:
        return ladder(_chosen(rungs, own=False), processes, tell or _nothing)


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
    """Rungs in processes beside this one.

    Args:
        command: The program, which climbs the rungs that it is asked for.
        job: Steps and seconds of a rung, and what else the program has to know.
        timeout: Seconds without a step after which a rung hangs.
        call: The number of the call of `diagnose` in the program.
        each: A process for each rung; otherwise one for all, and another one behind a rung that hangs or dies.
    """

    notes: tuple[str, ...] = ()

    def __init__(
        self, command: Sequence[str], job: dict[str, Any], timeout: float, call: int = 1, *, each: bool = False
    ) -> None:
        self._command, self._job, self._timeout = command, job, timeout
        self._call, self._each = call, each
        self._folder = tempfile.TemporaryDirectory(prefix="faststep-doctor-")
        self._process: subprocess.Popen[bytes] | None = None
        self._jobs: TextIO | None = None

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self._folder.cleanup()

    def climb(self, rung: Rung, measured: Measured, tell: Tell) -> None:
        """Climb a rung."""
        place = Path(self._folder.name)
        files = {name: str(place / f"{rung.name}-{name}") for name in ("events", "stacks")}
        job = {**self._job, "rung": rung.name, **files}
        process, jobs = self._started()
        known = memory()
        most = _SHARE * known[0] + resident(process.pid) if known else None
        with contextlib.suppress(BrokenPipeError):  # it has died: the watch tells
            jobs.write(json.dumps(job) + "\n")
            jobs.flush()
        limits = max(_BEGIN, self._timeout), self._timeout
        watch(process, measured, job, limits=limits, memory=most, tell=lambda each: tell(each, False))
        if self._each or process.poll() is not None:
            self._end()
        if "folder" in measured.facts:
            shutil.rmtree(measured.facts["folder"]["path"], ignore_errors=True)
        if measured.error is not None and not measured.error["trace"]:
            said = (place / "output").read_text(encoding="utf-8", errors="replace")
            last = [line for line in said.splitlines() if line.strip()][-20:]
            measured.error["trace"] = "\n".join(last)
            measured.error["message"] += f": {last[-1]}" if last else ""

    def _started(self) -> tuple[subprocess.Popen[bytes], TextIO]:
        if self._process is None or self._jobs is None:
            read, write = os.pipe()
            with Path(self._folder.name, "output").open("wb") as output:
                self._process = subprocess.Popen(
                    self._command,
                    env=os.environ | {PIPE: f"{read}:{self._call}", "PYTHONUNBUFFERED": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                    pass_fds=(read,),
                )
            os.close(read)
            self._jobs = os.fdopen(write, "w", encoding="utf-8")
        return self._process, self._jobs

    def _end(self) -> None:
        if self._process is not None and self._jobs is not None:
            with contextlib.suppress(BrokenPipeError):
                self._jobs.close()
            end(self._process)
            self._process = self._jobs = None


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
