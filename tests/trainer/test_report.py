"""Reading logs, and the pages about them."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from faststep.loggers import JsonLines
from faststep.report import LogError, compare, read_log, report
from support.trained import Training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Train 30 steps, be killed in the middle of a line, go on at step 20 and train to the end."""
    folder = tmp_path_factory.mktemp("runs") / "first <run>"
    train(folder, 60, killed=30, resumed=20, spoil=(4, 27))
    return folder


def train(folder: Path, steps: int, killed: int, resumed: int, rate: float = 1e-2, spoil: tuple[int, ...] = ()) -> None:
    logger = JsonLines(folder / "log.jsonl")
    training = Training([logger], rate, steps, spoil)
    training.start()
    training.run(killed)
    logger.close()
    with (folder / "log.jsonl").open("a") as file:
        file.write('{"kind": "step", "ti')
    training.loggers = [JsonLines(folder / "log.jsonl")]
    training.spoil = ()
    training.start(at=resumed)
    training.run(steps)
    training.end()


def test_what_a_resume_superseded_is_dropped(run: Path) -> None:
    log = read_log(run)
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines() if not line.endswith("ti")]
    again = max(place for place, each in enumerate(lines) if each["kind"] == "start")
    assert log.steps.step.tolist() == list(range(1, 61))
    assert log.intervals.step.tolist() == log.validations.step.tolist() == [10, 20, 30, 40, 50, 60]
    wanted = {each["step"]: each for each in lines[:again] if each["kind"] == "step" and each["step"] <= 20}
    wanted |= {each["step"]: each for each in lines[again:] if each["kind"] == "step"}
    for name in ("grad_norm", "learning_rate", "seconds", "tokens"):
        np.testing.assert_array_equal(log.steps[name], [float(wanted[step][name]) for step in range(1, 61)])
    losses = [wanted[step]["loss"] for step in range(1, 61)]
    np.testing.assert_array_equal(log.steps["loss"], [math.nan if each is None else each for each in losses])
    assert [int(step) for step in log.steps.step[np.isnan(log.steps["loss"])]] == [4]  # 27 was taken again
    assert [each["step"] for each in log.events] == [4, 27]  # which happened
    assert log.resumes == [20]
    assert log.superseded == 10 + 1 + 1 + 2
    assert log.torn == (again + 1,)
    assert log.end is not None
    assert log.end["reason"] == "done"
    assert log.config["optimizer"] == {"use": "AdamW", "learning_rate": 1e-2}
    assert (np.diff(log.steps.elapsed) >= 0).all()
    assert {"memory.active", "seconds.data"} < log.intervals.columns.keys()
    assert set(log.intervals.group("seconds")) == {"data", "step", "validation", "checkpoint", "other"}


def test_a_run_that_was_killed_has_no_end(run: Path, tmp_path: Path) -> None:
    lines = (run / "log.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "log.jsonl").write_text("".join(lines[:20]) + lines[20][:9])
    log = read_log(tmp_path / "log.jsonl")
    assert log.end is None
    assert log.torn == (21,)
    assert "no end: it was killed, or goes on" in report(tmp_path).read_text()


def test_numbers_that_are_not_finite_are_read_back(tmp_path: Path) -> None:
    values = [float("nan"), float("inf"), float("-inf"), 1e308, -0.0, None]
    logger = JsonLines(tmp_path / "log.jsonl")
    for step, value in enumerate(values):
        logger.log({"kind": "step", "time": 0.0, "step": step, "loss": value, "grad_norm": value})
    logger.close()
    wanted = np.array([math.nan if value is None else value for value in values])
    np.testing.assert_array_equal(read_log(tmp_path).steps["loss"], wanted)
    assert report(tmp_path).stat().st_size > 1000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("garbage", "expected a record in JSON, got 'garbage'"),
        ('{"kind": "st', "expected a record in JSON"),
        ("\0\0\0\0", "expected a record in JSON"),
        ("[" * 100_000, "expected a record in JSON"),
        ("[1, 2]", r"expected a record, a JSON object, got '\[1, 2\]'"),
        ('{"time": 0.0, "step": 1}', "expected a string as 'kind', got None"),
        ('{"kind": "step", "time": 0.0, "step": "1"}', "expected a whole number from 0 on as 'step', got '1'"),
        ('{"kind": "step", "time": 0.0, "step": true}', "expected a whole number from 0 on as 'step', got True"),
        ('{"kind": "step", "time": 0.0, "step": 9223372036854775808}', "expected a whole number from 0 on as 'step'"),
        ('{"kind": "step", "time": 0.0, "step": -1}', "expected a whole number from 0 on as 'step', got -1"),
        ('{"kind": "step", "time": NaN, "step": 1}', "expected a number as 'time', got nan"),
        ('{"kind": "step", "time": null, "step": 1}', "expected a number as 'time', got None"),
        ('{"kind": "step", "time": 0.0, "step": 1, "loss": "much"}', "expected a number or null as 'loss', got 'much'"),
        ('{"kind": "step", "time": 0.0, "step": 1, "loss": [1]}', r"expected a number or null as 'loss', got \[1\]"),
    ],
)
def test_what_is_wrong_is_said_by_file_and_line(run: Path, tmp_path: Path, line: str, message: str) -> None:
    lines = (run / "log.jsonl").read_text().splitlines()
    lines.insert(7, line)
    file = tmp_path / "log.jsonl"
    file.write_text("\n".join(lines))
    with pytest.raises(LogError, match=rf"{re.escape(str(file))}:8: {message}"):
        read_log(tmp_path)


def test_no_log_and_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="expected the log of a run"):
        read_log(tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert len(read_log(tmp_path).steps) == 0
    assert "no end" in report(tmp_path).read_text()


def test_a_run_that_began_anew_in_its_folder(tmp_path: Path) -> None:
    for steps in (20, 10):
        training = Training([JsonLines(tmp_path / "log.jsonl")], steps=steps)
        training.start()
        training.run(steps)
        training.end()
    log = read_log(tmp_path)
    assert len(log.starts) == 1
    assert log.steps.step.tolist() == list(range(1, 11))


class Page(HTMLParser):
    """The addresses of a page that a browser would fetch, and its texts."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        source = path.read_text()
        self.feed(source)
        self.fetched += re.findall(r"url\((?!#)[^)]*\)|@import[^;]*", source)
        self.text = " ".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "xlink:href", "srcset", "data") and not (value or "").startswith("#"):
                self.fetched.append(f"{tag} {name}={value}")

    def handle_data(self, data: str) -> None:
        self.texts += [data.strip()] if data.strip() else []


def test_the_page_of_a_run(run: Path, tmp_path: Path) -> None:
    page = Page(report(run, tmp_path / "deep" / "page.html"))
    assert not page.fetched
    assert not {"script", "link", "img", "iframe", "run"} & set(page.tags)
    for text in (
        "first <run>",
        "done, ",
        "60 of 60",
        "train config.yaml",
        "torn at line",
        "14 records of steps that were taken again",
        "Loss",
        "Gradient norm",
        "Learning rate",
        "Tokens per second",
        "Time of a step",
        "Seconds of each step",
        "Memory",
        "Traces and skipped batches",
        "Perplexity",
        "loss is not finite: the batch was skipped",
        "checkpoints/step-00000060",
        "learning_rate: 0.01",
        "5,376",
        "resumed",
    ):
        assert text in page.text, text
    assert page.tags.count("svg") == 9
    assert list((tmp_path / "deep").iterdir()) == [tmp_path / "deep" / "page.html"]


def test_nothing_in_a_log_is_read_as_html(tmp_path: Path) -> None:
    bad = "</pre><script>alert(1)</script>&\ud800 $x_$"
    logger = JsonLines(tmp_path / "log.jsonl")
    start = {"command": bad, "device": bad, "versions": {bad: bad}, "config": {bad: [bad]}, "resumed": False}
    start["modules"] = [{"name": bad, "trainable": 1, "frozen": 0}]
    logger.log({"kind": "start", "time": 0.0, "step": 0, **start})
    logger.log({"kind": "validation", "time": 1.0, "step": 1, "loss": 0.5, "metrics": {bad: 0.5}})
    logger.log({"kind": "event", "time": 1.0, "step": 1, "level": bad, "what": bad, "text": bad})
    logger.log({"kind": "checkpoint", "time": 1.0, "step": 1, "path": bad})
    logger.log({"kind": "end", "time": 1.0, "step": 1, "reason": bad})
    logger.close()
    for path in (report(tmp_path), compare([tmp_path, tmp_path], tmp_path / "both.html")):
        assert "script" not in Page(path).tags


def test_a_spike_among_100_000_steps_is_drawn(tmp_path: Path) -> None:
    training = Training([JsonLines(tmp_path / "one.jsonl")], steps=10)
    training.start()
    training.run(10)
    training.end()
    records = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    steps = [each for each in records if each["kind"] == "step"]
    (interval,) = [each for each in records if each["kind"] == "interval"]
    with (tmp_path / "log.jsonl").open("w") as file:
        for step in range(1, 100_001):
            loss = 3.0 if step == 70_003 else 1.0 + 0.1 * math.sin(step)
            file.write(json.dumps({**steps[step % 10], "step": step, "loss": loss}) + "\n")
            if step % 20 == 0:
                file.write(json.dumps({**interval, "step": step}) + "\n")
    page = report(tmp_path)
    assert page.stat().st_size < 2_000_000
    svg = page.read_text().split('aria-label="loss"')[1].split("</svg>")[0]
    path = max(re.findall(r'<path d="([^"]*)"', svg), key=len)  # the steps
    points = np.array([[float(x) for x in pair] for pair in re.findall(r"[ML] ?(\S+) (\S+)", path)])
    spike = points[points[:, 1].argmin()]  # y points down
    assert len(points) < 1010
    share = (spike[0] - points[0, 0]) / (points[-1, 0] - points[0, 0])
    assert share == pytest.approx(0.70003, abs=2e-3)  # of 400 pixels
    others = np.delete(points, points[:, 1].argmin(), axis=0)[:, 1]
    height = points[:, 1].max() - spike[1]
    assert (points[:, 1].max() - others.min()) / height == pytest.approx(0.2 / 2.1, abs=0.01)


def test_runs_over_each_other(run: Path, tmp_path: Path) -> None:
    train(tmp_path / "second", 40, killed=20, resumed=10, rate=3e-3)
    page = Page(compare([run, tmp_path / "second"], tmp_path / "compare.html"))
    assert not page.fetched
    for text in ("first <run>", "second", "optimizer.learning_rate", "0.01", "0.003", "60 of 60", "40 of 40"):
        assert text in page.text, text
    assert "optimizer.use" not in page.text  # is the same
    for text in ("Loss", "Validation loss", "Gradient norm", "Learning rate", "Tokens per second", "Active memory"):
        assert page.texts.count(text) == 2, text  # by step and by time
    with pytest.raises(ValueError, match="expected one run or more"):
        compare([], tmp_path / "none.html")


def test_runs_of_the_same_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    for place in "ab":
        (tmp_path / place / "run").mkdir(parents=True)
        (tmp_path / place / "run" / "log.jsonl").write_bytes((run / "log.jsonl").read_bytes())
    folders = [tmp_path / "a" / "run", tmp_path / "b" / "run"]
    page = Page(compare([*folders, folders[0]], tmp_path / "compare.html"))
    for name in ("a/run", "b/run", "a/run (2)"):
        assert name in page.texts


def test_a_run_of_one_step_is_drawn(tmp_path: Path) -> None:
    training = Training([JsonLines(tmp_path / "log.jsonl")], steps=1)
    training.start()
    training.run(1, every=1)
    training.end()
    svg = report(tmp_path).read_text().split('aria-label="gradient norm"')[1].split("</svg>")[0]
    assert svg.count("<use") == 1  # the point


def test_a_page_that_cannot_be_written_leaves_the_old_one(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.mkdir()
    (page / "kept").touch()
    with pytest.raises(OSError, match="directory"):
        report(run, page)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


def by_hand(folder: Path, *records: dict[str, object]) -> Path:
    logger = JsonLines(folder / "log.jsonl")
    logger.log({"kind": "start", "time": 100.0, "step": 0, "resumed": False})
    for record in records:
        logger.log({"time": 200.0, **record})
    logger.close()
    return folder


def test_steps_have_the_time_at_which_they_were_made(tmp_path: Path) -> None:
    event = {"kind": "event", "step": 0, "time": 109.0, "text": "written before the steps are"}
    steps = [{"kind": "step", "step": at, "time": 100.0 + 2 * at, "loss": 1.0} for at in (1, 2, 3)]
    log = read_log(by_hand(tmp_path, event, *steps))
    assert log.steps.elapsed.tolist() == [2.0, 4.0, 6.0]


def test_tracing_does_not_crush_the_time_of_a_step(tmp_path: Path) -> None:
    def interval(step: int, seconds: float) -> dict[str, object]:
        return {"kind": "interval", "step": step, "loss": 1.0, "seconds": {"step": seconds, "data": 0.0}}

    steady = [interval(10 * at, 0.1) for at in range(1, 6)]
    page = report(by_hand(tmp_path / "a", interval(1, 20.0), *steady)).read_text()
    assert "Cut off: 1 with up to 20 s a step." in page
    page = report(by_hand(tmp_path / "b", interval(1, 0.02), *steady)).read_text()
    assert "Cut off" not in page


def test_checkpoints_that_are_gone_are_marked(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-00000002").mkdir(parents=True)
    written = [{"kind": "checkpoint", "step": at, "path": f"x/checkpoints/step-{at:08}"} for at in (1, 2)]
    page = report(by_hand(tmp_path, *written)).read_text()
    rows = re.findall(r"step-(\d+)</td><td>(.*?)</td>", page)
    assert rows == [("00000001", '<span class="soft">deleted</span>'), ("00000002", "")]


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_tables_are_frames(run: Path, library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed")
    steps = read_log(run).steps
    frame = steps.to_pandas() if library == "pandas" else steps.to_polars()
    np.testing.assert_array_equal(frame["loss"].to_numpy(), steps["loss"])
    assert frame["step"].to_numpy().tolist() == steps.step.tolist()
    assert len(frame) == len(steps)
