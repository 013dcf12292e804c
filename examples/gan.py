"""A GAN on eight Gaussians in a ring: two models with an optimizer each, each a constant of the other's loss.

The losses are methods that reach the other model by ``self`` and draw their noise from ``mx.random``; one of them
differentiates inside (the penalty on the discriminator's slope at real points, https://arxiv.org/abs/1801.04406). Both
steps are the same call::

    fast_step(discriminator, optimizer, loss_fn, real)

First the same rounds run in plain MLX and with ``fast_step``: the numbers agree. Then it trains, and
its points are held against those of one Gaussian with the data's mean and covariance.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
import time
from collections.abc import Callable, Iterator

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    import numpy as np
    from mlx.utils import tree_map
    from side_by_side import compare_rounds, fast
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train]' (cuda13 for cpu on a GPU)")

MODES, SPREAD, NOISE, BATCH = 8, 0.05, 8, 256
SLOPE, KEPT = 0.1, 0.99  # weight of the penalty; of the average of the generator's weights
MAX_GRAD_NORM = 10.0
Make = Callable[[nn.Module, optim.Optimizer, Callable[..., mx.array], float], Callable[..., mx.array]]


def leaky(x: mx.array) -> mx.array:
    """Return x, a fifth of it below 0; those of ``mlx.nn`` are compiled, and have no second derivative."""
    return mx.maximum(x, 0.2 * x)


def softplus(x: mx.array) -> mx.array:
    """Return log(1 + exp(x))."""
    return mx.logaddexp(x, 0)


def network(*sizes: int) -> nn.Sequential:
    """Make linear layers with an activation between them."""
    layers: list[Callable[[mx.array], mx.array]] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), leaky]
    return nn.Sequential(*layers[:-1])


class Gan:
    """Generator, discriminator, and their steps.

    Args:
        make: Makes a step of model, optimizer, loss function and norm to clip to.
    """

    def __init__(self, make: Make) -> None:
        mx.random.seed(0)
        self.generator, self.discriminator = network(NOISE, 64, 64, 2), network(2, 64, 64, 1)
        self.average = tree_map(mx.array, self.generator.parameters())
        adam = [optim.Adam(1e-3, betas=[0.5, 0.99]) for _ in range(2)]
        self.judge = make(self.discriminator, adam[0], self.discriminator_loss, MAX_GRAD_NORM)
        self.forge = make(self.generator, adam[1], self.generator_loss, MAX_GRAD_NORM)

    def discriminator_loss(self, discriminator: nn.Module, real: mx.array) -> mx.array:
        """Return how badly real points are told from false ones, real: float32 [batch, 2]."""
        false = mx.stop_gradient(self.draw(real.shape[0]))
        slopes = mx.grad(lambda x: discriminator(x).sum())(real)
        loss = softplus(-discriminator(real)).mean() + softplus(discriminator(false)).mean()
        return loss + SLOPE / 2 * slopes.square().sum(axis=-1).mean()

    def generator_loss(self, _: nn.Module) -> mx.array:
        """Return how badly the discriminator is deceived."""
        return softplus(-self.discriminator(self.draw(BATCH))).mean()

    def draw(self, count: int) -> mx.array:
        """Draw points of the generator, float32 [count, 2]."""
        return self.generator(mx.random.normal((count, NOISE)))

    def round(self, real: mx.array) -> list[mx.array]:
        """Take a step of each; return their losses."""
        losses = [self.judge(real), self.forge()]
        now = self.generator.parameters()
        self.average = tree_map(lambda old, new: KEPT * old + (1 - KEPT) * new, self.average, now)
        mx.eval(self.average)
        return losses


def centres() -> np.ndarray:
    """Return the middles of the Gaussians, [8, 2]."""
    angles = 2 * math.pi / MODES * np.arange(MODES)
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def points(count: int, rng: np.random.Generator) -> np.ndarray:
    """Draw points of the data, float32 [count, 2]."""
    chosen = centres()[rng.integers(MODES, size=count)]
    return (chosen + SPREAD * rng.standard_normal((count, 2))).astype(np.float32)


def batches(seed: int = 0) -> Iterator[mx.array]:
    """Yield batches of the data for ever, float32 [256, 2]."""
    rng = np.random.default_rng(seed)
    while True:
        yield mx.array(points(BATCH, rng))


def found(drawn: np.ndarray) -> tuple[float, int]:
    """Return the share of points within four standard deviations of a Gaussian, and how many Gaussians are found.

    One is found where it has a quarter of the points that it ought to have.
    """
    distances = np.linalg.norm(drawn[:, None] - centres(), axis=-1)
    near = distances.min(axis=1) < 4 * SPREAD
    counts = np.bincount(distances.argmin(axis=1)[near], minlength=MODES)
    return float(near.mean()), int((counts > len(drawn) / MODES / 4).sum())


def baseline(count: int = 4000) -> tuple[float, int]:
    """Return what a Gaussian with the data's mean and covariance finds."""
    rng = np.random.default_rng(1)
    data = points(count, rng)
    return found(rng.multivariate_normal(data.mean(axis=0), np.cov(data.T), count))


def main() -> None:
    """Compare, train, and print the results."""
    parser = argparse.ArgumentParser(description="Train a GAN on eight Gaussians in a ring.")
    parser.add_argument("--rounds", type=int, default=3000, help="steps of each model (default: %(default)s)")
    parser.add_argument("--compare", type=int, default=30, help="rounds taken both ways first; 0: none (%(default)s)")
    args = parser.parse_args()
    if args.compare:
        compare_rounds(Gan, batches(), args.compare)
    gan, start = Gan(fast), time.perf_counter()
    for number, real in zip(range(1, args.rounds + 1), batches(), strict=False):
        losses = gan.round(real)
        if number % 500 == 0 or number == args.rounds:
            text = ", ".join(
                f"{name} {loss.item():.3f}" for name, loss in zip(("discriminator", "generator"), losses, strict=True)
            )
            print(f"round {number}: loss of {text}, {time.perf_counter() - start:.1f} s")
    gan.generator.update(gan.average)
    for name, (share, modes) in {"generator": found(np.array(gan.draw(4000))), "one Gaussian": baseline()}.items():
        print(f"{name}: {share:.1%} of its points are near one of the Gaussians, {modes} of {MODES} are found")


if __name__ == "__main__":
    main()
