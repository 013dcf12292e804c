"""The ladder: rungs in processes of their own, what hangs is ended, and a healthy training is called so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import faststep
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep.doctor._judge import judge
from faststep.doctor._watch import Measured
from mlx.utils import tree_flatten
from support.commands import faststep as command
from support.commands import set_, write_config
from support.faults import FAULTS, HEAD, TAIL, diagnosed

CORRECTED = {"use": "AdamW", "learning_rate": 0.01, "bias_correction": True}


def test_a_loader_that_hangs_is_found_in_a_process_of_its_own(tmp_path: Path) -> None:
    code = f"{FAULTS['a loader that blocks'].code}\nopen('pids', 'a').write(f'{{os.getpid()}}\\n')"
    found = diagnosed(tmp_path, code, "data evaluated forward", isolate=True)
    (finding,) = [each for each in found["findings"] if each["level"] == "failure"]
    assert finding["name"] == "hangs"
    assert "data alone hangs (batch 4), at train.py:" in finding["text"]
    assert [each["status"] for each in found["rungs"]] == ["hangs", "skipped", "skipped"]
    assert "in blocking" in found["rungs"][0]["stack"]
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_one_process_climbs_the_rungs_and_another_one_those_behind_a_death(tmp_path: Path) -> None:
    code = """
open('pids', 'a').write(f'{os.getpid()}\\n')
def loss_fn(model, x, y):
    if not os.path.exists('died'):
        open('died', 'w')
        os.abort()
    return nn.losses.cross_entropy(model(x), y, reduction="mean")
"""
    tail = TAIL.replace("progress=False, ", "").replace("CALL", "{'rungs': RUNGS, 'seconds': 0.2}")
    rungs = ["data", "joint", "clearing"]
    (tmp_path / "train.py").write_text(HEAD + code + tail.replace("RUNGS", repr(rungs)))
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    found = json.loads(done.stdout)
    assert [each["status"] for each in found["rungs"]] == ["ok", "error", "ok"]
    assert "joint evaluation fails: the process ended by signal SIGABRT" in found["findings"][0]["text"]
    assert len((tmp_path / "pids").read_text().split()) == 3
    assert "runs again once, and once more after a rung that hangs or dies; isolate=False" in done.stderr


def test_a_rung_that_takes_all_memory_is_ended(tmp_path: Path) -> None:
    code = """
import faststep.doctor._diagnose as ladder
ladder.memory = lambda: (5e8, 5e8)  # as on a machine of half a gigabyte
kept = []
def loss_fn(model, x, y):
    kept.append(np.ones(20_000_000))
    return nn.losses.cross_entropy(model(x), y, reduction="mean")
"""
    found = diagnosed(tmp_path, code, "data forward repeated", isolate=True)
    assert found["rungs"][2]["status"] == "grows"
    assert found["findings"][0]["name"] == "memory"
    assert "0.5 GB" in found["findings"][0]["text"]


def test_a_disk_that_does_not_answer_is_found_and_nothing_is_left_there(tmp_path: Path) -> None:
    code = """
os.fsync = lambda file: threading.Event().wait()
options.update(timeout=20.0 if mx.cuda.is_available() else 3.0, run="runs/first")  # CUDA compiles for some seconds
os.makedirs("runs", exist_ok=True)
"""
    found = diagnosed(tmp_path, code, "data checkpoint", isolate=True)
    (finding,) = found["findings"]
    assert "checkpoint hangs (writing a checkpoint)" in finding["text"]
    assert "local disk" in finding["remedy"]
    assert list((tmp_path / "runs").iterdir()) == []


def test_two_diagnoses_in_one_program(tmp_path: Path) -> None:
    code = """
first = faststep.diagnose(model, optimizer, loss_fn, batches, rungs=["data", "forward"], progress=False)
first.html("first.html")
def loss_fn(model, x, y):
    return 0.0
"""
    found = diagnosed(tmp_path, code, "data forward", isolate=True)
    assert found["findings"][0]["name"] == "loss-from-item"
    assert "healthy" in (tmp_path / "first.html").read_text()


def test_a_program_that_dies_is_told(tmp_path: Path) -> None:
    code = """
def loss_fn(model, x, y):
    os.abort()
"""
    found = diagnosed(tmp_path, code, "data forward", isolate=True)
    assert "the process ended by signal SIGABRT" in found["findings"][0]["text"]


def test_an_error_names_its_line(tmp_path: Path) -> None:
    code = """
def loss_fn(model, x, y):
    return nn.losses.cross_entropy(model(x.T), y, reduction="mean")
"""
    found = diagnosed(tmp_path, code, "data forward numbers", isolate=True)
    (finding,) = found["findings"]
    assert finding["name"] == "error"
    assert "in loss_fn: return nn.losses.cross_entropy(model(x.T)" in finding["text"]
    assert "Traceback" in found["rungs"][1]["error"]["trace"]


def test_the_diagnosis_leaves_everything_as_it_was() -> None:
    model, optimizer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1)), optim.Adam(1e-2)
    batches = [(mx.random.normal((8, 4)),) for _ in range(4)]
    mx.eval(model.parameters(), batches)
    before, draws = dict(tree_flatten(model.parameters())), mx.random.state[0].tolist()
    found = faststep.diagnose(
        model, optimizer, lambda model, x: mx.square(model(x)).mean(), batches, seconds=0.2, progress=False
    )
    assert found.healthy, str(found)
    assert len(found.rungs) == 16
    assert "no script to run again" in found.notes[0]
    after = dict(tree_flatten(model.parameters()))
    assert all(after[path] is before[path] for path in before)
    assert mx.random.state[0].tolist() == draws
    assert optimizer.state["step"].item() == 0
    assert "healthy" in str(found)


@pytest.mark.parametrize("count", [10, 200])
def test_a_generator_is_enough(count: int) -> None:
    model = nn.Linear(4, 1)
    batches = (mx.zeros((8, 4)) for _ in range(count))
    loss = lambda model, x: mx.square(model(x) - 1).mean()  # noqa: E731
    found = faststep.diagnose(model, optim.SGD(0.1), loss, batches, seconds=0.1, progress=False)
    assert [each.name for each in found.rungs if each.status != "ok"] == [], str(found)


def test_data_for_one_thread_are_no_fault(tmp_path: Path) -> None:
    code = """
def drawn():
    while True:
        rows = np.random.choice(160, 16)
        yield mx.array(x[rows]), mx.array(y[rows])
batches = drawn()
"""
    found = diagnosed(tmp_path, code, "data native prefetch")
    (finding,) = found["findings"]
    assert (finding["name"], finding["level"]) == ("one-thread", "note")
    assert "draws from numpy.random" in finding["text"]
    assert [each["status"] for each in found["rungs"]] == ["ok", "ok", "skipped"]


def test_a_number_that_becomes_an_input_is_no_fault(tmp_path: Path) -> None:
    code = """
batches = [(*batch, 0.1 * n) for n, batch in enumerate(3 * batches)]
def loss_fn(model, x, y, weight):
    return weight * nn.losses.cross_entropy(model(x), y, reduction="mean")
"""
    assert diagnosed(tmp_path, code, "data shapes")["findings"] == []


def test_a_note_says_why_the_loss_is_called(tmp_path: Path) -> None:
    code = """
def loss_fn(model, x, y):
    time.time()
    return nn.losses.cross_entropy(model(x), y, reduction="mean")
"""
    (finding,) = diagnosed(tmp_path, code, "data native")["findings"]
    assert (finding["name"], finding["level"]) == ("called", "note")
    assert "calls time.time (train.py:" in finding["text"]


@pytest.mark.parametrize("isolate", [False, True])
def test_a_native_step_calls_a_loss_that_draws(tmp_path: Path, isolate: bool) -> None:
    code = """
import random
def loss_fn(model, x, y):
    scale = random.random() + np.random.random()
    return scale * nn.losses.cross_entropy(model(x), y, reduction="mean")
"""
    found = diagnosed(tmp_path, code, "data joint native", isolate=isolate)
    assert [each["name"] for each in found["findings"] if each["level"] != "note"] == []


def test_the_labels_of_a_gpu_s_cross_entropy_are_looked_at(tmp_path: Path) -> None:
    code = """
def loss_fn(model, x, y):
    return mx.fast.cross_entropy(model(x), mx.where(y == 2, 7, y)).mean()
"""
    found = diagnosed(tmp_path, code, "data forward")
    assert [each["name"] for each in found["findings"]] == ["labels-out-of-range"]
    assert "labels go from 0 to 7" in found["findings"][0]["text"]


@pytest.mark.parametrize("read", ["loss", "logits", "h"])
def test_a_loss_that_reads_values_has_its_gradients(tmp_path: Path, read: str) -> None:
    code = f"""
def loss_fn(model, x, y):
    h = model.layers[0](x)
    logits = model.layers[2](nn.relu(h))
    loss = nn.losses.cross_entropy(logits, y, reduction="mean")
    {read}.max().item()
    return loss
"""
    found = diagnosed(tmp_path, code, "data forward numbers")
    assert found["findings"] == []


def test_wrong_options_are_refused() -> None:
    parts = nn.Linear(2, 1), optim.SGD(0.1), lambda model, x: model(x).sum(), [mx.zeros((1, 2))]
    with pytest.raises(ValueError, match="rungs: expected names among data, "):
        faststep.diagnose(*parts, rungs=["nothing"])
    with pytest.raises(TypeError, match="max_grad_nrm"):
        faststep.diagnose(*parts, max_grad_nrm=1.0)
    with pytest.raises(RuntimeError, match="expected a script that can be run again"):
        faststep.diagnose(*parts, isolate=True)


@pytest.mark.slow
def test_the_command_on_a_config(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    page = tmp_path / "page.html"
    words = ["--seconds", "0.3", "--html", page, *set_(optimizer=CORRECTED)]
    done = command("doctor", config, *words, cwd=tmp_path)
    assert "healthy: no fault found. Looked at: the values of " in done.stdout
    assert "Not looked at: your own step" in done.stdout
    assert "data alone" in done.stderr
    assert "<h2>Rungs</h2>" in page.read_text()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.yaml", "data.npz", "mine.py", "page.html"]


def test_the_command_names_a_fault_of_a_config(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    words = ["--seconds", "0.3", "--json", "--rung", "data", "--rung", "forward"]
    done = command("doctor", config, *words, "--set", "loss={use: mine.py:broken}", status=1, cwd=tmp_path)
    found = json.loads(done.stdout)
    assert found["findings"][0]["name"] == "error"
    assert "mine.py:" in found["findings"][0]["text"]
    done = command(
        "doctor", config, *words, "--set", "data.train={use: arrays, file: none.npz}", status=1, cwd=tmp_path
    )
    text = json.loads(done.stdout)["findings"][0]["text"]
    assert "while the config is built" in text
    assert "none.npz cannot be read" in text
    assert "rungs: expected names among" in command("doctor", config, "--rung", "nothing", status=2).stderr
    assert "unknown key" in command("doctor", config, "--set", "optimizer.learning_rat=1", status=2).stderr


def test_ctrl_c_ends_the_child_too(tmp_path: Path) -> None:
    code = f"{FAULTS['a loader that blocks'].code}\nopen('pids', 'a').write(f'{{os.getpid()}}\\n')"
    program = tmp_path / "train.py"
    program.write_text(f"{HEAD}{code}{TAIL.replace('CALL', '{}')}".replace('["timeout"] = 3.0', '["timeout"] = 300.0'))
    process = subprocess.Popen([sys.executable, str(program)], cwd=tmp_path, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 60
    while len((tmp_path / "pids").read_text().split() if (tmp_path / "pids").exists() else ()) < 2:
        assert time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    child = int((tmp_path / "pids").read_text().split()[1])
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize(("ahead", "status"), [(0, "grows"), (4000, "grows"), (8000, "ok")])
def test_batches_that_a_worker_has_ahead_are_no_growth(ahead: int, status: str) -> None:
    """One that was late catches up: as much as its batches take is there by and by."""
    steps = [{"active": 10_000 + 200 * number, "process": 0} for number in range(40)]
    rung = Measured("prefetch", "prefetch", steps=steps, facts={"ahead": {"bytes": ahead}})
    judge([rung])
    assert rung.status == status
