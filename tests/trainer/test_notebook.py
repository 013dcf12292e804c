"""Progress and pages in the kernel of a notebook."""

from __future__ import annotations

from pathlib import Path

import pytest

CELLS = (
    """
    import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np
    from faststep import Step
    from faststep.data import Loader
    from faststep.report import read_log, report
    from faststep.training import Trainer
    def loss_fn(model, x):
        loss = model(x).square().mean()
        return loss, {"<error>": loss}
    step, x = Step(nn.Linear(6, 1), optim.SGD(1e-3), loss_fn), np.ones((40, 6), np.float32)
    """,
    "Trainer(step, Loader(x, batch_size=4), validation=Loader(x), run=RUN, epochs=2, validate_every=10).train()",
    "report(RUN)",
    "read_log(RUN).steps.to_pandas()",
)


def test_progress_and_report_display_themselves(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed")
    cells = [each.replace("RUN", repr(str(tmp_path / "run"))).replace("\n    ", "\n").strip() for each in CELLS]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])
    client.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    progress, result = notebook.cells[1].outputs  # one output, drawn again and again
    shown = progress["data"]["text/html"]
    assert "<b>step 20/20</b> epoch 2/2" in shown
    for text in ("validation at step 10: loss ", "&lt;error&gt;", "ended", "done", "7 parameters"):
        assert text in shown, text
    assert "<error>" not in shown
    assert "Result(reason='done'" in result["data"]["text/plain"]
    page, frame = (cell.outputs[0]["data"]["text/html"] for cell in notebook.cells[2:])
    assert page.startswith("<iframe srcdoc=")
    assert "&lt;h3&gt;Loss&lt;/h3&gt;" in page
    assert "&gt;a notebook · " in page
    assert "<table" in frame
    (tmp_path / "notebook.ipynb").write_text(nbformat.writes(notebook))
