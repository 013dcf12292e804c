"""The encoders beside `transformers` and PyTorch: hidden states, loss and gradients of the same weights and texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from faststep import recipes
from faststep.data import Pack, Pad
from faststep.recipes.encoders._parts import attend, attend_near, in_blocks, near
from mlx.utils import tree_flatten
from support.encoder_cases import BERT, CASES, LENGTHS, MODERNBERT, Case, texts, weight
from support.places import TESTS

REFERENCE = TESTS / "recipes" / "encoders.npz"  # made by tests/support/encoder_reference.py
CLOSE = 1e-4


@pytest.fixture(scope="module")
def reference() -> dict[str, np.ndarray]:
    with np.load(REFERENCE, allow_pickle=False) as arrays:
        return dict(arrays)


def folder_of(name: str, reference: dict[str, np.ndarray], folder: Path) -> Path:
    """Write the folder of a case: the config.json and the names of weights that transformers wrote."""
    case, names = CASES[name], json.loads(str(reference[f"{name}/names"]))
    (folder / "config.json").write_text(str(reference[f"{name}/config"]), encoding="utf-8")
    shapes = {key.split("gradient ")[1]: each.shape for key, each in reference.items() if f"{name}/gradient" in key}
    assert shapes.keys() >= set(names), case
    weights = {each: mx.array(weight(each, shapes[each])) for each in names}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return folder


def load(name: str, reference: dict[str, np.ndarray], folder: Path) -> nn.Module:
    """Load the model of a case."""
    case: Case = CASES[name]
    head = "masked_lm" if case.classes is None else "classification"
    model = recipes.MODELS[case.recipe](folder_of(name, reference, folder), head=head)
    model.eval()
    return model


def loss_of(case: Case) -> Any:
    return recipes.masked_lm() if case.classes is None else recipes.text_classification()


@pytest.mark.parametrize("name", CASES)
def test_hidden_states_loss_and_gradients(name: str, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    case, model = CASES[name], load(name, reference, tmp_path)
    batch = {key: mx.array(each) for key, each in texts(case).items()}
    expected = {key.split("/")[1]: each for key, each in reference.items() if key.startswith(f"{name}/")}
    hidden = model.model if case.recipe == "modernbert" else model.bert
    places = (None,) if case.recipe == "modernbert" else (None, None)
    states = np.array(hidden(batch["tokens"], batch["mask"], *places))
    real = texts(case)["mask"]
    assert np.abs(states - expected["hidden"])[real].max() < CLOSE
    outputs = np.array(model(batch["tokens"], batch["mask"]))
    shown = real if case.classes is None else np.full(len(real), True)
    assert np.abs(outputs - expected["logits"])[shown].max() < CLOSE

    def loss_fn(model: nn.Module) -> mx.array:
        return loss_of(case)(model, **batch)[0]

    loss, gradients = nn.value_and_grad(model, loss_fn)(model)
    assert abs(loss.item() - expected["loss"]) < CLOSE
    found = dict(tree_flatten(gradients))
    theirs = {key.split("gradient ")[1]: each for key, each in expected.items() if key.startswith("gradient")}
    assert found.keys() | {"decoder.weight"} >= theirs.keys(), theirs.keys() - found.keys()
    for key in theirs.keys() & found.keys():
        assert np.abs(np.array(found[key]) - theirs[key]).max() < CLOSE, key


@pytest.mark.parametrize("name", ["modernbert", "bert"])
def test_packed_texts_see_what_they_see_alone(name: str, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    model, batch = load(name, reference, tmp_path), texts(CASES[name])
    alone = [batch["tokens"][i, :length] for i, length in enumerate(LENGTHS)]
    wanted = {len(each): np.array(model(mx.array(each[None]))[0]) for each in alone}
    packed = Pack(length=32, targets=False)([{"tokens": each.astype(np.int32)} for each in alone])
    logits, segments = np.array(model(**packed)), np.array(packed["segments"])
    found = [logits[row][segments[row] == number] for row in range(2) for number in (1, 2) if number in segments[row]]
    assert sorted(map(len, found)) == sorted(LENGTHS)
    assert (segments.max(axis=1) > 1).any()
    for each in found:
        assert np.abs(each - wanted[len(each)]).max() < CLOSE


def test_local_layers_see_half_a_window_to_each_side() -> None:
    config = MODERNBERT | {"num_hidden_layers": 2, "layer_types": ["sliding_attention"] * 2, "num_attention_heads": 1}
    model = recipes.modernbert(config=config)
    tokens = mx.arange(24)[None]
    changed = mx.where(mx.arange(24) == 12, 40, tokens)
    moved = mx.abs(model.hidden(tokens) - model.hidden(changed)).max(axis=-1)[0]
    seen = [place for place in range(24) if moved[place].item() > 0]
    assert seen == list(range(12 - 2 * 4, 12 + 2 * 4 + 1))  # two layers, four tokens each


def local_scores(real: np.ndarray, reach: int) -> np.ndarray:
    """Return who sees whom, bool [batch, seq, seq], by the numbers of texts [batch, seq]; 0 is padding."""
    places = np.arange(real.shape[1])
    close = np.abs(places[:, None] - places) <= reach
    return (close & (real[:, :, None] == real[:, None])) | np.eye(len(places), dtype=bool)


@pytest.mark.parametrize("seq", [61, 64], ids=str)
@pytest.mark.parametrize("kind", ["alone", "padded", "packed"])
def test_local_attention_in_blocks_is_that_of_all_scores(kind: str, seq: int) -> None:
    reach = 4
    assert in_blocks(seq, reach)
    numbers = np.ones((2, seq), np.int32)
    if kind != "alone":
        numbers[0, 40:], numbers[1, 7:] = (0, 0) if kind == "padded" else (3, 2)
    given = {"mask": mx.array(numbers > 0) if kind == "padded" else None}
    given["segments"] = mx.array(numbers) if kind == "packed" else None
    q, k, v, weights = (mx.random.normal((2, 3, seq, 8), key=mx.random.key(i)) for i in range(4))
    real = mx.array(numbers > 0)[:, None, :, None]  # what padding gives is nobody's
    all_scores = mx.array(local_scores(numbers, reach))[:, None]
    mask = near(seq, reach, **given)
    assert mask is not None

    def total(way: Any) -> Any:
        def weigh(*qkv: mx.array) -> mx.array:
            mixed = way(*qkv).reshape(2, seq, 3, 8).transpose(0, 2, 1, 3)
            return (mixed * weights * real).sum()

        return mx.value_and_grad(weigh, argnums=(0, 1, 2))(q, k, v)

    loss, gradients = total(lambda *qkv: attend_near(*qkv, mask, reach, 0.0))
    wanted, same = total(lambda *qkv: attend(*qkv, all_scores, 0.0))
    assert loss.item() == pytest.approx(wanted.item(), abs=1e-4)
    for got, want in zip(gradients, same, strict=True):
        assert mx.allclose(got, want, atol=1e-5)


def test_local_attention_of_long_rows_holds_no_full_scores() -> None:
    seq, config = 2048, MODERNBERT | {"num_hidden_layers": 2, "max_position_embeddings": 2048}
    model = recipes.modernbert(config=config | {"layer_types": ["sliding_attention"] * 2})
    tokens = mx.arange(seq)[None] % 48

    def loss(model: nn.Module) -> mx.array:
        return model.hidden(tokens).square().mean()

    mx.eval(model.parameters())
    mx.reset_peak_memory()
    mx.eval(nn.value_and_grad(model, loss)(model))
    assert mx.get_peak_memory() < 2 * seq * seq * 4  # of both heads of one layer


def test_padding_changes_nothing(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = load("modernbert, mean and biases", reference, tmp_path)
    items = [np.arange(3, 3 + length).astype(np.int32) for length in (5, 11, 20)]
    tokens, mask, _ = Pad(multiple=32)(items)
    wanted = mx.concatenate([model(mx.array(each)[None]) for each in items])
    assert mx.allclose(model(tokens, mask), wanted, atol=1e-5)


def test_dropout_is_drawn_in_training_alone() -> None:
    model = recipes.bert(config=BERT, head="classification", classes=2)
    tokens = mx.arange(10)[None]
    assert not mx.array_equal(model(tokens), model(tokens))
    model.eval()
    assert mx.array_equal(model(tokens), model(tokens))


def test_chunks_of_logits_give_the_same_loss(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    model = load("modernbert", reference, tmp_path)
    batch = {key: mx.array(each) for key, each in texts(CASES["modernbert"]).items()}
    whole, count, measured = recipes.masked_lm(weighted=True)(model, **batch)
    chunked, same = recipes.masked_lm(weighted=True, in_chunks=True)(model, **batch)
    assert chunked.item() == pytest.approx(whole.item(), rel=1e-5)
    assert count.item() == same.item() == (texts(CASES["modernbert"])["targets"] >= 0).sum()
    assert 0 <= measured["accuracy"].item() <= 1


def change(folder: Path, **keys: Any) -> None:
    """Change keys of a folder's config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


def rewrite(folder: Path, gone: str = "", more: str = "") -> None:
    """Take a weight out of a folder's file, or put one in."""
    file = folder / "model.safetensors"
    weights: Any = mx.load(str(file))
    weights = {name: mx.array(np.array(each)) for name, each in weights.items() if name != gone}
    mx.save_safetensors(str(file), weights | ({more: mx.zeros(3)} if more else {}))


MLM = "modernbert"
BAD_FOLDERS: dict[str, tuple[Any, str]] = {
    "nothing": (lambda folder: (folder / "config.json").unlink(), r"config\.json cannot be read"),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        r"expected model\.safetensors in .*, found none",
    ),
    "torn": (lambda folder: (folder / "model.safetensors").write_bytes(b"torn"), r"model\.safetensors cannot be read"),
    "other kind": (
        lambda folder: change(folder, model_type="roberta"),
        r"expected a model of type modernbert, .*'roberta'",
    ),
    "unknown key": (lambda folder: change(folder, alibi=True), r"has 'alibi', which is unknown here"),
    "activation": (
        lambda folder: change(folder, hidden_activation="swish9"),
        r"expected an activation of .*, got 'swish9'",
    ),
    "scaled positions": (
        lambda folder: change(folder, rope_parameters={"full_attention": {"rope_type": "yarn"}}),
        r"expected rope_type default for full_attention, got 'yarn'",
    ),
    "missing": (
        lambda folder: rewrite(folder, gone="model.layers.1.attn.Wo.weight"),
        r"it lacks model\.layers\.1\.attn\.Wo\.weight$",
    ),
    "left over": (
        lambda folder: rewrite(folder, more="model.layers.9.norm"),
        r"it has besides model\.layers\.9\.norm$",
    ),
    "shape": (lambda folder: change(folder, vocab_size=50), r"of other shapes .*is \[48, 16\], expected \[50, 16\]"),
}


@pytest.mark.parametrize("case", BAD_FOLDERS)
def test_a_folder_that_does_not_fit_is_refused(case: str, reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    harm, message = BAD_FOLDERS[case]
    folder = folder_of(MLM, reference, tmp_path)
    recipes.modernbert(folder)
    harm(folder)
    with pytest.raises(ValueError, match=message):
        recipes.modernbert(folder)


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"got 'hiden_size', which is unknown here: did you mean 'hidden_size'\?"):
        recipes.modernbert(config={"hiden_size": 4})
    with pytest.raises(ValueError, match=r"expected hidden_size to be a multiple of twice num_attention_heads \(2\)"):
        recipes.modernbert(config=MODERNBERT | {"hidden_size": 18})
    with pytest.raises(ValueError, match=r"classes: expected none for the head masked_lm"):
        recipes.modernbert(config=MODERNBERT, classes=2)
    with pytest.raises(ValueError, match=r"classes: expected a number from 2 on for head: classification, got None"):
        recipes.bert(config=BERT, head="classification")
    model = recipes.modernbert(config=MODERNBERT)
    with pytest.raises(ValueError, match=r"tokens: expected sequences of at most 32, got 40"):
        model(mx.zeros((1, 40), mx.int32))


def test_a_new_head_over_loaded_weights(reference: dict[str, np.ndarray], tmp_path: Path) -> None:
    folder = folder_of(MLM, reference, tmp_path)
    model = recipes.modernbert(folder, head="classification", classes=5)
    own = dict(tree_flatten(model.parameters()))
    assert own["classifier.weight"].shape == (5, 16)
    for name in ("model.layers.2.mlp.Wi.weight", "head.dense.weight"):
        assert np.array_equal(np.array(own[name]), weight(name, own[name].shape))
    with pytest.raises(ValueError, match=r"of other shapes classifier\.weight is \[3, 16\], expected \[5, 16\]"):
        recipes.modernbert(folder_of("modernbert, classes", reference, tmp_path), head="classification", classes=5)


def test_a_token_out_of_range_is_no_silent_number() -> None:
    model = recipes.modernbert(config=MODERNBERT)
    assert mx.isnan(model(mx.array([[1, 48, 2]]))).any()
