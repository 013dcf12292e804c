"""Training on preferences: DPO and ORPO as two losses over pairs of a chosen and a rejected answer.

A small model of bytes has learned to answer yes and no equally often; pairs say that yes is preferred. DPO
(https://arxiv.org/abs/2305.18290) needs a frozen reference, which the loss reaches like any other object; ORPO
(https://arxiv.org/abs/2403.07691) needs none. The step is one call::

    fast_step(model, optimizer, loss_fn, tokens, targets, max_grad_norm=1.0)

First the same updates run in plain MLX and with ``fast_step``: the numbers agree. Then it trains, and is asked about
words that it has not seen.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    import numpy as np
    from faststep import fast_step
    from faststep.recipes import GPT, next_token
    from mlx.utils import tree_flatten
    from side_by_side import compare_rounds, fast
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train]' (cuda13 for cpu on a GPU)")

CONTEXT, PAIRS, MAX_GRAD_NORM, IGNORED = 32, 16, 1.0, -100
WORDS = sorted(name for name in sys.stdlib_module_names if 3 < len(name) < 14)
SEEN, HELD_OUT = WORDS[::2], WORDS[1::2]
Batch = tuple[mx.array, mx.array]
Loss = Callable[[nn.Module, mx.array, mx.array], mx.array]
Make = Callable[[nn.Module, optim.Optimizer, Loss, float], Callable[..., mx.array]]


def rows(words: list[str], answers: list[str]) -> Batch:
    """Return tokens and targets, int32 [rows, context - 1]: only the answers count."""
    tokens = np.zeros((len(words), CONTEXT), np.int32)
    counts = np.zeros(tokens.shape, bool)
    for row, (word, answer) in enumerate(zip(words, answers, strict=True)):
        prompt, text = f"{word}? ".encode(), f"{answer}.\n".encode()
        tokens[row, : len(prompt) + len(text)] = list(prompt + text)
        counts[row, len(prompt) : len(prompt) + len(text)] = True
    targets = np.where(counts, tokens, IGNORED)
    return mx.array(tokens[:, :-1]), mx.array(targets[:, 1:])


def pairs(words: list[str]) -> Batch:
    """Return the chosen answers, then the rejected ones, of the same words."""
    return rows([*words, *words], [*("yes" for _ in words), *("no" for _ in words)])


def log_likelihood(model: nn.Module, tokens: mx.array, targets: mx.array) -> tuple[mx.array, mx.array]:
    """Return the log-likelihood of each row's answer, float32 [rows], and how many tokens it has."""
    counts = (targets != IGNORED).astype(mx.float32)
    losses = nn.losses.cross_entropy(model(tokens).astype(mx.float32), mx.maximum(targets, 0))
    return -(losses * counts).sum(axis=-1), counts.sum(axis=-1)


def dpo(reference: nn.Module, beta: float = 0.5) -> Loss:
    """Make the loss of DPO: the chosen answer gains more over the reference than the rejected one."""

    def loss_fn(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
        gains = log_likelihood(model, tokens, targets)[0] - log_likelihood(reference, tokens, targets)[0]
        chosen, rejected = mx.split(gains, 2)
        return -nn.log_sigmoid(beta * (chosen - rejected)).mean()

    return loss_fn


def orpo(share: float = 0.5) -> Loss:
    """Make the loss of ORPO: that of the chosen answers, and a share of the odds between chosen and rejected ones."""

    def loss_fn(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
        total, count = log_likelihood(model, tokens, targets)
        mean = total / count
        odds = mean - mx.log1p(-mx.exp(mx.minimum(mean, -1e-6)))
        (chosen, rejected), likely = mx.split(odds, 2), mx.split(mean, 2)[0]
        return -likely.mean() - share * nn.log_sigmoid(chosen - rejected).mean()

    return loss_fn


class Tuning:
    """A model that has learned both answers, and the step of a loss over preferences.

    Args:
        make: Makes a step of model, optimizer, loss function and norm to clip to.
        method: "dpo" or "orpo".
        weights: Of the model that both answers were taught to.
    """

    def __init__(self, make: Make, method: str, weights: list[tuple[str, mx.array]]) -> None:
        self.model, reference = new_model(weights), new_model(weights)
        reference.freeze()
        loss_fn = dpo(reference) if method == "dpo" else orpo()
        self.learn = make(self.model, optim.AdamW(3e-4), loss_fn, MAX_GRAD_NORM)

    def round(self, batch: Batch) -> list[mx.array]:
        """Take a step."""
        return [self.learn(*batch)]


def new_model(weights: list[tuple[str, mx.array]] | None = None) -> GPT:
    """Make the model."""
    mx.random.seed(0)
    model = GPT(layers=2, width=64, heads=4, context=CONTEXT)
    return model.load_weights(weights) if weights else model


def taught(steps: int) -> list[tuple[str, mx.array]]:
    """Teach a model both answers, equally often; return its weights."""
    model, optimizer, rng = new_model(), optim.AdamW(3e-3), np.random.default_rng(0)
    loss_fn = next_token()
    for _ in range(steps):
        words = rng.choice(SEEN, 2 * PAIRS).tolist()
        batch = rows(words, rng.choice(["yes", "no"], 2 * PAIRS).tolist())
        fast_step(model, optimizer, loss_fn, *batch, max_grad_norm=MAX_GRAD_NORM)
    return [(name, mx.array(each)) for name, each in tree_flatten(model.parameters())]


def batches(seed: int = 0) -> Iterator[Batch]:
    """Yield pairs."""
    rng = np.random.default_rng(seed)
    while True:
        yield pairs(rng.choice(SEEN, PAIRS, replace=False).tolist())


def says_yes(model: nn.Module) -> float:
    """Return how likely yes is, between yes and no, on average over words that were not seen."""
    chosen, rejected = mx.split(log_likelihood(model, *pairs(HELD_OUT))[0], 2)
    return float(mx.sigmoid(chosen - rejected).mean())


def main() -> None:
    """Compare, train by both methods, and print the results."""
    parser = argparse.ArgumentParser(description="Train on preferences, by DPO and by ORPO.")
    parser.add_argument("--rounds", type=int, default=100, help="updates by each method (%(default)s)")
    parser.add_argument("--compare", type=int, default=50, help="updates taken both ways first; 0: none (%(default)s)")
    args = parser.parse_args()
    weights = taught(300)
    print(f"taught both: yes {100 * says_yes(new_model(weights)):.0f}% of the time")
    if args.compare:
        compare_rounds(lambda make: Tuning(make, "dpo", weights), batches(), args.compare)
    for method in ("dpo", "orpo"):
        tuning = Tuning(fast, method, weights)
        for _, batch in zip(range(args.rounds), batches(), strict=False):
            (loss,) = tuning.round(batch)
        print(f"{method}: loss {loss.item():.4f}, yes {100 * says_yes(tuning.model):.0f}% of the time")


if __name__ == "__main__":
    main()
