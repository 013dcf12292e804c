"""Models of the measured cases, in plain MLX; each draws its own batches."""

from __future__ import annotations

import functools
import itertools

import mlx.core as mx
import mlx.nn as nn
import numpy as np

Batch = tuple[np.ndarray, np.ndarray]
CLASSES = 10


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.layers = [nn.Linear(width, width) for _ in range(layers - 1)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, width] to logits, float32 [batch, 10]."""
        for layer in self.layers:
            x = nn.relu(layer(x))
        return self.head(x)

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, width: int, **_: int) -> Batch:
        """Draw float32 [batch, width] and classes, int32 [batch]."""
        x = rng.standard_normal((batch, width), dtype=np.float32)
        return x, rng.integers(CLASSES, size=batch, dtype=np.int32)


class GPT(nn.Module):
    """MLX's own encoder with a causal mask; 24 layers of it make 293 tensors."""

    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(seq, width)
        self.blocks = nn.TransformerEncoder(layers, width, num_heads=heads, norm_first=True)
        self.head = nn.Linear(width, vocab, bias=False)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab] in the dtype of the parameters."""
        x = self.tokens(tokens) + self.positions(mx.arange(tokens.shape[1]))
        return self.head(self.blocks(x, "causal"))  # the mask for which MLX's GPU attention has a kernel

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, seq: int, vocab: int, **_: int) -> Batch:
        """Draw tokens, int32 [batch, seq], and those one later."""
        tokens = rng.integers(vocab, size=(batch, seq + 1), dtype=np.int32)
        return tokens[:, :-1], tokens[:, 1:]


class Block(nn.Module):
    """A norm, and two linear layers with SiLU between them."""

    def __init__(self, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        y: mx.array = self.down(nn.silu(self.up(self.norm(x))))
        return y


class Checkpointed(nn.Module):
    """Blocks whose activations are computed once more for the gradient: small tensors, large activations."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks = [Block(width) for _ in range(layers)]
        self.head = nn.Linear(width, CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, width] to logits, float32 [batch, 10]."""
        for block in self.blocks:
            x = nn.utils.checkpoint(block)(x)
        return self.head(x)

    draw = staticmethod(MLP.draw)


class Convolution(nn.Module):
    """A convolution with 3 x 3 weights, and batch norm."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm = nn.BatchNorm(outputs)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, inputs] to [batch, height / stride, width / stride, outputs]."""
        y: mx.array = self.norm(self.conv(x))
        return y


class Residual(nn.Module):
    """Two convolutions around which the input goes, every second pixel of it and more channels where they say so."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stride, self.channels = outputs // inputs, outputs - inputs
        self.first, self.second = Convolution(inputs, outputs, self.stride), Convolution(outputs, outputs)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, inputs] to [batch, height / stride, width / stride, outputs]."""
        y = self.second(nn.relu(self.first(x)))
        x = mx.pad(x[:, :: self.stride, :: self.stride], [(0, 0)] * 3 + [(0, self.channels)])
        return nn.relu(x + y)


class ResNet(nn.Module):
    """The residual network for images of 32 x 32 (He et al., 2016, 4.2): 3 times 3 blocks make ResNet-20."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        widths = [width, *(width << stage for stage in range(3) for _ in range(blocks))]
        self.stem = Convolution(3, width)
        self.blocks = [Residual(*pair) for pair in itertools.pairwise(widths)]
        self.head = nn.Linear(widths[-1], CLASSES)

    def __call__(self, x: mx.array) -> mx.array:
        """Map float32 [batch, 32, 32, 3] to logits, float32 [batch, 10]."""
        x = nn.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((1, 2)))

    @staticmethod
    def draw(rng: np.random.Generator, batch: int, **_: int) -> Batch:
        """Draw float32 [batch, 32, 32, 3] and classes, int32 [batch]."""
        x = rng.standard_normal((batch, 32, 32, 3), dtype=np.float32)
        return x, rng.integers(CLASSES, size=batch, dtype=np.int32)


class Recurrent(nn.Module):
    """A language model of LSTMs."""

    def __init__(self, layers: int, width: int, seq: int, vocab: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = nn.Embedding(vocab, width)
        self.layers = [nn.LSTM(width, width) for _ in range(layers)]
        self.head = nn.Linear(width, vocab)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, float32 [batch, seq, vocab]."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x, _ = layer(x)
        return self.head(x)

    draw = staticmethod(GPT.draw)


class Attention(nn.Module):
    """Causal attention with rotary positions; several heads share keys and values."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.size = width // heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, width // shared, bias=False) for _ in range(2))
        self.rope = nn.RoPE(self.size)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to the same."""
        q, k, v = (
            layer(x).reshape(*x.shape[:2], -1, self.size).swapaxes(1, 2) for layer in (self.query, self.key, self.value)
        )
        y = mx.fast.scaled_dot_product_attention(self.rope(q), self.rope(k), v, scale=self.size**-0.5, mask="causal")
        y = self.out(y.swapaxes(1, 2).flatten(2))
        return y


class SwiGLU(nn.Module):
    """Two linear layers, the first of them gated."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., width] to the same."""
        y: mx.array = self.down(nn.silu(self.gate(x)) * self.up(x))
        return y


class Experts(nn.Module):
    """Many of ``SwiGLU``; each token goes to two of them. Tokens are sorted by expert, as in mlx-lm's ``SwitchGLU``."""

    def __init__(self, width: int, hidden: int, experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.router = nn.Linear(width, experts, bias=False)
        self.gate, self.up = (mx.random.normal((experts, hidden, width), scale=width**-0.5) for _ in range(2))
        self.down = mx.random.normal((experts, width, hidden), scale=hidden**-0.5)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to the same."""
        scores = mx.softmax(self.router(x), axis=-1).flatten(0, 1)
        chosen = mx.argpartition(-mx.stop_gradient(scores), 1, axis=-1)[:, :2]
        order = mx.argsort(chosen.flatten())
        y = x.flatten(0, 1)[order // 2][:, None]
        multiply = functools.partial(mx.gather_mm, rhs_indices=chosen.flatten()[order], sorted_indices=True)
        gate, up, down = (weight.swapaxes(1, 2) for weight in (self.gate, self.up, self.down))
        y = multiply(nn.silu(multiply(y, gate)) * multiply(y, up), down)
        y = y[mx.argsort(order)].reshape(*chosen.shape, -1) * mx.take_along_axis(scores, chosen, axis=-1)[..., None]
        return y.sum(1).reshape(x.shape)


class Decoder(nn.Module):
    """A layer of ``Llama``."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int, experts: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.attention = Attention(width, heads, shared)
        self.mlp = Experts(width, hidden, experts) if experts else SwiGLU(width, hidden)
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to the same."""
        x = x + self.attention(self.before_attention(x))
        y: mx.array = self.mlp(self.before_mlp(x))
        return x + y


class Llama(nn.Module):
    """A small one, with tied embeddings: `shared` heads for each key; `experts`: in each layer, 0 for none."""

    def __init__(
        self, layers: int, width: int, heads: int, shared: int, hidden: int, seq: int, vocab: int, experts: int = 0
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tokens = nn.Embedding(vocab, width)
        self.layers = [Decoder(width, heads, shared, hidden, experts) for _ in range(layers)]
        self.norm = nn.RMSNorm(width)

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens, int32 [batch, seq], to logits, [batch, seq, vocab]."""
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.tokens.as_linear(self.norm(x))

    draw = staticmethod(GPT.draw)


class Adapted(nn.Module):
    """A layer in 4 bits with an adapter of low rank, which alone trains."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        outputs, inputs = layer.weight.shape
        self.linear = nn.QuantizedLinear.from_linear(layer, group_size=64, bits=4)
        self.down = 0.02 * mx.random.normal((inputs, rank))
        self.up = 0.02 * mx.random.normal((rank, outputs))
        self.freeze(keys=["weight", "scales", "biases"])

    def __call__(self, x: mx.array) -> mx.array:
        """Map [..., inputs] to [..., outputs]."""
        y: mx.array = self.linear(x)
        return y + (x @ self.down) @ self.up


class QLoRA(Llama):
    """``Llama``, all of it frozen but the adapters."""

    def __init__(self, rank: int, **shape: int) -> None:
        super().__init__(**shape)
        self.freeze()
        for layer in self.layers:
            for part in (layer.attention, layer.mlp):
                part.update_modules(
                    {name: Adapted(each, rank) for name, each in part.children().items() if name != "rope"}
                )
