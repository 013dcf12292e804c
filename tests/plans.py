"""The models, losses and options whose memory is planned and measured: large enough that their arrays are the peak."""

from __future__ import annotations

import itertools

import mlx.core as mx
import mlx.nn as nn


def mlp(width: int, hidden: int, batch: int, dtype: mx.Dtype = mx.float32) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make an MLP with three hidden layers and a batch for it."""
    sizes = [width, hidden, hidden, hidden, 16]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    model.set_dtype(dtype)
    return model, (mx.random.normal((batch, width)).astype(dtype), mx.random.randint(0, 16, (batch,)))


class Convolutions(nn.Module):
    """Convolutions with batch norm and strides."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        sizes = [3, channels, 2 * channels, 4 * channels]
        self.convolutions = [
            nn.Conv2d(*pair, kernel_size=3, stride=1 + (pair[0] > 3), padding=1, bias=False)
            for pair in itertools.pairwise(sizes)
        ]
        self.norms = [nn.BatchNorm(size) for size in sizes[1:]]
        self.head = nn.Linear(sizes[-1], 16)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, 3] to logits [batch, 16]."""
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = nn.relu(norm(convolution(x)))
        return self.head(x.mean(axis=(1, 2)))


def convolutions(channels: int, batch: int, size: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a network of convolutions and a batch for it."""
    return Convolutions(channels), (mx.random.normal((batch, size, size, 3)), mx.random.randint(0, 16, (batch,)))


class Transformer(nn.Module):
    """A masked encoder over tokens, whose output is its embedding where no head is asked for."""

    def __init__(self, vocabulary: int, dims: int, layers: int, head: bool, dropout: float, checkpoint: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dims)
        self.blocks = nn.TransformerEncoder(
            layers, dims, 4, mlp_dims=4 * dims, dropout=dropout, norm_first=True, checkpoint=checkpoint
        )
        self.head = nn.Linear(dims, vocabulary, bias=False) if head else None

    def __call__(self, tokens: mx.array) -> mx.array:
        """Map tokens [batch, seq] to logits [batch, seq, vocabulary]."""
        x = self.embedding(tokens)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1], x.dtype)
        x = self.blocks(x, mask)
        return self.head(x) if self.head else self.embedding.as_linear(x)


def transformer(
    vocabulary: int,
    dims: int,
    layers: int,
    batch: tuple[int, int],
    *,
    head: bool = True,
    dropout: float = 0.0,
    checkpoint: bool = False,
    dtype: mx.Dtype = mx.float32,
) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a transformer and a batch for it."""
    model = Transformer(vocabulary, dims, layers, head, dropout, checkpoint)
    model.set_dtype(dtype)
    return model, (mx.random.randint(0, vocabulary, batch), mx.random.randint(0, vocabulary, batch))


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width)
        self.down, self.up = mx.random.normal((width, 8)), mx.zeros((8, width))
        self.base.freeze()

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        return nn.relu(self.base(x) + (x @ self.down) @ self.up)


def adapted(width: int, layers: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a frozen network with adapters and a batch for it."""
    model = nn.Sequential(*(Adapted(width) for _ in range(layers)))
    return model, (mx.random.normal((batch, width)), mx.random.randint(0, width, (batch,)))


def quantized(width: int, layers: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make one whose frozen weights are quantized."""
    model, data = adapted(width, layers, batch)
    nn.quantize(model, group_size=64, bits=4)
    return model, data


class Recurrent(nn.Module):
    """An LSTM over a sequence."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.cell = nn.LSTM(width, hidden)
        self.head = nn.Linear(hidden, 16)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, seq, width] to logits [batch, 16]."""
        hidden, _ = self.cell(x)
        return self.head(hidden[:, -1])


def recurrent(width: int, hidden: int, batch: tuple[int, int]) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make an LSTM and a batch for it."""
    return Recurrent(width, hidden), (mx.random.normal((*batch, width)), mx.random.randint(0, 16, batch[:1]))


def cross_entropy(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean loss."""
    return nn.losses.cross_entropy(model(x).astype(mx.float32), y, reduction="mean")


def checkpointed(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Compute the model's activations once more for the gradient."""
    return nn.losses.cross_entropy(nn.utils.checkpoint(model)(x), y, reduction="mean")


ADAMW = "optim.AdamW(1e-3)"
GPT6 = "transformer(256, 384, 6, (2, 32))"
GPT24 = "transformer(256, 64, 24, (1, 16))"
# by name: model and batch, optimizer, loss, options; all of them code for a process of their own
CASES: dict[str, tuple[str, str, str, str]] = {
    "mlp-4x128": ("mlp(128, 128, 64)", ADAMW, "cross_entropy", ""),
    "mlp-4x128-clip": ("mlp(128, 128, 64)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
    "mlp-4x512": ("mlp(512, 512, 64)", ADAMW, "cross_entropy", ""),
    "mlp-4x512-clip-value": ("mlp(512, 512, 64)", ADAMW, "cross_entropy", "max_grad_norm=1.0, max_grad_value=0.1"),
    "mlp-4x512-accumulate": ("mlp(512, 512, 64)", ADAMW, "cross_entropy", "accumulate=4"),
    "mlp-4x512-average": ("mlp(512, 512, 64)", "optim.SGD(1e-2)", "cross_entropy", "ema_decay=0.99"),
    "mlp-4x512-raise": ("mlp(512, 512, 64)", ADAMW, "cross_entropy", "nonfinite='raise'"),
    "mlp-momentum": ("mlp(256, 1024, 256)", "optim.SGD(1e-2, momentum=0.9)", "cross_entropy", "nonfinite='allow'"),
    "mlp-large-tensors": ("mlp(2048, 2304, 64)", "optim.SGD(1e-2)", "cross_entropy", ""),
    "mlp-large-batch": ("mlp(128, 256, 8192)", "optim.Adam(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-adafactor": ("mlp(512, 1024, 1024)", "optim.Adafactor()", "cross_entropy", ""),
    "mlp-plain": ("mlp(512, 1024, 1024)", ADAMW, "cross_entropy", "compile=False"),
    "mlp-checkpoint": ("mlp(128, 256, 8192)", ADAMW, "checkpointed", ""),
    "mlp-muon-accumulate": ("mlp(256, 1024, 512)", "optim.Muon(1e-3)", "cross_entropy", "accumulate=2"),
    "mlp-own-optimizer": ("mlp(256, 1024, 512)", "SignedDescent(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "mlp-mixed": ("mlp(256, 512, 512)", "optim.Adam(1e-3)", "cross_entropy", "compute_dtype=mx.bfloat16"),
    "mlp-masters": (
        "mlp(256, 512, 512, mx.float16)",
        ADAMW,
        "cross_entropy",
        "compute_dtype=mx.float16, accumulate=2, ema_decay=0.9",
    ),
    "convolutions": ("convolutions(16, 16, 32)", "optim.Adam(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "lstm": ("recurrent(32, 64, (16, 32))", ADAMW, "cross_entropy", ""),
    "lstm-accumulate": ("recurrent(32, 64, (16, 32))", ADAMW, "cross_entropy", "accumulate=4, max_grad_norm=1.0"),
    "gpt-6x384": (GPT6, ADAMW, "cross_entropy", ""),
    "gpt-6x384-accumulate": (GPT6, "optim.SGD(1e-2)", "cross_entropy", "accumulate=4, max_grad_norm=1.0"),
    "gpt-24x64": (GPT24, ADAMW, "cross_entropy", ""),
    "gpt-24x64-clip": (GPT24, ADAMW, "cross_entropy", "max_grad_norm=1.0"),
    "gpt-24x64-accumulate": (GPT24, ADAMW, "cross_entropy", "accumulate=4"),
    "gpt-bfloat16": ("transformer(256, 128, 2, (16, 64), dtype=mx.bfloat16)", ADAMW, "cross_entropy", ""),
    "gpt-dropout": ("transformer(256, 128, 2, (16, 64), dropout=0.1)", "optim.Adam(1e-3)", "cross_entropy", ""),
    "gpt-checkpoint": ("transformer(256, 128, 3, (16, 128), checkpoint=True)", ADAMW, "cross_entropy", ""),
    "gpt-tied": ("transformer(16000, 128, 1, (2, 64), head=False)", "optim.Lion(1e-4)", "cross_entropy", ""),
    "lora": ("adapted(1024, 4, 256)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
    "lora-quantized": ("quantized(1024, 4, 256)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
}
