"""Processes that are killed, disks that are full, folders that vanish: what was there before stays."""

from __future__ import annotations

import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from faststep.checkpoints import CheckpointError, Checkpoints
from support.checkpointing import everything, step_of, train
from support.places import TESTS, Child

KILLS = 20
# saves one big checkpoint after the other: every value of one is its number
WRITER = """
    import sys
    import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from faststep import Step
    from faststep.checkpoints import Checkpoints

    model = nn.Linear(1024, 1024)
    step = Step(model, optim.SGD(0.1, momentum=0.9), lambda model: model.weight.sum())
    step.optimizer.init(model.trainable_parameters())
    checkpoints = Checkpoints(sys.argv[1], keep_last=2, background=len(sys.argv) < 3)
    found = checkpoints.restore(step)
    number = found.number if found else 0
    assert found is None or (model.weight == number).all().item(), "half of one"
    print("restored", number, flush=True)
    while True:
        number += 1
        model.update({"weight": mx.full((1024, 1024), float(number)), "bias": mx.full((1024,), float(number))})
        checkpoints.save(step, number=number, numbers={"number": number}, metric=-number)
        print(number, flush=True)
"""


def numbers_in(folder: Path) -> list[int]:
    return [each.number for each in Checkpoints(folder).list()]


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    script = tmp_path / "writer.py"
    script.write_text(textwrap.dedent(WRITER), encoding="utf-8")
    started: list[subprocess.Popen[str]] = []

    def start(folder: Path, *more: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(folder), *more]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def read_until(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout
    for got in process.stdout:
        if got.startswith(line):
            return
    raise AssertionError(process.communicate()[1])


@pytest.mark.slow
def test_killed_in_the_middle_of_a_write_twenty_times(
    writer: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    chance, folder, in_the_middle, newest = random.Random(3), tmp_path / "checkpoints", 0, 0
    for _ in range(KILLS):
        process = writer(folder)
        read_until(process, "restored")
        read_until(process, str(newest + 1))
        time.sleep(chance.random() * 0.1)
        process.kill()
        printed = process.stdout.read().split()
        in_the_middle += any(path.name.endswith((".partial", ".removed")) for path in folder.iterdir())
        listed = Checkpoints(folder).list()
        assert [each.problem for each in listed] == [None] * len(listed)
        for each in listed:
            each.verify()
        # a number is printed when its snapshot is taken, which is when the one before is there
        last, before = int(printed[-1]) if printed else newest + 1, newest
        newest = listed[-1].number if listed else 0
        assert max(last - 1, before) <= newest <= last + 1
    assert in_the_middle >= KILLS // 4, "the kills missed the writes"
    # of another model, which is found out when the folder has been cleaned
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoints(folder).restore(step_of())
    assert {path.name for path in folder.iterdir()} == {".lock"} | {f"step-{n:08d}" for n in numbers_in(folder)}


def test_a_living_writers_folder_is_left_alone(writer: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    process, partial = writer(folder), []
    read_until(process, "3")
    while not partial:
        process.send_signal(signal.SIGCONT)
        time.sleep(0.001)
        process.send_signal(signal.SIGSTOP)
        partial = list(folder.glob(".*.partial"))
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoints(folder).restore(step_of())
    assert list(folder.glob(".*.partial")) == partial
    process.kill()
    process.wait()
    with pytest.raises(CheckpointError, match="missing"):
        Checkpoints(folder).restore(step_of())
    assert list(folder.glob(".*.partial")) == []


def test_two_processes_write_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "checkpoints"
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step_of(), number=1)
    lock = os.open(folder / ".lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    monkeypatch.setattr("faststep.checkpoints._folder.PATIENCE", 0.2)
    checkpoints.save(step_of(), number=2)
    with pytest.raises(CheckpointError, match="is writing a checkpoint into it"):
        checkpoints.wait()
    os.close(lock)
    checkpoints.save(step_of(), number=2)
    checkpoints.wait()
    assert numbers_in(folder) == [1, 2]


def test_one_that_was_put_aside_comes_back(tmp_path: Path) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        saved = step_of()
        checkpoints.save(saved, number=1)
        checkpoints.wait()
        (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.aside")
        shutil.copytree(tmp_path / ".step-00000001.aside", tmp_path / ".step-00000001.partial")
        assert checkpoints.restore(step := step_of(seed=9)).number == 1
    assert everything(step) == everything(saved)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", "step-00000001"}


def test_the_exit_waits_for_the_write(child: Child, tmp_path: Path) -> None:
    child(
        f"""
        import mlx.nn as nn, mlx.optimizers as optim
        from faststep import Step
        from faststep.checkpoints import Checkpoints
        step = Step(nn.Linear(2048, 2048), optim.Adam(1e-3), lambda model: model.weight.sum())
        Checkpoints({str(tmp_path / "checkpoints")!r}).save(step, number=1)
        """
    )
    (found,) = Checkpoints(tmp_path / "checkpoints").list()
    found.verify()


def test_an_error_that_nobody_asked_for_is_told_at_the_exit(child: Child, tmp_path: Path) -> None:
    done = child(
        f"""
        import pathlib, mlx.nn as nn, mlx.optimizers as optim
        from faststep import Step
        from faststep.checkpoints import Checkpoints
        folder = pathlib.Path({str(tmp_path / "checkpoints")!r})
        step = Step(nn.Linear(2, 2), optim.Adam(1e-3), lambda model: model.weight.sum())
        checkpoints = Checkpoints(folder)
        checkpoints.save(step, number=1)
        checkpoints.wait()
        (folder / "step-00000001" / "mine").write_text("mine")
        checkpoints.save(step, number=1)
        """
    )
    assert "faststep: " in done.stderr
    assert "step-00000001: not written" in done.stderr


def test_a_vanished_folder_is_made_again(tmp_path: Path) -> None:
    with Checkpoints(tmp_path / "run" / "checkpoints") as checkpoints:
        checkpoints.save(step_of(), number=1)
        checkpoints.wait()
        shutil.rmtree(tmp_path / "run")
        checkpoints.save(step_of(), number=2)
    assert numbers_in(tmp_path / "run" / "checkpoints") == [2]


def test_a_file_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    checkpoints = Checkpoints(tmp_path / "run" / "checkpoints")
    with pytest.raises(CheckpointError, match=r"expected a folder of checkpoints \(Not a directory\)"):
        checkpoints.save(step_of(), number=1)
    (tmp_path / "run").unlink()
    checkpoints.save(step_of(), number=2)
    checkpoints.close()
    assert numbers_in(tmp_path / "run" / "checkpoints") == [2]


# runs in a user and mount namespace of its own, on a file system of four megabytes
SMALL = """
    import os, pathlib, shutil, subprocess, sys, warnings
    sys.path.insert(0, {tests!r})
    folder = pathlib.Path({folder!r})
    mount = lambda *options: subprocess.run(["mount", *options, str(folder)], check=True)
    mount("-t", "tmpfs", "-o", "size=4m", "none")
    import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from support.checkpointing import everything
    from faststep import Step
    from faststep.checkpoints import Checkpoints, CheckpointError

    def make():
        mx.random.seed(1)
        return Step(nn.Linear(400, 400), optim.SGD(1e-3), lambda model, x: model(x).square().mean())

    step = make()
    checkpoints = Checkpoints(folder / "checkpoints", keep_last=2)

    def listed():
        return [(each.number, each.problem) for each in checkpoints.list()]
"""
FULL = """
    checkpoints.save(step, number=1)
    checkpoints.save(step, number=2)
    checkpoints.wait()
    (folder / "other").write_bytes(b"x" * shutil.disk_usage(folder).free)
    for _ in range(3):
        checkpoints.save(step, number=3)
        try:
            checkpoints.wait()
        except CheckpointError as error:
            print("error:", error)
    print(listed(), sorted(path.name for path in (folder / "checkpoints").iterdir()))
    for each in checkpoints.list():
        each.verify()
    kept = everything(step)
    before = make()
    assert checkpoints.restore(before).number == 2 and everything(before) == kept
    (folder / "other").unlink()
    checkpoints.save(step, number=3)
    checkpoints.close()
    print(listed())
"""
READ_ONLY = """
    checkpoints.save(step, number=1)
    checkpoints.wait()
    (folder / "checkpoints" / ".step-00000009.partial").mkdir()
    mount("-o", "remount,ro")
    checkpoints.save(step, number=2)
    try:
        checkpoints.save(step, number=2)
    except CheckpointError as error:
        print("error:", error)
    print(listed())
    before = make()
    assert checkpoints.restore(before).number == 1
    mount("-o", "remount,rw")
    checkpoints.save(step, number=2)
    checkpoints.wait()
    print(listed(), (folder / "checkpoints" / ".step-00000009.partial").exists())
"""
FILLING = """
    # the disk is full after so many bytes: at every place of a write
    checkpoints.save(step, number=1)
    checkpoints.wait()
    needed = sum(file.stat().st_size for file in (folder / "checkpoints" / "step-00000001").iterdir())
    failed = 0
    for left in [0, 4096, 100_000, needed // 2, needed - 30_000, needed - 8192, needed - 4096, needed - 1]:
        (folder / "other").write_bytes(b"x" * (shutil.disk_usage(folder).free - left))
        checkpoints.save(step, number=2)
        try:
            checkpoints.wait()
        except CheckpointError as error:
            failed += 1
            assert listed() == [(1, None)], listed()
            assert "No space left on device" in str(error), error
        (folder / "other").unlink()
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names in ([".lock", "step-00000001"], [".lock", "step-00000001", "step-00000002"]), names
    print("failed", failed)
"""


@pytest.fixture
def small(tmp_path: Path) -> Callable[[str], str]:
    """Run code with a small file system of its own at `folder`."""
    unshare = ["unshare", "--user", "--map-root-user", "--mount"]
    if sys.platform != "linux" or shutil.which("unshare") is None:
        pytest.skip("no namespaces on this system")
    (tmp_path / "mnt").mkdir()
    probe = [*unshare, "mount", "-t", "tmpfs", "-o", "size=4m", "none", str(tmp_path / "mnt")]
    if (tried := subprocess.run(probe, capture_output=True, text=True)).returncode:
        pytest.skip(f"no mounts in a namespace of one's own here: {tried.stderr.strip()}")

    def run(code: str) -> str:
        head = textwrap.dedent(SMALL.format(tests=str(TESTS), folder=str(tmp_path / "mnt")))
        script = tmp_path / "small.py"
        script.write_text(head + textwrap.dedent(code), encoding="utf-8")
        done = subprocess.run([*unshare, sys.executable, str(script)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_a_full_disk_loses_nothing(small: Callable[[str], str]) -> None:
    printed = small(FULL)
    assert printed.count("step-00000003: not written, the earlier ones are as they were: No space left on device") == 3
    assert "[(1, None), (2, None)] ['.lock', 'step-00000001', 'step-00000002']" in printed
    assert printed.splitlines()[-1] == "[(2, None), (3, None)]"


def test_a_disk_that_is_full_at_any_place_of_a_write(small: Callable[[str], str]) -> None:
    assert int(small(FILLING).split()[-1]) >= 6


def test_a_read_only_file_system_is_an_error_and_can_be_restored_from(small: Callable[[str], str]) -> None:
    printed = small(READ_ONLY).splitlines()
    assert "not written, the earlier ones are as they were: Read-only file system" in printed[0]
    assert printed[1:] == ["[(1, None)]", "[(1, None), (2, None)] False"]


def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    checkpoints.save(step_of(), number=1)
    with pytest.raises(CheckpointError, match="not written"):
        checkpoints.wait()
    tmp_path.chmod(0o700)


def test_ctrl_c_while_it_writes_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, fsync, main = step_of(), os.fsync, threading.main_thread()
    train(step, range(1))
    checkpoints = Checkpoints(tmp_path, background=False)

    def interrupting(descriptor: int) -> None:
        assert threading.current_thread() is not main
        signal.pthread_kill(main.ident or 0, signal.SIGINT)
        monkeypatch.undo()
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", interrupting)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.save(step, number=1)
    checkpoints.wait()
    checkpoints.list()[0].verify()
    checkpoints.save(step, number=2)
    assert numbers_in(tmp_path) == [1, 2]


COLLECTED = """
import gc, pathlib, sys
from support.checkpointing import STEPS
from faststep._files import locked
from faststep.checkpoints import Checkpoints

step, folder = STEPS["plain"](), pathlib.Path(sys.argv[1])
folder.mkdir(exist_ok=True)
with locked(folder / ".lock"):  # the writer waits for it
    checkpoints = Checkpoints(folder)
    checkpoints.save(step, number=1)
    if len(sys.argv) > 2:
        (folder / ".step-00000001.partial").write_text("a file, where a folder is to be made")
    del checkpoints
    gc.collect()
    print("collected")
"""


def test_checkpoints_that_are_collected_are_written_all_the_same(child: Child, tmp_path: Path) -> None:
    for arguments, message in ((["good"], ""), (["bad", "spoil"], "step-00000001: not written")):
        line = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = ['', *{arguments}]"
        done = child(f"{line}\n{COLLECTED}")
        assert done.stdout == "collected\n"
        assert message in done.stderr
        assert bool(done.stderr) == bool(message)
    (saved,) = Checkpoints(tmp_path / "good").list()
    saved.verify()
