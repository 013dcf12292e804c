"""Loggers: what a real training leaves in their files, and what happens when these fail."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from faststep import loggers
from faststep.loggers import Csv, JsonLines, Loggers, Progress, Record, TensorBoard
from faststep.loggers._csv import COLUMNS
from support.places import Child
from support.trained import Training


class Kept:
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def log(self, record: Record) -> None:
        self.records.append(record)

    def close(self) -> None:
        pass


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_of_a_training_is_a_line(tmp_path: Path) -> None:
    kept, file = Kept(), tmp_path / "deep" / "log.jsonl"
    training = Training([kept, JsonLines(file)], steps=20, spoil=(7,))
    training.start()
    training.run(20)
    written = lines(file)  # before it is closed
    training.end()
    assert [each["kind"] for each in written] == [each["kind"] for each in kept.records[:-1]]
    steps = {each["step"]: each for each in written if each["kind"] == "step"}
    for record in kept.records:
        if record["kind"] == "step" and record["step"] != 7:
            assert steps[record["step"]]["loss"] == record["loss"].item()
            assert steps[record["step"]]["learning_rate"] == record["learning_rate"].item()
    assert steps[7]["loss"] is None
    assert steps[7]["skipped"] == 1
    assert lines(file)[-1]["kind"] == "end"


def test_what_json_has_no_word_for(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    logger = JsonLines(file)
    values = {
        "nan": float("nan"),
        "inf": mx.array(float("-inf")),
        "half": mx.array(0.5, mx.bfloat16),
        "numpy": np.float32(0.25),
        "array": np.arange(3),
        "true": np.True_,
        "path": tmp_path,
        "dtype": mx.float32,
        "deep": {1: [float("inf"), None]},
        "text": "ünï\n\x1b[31m\ud800",
    }
    logger.log({"kind": "event", "time": 0.0, "step": 1, **values})
    logger.close()
    (line,) = file.read_text().splitlines()
    read = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [read[name] for name in ("nan", "inf", "half", "numpy", "array")] == [
        "NaN",
        "-Infinity",
        0.5,
        0.25,
        [0, 1, 2],
    ]
    assert read["true"] is True
    assert read["path"] == tmp_path.as_posix()
    assert read["deep"] == {"1": ["Infinity", None]}
    assert read["text"] == values["text"]
    with pytest.raises(ValueError, match="expected a record before close"):
        logger.log({"kind": "event", "time": 0.0, "step": 2})


def test_a_killed_writer_loses_no_line(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    code = f"""
import itertools
from faststep.loggers import JsonLines
logger = JsonLines({str(file)!r})
for step in itertools.count(1):
    logger.log({{"kind": "step", "time": 0.0, "step": step, "loss": 1.0 / step}})
    print(step, flush=True)
"""
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    for _ in range(200):
        last = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    writer.stdout.close()
    writer.wait()
    steps = [each["step"] for each in lines(file)]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= last


def test_a_torn_line_is_ended_before_the_file_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    file.write_text('{"kind": "step", "step": 1}\n{"kind": "st')
    logger = JsonLines(file)
    logger.log({"kind": "start", "time": 0.0, "step": 1})
    logger.log({"kind": "step", "time": 0.0, "step": 2})
    logger.close()
    first, torn, second, third = file.read_text().splitlines()
    assert torn == '{"kind": "st'
    assert [json.loads(each)["step"] for each in (first, second, third)] == [1, 1, 2]


@pytest.mark.parametrize("name", ["JsonLines", "Csv"])
def test_a_record_is_written_whole_or_not_at_all(child: Child, tmp_path: Path, name: str) -> None:
    file = tmp_path / "log"
    code = f"""
    import resource, signal
    from faststep.loggers import Csv, JsonLines, Loggers
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit fails as on a full disk
    loggers = Loggers([{name}({str(file)!r})])
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for step in range(100):
        loggers.log({{"kind": "step", "time": 0.0, "step": step, "loss": 0.5}})
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    loggers.log({{"kind": "step", "time": 0.0, "step": 100, "loss": 0.5}})
    loggers.close()
    """
    done = child(code)
    assert done.stderr.count(f"RuntimeWarning: {name} fails: OSError") == 1
    read = lines(file) if name == "JsonLines" else list(csv.DictReader(file.read_text().splitlines()))
    steps = [int(str(each["step"])) for each in read if each.get("kind") != "event"]
    assert steps == [*range(len(steps) - 1), 100]
    assert 2 < len(steps) < 60
    told = f"{name} works again; {101 - len(steps)} records were lost"
    assert told in done.stderr
    if name == "JsonLines":  # its file tells of the gap, too
        assert told in [each["text"] for each in read if each["kind"] == "event"]


def test_a_logger_that_fails_ends_no_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, kept = Csv(tmp_path / "log.csv"), Kept()
    loggers = Loggers([broken, kept, Progress()])
    training = Training([loggers], steps=10)
    training.start()
    broken.close()
    training.run(10)
    with pytest.warns(RuntimeWarning, match="Csv: 10 records were lost"):
        training.end()
    assert training.count == 10
    events = [each for each in kept.records if each["kind"] == "event"]
    assert [(each["level"], each["what"]) for each in events] == [("error", "logger")]
    assert "Csv fails: ValueError:" in capsys.readouterr().out


def test_lost_records_are_told_at_the_end(tmp_path: Path) -> None:
    broken = JsonLines(tmp_path / "log.jsonl")
    broken.close()
    loggers = Loggers([broken])
    with pytest.warns(RuntimeWarning, match="JsonLines fails: ValueError"):
        loggers.log({"kind": "step", "time": 0.0, "step": 1})
    with pytest.warns(RuntimeWarning, match="JsonLines: 1 records were lost"):
        loggers.close()


def test_rows_of_steps(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    kept = Kept()
    training = Training([kept, Csv(file)], steps=20, spoil=(3,))
    training.start()
    training.run(10)
    training.end()
    torn = file.read_text() + "11,123"
    file.write_text(torn)
    again = Csv(file)
    again.log({"kind": "step", "time": 1.0, "step": 11, "loss": mx.array(float("nan"))})
    again.close()
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert tuple(rows[0]) == COLUMNS["step"]
    assert [int(row["step"]) for row in rows] == list(range(1, 12))
    assert rows[2]["loss"] == ""
    assert np.isnan(float(rows[-1]["loss"]))
    losses = [each["loss"].item() for each in kept.records if each["kind"] == "step" and each["loss"] is not None]
    assert [float(row["loss"]) for row in rows[:-1] if row["loss"]] == losses


def test_a_table_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "log.csv"
    file.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=r"log\.csv:1: expected the columns step,time"):
        Csv(file)
    assert file.read_text() == "a,b\n1,2\n"


def scalars_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read event files as TensorBoard does: in order, a session's start dropping what it supersedes."""
    from tensorboardX.proto.event_pb2 import Event, SessionLog

    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):  # length (8), its checksum (4), event, its checksum (4)
            length = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length
            if event.session_log.status == SessionLog.START:
                found = {tag: [each for each in points if each[0] < event.step] for tag, points in found.items()}
            for value in event.summary.value:
                if value.HasField("simple_value"):
                    found.setdefault(value.tag, []).append((event.step, value.simple_value))
                else:
                    found.setdefault(value.tag, []).append((event.step, len(value.tensor.string_val[0])))
    return found


def test_tensor_board_reads_a_resumed_training(tmp_path: Path) -> None:
    kept = Kept()
    training = Training([kept, TensorBoard(tmp_path)], steps=40, spoil=(4,))
    training.start()
    training.run(20)
    training.start(at=15)
    training.run(30)
    assert "train/loss" in scalars_of(tmp_path)  # flushed before the end
    training.end()
    assert len(list(tmp_path.iterdir())) == 2
    found = scalars_of(tmp_path)
    again = max(place for place, each in enumerate(kept.records) if each["kind"] == "start")
    valid = [each for each in kept.records[:again] if each["step"] <= 15] + kept.records[again:]
    steps = [each for each in valid if each["kind"] == "step" and each["loss"] is not None]
    assert found["train/loss"] == [(each["step"], pytest.approx(each["loss"].item())) for each in steps]
    validations = [each for each in valid if each["kind"] == "validation"]
    assert found["val/loss"] == [(each["step"], pytest.approx(each["loss"])) for each in validations]
    assert {"memory/active", "seconds/data", "speed/tokens_per_second", "val/perplexity"} < found.keys()
    assert len(found["config/text_summary"]) == 2
    assert [step for step, _ in found["events/text_summary"]] == [4]


def test_wandb_offline(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed: pip install wandb")
    for at in (0, 10):
        code = f"""
        from faststep.loggers import WandB
        from support.trained import Training
        training = Training([WandB({str(tmp_path)!r}, project="tests", mode="offline")], steps=20)
        training.start({at})
        training.run({at} + 10)
        training.end()
        """
        child(code, WANDB_SILENT="true")  # whose end brings all to the disk
    runs = list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
    assert len(runs) == 2
    known = (tmp_path / "wandb_id").read_text().strip()
    assert all(known in run.name for run in runs)  # one run, gone on with
    for run in runs:
        assert b"val/perplexity" in run.read_bytes()


def test_mlflow_goes_on_in_its_run(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("mlflow", reason="mlflow is not installed: pip install mlflow-skinny")
    for at in (0, 10):
        code = f"""
        from faststep.loggers import MLflow
        from support.trained import Training
        uri = "file://{tmp_path}/runs"
        training = Training([MLflow({str(tmp_path)!r}, experiment="tests", tracking_uri=uri)], steps=20)
        training.start({at})
        training.run({at} + 10)
        training.end()
        if {at}:
            import mlflow
            (run,) = mlflow.MlflowClient().search_runs([mlflow.get_experiment_by_name("tests").experiment_id])
            found = mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")
            assert len({{each.step for each in found}}) == 20, found
            assert "val/perplexity" in run.data.metrics
            assert run.data.params
            assert run.data.tags["reason"] == "done"
        """
        child(code, MLFLOW_DISABLE_TELEMETRY="true", MLFLOW_ALLOW_FILE_STORE="true")


def test_trackio_goes_on_in_its_run(tmp_path: Path, child: Child) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed: pip install trackio")
    for at in (0, 10):
        code = f"""
        from faststep.loggers import Trackio
        from support.trained import Training
        training = Training([Trackio({str(tmp_path / "run")!r}, project="tests")], steps=20)
        training.start({at})
        training.run({at} + 10)
        training.end()
        if {at}:
            import trackio
            (run,) = trackio.Api().runs("tests")
            assert run.name == "run"
            from trackio.sqlite_storage import SQLiteStorage
            assert len(SQLiteStorage.get_metric_values("tests", "run", "train/loss")) == 20
        """
        child(code, TRACKIO_DIR=str(tmp_path / "trackio"), HF_HUB_OFFLINE="1")


@pytest.mark.parametrize(("name", "package"), [("MLflow", "mlflow"), ("Trackio", "trackio")])
def test_others_that_are_missing_say_so(name: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{name} needs {package}, which no extra installs: pip install {package}"):
        getattr(loggers, name)("folder")


def test_wandb_that_is_missing_says_so(child: Child) -> None:
    code = """
    import sys
    sys.modules["wandb"] = None  # as if it were not installed
    from faststep.loggers import WandB
    try:
        WandB("folder")
    except ImportError as error:
        print(error)
    """
    assert child(code).stdout.startswith("WandB needs wandb, which no extra installs: pip install wandb")


def test_nothing_of_the_extra_is_imported_with_the_package(child: Child) -> None:
    code = """
    import sys
    import faststep.loggers, faststep.report
    print(*[name for name in ("rich", "matplotlib", "tensorboardX", "wandb") if name in sys.modules])
    """
    assert child(code).stdout.strip() == ""


def test_two_processes_append_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    code = f"""
from faststep.loggers import JsonLines
import os
logger = JsonLines({str(file)!r})
for step in range(300):
    logger.log({{"kind": "step", "time": 0.0, "step": step, "text": "x" * 200, "process": os.getpid()}})
"""
    both = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ)) for _ in range(2)]
    assert [each.wait() for each in both] == [0, 0]
    read = lines(file)
    for process in {each["process"] for each in read}:
        assert [each["step"] for each in read if each["process"] == process] == list(range(300))
    assert len(read) == 600
