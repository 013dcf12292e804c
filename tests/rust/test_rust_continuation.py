"""A run that is begun in Rust goes on in Python, and the other way round, as if it had been one run."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from support.continuation import CASES, COUNT, Run, everything, save, start
from support.helpers import assert_close

# where the first program of a run stops: in a window, behind one
STOPS = [4, 6]

pytestmark = pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo on this machine")


@pytest.mark.parametrize("case", CASES)
def test_the_same_run_in_either_language_and_in_both(case: str, runs: dict[str, Run], tmp_path: Path) -> None:
    save(tmp_path / "start", start(case))
    orders = [["python"], ["rust"], ["python", "rust"], ["rust", "python"], ["rust", "python", "rust"]]
    ends = []
    for order in orders:
        source, losses, first = tmp_path / "start", [], 0
        for number, (language, last) in enumerate(zip(order, [*STOPS[: len(order) - 1], COUNT], strict=True)):
            target = tmp_path / "-".join([*order, str(number)])
            losses += runs[language](case, source, target, first, last)
            source, first = target, last
        ends.append((order, losses, everything(source)))
    _, wanted, values = ends[0]
    assert values["step.steps"] == COUNT
    for order, losses, got in ends[1:]:
        # the same in every bit, as long as the sum of the norm has the same order
        np.testing.assert_allclose(losses, wanted, rtol=1e-6, err_msg=str(order))
        assert_close(got, values, 1e-6)
