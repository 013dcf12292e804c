"""The models, losses and options whose memory is planned and measured: large enough that their arrays are the peak."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


def mlp(width: int, hidden: int, batch: int, dtype: mx.Dtype = mx.float32) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make an MLP with three hidden layers and a batch for it."""
    sizes = [width, hidden, hidden, hidden, 16]
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    model.set_dtype(dtype)
    return model, (mx.random.normal((batch, width)).astype(dtype), mx.random.randint(0, 16, (batch,)))


def one_linear(width: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make one large layer and a batch for it: the update is most of a step."""
    return nn.Linear(width, width), (mx.random.normal((batch, width)),)


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


class Block(nn.Module):
    """A norm and two layers, whose activations are computed once more for the gradient."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        return self.down(nn.silu(self.up(self.norm(x))))

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, width] to [batch, width]."""
        return nn.utils.checkpoint(self, self.forward)(x)


def blocks(layers: int, width: int, hidden: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make blocks that are checkpointed, and a batch for them."""
    model = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
    return model, (mx.random.normal((batch, width)), mx.random.randint(0, width, (batch,)))


class Residual(nn.Module):
    """Two convolutions with batch norm, and what goes past them (He et al., 2016)."""

    def __init__(self, channels: int, to: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, to, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(to, to, 3, padding=1, bias=False)
        self.norms = [nn.BatchNorm(to), nn.BatchNorm(to)]
        self.past = nn.Conv2d(channels, to, 1, stride=stride, bias=False) if channels != to else None

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, channels] to [batch, height / stride, width / stride, to]."""
        y = self.norms[1](self.second(nn.relu(self.norms[0](self.first(x)))))
        return nn.relu(y + (self.past(x) if self.past else x))


class Resnet20(nn.Module):
    """Residual blocks for images of 32 x 32."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [(16, 16, 1)] * 3 + [(16, 32, 2), (32, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm(16), nn.ReLU())
        self.blocks = nn.Sequential(*(Residual(*size) for size in sizes))
        self.head = nn.Linear(64, 10)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 32, 32, 3] to logits [batch, 10]."""
        return self.head(self.blocks(self.stem(x)).mean(axis=(1, 2)))


def resnet20(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a residual network and a batch for it."""
    return Resnet20(), (mx.random.normal((batch, 32, 32, 3)), mx.random.randint(0, 10, (batch,)))


class Images(nn.Module):
    """Convolutions and what comes after each of them, ending in logits (mlx-examples' cifar) where there is a head."""

    def __init__(self, *layers: Callable[[mx.array], mx.array], head: nn.Module | None = None) -> None:
        super().__init__()
        self.layers, self.head = list(layers), head

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, channels] to images, or to logits [batch, 10]."""
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(1)) if self.head else x


def images(batch: int, size: int, channels: int) -> mx.array:
    """Draw images."""
    return mx.random.normal((batch, size, size, channels))


def one_convolution(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a single convolution and a batch for it: what it unfolds is most of its memory."""
    model = Images(nn.Conv2d(16, 32, 3, padding=1), nn.relu, nn.AvgPool2d(32), head=nn.Linear(32, 10))
    return model, (images(batch, 32, 16), mx.random.randint(0, 10, (batch,)))


def small_cifar(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make convolutions with pooling and a batch for them."""
    sizes = [3, 16, 32, 32]
    layers = [(nn.Conv2d(*pair, 3, padding=1), nn.relu, nn.MaxPool2d(2, 2)) for pair in itertools.pairwise(sizes)]
    model = Images(*itertools.chain(*layers), head=nn.Linear(512, 10))
    return model, (images(batch, 32, 3), mx.random.randint(0, 10, (batch,)))


def autoencoder(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make an autoencoder with transposed convolutions and a batch for it."""
    down = [nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.relu, nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.relu]
    up = [nn.ConvTranspose2d(32, 16, 4, stride=2, padding=1), nn.relu]
    return Images(*down, *up, nn.ConvTranspose2d(16, 1, 4, stride=2, padding=1)), (images(batch, 28, 1),)


class Variational(nn.Module):
    """Images encoded as normal distributions, and decoded by upsampling and convolutions (Kingma & Welling, 2014)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        down = [nn.Conv2d(*pair, 3, stride=2, padding=1) for pair in itertools.pairwise([1, width, 2 * width])]
        up = [nn.Conv2d(*pair, 3, padding=1) for pair in itertools.pairwise([2 * width, width, 1])]
        norms = [nn.BatchNorm(width), nn.BatchNorm(2 * width)]
        self.down, self.norms, self.up, self.norm = down, norms, up, nn.BatchNorm(width)
        self.coded, self.decoded = nn.Linear(512 * width, 16), nn.Linear(8, 512 * width)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 64, 64, 1] to the same, by way of 8 normal numbers."""
        for convolution, norm in zip(self.down, self.norms, strict=True):
            x = nn.leaky_relu(norm(convolution(x)))
        mean, spread = self.coded(x.flatten(1)).split(2, axis=1)
        z = self.decoded(mean + mx.exp(spread) * mx.random.normal(mean.shape))
        x = self.norm(self.up[0](self.enlarged(z.reshape(-1, 16, 16, z.shape[1] // 256))))
        return mx.sigmoid(self.up[1](self.enlarged(nn.leaky_relu(x))))

    @staticmethod
    def enlarged(x: mx.array) -> mx.array:
        """Map [batch, height, width, channels] to twice the height and width."""
        batch, height, width, channels = x.shape
        x = mx.broadcast_to(x[:, :, None, :, None], (batch, height, 2, width, 2, channels))
        return x.reshape(batch, 2 * height, 2 * width, channels)


def variational(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a variational autoencoder and a batch for it."""
    return Variational(16), (images(batch, 64, 1),)


class Unet(nn.Module):
    """Convolutions at two sizes, of which the larger goes past the smaller one (Ronneberger et al., 2015)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        sizes = [(1, width), (width, 2 * width), (2 * width, width)]
        self.blocks = [[nn.Conv2d(*pair, 3, padding=1), nn.GroupNorm(4, pair[1])] for pair in sizes]
        self.up, self.out = nn.ConvTranspose2d(2 * width, width, 2, stride=2), nn.Conv2d(width, 1, 1)
        self.smaller = nn.MaxPool2d(2, 2)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, height, width, 1] to the same."""
        past = self.block(0, x)
        x = self.up(self.block(1, self.smaller(past)))
        return self.out(self.block(2, mx.concatenate([x, past], axis=-1)))

    def block(self, number: int, x: mx.array) -> mx.array:
        """Apply a convolution, its norm, ReLU."""
        convolution, norm = self.blocks[number]
        return nn.relu(norm(convolution(x)))


def unet(batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a U-Net and a batch for it."""
    return Unet(16), (images(batch, 64, 1),)


class Experts(nn.Module):
    """Layers of experts, two for each token: a weight's gradient is a sum of products, one for each of its tokens."""

    def __init__(self, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.layers = [mx.random.normal((experts, width, width)) / width**0.5 for _ in range(layers)]
        self.routers = [nn.Linear(width, experts, bias=False) for _ in range(layers)]
        self.head = nn.Linear(width, 256)

    def __call__(self, tokens: mx.array) -> mx.array:
        x = self.embedding(tokens)
        for weight, router in zip(self.layers, self.routers, strict=True):
            scores = mx.softmax(router(x), axis=-1)
            chosen = mx.stop_gradient(mx.argpartition(-scores, kth=1, axis=-1)[..., :2])
            out = mx.gather_mm(x[..., None, None, :], weight, rhs_indices=chosen).squeeze(-2)
            x = x + nn.silu(out * mx.take_along_axis(scores, chosen, axis=-1)[..., None]).sum(-2)
        return self.head(x)


def experts(width: int, layers: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Return such a model with 4 experts a layer and tokens."""
    tokens = mx.random.randint(0, 256, (batch, 12))
    return Experts(width, layers, 4), (tokens, tokens)


class Sides(nn.Module):
    """Sums of a large table's rows, twice: a sparse net."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(rows, width)
        self.head = nn.Linear(2 * width, 256)

    def __call__(self, rows: mx.array) -> mx.array:
        sides = [self.table(rows[:, side]).sum(1) for side in (0, 1)]
        return self.head(mx.clip(mx.concatenate(sides, axis=-1), 0, 1))


def sides(rows: int, width: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Return such a model and 30 rows for each side of a position."""
    return Sides(rows, width), (mx.random.randint(0, rows, (batch, 2, 30)), mx.random.randint(0, 256, (batch,)))


class Keywords(nn.Module):
    """Normed after attention and MLP, over the frames of a word: the keyword transformer (Berg et al., 2021)."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.frames, self.positions = nn.Linear(40, width), mx.random.normal((1, 98, width))
        self.blocks = nn.TransformerEncoder(layers, width, 1, mlp_dims=4 * width, norm_first=False)
        self.head = nn.Linear(width, 35)

    def __call__(self, x: mx.array) -> mx.array:
        """Map [batch, 98, 40] to logits [batch, 35]."""
        x = self.frames(x) + self.positions
        return self.head(self.blocks(x, None).mean(axis=1))


def keywords(width: int, layers: int, batch: int) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """Make a keyword transformer and a batch for it."""
    return Keywords(width, layers), (mx.random.normal((batch, 98, 40)), mx.random.randint(0, 35, (batch,)))


def cross_entropy(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Return the mean loss."""
    return nn.losses.cross_entropy(model(x).astype(mx.float32), y, reduction="mean")


def reconstruction(model: nn.Module, x: mx.array) -> mx.array:
    """Return the mean squared error of what a model makes of images."""
    return nn.losses.mse_loss(model(x), x)


def squares(model: nn.Module, x: mx.array) -> mx.array:
    """Return the mean square of what a model makes of numbers."""
    return mx.square(model(x)).mean()


def checkpointed(model: nn.Module, x: mx.array, y: mx.array) -> mx.array:
    """Compute the model's activations once more for the gradient."""
    return nn.losses.cross_entropy(nn.utils.checkpoint(model)(x), y, reduction="mean")


ADAMW = "optim.AdamW(1e-3)"
GPT6 = "transformer(256, 384, 6, (2, 32))"
BLOCKS = "blocks(8, 128, 512, 1024)"  # small tensors, and large activations that are computed twice
GPT3 = "transformer(256, 128, 3, (2, 32))"  # matrices of which some share buffers, and some do not
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
    "gpt-3x128-muon": (GPT3, "optim.Muon(1e-3)", "cross_entropy", ""),
    "gpt-3x128-adafactor": (GPT3, "optim.Adafactor(1e-3)", "cross_entropy", "max_grad_norm=1.0"),
    "gpt-3x128-adafactor-accumulate": (GPT3, "optim.Adafactor(1e-3)", "cross_entropy", "accumulate=2"),
    "gpt-checkpoint-adafactor-accumulate": (
        "transformer(256, 128, 3, (2, 32), checkpoint=True)",
        "optim.Adafactor(1e-3)",
        "cross_entropy",
        "accumulate=4",
    ),
    "one-linear": ("one_linear(1024, 64)", ADAMW, "squares", ""),
    "one-linear-allow": ("one_linear(1024, 64)", ADAMW, "squares", "nonfinite='allow'"),
    "one-linear-codes": ("one_linear(1024, 64)", ADAMW, "squares", "state_bits=8"),
    "mlp-4x512-codes": ("mlp(512, 512, 64)", ADAMW, "cross_entropy", "state_bits=8, max_grad_norm=1.0"),
    "one-linear-lion": ("one_linear(1024, 64)", "optim.Lion(1e-4)", "squares", "accumulate=2"),
    "one-linear-adafactor": ("one_linear(1024, 64)", "optim.Adafactor(1e-3)", "squares", "accumulate=2"),
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
    "gpt-24x64-raise": (GPT24, ADAMW, "cross_entropy", "nonfinite='raise'"),
    "gpt-24x64-accumulate": (GPT24, ADAMW, "cross_entropy", "accumulate=4"),
    "gpt-bfloat16": ("transformer(256, 128, 2, (16, 64), dtype=mx.bfloat16)", ADAMW, "cross_entropy", ""),
    "gpt-dropout": ("transformer(256, 128, 2, (16, 64), dropout=0.1)", "optim.Adam(1e-3)", "cross_entropy", ""),
    "gpt-checkpoint": ("transformer(256, 128, 3, (16, 128), checkpoint=True)", ADAMW, "cross_entropy", ""),
    "blocks": (BLOCKS, "optim.SGD(1e-2)", "cross_entropy", ""),
    "resnet20": ("resnet20(8)", ADAMW, "cross_entropy", ""),
    "one-convolution": ("one_convolution(16)", "optim.SGD(1e-2)", "cross_entropy", ""),
    "cifar": ("small_cifar(16)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
    "autoencoder": ("autoencoder(16)", ADAMW, "reconstruction", ""),
    "variational": ("variational(4)", ADAMW, "reconstruction", ""),
    "unet": ("unet(2)", ADAMW, "reconstruction", "in_flight=1"),
    "keywords": ("keywords(64, 6, 8)", "optim.SGD(1e-2)", "cross_entropy", "max_grad_norm=1.0"),
    "gpt-tied": ("transformer(16000, 128, 1, (2, 64), head=False)", "optim.Lion(1e-4)", "cross_entropy", ""),
    "lora": ("adapted(1024, 4, 256)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
    "lora-quantized": ("quantized(1024, 4, 256)", ADAMW, "cross_entropy", "max_grad_norm=1.0"),
}
