"""The plan of a step of a 7B model in 4 bits, made of its shapes alone."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest

pytest.importorskip("mlx_lm", reason="mlx-lm needs Python 3.11")

from faststep import Step
from faststep.mlx_lm import Lora
from faststep.mlx_lm._lora import adapt
from faststep.recipes import checkpoint_gradients, next_token
from mlx_lm.models import llama

LLAMA_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
    "vocab_size": 32000,
    "tie_word_embeddings": False,
}


@pytest.mark.skipif(mx.default_device().type == mx.gpu, reason="the plan of a GPU is an estimate")
def test_a_step_of_7b_in_four_bits_takes_less_than_6_gb() -> None:
    model = llama.Model(llama.ModelArgs.from_dict(LLAMA_7B))
    model.set_dtype(mx.bfloat16)
    nn.quantize(model, 64, 4)
    adapt(model, Lora(rank=8))
    checkpoint_gradients(model, ["model.layers.*"])
    step = Step(model, optim.AdamW(1e-4), next_token(weighted=True), weighted=True, max_grad_norm=1.0)
    before = mx.get_active_memory()
    plan = step.memory_plan(mx.zeros((1, 513), dtype=mx.int32))
    assert 3.7e9 < plan.others < 3.9e9
    assert plan.peak < 6e9, str(plan)
    assert mx.get_active_memory() - before < 1e6  # nothing was computed
