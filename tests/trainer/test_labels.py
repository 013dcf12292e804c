"""Labels and tokens that a model does not have: the batch is skipped with words of its own, and nothing is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step
from faststep.data import Loader
from faststep.recipes import GPT, LOSSES, next_token
from faststep.report import read_log
from faststep.training import Trainer, TrainingError
from mlx.utils import tree_flatten
from support.commands import faststep, set_, write_config

FAR = 2_000_000_000  # gigabytes behind the array


def classifier(loss: str, labels: Any, **options: Any) -> tuple[Step, mx.array, mx.array]:
    mx.random.seed(1)
    step = Step(nn.Linear(4, 5), optim.Adam(1e-2), LOSSES[loss](**options))
    return step, mx.random.normal((len(labels), 4)), mx.array(labels)


@pytest.mark.parametrize("loss", ["cross_entropy", "nll_loss"])
@pytest.mark.parametrize("label", [5, -1, FAR, -FAR])
def test_a_label_out_of_range_is_a_bad_batch(loss: str, label: int) -> None:
    step, x, y = classifier(loss, [0, 4, label])
    before = dict(tree_flatten(step.model.parameters()))
    out = step(x, y)
    assert bool(out.skipped)
    assert out.loss.item() == -float("inf")
    for name, array in tree_flatten(step.model.parameters()):
        assert mx.array_equal(array, before[name]).item()
    assert step.stats.mode == "called"
    assert f"a batch of integers from {min(0, label)} to {max(4, label)}" in step.loss_fn.explain(out.loss.item(), x, y)


@pytest.mark.parametrize("dtype", [mx.uint8, mx.int64])
def test_labels_that_do_not_count_and_those_in_range_are_as_they_were(dtype: mx.Dtype) -> None:
    step, x, y = classifier("cross_entropy", [0, 4, 3])
    wanted = nn.losses.cross_entropy(step.model(x), y, reduction="mean").item()
    assert step(x, y.astype(dtype)).loss.item() == pytest.approx(wanted, rel=1e-6)
    step, x, y = classifier("cross_entropy", [0, 4, -100, FAR])
    masked = step(x, y, mx.array([True, True, True, False]))
    assert not bool(masked.skipped)


def test_a_label_of_uint8_is_not_the_one_to_be_ignored() -> None:
    model = nn.Linear(2, 200)
    x, y = mx.ones((1, 2)), mx.array([156], mx.uint8)  # -100, of 8 bits
    assert LOSSES["cross_entropy"]()(model, x, y).item() > 1


@pytest.mark.parametrize("in_chunks", [False, True])
@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_token_out_of_the_vocabulary_is_a_bad_batch(in_chunks: bool, place: int) -> None:
    tokens = np.arange(8, dtype=np.int32)[None] % 5
    tokens[0, place] = FAR
    mx.random.seed(1)
    step = Step(GPT(1, 8, 2, context=8, vocabulary=16), optim.Adam(1e-2), next_token(in_chunks=in_chunks))
    assert bool(step(mx.array(tokens)).skipped)
    assert not bool(step(mx.array(tokens % 5)).skipped)


def test_a_sequence_longer_than_the_context_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"sequences of at most 8 \(context\), got 9"):
        GPT(1, 8, 2, context=8)(mx.zeros((1, 9), mx.int32))


def test_the_trainer_says_so(tmp_path: Path) -> None:
    step, _, _ = classifier("cross_entropy", [0])
    data = np.random.default_rng(0).standard_normal((12, 4), dtype=np.float32), np.full(12, 7, np.int32)
    trainer = Trainer(step, Loader(data, batch_size=4), run=tmp_path, epochs=1, stop_after_bad=2, loggers=[])
    with pytest.raises(TrainingError, match=r"a label is out of range: .* got a batch of integers from 7 to 7"):
        trainer.train()
    events = [each["text"] for each in read_log(tmp_path).events if each["what"] == "skipped"]
    assert "batch 0 of epoch 1 was skipped: a label is out of range" in events[0]


class Words(nn.Module):
    """A model of a user's own, which does not look at its ids."""

    def __init__(self, quantized: bool) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(9, 32), nn.Linear(32, 9)
        if quantized:
            self.words = self.words.to_quantized(32, 4)
            self.words.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        return self.out(self.words(x))


def words_loss(model: nn.Module, x: mx.array) -> mx.array:
    return nn.losses.cross_entropy(model(x[:, :-1]), mx.clip(x[:, 1:], 0, 8), reduction="mean")


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize(("place", "id_"), [(0, FAR), (2, -FAR), (1, 9)])
def test_an_id_that_an_embedding_has_no_row_for_is_a_bad_batch(
    tmp_path: Path, quantized: bool, place: int, id_: int
) -> None:
    tokens = np.random.default_rng(0).integers(-9, 9, (12, 6)).astype(np.int32)
    tokens[5, place] = id_
    step = Step(Words(quantized), optim.Adam(1e-2), words_loss)
    Trainer(step, Loader(tokens, batch_size=4), run=tmp_path, epochs=1, loggers=[], checkpoint_every=0).train()
    log = read_log(tmp_path)
    assert log.steps["skipped"].tolist() == [0, 1, 0]
    (event,) = (each["text"] for each in log.events if each["what"] == "skipped")
    low, high = tokens[4:8].min(), tokens[4:8].max()
    assert f"is an id out of range? The batch has integers from {low} to {high}, rows of embeddings: words 9" in event
    assert step.stats.mode == "native"


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.uint32, np.int64])
def test_ids_that_are_there_give_the_same_bits(tmp_path: Path, dtype: type) -> None:
    tokens = np.random.default_rng(0).integers(0, 9, (12, 6)).astype(dtype)
    mx.random.seed(3)
    ours, theirs = (Step(Words(False), optim.Adam(1e-2), words_loss) for _ in range(2))
    theirs.model.update(ours.model.parameters())
    Trainer(ours, Loader(tokens, batch_size=4), run=tmp_path, epochs=2, loggers=[], checkpoint_every=0).train()
    for start in (0, 4, 8) * 2:
        theirs(mx.array(tokens[start : start + 4]))
    for (name, mine), (_, other) in zip(
        *(tree_flatten(each.model.parameters()) for each in (ours, theirs)), strict=True
    ):
        assert mx.array_equal(mine, other).item(), name


def test_a_process_survives_them(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    labels = np.arange(200) % 8
    labels[3] = FAR
    np.savez(tmp_path / "labels.npz", x=np.load(tmp_path / "data.npz")["x"], y=labels.astype(np.int32))
    data = {"use": "arrays", "file": "labels.npz", "stop": 160}
    faststep("train", config, *set_(data__train=data, data__validation=None, loss={"use": "cross_entropy"},
             model={"use": "mlp", "sizes": [8, 8]}, train={"epochs": 1}, checkpoints={"every": 5}))  # fmt: skip
    log = read_log(tmp_path / "run")
    assert sum(log.steps["skipped"]) == 1
    assert "a label is out of range" in next(each["text"] for each in log.events if each["what"] == "skipped")
