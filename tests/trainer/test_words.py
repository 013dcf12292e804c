"""Units and words of records and lines: samples and tokens, rates, epochs, warnings, signs of life."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, recipes
from faststep.data import Loader, Pad
from faststep.loggers import Progress
from faststep.report import read_log
from faststep.training import Trainer
from faststep.training._clock import Clock, contention
from faststep.training._heartbeat import Heartbeat


def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
    return model(x).square().mean()


def train(run: Path, loader: Loader, **options: Any) -> Any:
    step = Step(options.pop("model", nn.Linear(6, 1)), optim.SGD(1e-3), options.pop("loss", loss_fn))
    parts = {"loggers": [], "checkpoint_every": 0, "epochs": 1} | options
    Trainer(step, loader, run=run, **parts).train()
    return read_log(run)


def test_samples_are_rows_and_not_elements(tmp_path: Path) -> None:
    log = train(tmp_path, Loader(np.ones((20, 6), np.float32), batch_size=8))
    assert log.steps["samples"].tolist() == [8, 8, 4]
    assert not log.steps.known("tokens")


def test_tokens_are_told_where_the_data_says_so(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be " * 10)
    text = recipes.Bytes(tmp_path / "text.txt", context=16, split="all")
    model = recipes.GPT(vocabulary=256, width=16, heads=2, layers=1, context=32)
    options: dict[str, Any] = {"model": model, "loss": recipes.next_token()}
    log = train(tmp_path / "a", Loader(text, batch_size=4), **options)
    assert log.steps["tokens"].tolist() == (16 * log.steps["samples"]).tolist()
    ragged = [(np.arange(size, dtype=np.int32),) for size in (3, 5, 2, 9)]
    log = train(tmp_path / "b", Loader(ragged, batch_size=2, collate=Pad()), **options)
    assert (log.steps["tokens"].tolist(), log.steps["samples"].tolist()) == ([8, 11], [2, 2])


def test_rates_of_a_line_are_of_the_same_steps(tmp_path: Path) -> None:
    class Slow:
        def __len__(self) -> int:
            return 48

        def __getitem__(self, index: int) -> np.ndarray:
            time.sleep(0.002)
            return np.ones(6, np.float32)

    log = train(tmp_path, Loader(Slow(), batch_size=4), log_every=4)
    rates = [each for each in log.intervals.records if each.get("steps_per_second")]
    assert [each["step"] for each in rates] == [4, 8, 12]
    for each in rates:
        assert each["samples_per_second"] == pytest.approx(4 * each["steps_per_second"])
    first = log.intervals.records[0]
    assert (first["step"], first["loss"] is not None, "steps_per_second" in first) == (1, True, False)


def test_epochs_count_from_one(tmp_path: Path) -> None:
    log = train(tmp_path, Loader(np.ones((16, 6), np.float32), batch_size=8), epochs=2, validation=[mx.ones((4, 6))])
    assert log.steps["epoch"].tolist() == [1, 1, 2, 2]
    assert (log.intervals["epoch"][-1], log.validations["epoch"][-1], log.starts[0]["epoch"]) == (2, 2, 1)


def test_each_step_has_its_own_time_and_learning_rate(tmp_path: Path) -> None:
    log = train(tmp_path, Loader(np.ones((80, 6), np.float32), batch_size=4))
    times = log.steps["time"]
    assert (np.diff(times) > 0).all()  # though they were written together
    np.testing.assert_allclose(np.diff(times), log.steps["seconds"][1:], atol=2e-3)
    assert log.steps["learning_rate"].tolist() == pytest.approx([1e-3] * 20)


def test_a_schedule_is_in_every_step(tmp_path: Path) -> None:
    step = Step(nn.Linear(6, 1), optim.AdamW(optim.linear_schedule(1e-2, 0, 10)), loss_fn)
    loader = Loader(np.ones((40, 6), np.float32), batch_size=4)
    Trainer(step, loader, run=tmp_path, epochs=1, loggers=[], checkpoint_every=0).train()
    rates = [optim.linear_schedule(1e-2, 0, 10)(mx.array(at)).item() for at in range(10)]
    assert read_log(tmp_path).steps["learning_rate"].tolist() == pytest.approx(rates)


def texts(log: Any, what: str) -> list[tuple[str, str]]:
    return [(each["level"], each["text"]) for each in log.events if each["what"] == what]


def test_more_in_a_batch_than_there_is_warns(tmp_path: Path) -> None:
    log = train(tmp_path, Loader(np.ones((5, 6), np.float32), batch_size=8))
    assert texts(log, "batch_size") == [
        ("warning", "batch_size is 8, and there are 5 samples: all of them are one batch")
    ]
    assert not texts(train(tmp_path / "b", Loader(np.ones((12, 6), np.float32), batch_size=8)), "batch_size")


@pytest.mark.parametrize(("dtype", "compute"), [(mx.bfloat16, None), (mx.bfloat16, mx.bfloat16), (mx.float32, None)])
def test_updates_that_are_rounded_away_are_told_of(tmp_path: Path, dtype: mx.Dtype, compute: mx.Dtype | None) -> None:
    """A rate of 1e-5 changes no weight of a published model in bfloat16, unless there are masters."""
    model = nn.Linear(6, 1)
    model.set_dtype(dtype)
    step = Step(model, optim.SGD(1e-3), loss_fn, compute_dtype=compute)
    loader = Loader(np.ones((8, 6), np.float32), batch_size=8)
    Trainer(step, loader, run=tmp_path, loggers=[], checkpoint_every=0, epochs=1).train()
    told = texts(read_log(tmp_path), "precision")
    assert len(told) == (dtype == mx.bfloat16 and compute is None)
    assert not told or "weight, ...: bfloat16 weights without float32 masters lose" in told[0][1]


def test_a_validation_that_is_nan_warns(tmp_path: Path) -> None:
    log = train(tmp_path, Loader(np.ones((16, 6), np.float32), batch_size=8), validation=[mx.full((4, 6), mx.nan)])
    assert texts(log, "validation") == [("warning", "the validation loss is NaN, over 1 batches")]
    assert log.best is None


def test_what_is_waited_for_is_told() -> None:
    clock, told = Clock(), []
    loader = Loader(np.ones((4, 6), np.float32), batch_size=2)
    with Heartbeat(clock, loader, lambda *event: told.append(event), silent=0.3):
        with clock.phase("data"):
            while len(told) < 2:  # at 0.3 s, and at 0.6 s
                time.sleep(0.01)
        with clock.phase("validation"):
            while len(told) < 3:
                time.sleep(0.01)
    (what, first, level), second, (_, third, mild) = told
    assert (what, level, mild) == ("heartbeat", "warning", "info")
    assert first.startswith("waiting for data for ")
    assert first.endswith(": workers=0, try 4")
    assert second[1].startswith("waiting for data for ")
    assert third.startswith("validating for ")


def test_compiling_is_told_while_it_happens(tmp_path: Path, child: Any) -> None:
    code = f"""
    import mlx.nn as nn, mlx.optimizers as optim, numpy as np
    from faststep import Step
    from faststep._native import core
    from faststep.data import Loader
    from faststep.training import Trainer
    step = Step(nn.Linear(6, 1), optim.SGD(1e-3), lambda model, x: model(x).mean())
    Trainer(step, Loader(np.ones((8, 6), np.float32), batch_size=4), run={str(tmp_path / "run")!r}, epochs=1).train()
    print("compiled", core.compiled_kernels())
    """
    cache = tmp_path / "cache"
    cold, warm = (child(code, XDG_CACHE_HOME=str(cache)).stdout for _ in range(2))
    compiled = int(cold.rpartition("compiled ")[2])
    if not compiled:
        pytest.skip("MLX's kernels are not compiled our way here")
    line = "info at step 0: compiling kernels, once per machine\n"
    assert cold.index(line) < cold.index("step 1/2")
    assert line not in warm
    assert warm.endswith("compiled 0\n")


def test_too_many_threads_name_tune() -> None:
    assert contention(8.0, 4) is None
    text = contention(9.3, 4)
    assert text is not None
    assert text.startswith("the load is 9 on 4 cores: fewer threads may be faster; `faststep tune CONFIG`")


def test_quantized_weights_count_as_weights(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    nn.quantize(model, 32, 4, class_predicate=lambda path, module: path == "layers.0")
    start = train(tmp_path, Loader(np.ones((8, 64), np.float32), batch_size=4), model=model).starts[0]
    assert (start["frozen"], start["trainable"]) == (64 * 64, 64 + 64 + 1)


def test_data_bound_names_its_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    for workers, remedy in ((0, "; workers=0, try 4"), (4, "; workers=4, try more, or cheaper items"), (None, "")):
        progress = Progress(plain=True)
        progress.log({"kind": "start", "time": 0.0, "step": 0, "workers": workers, "steps": 4})
        seconds = {"data": 0.5, "step": 0.5}
        progress.log({"kind": "interval", "time": 0.0, "step": 2, "loss": 1.0, "seconds": seconds})
        assert capsys.readouterr().out.endswith(f"\ndata-bound: 50 % of the step{remedy}\n")


def test_the_slowest_rank_is_named_where_ranks_differ(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress(plain=True)
    note = "rank 1 is the slowest: between exchanges the others take 50 % of its time\n"
    for others, told in (({"0": 3.3, "2": 3.2}, ""), ({"0": 1.0, "2": 3.0}, note), ({"0": 1.0, "2": 3.0}, "")):
        seconds = {**others, "1": 4.0}
        progress.log({"kind": "interval", "time": 0.0, "step": 2, "loss": 1.0, "rank_seconds": seconds})
        assert capsys.readouterr().out.partition("\n")[2] == told


def test_piped_lines_stay_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def measured(model: nn.Module, x: mx.array) -> Any:
        loss = loss_fn(model, x)
        return loss, {f"metric_number_{index}": loss for index in range(9)}

    options: dict[str, Any] = {"loss": measured, "loggers": [Progress(plain=True)], "validation": [mx.ones((4, 6))]}
    train(tmp_path / "run", Loader(np.ones((200, 6), np.float32), batch_size=2), log_every=5, **options)
    lines = [line for line in capsys.readouterr().out.splitlines() if str(tmp_path) not in line]
    assert max(map(len, lines)) < 120
    assert any("metric_number_8" in line for line in lines)
