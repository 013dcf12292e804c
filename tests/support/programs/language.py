"""Language models: LoRA with checkpointing, preferences against a reference, experts, a recurrent one."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from support.programs.parts import BATCHES, Losses, Make, integers

VOCABULARY, SEQ, BATCH, LAYERS, HEADS = 128, 24, 4, 2, 4


class Attention(nn.Module):
    """Causal attention with rotary positions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.rope = nn.RoPE(width // HEADS)

    def __call__(self, x: mx.array) -> mx.array:
        heads = (each(x).reshape(*x.shape[:2], HEADS, -1).transpose(0, 2, 1, 3) for each in self.projections())
        queries, keys, values = heads
        out = mx.fast.scaled_dot_product_attention(
            self.rope(queries), self.rope(keys), values, scale=queries.shape[-1] ** -0.5, mask="causal"
        )
        return self.o_proj(out.transpose(0, 2, 1, 3).reshape(x.shape))

    def projections(self) -> list[nn.Module]:
        return [self.q_proj, self.k_proj, self.v_proj]


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(2 * width, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        return self.down_proj(nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Experts(nn.Module):
    """A router and experts in stacked matrices, of which each token takes two (Shazeer et al., 2017)."""

    def __init__(self, width: int, activation: nn.Module, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.up = mx.random.normal((count, 2 * width, width)) * width**-0.5
        self.down = mx.random.normal((count, width, 2 * width)) * (2 * width) ** -0.5
        self.activation = activation

    def __call__(self, x: mx.array) -> mx.array:
        gates = mx.softmax(self.router(x), axis=-1)
        chosen = mx.stop_gradient(mx.argpartition(-gates, kth=1, axis=-1)[..., :2])
        weights = mx.take_along_axis(gates, chosen, axis=-1)
        hidden = mx.gather_mm(x[..., None, None, :], self.up.swapaxes(-1, -2), rhs_indices=chosen)
        out = mx.gather_mm(self.activation(hidden), self.down.swapaxes(-1, -2), rhs_indices=chosen)
        return (out.squeeze(-2) * weights[..., None]).sum(axis=-2)


class Block(nn.Module):
    """Attention and what follows it, each behind a norm."""

    def __init__(self, width: int, feed_forward: nn.Module) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(width), feed_forward
        self.norms = [nn.RMSNorm(width), nn.RMSNorm(width)]

    def __call__(self, x: mx.array) -> mx.array:
        x = x + self.self_attn(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Llama(nn.Module):
    """A decoder whose embedding is the output too; `checkpointed` blocks are computed again for the gradient."""

    def __init__(self, width: int, experts: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        activation = nn.SiLU()  # one object for all experts
        parts = [Experts(width, activation) if experts else FeedForward(width) for _ in range(LAYERS)]
        self.layers = [Block(width, part) for part in parts]
        self.norm = nn.RMSNorm(width)
        self.checkpointed = False

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = nn.utils.checkpoint(layer)(x) if self.checkpointed else layer(x)
        return self.embed.as_linear(self.norm(x))


class LoRA(nn.Module):
    """A linear layer and a trainable difference of low rank, behind a dropout (Hu et al., 2021)."""

    def __init__(self, linear: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.linear, self.dropout, self.scale = linear, nn.Dropout(0.05), 2.0
        self.lora_a = mx.random.normal((inputs, rank)) * inputs**-0.5
        self.lora_b = mx.zeros((rank, outputs))

    def __call__(self, x: mx.array) -> mx.array:
        return self.linear(x) + self.scale * (self.dropout(x) @ self.lora_a @ self.lora_b)


def with_lora(model: Llama) -> Llama:
    """Freeze the model, and give the projections of its attention what is trained."""
    model.freeze()
    for layer in model.layers:
        attention = layer.self_attn
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            attention[name] = LoRA(attention[name])
    return model


def loss_over_lengths(model: nn.Module, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """Return the mean cross entropy over what is no padding, in nats, and the number of those tokens."""
    mask = mx.arange(1, tokens.shape[1]) < lengths[:, None]
    each = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * mask
    count = mask.sum()
    return each.sum() / count, count


class FineTuning:
    """LoRA with dropout on a small Llama, every block checkpointed."""

    experts, lora = False, True

    def __init__(self, make: Make, width: int) -> None:
        model = Llama(width, self.experts)
        if self.lora:
            with_lora(model).checkpointed = True
        self.models = [model]
        self.learn = make(model, optim.AdamW(1e-3), loss_over_lengths)
        lengths = [mx.array([SEQ - i, SEQ, SEQ - 2 * i, SEQ]) for i in range(BATCHES)]
        self.batches = list(zip(integers(VOCABULARY, BATCH, SEQ), lengths, strict=True))

    def round(self, number: int) -> Losses:
        loss, tokens = self.learn(*self.batches[number % BATCHES])
        return [loss, tokens]


class MixtureOfExperts(FineTuning):
    """A model with routed experts that is trained as a whole."""

    experts, lora = True, False


class Recurrent(nn.Module):
    """A GRU over tokens (Cho et al., 2014)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(VOCABULARY, width), nn.GRU(width, width)
        self.out = nn.Linear(width, VOCABULARY)

    def __call__(self, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
        states = self.gru(self.embed(tokens), hidden=hidden)
        return self.out(states), states[:, -1]


class TruncatedBackpropagation:
    """A recurrent model whose state is an argument, comes back behind the loss, and goes into the next step."""

    def __init__(self, make: Make, width: int) -> None:
        model = Recurrent(width)
        self.models, self.hidden = [model], mx.zeros((BATCH, width))

        def loss(model: nn.Module, tokens: mx.array, hidden: mx.array) -> tuple[mx.array, mx.array]:
            logits, hidden = model(tokens[:, :-1], hidden)
            return nn.losses.cross_entropy(logits, tokens[:, 1:], reduction="mean"), mx.stop_gradient(hidden)

        self.learn = make(model, optim.Adam(1e-3), loss, max_grad_norm=1.0)
        self.batches = integers(VOCABULARY, BATCH, 2 * SEQ)

    def round(self, number: int) -> Losses:
        loss, self.hidden = self.learn(self.batches[number % BATCHES], self.hidden)
        return [loss, self.hidden.square().mean()]


@dataclass
class Preference:
    """Settings of direct preference optimization; changed on the way."""

    beta: float = 0.1
    kind: str = "sigmoid"


class DirectPreference:
    """DPO (Rafailov et al., 2023): a LoRA against a frozen reference, which is brought up to date at intervals."""

    def __init__(self, make: Make, width: int) -> None:
        policy, reference = Llama(width), Llama(width)
        reference.update(tree_map(mx.array, policy.parameters()))
        reference.freeze()
        with_lora(policy)
        self.policy, self.reference, self.told = policy, reference, Preference()
        self.models = [policy, reference]

        def score(model: nn.Module, tokens: mx.array) -> mx.array:
            return -nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).sum(axis=-1)

        def loss(policy: nn.Module, chosen: mx.array, rejected: mx.array) -> tuple[mx.array, mx.array]:
            gains = [score(policy, tokens) - score(reference, tokens) for tokens in (chosen, rejected)]
            margin = self.told.beta * (gains[0] - gains[1])
            each = -nn.log_sigmoid(margin) if self.told.kind == "sigmoid" else nn.relu(1 - margin)
            return each.mean(), (margin > 0).mean()

        self.learn = make(policy, optim.Adam(1e-3), loss)
        drawn = (integers(VOCABULARY, BATCH, SEQ, seed=seed) for seed in (1, 2))
        self.batches = list(zip(*drawn, strict=True))

    def round(self, number: int) -> Losses:
        loss, right = self.learn(*self.batches[number % BATCHES])
        if number == 2:  # the reference moves
            self.reference.embed.weight = 0.9 * self.reference.embed.weight
            self.told.beta = 0.2
        if number == 4:
            self.told.kind = "hinge"
        return [loss, right]
