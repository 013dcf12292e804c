"""Deep Q-learning of a cart that balances a pole: a target network, and an environment between the steps.

The loss is a method that reaches the target network by ``self``; the target network is replaced at intervals, which the
step sees without tracing anew. The step is one call::

    fast_step(online, optimizer, loss_fn, seen, action, reward, then, goes_on, max_grad_norm=10.0)

First the same updates run in plain MLX and with ``fast_step``: the numbers agree. Then it plays and learns, and is held
against random actions: double Q-learning (https://arxiv.org/abs/1509.06461), on the cart and pole of Barto, Sutton and
Anderson (1983) with the constants of Gymnasium's CartPole-v1.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator

try:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    import numpy as np
    from side_by_side import compare_rounds, fast
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train]' (cuda13 for cpu on a GPU)")

CARTS, BATCH, KEPT, LONGEST = 16, 128, 50_000, 500  # LONGEST: steps of an episode
DISCOUNT, REPLACED_EVERY, MAX_GRAD_NORM = 0.99, 20, 10.0
Make = Callable[[nn.Module, optim.Optimizer, Callable[..., mx.array], float], Callable[..., mx.array]]
Batch = tuple[mx.array, ...]


class Carts:
    """Carts with a pole each, in steps of 20 ms: position, speed, angle and angular speed, float64 [carts, 4].

    An episode ends when the cart leaves the track (2.4 m), the pole falls (12 degrees), or it has lasted 500 steps.
    """

    def __init__(self, count: int, rng: np.random.Generator) -> None:
        self.rng, self.ages = rng, np.zeros(count, int)
        self.state = self.fresh(count)

    def fresh(self, count: int) -> np.ndarray:
        return self.rng.uniform(-0.05, 0.05, (count, 4))

    def step(self, action: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Push to the left (0) or to the right (1), int [carts].

        Returns:
            The states behind it, those that fell, and those that fell or have lasted longest, which begin anew.
        """
        x, v, angle, turn = self.state.T
        force = np.where(action == 1, 10.0, -10.0)
        pushed = (force + 0.05 * turn**2 * np.sin(angle)) / 1.1
        turned = (9.8 * np.sin(angle) - np.cos(angle) * pushed) / (0.5 * (4 / 3 - 0.1 * np.cos(angle) ** 2 / 1.1))
        moved = pushed - 0.05 * turned * np.cos(angle) / 1.1
        then = np.stack([x + 0.02 * v, v + 0.02 * moved, angle + 0.02 * turn, turn + 0.02 * turned], axis=-1)
        self.ages += 1
        fell = (abs(then[:, 0]) > 2.4) | (abs(then[:, 2]) > np.deg2rad(12))
        over = fell | (self.ages >= LONGEST)
        self.state, self.ages = np.where(over[:, None], self.fresh(len(then)), then), np.where(over, 0, self.ages)
        return then, fell, over


class Agent:
    """Two networks of equal shape and the step of one.

    Args:
        make: Makes a step of model, optimizer, loss function and norm to clip to.
        rounds: Updates until the learning rate is at its end.
    """

    def __init__(self, make: Make, rounds: int) -> None:
        mx.random.seed(0)
        self.online, self.target = (
            nn.Sequential(nn.Linear(4, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 2))
            for _ in range(2)
        )
        self.target.update(self.online.parameters())
        rate = optim.linear_schedule(1e-3, 1e-5, rounds)
        self.learn = make(self.online, optim.Adam(rate), self.loss_fn, MAX_GRAD_NORM)
        self.updates = 0

    def loss_fn(
        self, online: nn.Module, seen: mx.array, action: mx.array, reward: mx.array, then: mx.array, goes_on: mx.array
    ) -> mx.array:
        """Return the Huber loss of the values that were expected.

        Args:
            online: The network that is trained.
            seen: States, float32 [batch, 4].
            action: What was done in them, int32 [batch, 1].
            reward: Rewards of the actions, float32 [batch].
            then: The states behind, float32 [batch, 4].
            goes_on: 0 where the pole fell, 1 elsewhere, float32 [batch].
        """
        best = online(then).argmax(axis=-1, keepdims=True)
        value = mx.take_along_axis(self.target(then), best, axis=-1).squeeze(-1)
        wanted = mx.stop_gradient(reward + DISCOUNT * goes_on * value)
        expected = mx.take_along_axis(online(seen), action, axis=-1).squeeze(-1)
        return nn.losses.huber_loss(expected, wanted, reduction="mean")

    def round(self, batch: Batch) -> list[mx.array]:
        """Take a step, and replace the target network when it is time."""
        loss = self.learn(*batch)
        self.updates += 1
        if self.updates % REPLACED_EVERY == 0:
            self.target.update(self.online.parameters())
        return [loss]

    def act(self, state: np.ndarray) -> np.ndarray:
        """Return what is best for states [carts, 4], by what is known so far."""
        return np.array(self.online(mx.array(state.astype(np.float32))).argmax(axis=-1))


class Replay:
    """The newest transitions, of which batches are drawn."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.rng, self.count = rng, 0
        self.rows = np.zeros((KEPT, 11), np.float32)  # state, action, reward, state behind, whether it goes on

    def add(self, state: np.ndarray, action: np.ndarray, then: np.ndarray, fell: np.ndarray) -> None:
        """Keep a transition of each cart; the reward is -1 where the pole fell, 0 elsewhere."""
        columns = [state, action[:, None], -fell[:, None].astype(float), then, ~fell[:, None]]
        self.rows[(self.count + np.arange(len(state))) % KEPT] = np.concatenate(columns, axis=-1)
        self.count += len(state)

    def draw(self) -> Batch:
        """Draw a batch for `Agent.loss_fn`."""
        rows = self.rows[self.rng.integers(min(self.count, KEPT), size=BATCH)]
        parts = rows[:, :4], rows[:, 4:5].astype(np.int32), rows[:, 5], rows[:, 6:10], rows[:, 10]
        return tuple(map(mx.array, parts))


def random_batches(seed: int = 0) -> Iterator[Batch]:
    """Yield batches of what random actions give."""
    rng = np.random.default_rng(seed)
    carts, replay = Carts(CARTS, rng), Replay(rng)
    while True:
        state, action = carts.state, rng.integers(2, size=CARTS)
        then, fell, _ = carts.step(action)
        replay.add(state, action, then, fell)
        yield replay.draw()


def train(agent: Agent, rounds: int) -> None:
    """Play with all carts and learn from a batch, so many times; fewer and fewer actions are random."""
    rng, start = np.random.default_rng(0), time.perf_counter()
    carts, replay = Carts(CARTS, rng), Replay(rng)
    for number in range(1, rounds + 1):
        chance = max(0.05, 1 - number / (0.3 * rounds))
        state = carts.state
        action = np.where(rng.random(CARTS) < chance, rng.integers(2, size=CARTS), agent.act(state))
        then, fell, _ = carts.step(action)
        replay.add(state, action, then, fell)
        (loss,) = agent.round(replay.draw())
        if number % 1000 == 0 or number == rounds:
            print(f"round {number}: loss {loss.item():.4f}, {time.perf_counter() - start:.1f} s")


def lasting(act: Callable[[np.ndarray], np.ndarray], episodes: int = 100) -> float:
    """Return how many steps an episode lasts on average, of 500 at most."""
    carts, ages = Carts(episodes, np.random.default_rng(1)), np.zeros(episodes, int)
    for age in range(1, LONGEST + 1):
        _, _, over = carts.step(act(carts.state))
        ages = np.where((ages == 0) & over, age, ages)
    return float(ages.mean())


def main() -> None:
    """Compare, train, and print the results."""
    parser = argparse.ArgumentParser(description="Learn to balance a pole by deep Q-learning.")
    parser.add_argument("--rounds", type=int, default=10000, help="updates, each with a step of 16 carts (%(default)s)")
    parser.add_argument("--compare", type=int, default=250, help="updates taken both ways first; 0: none (%(default)s)")
    args = parser.parse_args()
    if args.compare:
        compare_rounds(lambda make: Agent(make, args.rounds), random_batches(), args.compare)
    agent = Agent(fast, args.rounds)
    train(agent, args.rounds)
    rng = np.random.default_rng(2)
    print(f"the agent balances the pole for {lasting(agent.act):.0f} steps of {LONGEST} on average")
    print(f"random actions balance it for {lasting(lambda state: rng.integers(2, size=len(state))):.0f}")


if __name__ == "__main__":
    main()
