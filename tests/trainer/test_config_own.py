"""The user's own parts in a config: named by file or module, checked as ours are, with their own errors."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import pytest
from faststep.config import CodeError, ConfigError, build, load
from support.configs import config, make, refusal, train

USER = """
    from pathlib import Path
    import mlx.nn as nn
    import neighbour

    class Model(nn.Module):
        def __init__(self, width: int, inner: nn.Module | None = None):
            super().__init__()
            self.inner, self.out = inner or nn.Identity(), nn.Linear(8, width)
        def __call__(self, x):
            return self.out(self.inner(x))

    def loss_fn(model, x, y, power=2):
        return ((model(x) - y).abs() ** power).mean()

    def make_loss(factor: float = 1.0):
        return lambda model, x, y: factor * loss_fn(model, x, y)

    def data(folder: Path, rows: int = 20):
        assert isinstance(folder, Path) and folder.is_absolute()
        return neighbour.rows(rows)

    ready = [(row[0], row[1]) for row in neighbour.rows(6)]

    class Endless:
        def __iter__(self):
            while True:
                yield from neighbour.rows(3)

    class Callback:
        def __init__(self, every: int):
            self.every = every

    class Logger:
        def __init__(self, channel: str):
            self.channel, self.records = channel, []

        def log(self, record):
            self.records.append(record["kind"])

        def close(self):
            self.records.append("closed")

    def broken():
        return {}["not there"]

    def no_model():
        return 3
"""
NEIGHBOUR = """
    import numpy as np
    def rows(count):
        x = np.random.default_rng(0).normal(size=(count, 8)).astype(np.float32)
        return [(each, each[:3]) for each in x]
"""
USERS = """\
model: {use: user.py:Model, width: 3}
loss: {use: user.py:loss_fn}
data:
  train: {use: user.py:data, folder: here}
  batch_size: 4
optimizer: {use: SGD, learning_rate: 1e-2}
train: {steps: 3}
callbacks: [{use: user.py:Callback, every: 3}]
loggers: [{use: user.py:Logger, channel: runs}]
"""
OWN_FILES = {"user": USER, "neighbour": NEIGHBOUR}


@pytest.mark.parametrize(
    "override",
    [
        "seed=1",
        "loss={use: user.py:loss_fn, power: 3}",
        "loss={use: user.py:make_loss}",
        "loss={use: user.py:make_loss, factor: 2}",
        "data.train={use: user.py:ready}",
        "data.train={use: user.py:Endless}",
        "data.train={use: user.py:data, folder: x, rows: 12}",
        "model.inner={use: mlp, sizes: [8, 8]}",
        "model={use: user.py:Model, width: 3, inner: {use: user.py:Model, width: 8}}",
        "optimizer={use: 'mlx.optimizers:Lion', learning_rate: 0.1}",
    ],
)
def test_the_users_own(tmp_path: Path, override: str) -> None:
    path = list(sys.path)
    built = make(tmp_path, USERS, override, **OWN_FILES)
    assert len(train(built)) >= 2
    assert built.callbacks[0].every == 3
    assert sys.path == path


def test_the_users_loggers_are_made_when_they_are_wanted(tmp_path: Path) -> None:
    built = make(tmp_path, USERS, **OWN_FILES)
    (logger,) = [make_logger() for make_logger in built.loggers]
    assert (logger.channel, logger.records) == ("runs", [])
    (neither,) = make(tmp_path, USERS, "loggers=[{use: user.py:Callback, every: 3}]", **OWN_FILES).loggers
    with pytest.raises(ConfigError, match=r"loggers\.0\.use: expected a logger with log\(record\) and close\(\), got"):
        neither()


def test_a_loss_with_arguments_is_what_it_says(tmp_path: Path) -> None:
    losses = [
        train(make(tmp_path, USERS, f"loss={loss}", **OWN_FILES), 1)[0]
        for loss in (
            "{use: user.py:loss_fn}",
            "{use: user.py:make_loss, factor: 2}",
            "{use: user.py:loss_fn, power: 2}",
        )
    ]
    assert losses == [losses[0], pytest.approx(2 * losses[0]), losses[0]]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.use=user.py:Modle", "model.use: user.py: unknown name 'Modle': did you mean 'Model'?"),
        ("model.use=usr.py:Model", "model.use: expected a file, got "),
        ("model.use=nowhere:Model", "model.use: expected a module that can be imported, got 'nowhere'"),
        ("model.use=':Model'", "model.use: expected module:attribute or file.py:attribute"),
        ("model.widht=3", "model.widht: unknown key 'widht': did you mean 'width'?"),
        ("model={use: user.py:Model}", "model.width: missing"),
        ("model.width=x", "model.width: expected a whole number, got 'x'"),
        ("model={use: user.py:no_model}", "model.use: expected an mlx.nn.Module, got int"),
        ("loss={use: user.py:loss_fn, powr: 2}", "loss.powr: unknown key 'powr': did you mean 'power'?"),
        ("data.train={use: user.py:ready, rows: 3}", "takes no arguments"),
        ("callbacks.0.evry=3", "callbacks.0.evry: unknown key 'evry': did you mean 'every'?"),
        ("loggers.0.chanel=3", "loggers.0.chanel: unknown key 'chanel': did you mean 'channel'?"),
        ("loggers=[{use: csv}]", "loggers.0.use: unknown logger 'csv': there are none (the user's own are module"),
        ("model.inner={use: mpl}", "model.inner.use: unknown model 'mpl': did you mean 'mlp'?"),
    ],
)
def test_mistakes_about_the_users_own(tmp_path: Path, override: str, expected: str) -> None:
    message = refusal(tmp_path, USERS, override, **OWN_FILES)
    assert expected in message
    assert "override" in message


def test_errors_of_the_users_code_name_the_key_and_have_their_traceback(tmp_path: Path) -> None:
    built = config(tmp_path, USERS, "model={use: user.py:broken}", **OWN_FILES)
    with pytest.raises(CodeError, match=r"model: KeyError: 'not there'") as caught:
        build(built)
    cause = caught.value.__cause__
    assert isinstance(cause, KeyError)
    assert "user.py" in traceback.extract_tb(cause.__traceback__)[-1].filename
    for code, kind in (
        *(("1 / 0", ZeroDivisionError), ("{}['x']", KeyError)),
        *(("import not_installed", ModuleNotFoundError), ("(", SyntaxError)),
    ):
        (tmp_path / "bad.py").write_text(code, encoding="utf-8")
        with pytest.raises(CodeError, match=rf"model\.use: {kind.__name__}: ") as caught:
            build(config(tmp_path, USERS, "model={use: bad.py:Model}", **OWN_FILES))
        assert isinstance(caught.value.__cause__, kind)


def test_a_run_that_is_resolved_finds_its_files_from_anywhere(tmp_path: Path) -> None:
    first = config(tmp_path, USERS, **OWN_FILES)
    elsewhere = tmp_path / "runs" / "x"
    elsewhere.mkdir(parents=True)
    (elsewhere / "config.yaml").write_text(first.text(), encoding="utf-8")
    assert train(build(load(elsewhere / "config.yaml"))) == train(build(first))
