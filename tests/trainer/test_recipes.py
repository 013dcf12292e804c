"""The recipes beside plain MLX: adapters, few bits, freezing, checkpointed gradients, losses, datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from faststep import Step, recipes
from faststep._reach import search
from faststep.data import Loader, Pack, Pad
from faststep.metrics import LossWithMetrics, accuracy
from faststep.recipes._activations import gelu_approx
from mlx.utils import tree_flatten

Arrays = dict[str, mx.array]


def small(layers: int = 2, width: int = 64) -> recipes.GPT:
    """Build a small GPT."""
    mx.random.seed(3)
    return recipes.GPT(layers=layers, width=width, heads=4, context=32)


def flat(tree: Any) -> Arrays:
    """Return a tree's arrays by path, as copies that nothing changes."""
    return {path: mx.array(array) for path, array in tree_flatten(tree)}


def same(one: Arrays, other: Arrays) -> bool:
    """Return whether two trees have the same bits."""
    return one.keys() == other.keys() and all(mx.array_equal(one[path], other[path]).item() for path in one)


def tokens(*shape: int) -> mx.array:
    """Draw some bytes."""
    return mx.random.randint(0, 256, shape)


@pytest.mark.parametrize("name", recipes.LOSSES)
def test_a_step_can_look_through_a_loss(name: str) -> None:
    """So that calls of it can be left out."""
    found = search(recipes.LOSSES[name](), small(), (), 60.0)
    assert found.reason is None


@pytest.mark.parametrize("name", ["next_token", "cross_entropy"])
def test_a_step_can_look_through_metrics(name: str) -> None:
    loss = LossWithMetrics(recipes.LOSSES[name](outputs=True), {"accuracy": accuracy()}, weighted=False)
    assert search(loss, small(), (), 60.0).reason is None


def test_only_adapters_of_a_model_in_four_bits_train() -> None:
    model = small()
    recipes.quantize(model, bits=4, group_size=64)
    recipes.add_lora(model, rank=4, scale=2.0, modules=["*.qkv", "*.down"])
    before, trainable = flat(model.parameters()), flat(model.trainable_parameters())
    assert all(path.rpartition(".")[2] in ("lora_a", "lora_b") for path in trainable)
    sizes = [(64, 192), (256, 64)]  # of qkv and down, in each of two blocks
    assert sum(array.size for array in trainable.values()) == 2 * sum(
        4 * (inputs + outputs) for inputs, outputs in sizes
    )
    assert before["blocks.0.qkv.linear.weight"].dtype == mx.uint32
    step = Step(model, optim.AdamW(1e-2), recipes.next_token(), max_grad_norm=1.0)
    batch = tokens(4, 32)
    losses = [float(step(batch).loss) for _ in range(15)]
    assert losses[-1] < losses[0] - 0.3
    after = flat(model.parameters())
    base = before.keys() - trainable.keys()
    assert same({path: before[path] for path in base}, {path: after[path] for path in base})
    assert not any(mx.array_equal(before[path], after[path]).item() for path in trainable)


@pytest.mark.parametrize("bits", [0, 8])
def test_adapters_change_nothing_at_first_and_fuse_into_the_layer(bits: int) -> None:
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8, bias=False))
    x = mx.random.normal((5, 64))
    if bits:
        recipes.quantize(model, bits, group_size=32)
    expected = model(x)
    recipes.add_lora(model, rank=3, dropout=0.5)
    model.eval()
    assert mx.array_equal(model(x), expected)
    for layer in (model.layers[0], model.layers[2]):
        layer.lora_b = mx.random.normal(layer.lora_b.shape) * 0.1
    adapted = model(x)
    assert not mx.allclose(adapted, expected, atol=0.1)
    by_hand = model.layers[0].linear(x) + 20 * (x @ model.layers[0].lora_a) @ model.layers[0].lora_b
    assert mx.allclose(model.layers[0](x), by_hand, atol=1e-5)
    recipes.fuse(model)
    assert [type(layer) for layer in model.layers] == [nn.Linear, nn.ReLU, nn.Linear]
    assert mx.allclose(model(x), adapted, atol=1e-3)


def test_parts_beside_the_adapters_can_train() -> None:
    model = small()
    recipes.add_lora(model, rank=2, modules=["*.up"], trainable=["norm", "blocks.0", "embedding*"])
    paths = set(flat(model.trainable_parameters()))
    assert {
        "norm.weight",
        "embedding.weight",
        "blocks.0.qkv.weight",
        "blocks.0.up.lora_a",
        "blocks.1.up.lora_b",
    } <= paths
    assert not {"blocks.0.up.linear.weight", "blocks.1.qkv.weight", "positions.weight"} & paths


def test_freezing_by_pattern() -> None:
    model = small()
    recipes.freeze(model, ["embedding*", "blocks.0", "*.down.weight"])
    paths = set(flat(model.trainable_parameters()))
    assert paths == {"positions.weight", "norm.weight"} | {
        f"blocks.1.{name}.weight" for name in ("attention_norm", "qkv", "out", "network_norm", "up")
    }
    with pytest.raises(
        ValueError, match=r"'block' matches no module or parameter; there are blocks\.0\.attention_norm"
    ):
        recipes.freeze(model, ["norm", "block"])


def test_few_bits_by_pattern() -> None:
    model = small()
    recipes.quantize(model, bits=8, group_size=32, modules=["blocks.1"])
    kinds = {path: type(each) for path, each in model.named_modules()}
    assert (kinds["blocks.0.qkv"], kinds["blocks.1.qkv"], kinds["embedding"]) == (
        nn.Linear,
        nn.QuantizedLinear,
        nn.Embedding,
    )
    assert not [path for path in flat(model.trainable_parameters()) if path.endswith(("scales", "biases"))]
    with pytest.raises(
        ValueError, match=r"group_size: expected one that divides the last dimension, got 128 for blocks"
    ):
        recipes.quantize(small(), group_size=128, modules=["blocks.0.qkv"])
    with pytest.raises(ValueError, match="'qkv' matches no module that can be quantized"):
        recipes.quantize(model, modules=["qkv"])


def test_weights_are_loaded_whole_or_not_at_all(tmp_path: Path) -> None:
    model, file = small(), tmp_path / "model.safetensors"
    model.save_weights(str(file))
    other = recipes.GPT(2, 64, 4, 32)
    recipes.load_weights(other, file)
    assert same(flat(other.parameters()), flat(model.parameters()))
    for wrong in (recipes.GPT(3, 64, 4, 32), recipes.GPT(1, 64, 4, 32), recipes.GPT(2, 64, 4, 16)):
        before = flat(wrong.parameters())
        with pytest.raises(ValueError, match="has other weights than the model") as caught:
            recipes.load_weights(wrong, file)
        assert any(
            text in str(caught.value)
            for text in ("lacks blocks.2.", "besides blocks.1.", "is [32, 64], expected [16, 64]")
        )
        assert same(flat(wrong.parameters()), before)
    file.write_bytes(b"not weights at all, but long enough for a header")
    for path in (file, tmp_path / "none.safetensors", tmp_path):
        with pytest.raises(ValueError, match="cannot be read"):
            recipes.load_weights(other, path)


class Noisy(nn.Module):
    """A block with all that a second call could spoil: random numbers, running means."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm, self.dropout = nn.BatchNorm(width), nn.Dropout(0.3)

    def __call__(self, x: mx.array, *, scale: float = 1.0) -> mx.array:
        """Map [batch, width] to the same."""
        return x + scale * self.norm(self.dropout(self.down(nn.gelu(self.up(x)))))


class Shared(nn.Module):
    """Blocks, of which the first is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = [Noisy(16) for _ in range(3)]
        self.first = nn.Linear(16, 16)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 16] to the same."""
        x = self.first(x)
        for block in [*self.blocks, self.blocks[0]]:
            x = block(x, scale=0.5)
        return x


@pytest.mark.parametrize("way", ["eager", "step"])
def test_checkpointed_gradients_have_the_same_bits(way: str) -> None:
    def loss_fn(model: Shared, x: mx.array) -> mx.array:
        return model(x).square().mean()

    def run(checkpointed: bool) -> tuple[Arrays, list[float], list[int]]:
        mx.random.seed(5)
        model, x = Shared(), mx.random.normal((8, 16))
        recipes.freeze(model, ["blocks.1.up"])
        if checkpointed:
            recipes.checkpoint_gradients(model, ["blocks.*"])
            assert isinstance(model.blocks[0], Noisy)
        optimizer = optim.SGD(1e-2)
        step = Step(model, optimizer, loss_fn)
        losses = []
        for _ in range(3):
            if way == "step":
                losses.append(float(step(x).loss))
            else:
                loss, grads = nn.value_and_grad(model, loss_fn)(model, x)
                optimizer.update(model, grads)
                mx.eval(model.parameters(), optimizer.state)
                losses.append(float(loss))
        return flat(model.parameters()), losses, mx.random.state[0].tolist()

    plain, checkpointed = run(False), run(True)
    assert same(plain[0], checkpointed[0])
    assert plain[1:] == checkpointed[1:]


@pytest.mark.slow
def test_checkpointed_gradients_need_less_memory() -> None:
    def peak(checkpointed: bool) -> int:
        mx.random.seed(0)
        model, batch = recipes.GPT(layers=12, width=64, heads=4, context=128), tokens(4, 129)
        if checkpointed:
            recipes.checkpoint_gradients(model, ["blocks.*"])
        mx.eval(model.parameters(), batch)
        held = mx.get_active_memory()
        mx.reset_peak_memory()
        loss, grads = nn.value_and_grad(model, recipes.next_token())(model, batch)
        mx.eval(loss, grads)
        return mx.get_peak_memory() - held

    assert peak(True) < 0.75 * peak(False)


def test_checkpointed_gradients_hold_nothing_between_steps() -> None:
    """A function for the backward pass that kept parameters would keep those of the first step."""

    def held(checkpointed: bool) -> int:
        before = mx.get_active_memory()
        model, batch = small(), tokens(2, 33)
        if checkpointed:
            recipes.checkpoint_gradients(model, ["blocks.*"])
        step = Step(model, optim.SGD(1e-2), recipes.next_token())
        for _ in range(4):
            step(batch)
        step.synchronize()
        return mx.get_active_memory() - before

    plain, checkpointed = held(False), held(True)
    size = sum(each.nbytes for _, each in tree_flatten(small().parameters()))
    assert checkpointed - plain < 0.1 * size


def test_patterns_of_checkpointing_match_something() -> None:
    with pytest.raises(ValueError, match="'block' matches no module"):
        recipes.checkpoint_gradients(small(), ["block"])


def test_next_token_beside_plain_mlx() -> None:
    model, batch = small(), tokens(3, 20)
    logits = model(batch[:, :-1])
    plain = nn.losses.cross_entropy(logits, batch[:, 1:])
    loss, weighted = recipes.next_token(), recipes.next_token(weighted=True)
    chunked = recipes.next_token(weighted=True, in_chunks=True)
    assert loss(model, batch).item() == pytest.approx(plain.mean().item(), rel=1e-6)
    assert loss(model, batch[:, :-1], batch[:, 1:]).item() == loss(model, batch).item()
    mask = mx.arange(20)[None] < mx.array([[20], [5], [1]])
    expected = (plain[0].sum() + plain[1, :4].sum()) / 23
    for given in ({"mask": mask}, {"targets": mask}):  # by name, and in the place where Pad has it
        mean, weight = weighted(model, batch, **given)
        assert (mean.item(), weight.item()) == (pytest.approx(expected.item(), rel=1e-6), 23)
        assert [each.item() for each in chunked(model, batch, **given)] == [pytest.approx(mean.item(), rel=1e-5), 23]
    targets = mx.where(mask[:, 1:], batch[:, 1:], -100)
    assert loss(model, batch[:, :-1], targets).item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss(model, batch[:, :-1], mx.full(targets.shape, -100)).item() == 0


def test_next_token_takes_what_the_loader_gives() -> None:
    model, loss = small(), recipes.next_token(weighted=True)
    texts = [np.array(tokens(length)) for length in (9, 4, 12, 7)]
    alone = [loss(model, mx.array(text)[None]) for text in texts]
    expected = sum(mean.item() * weight.item() for mean, weight in alone) / sum(weight.item() for _, weight in alone)
    for collate, size in ((Pad(multiple=4), 4), (Pack(length=16), 3)):
        (batch,) = Loader(texts, batch_size=size, collate=collate)
        mean, weight = loss(model, **batch) if isinstance(batch, dict) else loss(model, *batch)
        assert mean.item() == pytest.approx(expected, rel=1e-5)
        assert weight.item() == sum(map(len, texts)) - 4


def test_next_token_takes_batches_by_hugging_faces_names() -> None:
    """Labels stand at their own tokens there, and -100 or a mask leaves some out."""
    model, loss, ids = small(), recipes.next_token(weighted=True), tokens(3, 12)
    ours = loss(model, ids)
    assert [each.item() for each in loss(model, input_ids=ids)] == [each.item() for each in ours]
    labels = mx.where(mx.arange(12) < 4, -100, ids)
    mask = (mx.arange(12) < 9)[None] * mx.ones((3, 1), mx.int32)
    found = loss(model, input_ids=ids, labels=labels, attention_mask=mask)
    shifted = mx.where((mx.arange(1, 12) >= 4) & (mx.arange(1, 12) < 9), ids[:, 1:], -100)
    assert [each.item() for each in found] == [each.item() for each in loss(model, ids[:, :-1], shifted)]
    assert found[1].item() == 3 * 5
    left = [mx.roll(each, 3, axis=1) for each in (ids, labels, mask)]  # padded there, which no token is to see
    again = loss(model, input_ids=left[0], labels=left[1], attention_mask=left[2])
    assert [each.item() for each in again] == [each.item() for each in found]
    with pytest.raises(TypeError, match="next_token: expected a batch with tokens or input_ids, got pixels"):
        loss(model, pixels=ids)


def test_other_losses_beside_plain_mlx() -> None:
    model, x = nn.Linear(4, 3), mx.random.normal((5, 4))
    labels, y = mx.array([0, 1, 2, -100, 1]), mx.random.normal((5, 3))
    kept = mx.array([0, 1, 2, 4])
    expected = nn.losses.cross_entropy(model(x)[kept], labels[kept], label_smoothing=0.1, reduction="mean")
    mean, weight = recipes.cross_entropy(weighted=True, label_smoothing=0.1)(model, x, labels)
    assert (mean.item(), weight.item()) == (pytest.approx(expected.item(), rel=1e-6), 4)
    assert recipes.mse()(model, x, y).item() == nn.losses.mse_loss(model(x), y).item()
    huber = recipes.LOSSES["huber_loss"](delta=0.3)(model, x, y)
    assert huber.item() == nn.losses.huber_loss(model(x), y, delta=0.3, reduction="mean").item()


def test_smoothed_labels_and_weights_of_classes() -> None:
    model, batch = small(), tokens(3, 20)
    logits = model(batch[:, :-1])
    smooth = nn.losses.cross_entropy(logits, batch[:, 1:], label_smoothing=0.1, reduction="mean")
    assert recipes.next_token(label_smoothing=0.1)(model, batch).item() == pytest.approx(smooth.item(), rel=1e-6)
    with pytest.raises(ValueError, match="in_chunks: expected no label_smoothing"):
        recipes.next_token(label_smoothing=0.1, in_chunks=True)
    line, x, y = nn.Linear(4, 3), mx.random.normal((5, 4)), mx.array([0, 1, 2, -100, 1])
    counts = mx.array([0.5, 2.0, 3.0])[mx.array([0, 1, 2, 1])]
    losses = nn.losses.cross_entropy(line(x)[mx.array([0, 1, 2, 4])], mx.array([0, 1, 2, 1]))
    loss = recipes.cross_entropy(weighted=True, class_weights=[0.5, 2.0, 3.0])
    mean, weight = loss(line, x, y)
    assert mean.item() == pytest.approx(((losses * counts).sum() / counts.sum()).item(), rel=1e-6)
    assert weight.item() == 7.5
    step = Step(line, optim.SGD(0.1), recipes.cross_entropy(class_weights=[0.5, 2.0, 3.0]))
    assert step(x, y).loss.item() == pytest.approx(mean.item(), rel=1e-6)
    with pytest.raises(ValueError, match="class_weights: expected 3, one for each class, got 2"):
        recipes.cross_entropy(class_weights=[1.0, 2.0])(line, x, y)


def test_one_cycle_rises_and_falls() -> None:
    """By the formula of PyTorch's OneCycleLR, of max_lr 1: cosines from step 0 to 2, and on to 9."""
    expected = [0.04, 0.52, 1.0, 0.950485, 0.811746, 0.611262, 0.388742, 0.188258, 0.049519, 4e-06]
    schedule = recipes.one_cycle(1.0, 10)
    assert [schedule(mx.array(step)).item() for step in range(10)] == pytest.approx(expected, abs=2e-6)
    assert schedule(mx.array(50)).item() == pytest.approx(4e-6)
    for steps, share in ((1, 0.3), (9, 1.0)):
        with pytest.raises(ValueError, match="steps: expected 2 or more and a share"):
            recipes.one_cycle(1.0, steps, share=share)


def test_gelu_is_that_of_mlx() -> None:
    x = mx.concatenate([mx.linspace(-9, 9, 2001), mx.array([-1e4, -30.0, 30.0, 1e4])])

    def both(gelu: Any) -> Any:
        return mx.value_and_grad(lambda x: gelu(x).sum())(x)[1], gelu(x)

    for got, wanted in zip(both(gelu_approx), both(nn.gelu_approx), strict=True):
        assert mx.allclose(got, wanted, rtol=1e-6, atol=2e-6)
    assert gelu_approx(x.astype(mx.bfloat16)).dtype == mx.bfloat16


def test_windows_of_bytes(tmp_path: Path) -> None:
    for i in range(8):
        (tmp_path / f"{i}.txt").write_bytes(bytes([i]) * 10)
    train, held_out = (recipes.Bytes(tmp_path, context=4, split=split, every=4) for split in ("train", "held_out"))
    assert (sorted(set(train.data.tolist())), sorted(set(held_out.data.tolist()))) == ([0, 1, 3, 4, 5, 7], [2, 6])
    (tmp_path / "0.txt").write_bytes(bytes(range(12)))
    windows = recipes.Bytes([tmp_path / "0.txt"], context=4, stride=3, split="all")
    assert [(x.tolist(), y.tolist()) for x, y in windows] == [
        ([0, 1, 2, 3], [1, 2, 3, 4]),
        ([3, 4, 5, 6], [4, 5, 6, 7]),
        ([6, 7, 8, 9], [7, 8, 9, 10]),
    ]
    assert len(recipes.Bytes(tmp_path / "[12].txt", context=4, split="all").data) == 20
    library = recipes.Bytes(split="held_out")
    assert len(library) > 100
    assert (library[0][0].dtype, library[0][0].shape) == (np.int32, (64,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "context: expected a number from 1 on, got 0"),
        ({"stride": -1}, "stride: expected a number from 1 on"),
        ({"every": 1}, "every: expected a number from 2 on"),
        ({"files": Path("none/*")}, "files: expected files, .* matches none"),
        ({"context": 100, "split": "all"}, "context: expected files of more than 100 bytes, got 3 bytes"),
        ({}, "files: expected 11 or more to hold one out, got 1"),
    ],
)
def test_windows_that_cannot_be(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    (tmp_path / "a.txt").write_bytes(b"abc")
    with pytest.raises(ValueError, match=message):
        recipes.Bytes(**{"files": tmp_path / "a.txt", **options})


def test_rows_of_arrays(tmp_path: Path) -> None:
    x, y = np.arange(12.0, dtype=np.float32).reshape(6, 2), np.arange(6)
    np.savez(tmp_path / "a.npz", x=x, y=y)
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"y": mx.array(y), "x": mx.array(x).astype(mx.bfloat16)})
    for file in ("a.npz", "a.safetensors"):
        rows = recipes.Arrays(tmp_path / file, start=1, stop=5)
        assert len(rows) == 4
        assert [each.tolist() for each in rows[0]] == [[2.0, 3.0], 1]
    assert recipes.Arrays(tmp_path / "a.npz", names=["y"])[3][0] == 3
    np.savez(tmp_path / "b.npz", x=x, y=y[:3])
    (tmp_path / "c.npz").write_bytes(b"PK nothing")
    np.savez(tmp_path / "e.npz", x=x[:0], y=y[:0])
    for file, options, message in (
        ("a.npz", {"names": ["z"]}, r"has no z; there are x, y"),
        ("b.npz", {}, "expected arrays of one length"),
        ("a.npz", {"start": 6}, "expected rows from 6"),
        ("e.npz", {}, "expected at least one item"),
        ("c.npz", {}, "cannot be read"),
        ("d.npz", {}, "cannot be read"),
        ("d.safetensors", {}, "cannot be read"),
    ):
        with pytest.raises(ValueError, match=message):
            recipes.Arrays(tmp_path / file, **options)


def test_schedules_start_slowly() -> None:
    decay = optim.cosine_decay(1.0, 10, 0.1)
    schedule = recipes.warm_up(decay, 4, init=0.2)
    values = [schedule(mx.array(step)).item() for step in range(10)]
    assert values[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert values[4:] == pytest.approx([decay(mx.array(step)).item() for step in range(6)])
    assert [recipes.constant(0.3)(mx.array(step)).item() for step in (0, 1, 7)] == pytest.approx([0.3] * 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: recipes.GPT(2, 30, 4), "width: expected a multiple of heads"),
        (lambda: recipes.GPT(0, 32, 4), "layers: expected a number from 1 on, got 0"),
        (lambda: recipes.MLP([3]), "sizes: expected two or more"),
    ],
)
def test_models_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
