"""`tune`: its rule on given times, and its search with real child processes on a target whose times are known.

The target's module replaces the clock of its process by one that its steps advance, so that every time is exact and no
load of the machine decides a test.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from fractions import Fraction
from mmap import ACCESS_READ, mmap
from pathlib import Path

import mlx.core as mx
import pytest
from faststep._tune import main, tune
from faststep._tune._report import Measured, Trial, combine, gains, loss_difference, quartiles
from faststep._tune._search import Group, Run, Search, run_child
from faststep._tune._tune import _address, default_settings

ROUNDS = 3
TARGET = """
    import os, subprocess, sys, time
    import mlx.core as mx

    now = 0.0
    time.perf_counter = lambda: now
    READ = ("MS", "SHARE", "NUMBERS", "BROKEN", "HANGS")
    with open(__file__ + ".log", "a") as log:
        print(*(f"{name}={os.environ[name]}" for name in READ if name in os.environ), file=log)

    def training():
        global now
        if "BROKEN" in os.environ:
            raise ValueError("this setting is broken")
        if "HANGS" in os.environ:
            worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            with open(__file__ + ".pids", "w") as file:
                print(os.getpid(), worker.pid, file=file, flush=True)
            worker.wait()
        while True:
            now += float(os.environ.get("MS", 10)) * float(os.environ.get("SHARE", 1)) / 1e3
            yield mx.random.uniform() + float(os.environ.get("NUMBERS", 0))

    def ends():
        yield from [0.0] * 7

    def yields_nothing():
        while True:
            yield

    def no_loop():
        return 1.0
"""
STEPS = """
    import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from faststep import Step, fast_step

    def loss_fn(model, x, y):
        return nn.losses.mse_loss(model(x), y), mx.abs(y).max()

    def setup():
        model, x = nn.Linear(32, 8), mx.random.normal((16, 32))
        return model, optim.AdamW(1e-2), (x, x[:, :8])

    def fast():
        model, optimizer, batch = setup()
        while True:
            yield fast_step(model, optimizer, loss_fn, *batch)

    def explicit():
        model, optimizer, batch = setup()
        step = Step(model, optimizer, loss_fn)
        while True:
            yield step(*batch)

    def plain():
        model, optimizer, batch = setup()
        loss_and_grads = nn.value_and_grad(model, loss_fn)
        while True:
            (loss, _), grads = loss_and_grads(model, *batch)
            optimizer.update(model, grads)
            mx.eval(loss, model.state, optimizer.state)
            yield loss
"""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Write the target with the clock of its own."""
    file = tmp_path / "target.py"
    file.write_text(textwrap.dedent(TARGET), encoding="utf-8")
    return file


@pytest.mark.parametrize(
    ("ratios", "control", "expected"),
    [
        ([0.90, 0.91, 0.92], [0.99, 1.00, 1.01], True),
        ([0.98, 0.98, 0.98], [1.00, 1.00, 1.00], True),
        ([0.985, 0.985, 0.985], [1.00, 1.00, 1.00], False),  # less than 2 %
        ([0.90, 0.91], [1.00, 1.00, 1.00], False),  # too few rounds
        ([0.90, 0.91, 0.92], [1.00, 1.00], False),
        ([0.80, 0.90, 1.20], [0.99, 1.00, 1.01], False),  # its upper quartile is 1.05
        ([0.90, 0.91, 0.92], [0.80, 1.00, 1.25], False),  # two equal runs differ as much
        ([0.90, 0.91, 0.92, 0.91, 3.00], [1.00, 1.01, 0.99, 1.00, 0.40], True),  # one outlier each
        ([1.10, 1.11, 1.12], [1.20, 1.21, 1.22], False),
        ([], [], False),
    ],
)
def test_the_rule(ratios: list[float], control: list[float], expected: bool) -> None:
    assert gains(ratios, control) is expected


def test_quartiles_are_interpolated() -> None:
    assert quartiles([4.0, 1.0, 2.0, 3.0]) == (1.75, 3.25)
    assert quartiles([2.0]) == (2.0, 2.0)


def test_losses_are_compared_relatively_and_nan_equals_nan_only() -> None:
    nan, inf = float("nan"), float("inf")
    assert loss_difference([2.0, nan, inf, 0.0], [2.0, nan, inf, 0.0]) == 0
    assert loss_difference([2.0, 1.0], [2.0, 0.75]) == 0.25
    assert loss_difference([nan, 1.0], [1.0, 1.0]) == inf
    assert loss_difference([1.0, inf], [1.0, 1.0]) == inf


def winner(ratio: float, **environment: str) -> Trial:
    return Trial(environment, (ratio,), (ratio,), 0, 0.0, "faster")


def test_the_best_value_of_each_variable_is_combined() -> None:
    winners = [
        winner(0.9, A="1"),
        winner(0.8, A="2"),
        winner(0.7, B="3", C="4"),
        winner(0.95, C="5"),
        winner(0.96, D="6"),
    ]
    assert combine(winners) == [{"B": "3", "C": "4", "A": "2", "D": "6"}, {"B": "3", "C": "4"}]
    assert combine(winners[:2]) == [{"A": "2"}]


def given(run: Run, *milliseconds: float, loss: float = 1.0) -> None:
    for number, one in enumerate(milliseconds):
        run.measured[number] = Measured(one, (loss,), 1000, "cpu", "a device")


def searched(*, loss: float = 1.0, again: float = 1.0) -> Search:
    """Return a search that has tried A=1, of half the time, and has verified it."""
    search = Search("a:b", 1.0, 1.0, 1e-5)
    search.reference = Measured(10.0, (1.0,), 1000, "cpu", "a device")
    for groups in search.tried, search.verified:
        group = Group([{"A": "1"}])
        groups.append(group)
        given(group.baseline, 10, 20, 40)
        given(group.again, 10, 20, 40, loss=again)
        given(group.runs[0], 5, 10, 20, loss=loss)
    return search


def test_ratios_are_of_the_same_round() -> None:
    result = searched().result(interrupted=False)
    assert result.trials[0].ratios == (0.5, 0.5, 0.5)  # though the machine became four times slower
    assert (result.environment, result.ratio, result.export) == ({"A": "1"}, 0.5, "export A=1")


def test_a_round_without_its_baseline_does_not_count() -> None:
    search = searched()
    del search.verified[0].baseline.measured[1]
    result = search.result(interrupted=False)
    assert result.verified[0].ratios == (0.5, 0.5)
    assert (result.environment, result.export) == ({}, "")


def test_what_was_not_verified_is_not_recommended() -> None:
    search = searched()
    given(search.verified[0].runs[0], 10, 20, 40)
    result = search.result(interrupted=False)
    assert (result.trials[0].verdict, result.verified[0].verdict, result.environment) == ("faster", "not faster", {})
    assert "Nothing to set" in str(result)


def test_other_losses_are_reported_and_never_recommended() -> None:
    result = searched(loss=1.001).result(interrupted=False)
    assert result.trials[0].verdict == "other losses"
    assert "changes the losses by 1.0e-03" in str(result)
    assert (result.environment, result.note) == ({}, "")


def test_losses_that_differ_by_themselves_are_told() -> None:
    result = searched(loss=1.002, again=1.001).result(interrupted=False)
    assert "equal runs differ by 1.0e-03" in result.note
    assert result.note in str(result)
    assert result.environment == {"A": "1"}


def test_a_busy_machine_is_told() -> None:
    search = searched()
    given(search.tried[0].again, 10, 12, 70)
    result = search.result(interrupted=False)
    assert result.note == (
        "Equal runs take 0.80 to 1.38 of each other's time: the machine is busy, and smaller gains do not show. "
        "Measure again when it is idle, or for more seconds and rounds."
    )


def test_order_rotates_and_what_cannot_win_is_left_out() -> None:
    group = Group([{"A": "1"}, {"A": "2"}, {"A": "3"}])
    one, two, three = group.runs
    assert group.order(0) == [group.baseline, one, two, group.again, three]
    assert group.order(6) == [one, two, group.again, three, group.baseline]
    given(group.baseline, 10, 10)
    given(one, 11, 12)
    given(two, 11, 9)
    three.failure = "broken"
    assert group.order(2) == [two, group.again, group.baseline]
    given(two, 11, 11)
    assert group.order(2) == []


@pytest.mark.slow
def test_the_search(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    names = ["MS=5", "SHARE=0.5", "MS=20", "MS=1 NUMBERS=1", "BROKEN=1"]
    settings = [dict(word.split("=") for word in name.split()) for name in names]
    tuning = tune(f"{target}:training", settings=settings, seconds=0.2, rounds=ROUNDS)

    fast, share, slow, other, broken = tuning.trials
    assert [trial.verdict for trial in tuning.trials] == ["faster", "faster", "not faster", "other losses", "failed"]
    assert (fast.ratio, share.ratio, slow.ratio, other.ratio) == pytest.approx((0.5, 0.5, 2.0, 0.1))
    assert [len(trial.milliseconds) for trial in tuning.trials] == [ROUNDS, ROUNDS, 2, ROUNDS, 0]
    assert broken.failure == "ValueError: this setting is broken"
    assert other.loss_difference > 0.1
    assert tuning.baseline.milliseconds == pytest.approx([10] * len(tuning.baseline.milliseconds))
    assert tuning.control.ratios == pytest.approx([1.0] * len(tuning.control.ratios))
    assert [trial.environment for trial in tuning.verified] == [{"MS": "5", "SHARE": "0.5"}, {"MS": "5"}]
    assert (tuning.environment, tuning.export) == ({"MS": "5", "SHARE": "0.5"}, "export MS=5 SHARE=0.5")
    assert tuning.ratio == pytest.approx(0.25)
    assert (tuning.note, tuning.interrupted) == ("", False)
    assert str(tuning).endswith("A step takes 0.250 of its time with:\nexport MS=5 SHARE=0.5")
    assert "failed: ValueError: this setting is broken" in str(tuning)
    assert dict(os.environ) == environment

    ran = Path(f"{target}.log").read_text(encoding="utf-8").splitlines()
    first, second = ["", *names[:2], "", *names[2:4]], ["", names[4], ""]  # the groups, each with two baselines
    assert ran[:10] == ["", *first, *second]
    assert ran[10:16] == [*first[1:], ""]  # rotated; nothing is left to try in the other group
    assert ran[16:21] == [names[1], "", names[3], "", names[0]]  # MS=20 won neither round
    assert len(ran) == 21 + 4 * ROUNDS
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(ran)
    assert lines[2].startswith("trying, round 1 of 3: MS=5: 5.00 ms a step (at most ")
    assert "BROKEN=1: failed: ValueError: this setting is broken" in "\n".join(lines)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that has ended and waits to be reaped does not."""
    stat = Path("/proc", str(pid), "stat")
    try:
        return stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(target: Path) -> bool:
    """Tell whether the hanging child, and the process that it started, come to an end."""
    pids = [int(pid) for pid in Path(f"{target}.pids").read_text(encoding="utf-8").split()]
    end = time.monotonic() + 60
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.05)
    return len(pids) == 2 and not any(map(alive, pids))


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_ctrl_c_ends_the_children_and_gives_what_there_is(target: Path) -> None:
    code = "import sys; from faststep._tune import main; sys.exit(main(sys.argv[1:]))"
    command = [
        sys.executable,
        "-c",
        code,
        f"{target}:training",
        "--set",
        "HANGS=1",
        "--seconds",
        "0.2",
        "--rounds",
        "3",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        end, pids = time.monotonic() + 300, Path(f"{target}.pids")
        while not (pids.exists() and pids.read_text(encoding="utf-8").endswith("\n")) and time.monotonic() < end:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        table, lines = process.communicate(timeout=60)
    assert process.returncode == 130
    assert gone(target)
    assert "Interrupted: this is what was measured so far." in table
    assert table.endswith("Nothing to set: no gain was verified.\n")
    assert [line.split()[:4] for line in table.splitlines() if line.startswith("as it is ")] == [
        ["as", "it", "is", "10.00"]
    ]
    assert len(lines.splitlines()) == 2
    assert "Traceback" not in lines


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")
def test_a_child_that_hangs_is_ended_with_all_it_started(target: Path) -> None:
    assert run_child(f"{target}:training", {"HANGS": "1"}, 0.2, timeout=12) == "took longer than 12 s"
    assert gone(target)


def test_a_step_that_fails_as_it_is_ends_the_search(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    with pytest.raises(
        RuntimeError, match=r"fails in the environment as it is:\n(.*\n)+ValueError: this setting is broken$"
    ):
        tune(f"{target}:training", settings=[{"MS": 5}])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("ends", r"RuntimeError: .*target.py:ends\(\) ended after 7 steps: let it loop for ever"),
        ("yields_nothing", r"TypeError: .*yields_nothing\(\) yielded a NoneType; expected the loss of the step"),
        ("no_loop", r"TypeError: .*no_loop\(\) returned a float; expected an iterator of losses"),
        ("missing", "AttributeError: .*missing"),
    ],
)
def test_what_is_no_training_loop_is_told(target: Path, function: str, said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        tune(f"{target}:{function}", settings=[{"MS": 5}], seconds=0.2)


def test_fast_step_step_and_a_plain_loop_are_measured(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text(textwrap.dedent(STEPS), encoding="utf-8")
    runs = {name: run_child(f"{tmp_path}/steps.py:{name}", {}, 0.2, 300) for name in ("fast", "explicit", "plain")}
    runs["one thread"] = run_child(f"{tmp_path}/steps.py:fast", {"OPENBLAS_NUM_THREADS": "1"}, 0.2, 300)
    for run in runs.values():
        assert isinstance(run, Measured), run
        assert len(run.losses) == 5
        assert run.losses[-1] < run.losses[0]
        assert loss_difference(run.losses, runs["plain"].losses) < 1e-5
        assert run.milliseconds > 0
        assert run.peak_bytes > 0
        assert default_settings(run.back_end)


def test_a_script_may_tune_its_own_function_below_its_guard(tmp_path: Path, target: Path) -> None:
    script = tmp_path / "script.py"
    ending = (
        "\nfrom faststep._tune import tune\n{}print(tune(training, settings=[dict(MS=20)], seconds=0.2, rounds=3))\n"
    )
    for guard, status in ('if __name__ == "__main__": ', 0), ("", 1):
        script.write_text(textwrap.dedent(TARGET) + ending.format(guard), encoding="utf-8")
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
        assert done.returncode == status, done.stderr
        if guard:
            assert f"{script}:training on " in done.stdout
        else:
            assert "RuntimeError: tune() is called while its target is imported" in done.stderr


@pytest.mark.parametrize("target", ["training", ":training", "module:", "there/is/no/such/file.py:training"])
def test_a_target_of_another_form_is_refused(target: str) -> None:
    with pytest.raises(ValueError, match="target: "):
        tune(target)


def test_functions_have_an_address_when_children_can_import_them() -> None:
    assert _address(Fraction.from_float) == "fractions:Fraction.from_float"
    assert _address(test_quartiles_are_interpolated) == f"{__name__}:test_quartiles_are_interpolated"
    for function in (lambda: iter([]), len, print.__call__):
        with pytest.raises(TypeError, match="expected a function of a module or a script"):
            _address(function)


def test_numbers_out_of_range_are_refused(target: Path) -> None:
    for name, value in {"rounds": 2, "seconds": 0, "timeout": -1, "tolerance": 0, "settings": [{}]}.items():
        with pytest.raises(ValueError, match=f"{name}: expected"):
            tune(f"{target}:training", **{name: value})


def test_the_command_line_refuses_what_is_no_assignment(target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"{target}:training", "--set", "MS"])
    assert "faststep tune: error: " in capsys.readouterr().err


@pytest.mark.parametrize("name", ["MLX_MAX_OPS_PER_BUFFER", "MLX_MAX_MB_PER_BUFFER", "MLX_USE_CUDA_GRAPHS"])
def test_mlx_reads_the_settings_of_cuda(name: str) -> None:
    assert any(name in setting for setting in default_settings("cuda"))
    place = Path(mx.__file__).parent
    if mx.cuda.is_available():
        with (place / "lib" / "libmlx.so").open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as library:
            assert library.find(f"{name}\0".encode()) >= 0
    elif name == "MLX_USE_CUDA_GRAPHS":
        pytest.skip("only a libmlx with CUDA has the name")
    else:
        assert f'"{name}"' in (place / "include" / "mlx" / "utils.h").read_text(encoding="utf-8")


def test_defaults_leave_out_what_the_environment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "GLIBC_TUNABLES", "MLX_USE_CUDA_GRAPHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(6)), raising=False)
    pages = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    assert default_settings("cpu") == [*({"OPENBLAS_NUM_THREADS": count} for count in "124"), pages]
    assert {"MLX_USE_CUDA_GRAPHS": "0"} in default_settings("cuda")
    assert not any("MLX_ENABLE_TF32" in s for back_end in ("cpu", "cuda", "metal") for s in default_settings(back_end))
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    monkeypatch.setenv("MLX_USE_CUDA_GRAPHS", "0")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.arena_max=1")
    assert default_settings("cpu") == [{"OPENBLAS_NUM_THREADS": count} for count in "146"]
    assert {"MLX_USE_CUDA_GRAPHS": "0"} not in default_settings("cuda")
