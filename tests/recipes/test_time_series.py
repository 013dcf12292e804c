"""Series in front of a frozen decoder: counts, layouts, gradients by part, the decoder beside mlx-lm's."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import Step, recipes
from faststep.data import Loader
from mlx.optimizers import AdamW
from mlx.utils import tree_flatten
from support.reader import commands, copy_examples, run

DECODER = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ANSWERS = ["slow", "fast"]


def model(**sizes: Any) -> recipes.SeriesToText:
    return recipes.series_model(3, **{"width": 16, "hidden": 24, "stride": 2, "decoder": DECODER} | sizes)


def sizes(tree: Any) -> int:
    return sum(each.size for _, each in tree_flatten(tree))


def write(folder: Path, length: int = 20, channels: int = 3, turned: bool = True) -> Path:
    """Write series of slow and fast waves, [items, channels, length] where they are turned."""
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    places = np.arange(length)[None, :, None] * (0.3 + 0.9 * labels)[:, None, None]
    series = np.sin(places + rng.uniform(0, 6, (40, 1, channels))).astype(np.float32)
    file = folder / "series.npz"
    np.savez(file, series=series.transpose(0, 2, 1) if turned else series, labels=labels)
    return file


def test_the_counts_of_full_size() -> None:
    """Nothing is evaluated: these are shapes."""
    full = recipes.series_model(128)
    recipes.quantize(full, bits=4, group_size=64, modules=["decoder"])
    trainable, everything = sizes(full.trainable_parameters()), sizes(full.parameters())
    assert trainable == 273_724_160
    assert everything - trainable == 193_153_024
    assert sizes(full.lm_head.parameters()) == 128_256 * 2_048


def test_the_decoder_stays_and_all_else_moves(tmp_path: Path) -> None:
    data = recipes.Series(write(tmp_path), ANSWERS, 3, "NCL")
    trained = model()
    before = {path: mx.array(each) for path, each in tree_flatten(trained.parameters())}
    step = Step(trained, AdamW(3e-3), recipes.series_to_text(), max_grad_norm=1.0)
    outs = [step(**batch) for _ in range(12) for batch in Loader(data, batch_size=20)]
    assert float(outs[-1].loss) < 0.5 * float(outs[0].loss)
    assert all(float(out.grad_norm) > 0 for out in outs if out.grad_norm is not None)
    for path, each in tree_flatten(trained.parameters()):
        assert mx.array_equal(each, before[path]).item() == path.startswith("decoder."), path


def test_chunks_of_logits_give_the_same_loss(tmp_path: Path) -> None:
    batch = next(iter(Loader(recipes.Series(write(tmp_path), ANSWERS, 3, "NCL"), batch_size=8)))
    trained = model()

    def loss_of(**options: Any) -> Any:
        loss = recipes.series_to_text(**options)
        return nn.value_and_grad(trained, lambda model: _first(loss(model, **batch)))(trained)

    (whole, gradients), (chunked, same) = loss_of(), loss_of(in_chunks=True)
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-5)
    for (path, one), (_, other) in zip(tree_flatten(gradients), tree_flatten(same), strict=True):
        assert mx.allclose(one, other, atol=1e-5), path


def _first(found: Any) -> mx.array:
    return found[0] if isinstance(found, tuple) else found


def test_a_layout_is_turned_once_where_it_is_declared(tmp_path: Path) -> None:
    turned, straight = tmp_path / "a", tmp_path / "b"
    turned.mkdir()
    straight.mkdir()
    one = recipes.Series(write(turned), ANSWERS, layout="NCL")
    other = recipes.Series(write(straight, turned=False), ANSWERS, channels=3)
    assert one.channels == other.channels == 3
    assert all(np.array_equal(a["series"], b["series"]) for a, b in zip(one, other, strict=True))
    assert one[1]["tokens"].tolist() == [*b"fast", 0]
    assert one[1]["mask"].all()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ({}, {"channels": 3}, r"layout: \[40, 3, 20\] with 3 channels is \[items, channels, length\].*`layout: NCL`"),
        ({}, {}, r"layout: expected NLC .* or NCL: \[40, 3, 20\] does not tell, and channels is not given"),
        ({"length": 3}, {"channels": 3}, r"\[40, 3, 3\] does not tell, and channels is 3"),
        ({}, {"channels": 3, "layout": "NLC"}, r"layout: NLC of \[40, 3, 20\] has 20 channels, expected 3"),
        ({}, {"answers": ["one"], "layout": "NCL"}, r"answers: expected a text .* got 1 texts and labels of 0 to"),
    ],
)
def test_what_cannot_be_told_apart_is_refused(
    shape: dict[str, int], options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        recipes.Series(write(tmp_path, **shape), **{"answers": ANSWERS} | options)


def test_a_model_refuses_series_that_are_turned() -> None:
    with pytest.raises(ValueError, match=r"expected \[batch, length, 3\], got \[2, 3, 20\].*`layout: NCL`"):
        model()(mx.zeros((2, 3, 20)), mx.zeros((2, 4), mx.int32))


def test_a_shift_is_another_in_each_epoch_and_the_same_again(tmp_path: Path) -> None:
    data = recipes.Series(write(tmp_path), ANSWERS, 3, "NCL", shift=True)
    plain = recipes.Series(write(tmp_path), ANSWERS, 3, "NCL")
    data.set_epoch(1)
    first, again = data[3]["series"], data[3]["series"]
    data.set_epoch(2)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, data[3]["series"])
    assert np.array_equal(np.sort(first, axis=0), np.sort(plain[3]["series"], axis=0))


@pytest.mark.parametrize("scaled", [False, True], ids=["plain", "scaled"])
def test_the_decoder_is_that_of_mlx_lm(scaled: bool, tmp_path: Path) -> None:
    """With the same weights, from a folder as Hugging Face writes it."""
    llama = pytest.importorskip("mlx_lm.models.llama", reason="the extra llm is not installed")
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    config = {"model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, **DECODER}
    config |= {"rope_scaling": scaling if scaled else None, "tie_word_embeddings": True}
    theirs = llama.Model(llama.ModelArgs.from_dict(config))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(theirs.parameters())))
    (tmp_path / "config.json").write_text(json.dumps(config))
    ours = recipes.series_model(3, width=16, hidden=24, path=tmp_path)
    tokens = mx.random.randint(0, 256, (2, 40))
    states = ours.decoder(ours.decoder.embed_tokens(tokens))
    assert mx.allclose(states, theirs.model(tokens), atol=1e-5)
    assert mx.array_equal(ours.lm_head.weight, theirs.model.embed_tokens.weight)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Put the examples into a folder, with series in the place of those that a package has."""
    folder = tmp_path_factory.mktemp("reader")
    copy_examples(folder)
    data = folder / "examples" / "runs" / "series"
    data.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name in ("train", "held_out"):
        series = rng.standard_normal((40, 6, 100), dtype=np.float32)
        np.savez(data / f"{name}.npz", series=series, labels=np.arange(40) % 4)
    return folder / "examples"


def test_quick_test_shows_counts_and_norms_by_part(place: Path) -> None:
    done = run(
        "faststep train configs/mlx/quick_test.yaml", place, "--set", "train.steps=8", "--set", "train.log_every=2"
    )
    for part in ("encoder", "projector", "decoder", "lm_head"):
        assert part in done.stdout
    records = [json.loads(line) for line in (place / "runs/quick_test/log.jsonl").read_text().splitlines()]
    norms: dict[str, Any] = {}
    for record in records:
        norms |= {key: value for key, value in record.get("values", {}).items() if key.startswith("grad_norm/")}
    assert norms.keys() == {"grad_norm/encoder", "grad_norm/projector", "grad_norm/lm_head"}
    assert all(norm > 0 for norm in norms.values())
    rates = [record["learning_rate"] for record in records if record["kind"] == "step"]
    assert rates == sorted(rates)  # warm-up


def test_a_quick_test_resumes_exactly(place: Path) -> None:
    command = next(each for each in commands("time_series.md") if "verify-resume" in each)
    done = run(command, place, "--kills", "2")
    assert "proved" in done.stdout


def test_the_page_leads_to_series_of_a_package(tmp_path: Path) -> None:
    if importlib.util.find_spec("aeon") is None:
        pytest.skip("series that a package ships: pip install --no-deps aeon")
    copy_examples(tmp_path)
    place = tmp_path / "examples"
    prepare, train = (each for each in commands("time_series.md")[2:4])
    assert "that of the nearest series 0.600" in run(prepare, place).stdout
    run(train, place, "--set", "train.steps=100")
    validations = [json.loads(line) for line in (place / "runs/quick_test/log.jsonl").read_text().splitlines()]
    answers = [each["metrics"]["answers"] for each in validations if each["kind"] == "validation"]
    assert answers[-1] > 0.6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("data.train.layout=null", "data.train.layout: [40, 6, 100] with 6 channels is [items, channels, length]"),
        ("model.channels=3", "data.train: expected 3 channels, as the model has, got 6"),
        ("model.decoder.vocab_size=64", "data.train: expected tokens below 64, the model's vocabulary"),
        ("data.train.file=nowhere.npz", "nowhere.npz cannot be read"),
    ],
)
def test_what_does_not_fit_is_refused_before_training(change: str, message: str, place: Path) -> None:
    done = run("faststep train configs/mlx/quick_test.yaml", place, "--set", change, "--set", "run=runs/no", status=2)
    assert message in " ".join(done.stderr.split()), done.stderr
    assert not (place / "runs/no").exists()
