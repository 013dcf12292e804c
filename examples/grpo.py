"""Group relative policy optimization: answers drawn between the steps, and rewards instead of labels.

GRPO (https://arxiv.org/abs/2402.03300): several answers to each question, each worth how far its reward is above the
mean of its group; a clipped ratio, and a penalty for what parts from a frozen reference. The step is one call::

    fast_step(model, optimizer, loss_fn, tokens, targets, advantages, before, max_grad_norm=1.0)

First the same updates run in plain MLX and with ``fast_step``: the numbers agree. Then a small model of bytes, taught
sums of which two of three are wrong, learns to add by being told which of its own answers are right.
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

QUESTIONS, GROUP, UPDATES = 32, 8, 2  # questions of a round, answers to each, updates with them
CLIP, PENALTY, MAX_GRAD_NORM, IGNORED = 0.2, 0.02, 1.0, -100
PROMPT, ANSWER = 4, 2  # bytes: "3+8=" and "11"
Batch = tuple[mx.array, ...]
Make = Callable[[nn.Module, optim.Optimizer, Callable[..., mx.array], float], Callable[..., mx.array]]


def new_model(weights: list[tuple[str, mx.array]] | None = None) -> GPT:
    """Make the model."""
    mx.random.seed(0)
    model = GPT(layers=2, width=64, heads=4, context=PROMPT + ANSWER)
    return model.load_weights(weights) if weights else model


def encoded(texts: list[str]) -> np.ndarray:
    """Return texts of one length as int32 [texts, bytes]."""
    return np.array([list(text.encode()) for text in texts], np.int32)


def questions(rng: np.random.Generator, count: int) -> tuple[list[str], list[str]]:
    """Draw questions; return them with their answers."""
    numbers = rng.integers(10, size=(count, 2)).tolist()
    return [f"{a}+{b}=" for a, b in numbers], [f"{a + b:02d}" for a, b in numbers]


def taught(steps: int) -> list[tuple[str, mx.array]]:
    """Teach a model sums of which two of three are wrong; return its weights."""
    model, optimizer, rng = new_model(), optim.AdamW(3e-3), np.random.default_rng(0)
    loss_fn = next_token()
    for _ in range(steps):
        asked, right = questions(rng, 64)
        said = [each if rng.random() < 1 / 3 else f"{rng.integers(19):02d}" for each in right]
        tokens = mx.array(encoded([a + b for a, b in zip(asked, said, strict=True)]))
        targets = mx.where(mx.arange(1, PROMPT + ANSWER) >= PROMPT, tokens[:, 1:], IGNORED)
        fast_step(model, optimizer, loss_fn, tokens[:, :-1], targets, max_grad_norm=MAX_GRAD_NORM)
    return [(name, mx.array(each)) for name, each in tree_flatten(model.parameters())]


def answered(model: nn.Module, tokens: mx.array, temperature: float = 1.0) -> mx.array:
    """Go on with prompts, int32 [rows, bytes]; temperature 0: with the likeliest byte."""
    for _ in range(ANSWER):
        logits = model(tokens)[:, -1].astype(mx.float32)
        drawn = mx.random.categorical(logits / temperature) if temperature else logits.argmax(axis=-1)
        tokens = mx.concatenate([tokens, drawn[:, None].astype(mx.int32)], axis=1)
    return tokens


def log_likelihoods(model: nn.Module, tokens: mx.array, targets: mx.array) -> mx.array:
    """Return the log-likelihood of each target, 0 where it does not count, float32 [rows, bytes]."""
    losses = nn.losses.cross_entropy(model(tokens).astype(mx.float32), mx.maximum(targets, 0))
    return -losses * (targets != IGNORED)


class Policy:
    """A model that answers and learns, and its frozen reference.

    Args:
        make: Makes a step of model, optimizer, loss function and norm to clip to.
        weights: What it begins with, and what the reference stays with.
    """

    def __init__(self, make: Make, weights: list[tuple[str, mx.array]]) -> None:
        self.model, self.reference = new_model(weights), new_model(weights)
        self.reference.freeze()
        self.learn = make(self.model, optim.AdamW(3e-4), self.loss_fn, MAX_GRAD_NORM)

    def loss_fn(
        self, model: nn.Module, tokens: mx.array, targets: mx.array, advantages: mx.array, before: mx.array
    ) -> mx.array:
        """Return the loss of answers.

        Args:
            model: The model that is trained.
            tokens: Questions with answers, int32 [rows, bytes].
            targets: The bytes of the answers, one place on; -100 elsewhere.
            advantages: What each answer is worth, float32 [rows].
            before: Log-likelihoods of the targets when they were drawn, float32 [rows, bytes].
        """
        now, fixed = log_likelihoods(model, tokens, targets), log_likelihoods(self.reference, tokens, targets)
        ratio, worth = mx.exp(now - before), advantages[:, None]
        gain = mx.minimum(ratio * worth, mx.clip(ratio, 1 - CLIP, 1 + CLIP) * worth)
        apart = mx.exp(fixed - now) - (fixed - now) - 1  # an estimate of the divergence, never negative
        counts = targets != IGNORED
        return ((PENALTY * apart - gain) * counts).sum() / counts.sum()

    def drawn(self, rng: np.random.Generator) -> tuple[Batch, float]:
        """Answer questions; return a batch for `loss_fn`, and the mean reward."""
        asked, right = questions(rng, QUESTIONS)
        prompts = encoded([each for each in asked for _ in range(GROUP)])
        whole = answered(self.model, mx.array(prompts))
        rewards = (np.array(whole[:, PROMPT:]) == np.repeat(encoded(right), GROUP, axis=0)).all(axis=1)
        groups = rewards.reshape(QUESTIONS, GROUP).astype(np.float32)
        worth = (groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, keepdims=True) + 1e-4)
        tokens, targets = whole[:, :-1], mx.where(mx.arange(1, PROMPT + ANSWER) >= PROMPT, whole[:, 1:], IGNORED)
        before = log_likelihoods(self.model, tokens, targets)
        batch = tokens, targets, mx.array(worth.reshape(-1)), before
        mx.eval(batch)
        return batch, float(rewards.mean())

    def round(self, batch: Batch) -> list[mx.array]:
        """Take a step."""
        return [self.learn(*batch)]


def batches(weights: list[tuple[str, mx.array]], seed: int = 0) -> Iterator[Batch]:
    """Yield what a policy that does not learn answers."""
    policy, rng = Policy(fast, weights), np.random.default_rng(seed)
    while True:
        yield policy.drawn(rng)[0]


def right_answers(model: nn.Module) -> float:
    """Return the share of all sums for which the likeliest answer is right."""
    sums = [(a, b) for a in range(10) for b in range(10)]
    tokens = answered(model, mx.array(encoded([f"{a}+{b}=" for a, b in sums])), temperature=0)
    return float((np.array(tokens[:, PROMPT:]) == encoded([f"{a + b:02d}" for a, b in sums])).all(axis=1).mean())


def main() -> None:
    """Compare, train, and print the results."""
    parser = argparse.ArgumentParser(description="Learn sums from rewards, by GRPO.")
    parser.add_argument("--rounds", type=int, default=150, help="rounds of answers (%(default)s)")
    parser.add_argument("--compare", type=int, default=50, help="updates taken both ways first; 0: none (%(default)s)")
    args = parser.parse_args()
    weights = taught(600)
    if args.compare:
        compare_rounds(lambda make: Policy(make, weights), batches(weights), args.compare)
    policy, rng, rewards = Policy(fast, weights), np.random.default_rng(1), list[float]()
    for number in range(1, args.rounds + 1):
        batch, reward = policy.drawn(rng)
        for _ in range(UPDATES):
            (loss,) = policy.round(batch)
        rewards.append(reward)
        if number % 25 == 0:
            print(
                f"round {number}: loss {loss.item():.4f}, {100 * np.mean(rewards[-25:]):.0f}% of the answers are right"
            )
    first = 100 * np.mean(rewards[:5])
    print(f"drawn answers: {first:.0f}% right at first, {100 * np.mean(rewards[-5:]):.0f}% at the end")
    print(f"the likeliest answer: {100 * right_answers(new_model(weights)):.0f}% right at first, "
          f"{100 * right_answers(policy.model):.0f}% at the end")  # fmt: skip


if __name__ == "__main__":
    main()
