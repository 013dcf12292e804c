"""Agents: classes whose losses are methods, with other networks, targets and numbers as attributes that change."""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.parts import BATCHES, Losses, Make, Net, follow, integers, normals

SEEN, ACTIONS, GAMMA = 8, 2, 0.99  # observations, actions, discount
BATCH = 32


class Critics(nn.Module):
    """Two estimates of an action's value."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.both = [Net([SEEN + ACTIONS, width, width, 1]) for _ in range(2)]

    def __call__(self, seen: mx.array, action: mx.array) -> list[mx.array]:
        x = mx.concatenate([seen, action], axis=-1)
        return [each(x).squeeze(-1) for each in self.both]


class Scalar(nn.Module):
    """One number that is learnt."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = mx.array(value)


class SoftActorCritic:
    """SAC (Haarnoja et al., 2018): losses reach the actor, targets and entropy coefficient by `self`."""

    def __init__(self, make: Make, width: int) -> None:
        self.actor = Net([SEEN, width, width, 2 * ACTIONS])
        self.critics, self.targets = Critics(width), Critics(width)
        self.targets.update(self.critics.parameters())
        self.log_alpha = Scalar(-1.0)
        self.alpha = mx.array(0.4)
        self.models = [self.actor, self.critics, self.targets, self.log_alpha]
        self.learn_critics = make(self.critics, optim.Adam(1e-3), self.critic_loss)
        self.learn_actor = make(self.actor, optim.Adam(1e-3), self.actor_loss)
        self.learn_alpha = make(self.log_alpha, optim.Adam(1e-2), self.alpha_loss)
        drawn = [normals(BATCH, n, seed=n) for n in (SEEN, ACTIONS, SEEN + 1)]
        self.batches = list(zip(*drawn, strict=True))

    def act(self, seen: mx.array) -> tuple[mx.array, mx.array]:
        """Draw actions from the squashed normal distribution; return them with the logarithm of their density."""
        mean, log_std = mx.split(self.actor(seen), 2, axis=-1)
        noise = mx.random.normal(mean.shape)
        action = mx.tanh(mean + mx.exp(log_std) * noise)
        density = -0.5 * noise.square() - log_std - mx.log(1 - action.square() + 1e-6)
        return action, density.sum(axis=-1)

    def critic_loss(
        self, critics: nn.Module, seen: mx.array, action: mx.array, reward: mx.array, then: mx.array
    ) -> mx.array:
        next_action, density = self.act(then)
        value = mx.minimum(*self.targets(then, next_action)) - self.alpha * density
        target = mx.stop_gradient(reward + GAMMA * value)
        return sum(nn.losses.mse_loss(each, target) for each in critics(seen, action))

    def actor_loss(self, _actor: nn.Module, seen: mx.array) -> mx.array:
        action, density = self.act(seen)
        return (self.alpha * density - mx.minimum(*self.critics(seen, action))).mean()

    def alpha_loss(self, log_alpha: nn.Module, seen: mx.array) -> mx.array:
        _, density = self.act(seen)
        return -(mx.exp(log_alpha.value) * mx.stop_gradient(density - ACTIONS)).mean()

    def round(self, number: int) -> Losses:
        seen, action, after = self.batches[number % BATCHES]
        losses = [self.learn_critics(seen, action, after[:, 0], after[:, 1:]), self.learn_actor(seen)]
        losses.append(self.learn_alpha(seen))
        self.alpha = mx.exp(self.log_alpha.value)
        mx.eval(self.alpha)
        follow(self.targets, self.critics, 0.05)
        return losses


class DeepQ:
    """DQN with prioritised replay: a target network that is copied, an exponent that grows at every step."""

    def __init__(self, make: Make, width: int) -> None:
        self.online, self.target = (Net([SEEN, width, width, 4]) for _ in range(2))
        self.target.update(self.online.parameters())
        self.models = [self.online, self.target]
        self.beta, self.huber, self.taken = 0.4, 1.0, 0
        self.learn = make(self.online, optim.RMSprop(1e-3), self.loss, max_grad_norm=10.0)
        drawn = normals(BATCH, SEEN), integers(4, BATCH, 1), normals(BATCH, SEEN + 2, seed=2)
        self.batches = list(zip(*drawn, strict=True))

    def loss(self, online: nn.Module, seen: mx.array, action: mx.array, after: mx.array) -> mx.array:
        self.taken += 1  # no number depends on it
        reward, rarity, then = after[:, 0], mx.sigmoid(after[:, 1]), after[:, 2:]
        best = online(then).argmax(axis=-1, keepdims=True)
        value = mx.take_along_axis(self.target(then), best, axis=-1).squeeze(-1)
        chosen = mx.take_along_axis(online(seen), action, axis=-1).squeeze(-1)
        error = nn.losses.huber_loss(
            chosen, mx.stop_gradient(reward + GAMMA * value), delta=self.huber, reduction="none"
        )
        return (rarity**-self.beta * error).mean()

    def round(self, number: int) -> Losses:
        loss = self.learn(*self.batches[number % BATCHES])
        self.beta = min(1.0, self.beta + 0.01)
        if number % 3 == 2:
            self.target.update(self.online.parameters())
        return [loss]


class ProximalPolicy:
    """PPO (Schulman et al., 2017): actor and critic with an optimizer each, and a clip range that is annealed."""

    def __init__(self, make: Make, width: int) -> None:
        self.actor, self.critic = Net([SEEN, width, width, 4], mx.tanh), Net([SEEN, width, width, 1], mx.tanh)
        self.models = [self.actor, self.critic]
        self.clip, self.entropy = 0.2, 0.01
        self.learn_actor = make(self.actor, optim.Adam(3e-4), self.actor_loss, max_grad_norm=0.5)
        self.learn_critic = make(self.critic, optim.Adam(1e-3), self.critic_loss, max_grad_norm=0.5)
        self.batches = list(zip(normals(BATCH, SEEN), integers(4, BATCH, 1), normals(BATCH, 2, seed=2), strict=True))
        self.old: list[mx.array] = []  # the densities of the rollout's actions, by batch
        self.density = mx.zeros((BATCH,))

    def densities(self, seen: mx.array) -> mx.array:
        logits = self.actor(seen)
        return logits - mx.logsumexp(logits, axis=-1, keepdims=True)

    def actor_loss(self, _actor: nn.Module, seen: mx.array, action: mx.array, gain: mx.array) -> mx.array:
        logs = self.densities(seen)
        ratio = mx.exp(mx.take_along_axis(logs, action, axis=-1).squeeze(-1) - self.density)
        clipped = mx.clip(ratio, 1 - self.clip, 1 + self.clip)
        entropy = -(mx.exp(logs) * logs).sum(axis=-1).mean()
        return -mx.minimum(ratio * gain, clipped * gain).mean() - self.entropy * entropy

    def critic_loss(self, critic: nn.Module, seen: mx.array, gain: mx.array) -> mx.array:
        return nn.losses.mse_loss(critic(seen).squeeze(-1), gain)

    def round(self, number: int) -> Losses:
        if number % BATCHES == 0:  # a new rollout
            self.old = [
                mx.take_along_axis(self.densities(seen), action, axis=-1).squeeze(-1)
                for seen, action, _ in self.batches
            ]
            mx.eval(self.old)
            self.clip *= 0.9
        self.density = self.old[number % BATCHES]
        seen, action, gains = self.batches[number % BATCHES]
        return [self.learn_actor(seen, action, gains[:, 0]), self.learn_critic(seen, gains[:, 1])]
