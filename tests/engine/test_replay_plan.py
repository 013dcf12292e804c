"""The parts of replay that need no GPU: the plan of a capture, and a step that cannot be replayed."""

import subprocess
from pathlib import Path

import mlx.core as mx
import pytest
from faststep import Step
from support.helpers import Row
from support.places import ROOT, TESTS, Child

NATIVE = ROOT / "rust/faststep/native"


def test_any_order_that_the_plan_allows_gives_what_the_serial_one_gives(tmp_path: Path) -> None:
    program = tmp_path / "replay_plan"
    sources = [TESTS / "support/programs/replay_plan.cpp", NATIVE / "replay/plan.cpp"]
    subprocess.run(["g++", "-std=c++20", "-O1", f"-I{NATIVE}", *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


REFUSED = """
import warnings
import mlx.core as mx
from faststep import Step
from support.helpers import Row, assert_close, run, taking

row = Row("mlp", "adamw", 0.05)
ends = []
for replay in (False, "auto", True):
    pair = row.new()
    step = Step(*pair, row.case.loss_fn, max_grad_norm=0.05, replay=replay)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ends.append(run(row, pair, taking(step), 7))
    reason = "the functions by which MLX's CPU back end hands over its tasks cannot be replaced"
    told = [str(each.message) for each in caught if "not replayed" in str(each.message)]
    assert told == ([f"faststep: this step is not replayed: {reason}"] if replay is True else []), told
    (trace,) = step.stats.traces
    assert trace.replay == (f"not replayed: {reason}" if replay else None), trace.replay
    assert step.stats.bytes["replay"] == 0
assert_close(ends[1], ends[0], 0)
assert_close(ends[2], ends[0], 0)
"""


@pytest.mark.skipif(mx.default_device() == mx.gpu, reason="needs MLX's CPU")
def test_where_nothing_can_be_recorded_mlx_goes_on_and_says_why(child: Child) -> None:
    child(REFUSED, FASTSTEP_CALLER="0")


@pytest.mark.parametrize(("replay", "error"), [("always", ValueError), (2, TypeError), (None, TypeError)])
def test_what_is_no_way_to_replay_is_refused(replay: object, error: type[Exception]) -> None:
    row = Row("mlp", "adamw")
    with pytest.raises(error, match='replay: expected "auto", True or False'):
        Step(*row.new(), row.case.loss_fn, replay=replay)  # type: ignore[arg-type]
