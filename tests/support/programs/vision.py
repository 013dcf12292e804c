"""Networks for images and sounds: residual blocks with BatchNorm, a transformer over frames, a denoiser."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.parts import BATCHES, Losses, Make, follow, integers, normals

SIDE, CLASSES, BATCH, FRAMES, BANDS, TIMES = 16, 10, 8, 24, 20, 100


def cross_entropy(model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, mx.array]:
    """Return the mean cross entropy, in nats, and the share of right answers."""
    logits = model(x)
    return nn.losses.cross_entropy(logits, y, reduction="mean"), (logits.argmax(axis=-1) == y).mean()


class Residual(nn.Module):
    """Two convolutions with BatchNorm and a shortcut (He et al., 2015)."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = [nn.BatchNorm(outputs), nn.BatchNorm(outputs)]
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False) if stride > 1 else None

    def __call__(self, x: mx.array) -> mx.array:
        y = self.norms[1](self.second(nn.relu(self.norms[0](self.first(x)))))
        return nn.relu(y + (x if self.shortcut is None else self.shortcut(x)))


class ResidualNetwork:
    """A small ResNet on images, with its accuracy beside the loss."""

    def __init__(self, make: Make, width: int) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
                self.norm = nn.BatchNorm(width)
                self.blocks = [Residual(width, width, 1), Residual(width, 2 * width, 2)]
                self.head = nn.Linear(2 * width, CLASSES)

            def __call__(self, x: mx.array) -> mx.array:
                x = nn.relu(self.norm(self.stem(x)))
                for block in self.blocks:
                    x = block(x)
                return self.head(x.mean(axis=(1, 2)))

        model = Model()
        self.models = [model]
        self.learn = make(model, optim.SGD(0.02, momentum=0.9), cross_entropy)
        self.batches = list(zip(normals(BATCH, SIDE, SIDE, 3), integers(CLASSES, BATCH), strict=True))

    def round(self, number: int) -> Losses:
        return list(self.learn(*self.batches[number % BATCHES]))


class KeywordTransformer:
    """A transformer over the frames of a spectrogram (Berg et al., 2021), its learning rate warmed up by hand."""

    def __init__(self, make: Make, width: int) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.embed = nn.Linear(BANDS, width)
                self.token = mx.random.normal((1, 1, width)) * 0.02
                self.positions = mx.random.normal((1, FRAMES + 1, width)) * 0.02
                self.blocks = nn.TransformerEncoder(2, width, num_heads=4, mlp_dims=2 * width, dropout=0.1)
                self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, CLASSES))

            def __call__(self, x: mx.array) -> mx.array:
                x = self.embed(x)
                token = mx.broadcast_to(self.token, (len(x), 1, x.shape[-1]))
                x = mx.concatenate([token, x], axis=1) + self.positions
                return self.head(self.blocks(x, None)[:, 0])

        model = Model()
        self.models, self.optimizer = [model], optim.AdamW(1e-3, weight_decay=0.1)
        self.learn = make(model, self.optimizer, cross_entropy)
        self.batches = list(zip(normals(BATCH, FRAMES, BANDS), integers(CLASSES, BATCH), strict=True))

    def round(self, number: int) -> Losses:
        self.optimizer.learning_rate = 1e-3 * min(1.0, (number + 1) / 5)
        return list(self.learn(*self.batches[number % BATCHES]))


class Denoiser(nn.Module):
    """Convolutions that are told the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.SinusoidalPositionalEncoding(16), nn.Linear(16, width), nn.SiLU())
        self.convolutions = [nn.Conv2d(i, o, 3, padding=1) for i, o in ((1, width), (width, width), (width, 1))]
        self.norm = nn.GroupNorm(4, width)

    def __call__(self, x: mx.array, time: mx.array) -> mx.array:
        x = nn.silu(self.norm(self.convolutions[0](x))) + self.time(time)[:, None, None, :]
        return self.convolutions[2](nn.silu(self.convolutions[1](x)))


class Diffusion:
    """DDPM (Ho et al., 2020) with averaged weights; the loss is made anew at every step, around what was drawn."""

    def __init__(self, make: Make, width: int) -> None:
        self.model, self.average = Denoiser(width), Denoiser(width)
        self.average.update(self.model.parameters())
        self.models = [self.model, self.average]
        self.kept = mx.cumprod(1 - mx.linspace(1e-4, 0.02, TIMES))  # of the signal, by time
        self.make, self.optimizer = make, optim.Adam(1e-3)
        self.images = normals(BATCH, SIDE, SIDE, 1)

    def round(self, number: int) -> Losses:
        model, image = self.model, self.images[number % BATCHES]
        time, noise = mx.random.randint(0, TIMES, (BATCH,)), mx.random.normal(image.shape)
        kept = self.kept[time][:, None, None, None]
        noisy = mx.sqrt(kept) * image + mx.sqrt(1 - kept) * noise

        def loss(model: nn.Module) -> mx.array:
            return (model(noisy, time) - noise).square().mean()

        taken = self.make(model, self.optimizer, loss)()
        follow(self.average, model, 0.1)
        return [taken]
