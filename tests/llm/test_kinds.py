"""Steps of the kinds of models that mlx-lm's users train, whole, with adapters and over few bits, beside plain MLX."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep import Step
from faststep.mlx_lm import Lora
from faststep.mlx_lm._lora import adapt
from faststep.recipes import checkpoint_gradients, next_token
from mlx.utils import tree_flatten
from support.language_models import KINDS, new_model

STEPS = 3
RATE = 1e-2
CALLED = {"qwen3_moe": "sum_gradients", "mamba2": "default_device"}  # by what their code reads


def batches(count: int = STEPS) -> list[mx.array]:
    rng = np.random.default_rng(0)
    return [mx.array(rng.integers(0, 256, (2, 17)).astype(np.int32)) for _ in range(count)]


def made(kind: str, way: str) -> nn.Module:
    model = new_model(kind)
    if way == "few bits":
        nn.quantize(model, 32, 4, class_predicate=lambda _, each: isinstance(each, nn.Linear))
    if way != "whole":
        mx.random.seed(3)
        adapt(model, Lora(rank=2, dropout=0.0), dora=way == "dora")
        for number, (_, each) in enumerate(model.named_modules()):
            if "lora_b" in each:  # that are zero at first, and the gradients of the others with them
                each.lora_b = 0.1 * mx.random.normal(each.lora_b.shape, key=mx.random.key(number))
    if way == "checkpointed":
        blocks = {id(each) for each in model.layers}
        checkpoint_gradients(model, [name for name, each in model.named_modules() if id(each) in blocks])
    mx.eval(model.parameters())
    return model


def plain_losses(model: nn.Module, loss: Any) -> list[float]:
    optimizer, losses = optim.SGD(RATE), []
    for tokens in batches():
        value, grads = nn.value_and_grad(model, loss)(model, tokens)
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        losses.append(float(value))
    return losses


@pytest.mark.usefixtures("own_quantized_products")
@pytest.mark.parametrize("way", ["whole", "lora", "dora", "few bits", "checkpointed"])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_those_of_plain_mlx(kind: str, way: str) -> None:
    if way == "dora" and kind in ("qwen3_moe", "mixtral"):
        with pytest.raises(ValueError, match="dora: SwitchLinear doesn't support DoRA yet"):
            made(kind, way)
        return
    expected, model, loss = made(kind, way), made(kind, way), next_token()
    losses = plain_losses(expected, loss)
    step = Step(model, optim.SGD(RATE), loss)
    found = [float(step(tokens).loss) for tokens in batches()]
    reason = "gradients of its own" if way == "checkpointed" else CALLED.get(kind)
    assert step.stats.mode == ("called" if reason else "native")
    assert reason is None or reason in str(step.stats.reason)
    assert found == pytest.approx(losses, rel=2e-5)
    before = dict(tree_flatten(made(kind, way).trainable_parameters()))
    wanted = dict(tree_flatten(expected.trainable_parameters()))
    for name, array in tree_flatten(model.trainable_parameters()):
        change = mx.abs(wanted[name] - before[name]).max().item()
        assert mx.abs(array - wanted[name]).max().item() <= 2e-3 * change + 1e-7, name


@pytest.mark.usefixtures("own_quantized_products")
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])  # MLX's CPU multiplies experts in float32 only
def test_half_precision_over_few_bits(kind: str) -> None:
    """As most models are: bfloat16, of which products are rounded otherwise in another order."""
    models = []
    for _ in range(2):
        model = new_model(kind)
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, 32, 4, class_predicate=lambda _, each: isinstance(each, nn.Linear))
        mx.random.seed(3)
        adapt(model, Lora(rank=2))
        models.append(model)
    losses = plain_losses(models[0], next_token())
    step = Step(models[1], optim.SGD(RATE), next_token())
    assert [float(step(tokens).loss) for tokens in batches()] == pytest.approx(losses, rel=5e-3)
    assert step.stats.mode == "native"
    found = {name.rpartition(".")[2]: each.dtype for name, each in tree_flatten(models[1].trainable_parameters())}
    assert found == {"lora_a": mx.float32, "lora_b": mx.float32}


@pytest.mark.parametrize("kind", KINDS)
def test_losses_in_chunks_find_the_head(kind: str) -> None:
    model, (tokens,) = new_model(kind), batches(1)
    plain, chunked = (nn.value_and_grad(model, next_token(in_chunks=each)) for each in (False, True))
    (expected, grads), (found, same) = plain(model, tokens), chunked(model, tokens)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    same = dict(tree_flatten(same))
    for name, array in tree_flatten(grads):
        assert mx.allclose(same[name], array, rtol=1e-3, atol=1e-6), name


def test_losses_in_chunks_take_heads_of_few_bits_and_biases() -> None:
    model, (tokens,) = new_model("qwen3"), batches(1)
    model.lm_head = nn.Linear(64, 256, bias=True)
    nn.quantize(model, 32, 8)
    expected, found = (next_token(in_chunks=each)(model, tokens).item() for each in (False, True))
    assert found == pytest.approx(expected, rel=1e-4)


def test_models_whose_logits_are_needed_whole_are_refused() -> None:
    (tokens,) = batches(1)

    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lm_head = nn.Embedding(256, 8), nn.Linear(8, 256)

        def __call__(self, tokens: mx.array) -> mx.array:
            return mx.tanh(self.lm_head(self.embedding(tokens)))

    with pytest.raises(ValueError, match="in_chunks: 'Capped' changes its logits after its last layer"):
        next_token(in_chunks=True)(Capped(), tokens)
    adapted = new_model("qwen3")
    adapt(adapted, Lora(keys=["lm_head"]))
    with pytest.raises(ValueError, match=r"in_chunks: expected 'qwen3' to have .*, found a LoRALinear"):
        next_token(in_chunks=True)(adapted, tokens)
