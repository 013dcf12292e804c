"""A small model that is trained and logged: the records of the tests of loggers and reports."""

from __future__ import annotations

import platform
import time
from collections.abc import Iterable, Iterator
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
from faststep import Step, __version__
from faststep.loggers import Logger
from mlx.utils import tree_flatten

from support.models import GPT

Record = dict[str, Any]
BATCH, SEQ = 8, 16


def loss_fn(model: GPT, tokens: mx.array) -> mx.array:
    """Return the loss of the next tokens."""
    logits = model(tokens[:, :-1])
    correct = mx.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return (mx.logsumexp(logits, axis=-1) - correct).mean()


class Training:
    """A loop over `faststep.Step` that makes the records which a trainer makes.

    Args:
        loggers: What takes them.
        learning_rate: Where the cosine begins.
        steps: How many steps the whole training has.
        spoil: The steps at which the loss is not finite.
    """

    def __init__(
        self, loggers: Iterable[Logger], learning_rate: float = 1e-2, steps: int = 60, spoil: tuple[int, ...] = ()
    ) -> None:
        mx.random.seed(5)
        self.loggers, self.steps, self.spoil = list(loggers), steps, spoil
        self.config = {"seed": 5, "optimizer": {"use": "AdamW", "learning_rate": learning_rate}}
        optimizer = optim.AdamW(optim.cosine_decay(learning_rate, steps))
        self.step = Step(GPT(), optimizer, self._loss, max_grad_norm=1.0)
        self.count, self.scale = 0, 1.0
        self.best = float("inf")

    def _loss(self, model: GPT, tokens: mx.array, scale: mx.array) -> mx.array:
        return loss_fn(model, tokens) * scale

    def log(self, kind: str, **values: Any) -> None:
        """Give a record to the loggers."""
        for logger in self.loggers:
            logger.log({"kind": kind, "time": time.time(), "step": self.count, **values})

    def start(self, at: int = 0) -> None:
        """Begin, or go on at a step."""
        self.count = at
        names, counts = ("tokens", "blocks", "head"), []
        for name in names:
            arrays = [array for _, array in tree_flatten(self.step.model[name].trainable_parameters())]
            counts.append({"name": name, "trainable": sum(array.size for array in arrays), "frozen": 0})
        self.log(
            "start",
            resumed=at > 0,
            epoch=at // 20 + 1,
            steps=self.steps,
            epochs=None,
            batches_per_epoch=20,
            accumulate=1,
            versions={"python": platform.python_version(), "mlx": mx.__version__, "faststep": __version__},
            device="cpu",
            command="train config.yaml",
            modules=counts,
            trainable=sum(each["trainable"] for each in counts),
            frozen=0,
            config=self.config,
        )

    def batches(self) -> Iterator[mx.array]:
        """Draw tokens [batch, seq] that count upwards, so that there is something to learn."""
        while True:
            first = mx.random.randint(0, 32, (BATCH, 1))
            yield (first + mx.arange(SEQ)) % 32

    def run(self, until: int, every: int = 10, pause: float = 0.0) -> None:
        """Train to a step; a line of each kind every so many steps."""
        batches, losses, began = self.batches(), [], time.perf_counter()
        spent = dict.fromkeys(("data", "step", "validation", "checkpoint", "other"), 0.0)
        while self.count < until:
            began = time.perf_counter()
            tokens = next(batches)
            mx.eval(tokens)
            time.sleep(pause)
            wait = time.perf_counter() - began
            self.count += 1
            out = self.step(tokens, mx.array(float("nan") if self.count in self.spoil else 1.0))
            skipped = bool(out.skipped.item())
            loss = None if skipped else out.loss
            losses += [] if skipped else [out.loss.item()]
            seconds = time.perf_counter() - began
            spent["data"] += wait
            spent["step"] += seconds - wait
            rate = self.step.optimizer.learning_rate
            norm = out.grad_norm
            self.log(
                "step",
                epoch=(self.count - 1) // 20 + 1,
                loss=loss,
                grad_norm=norm,
                learning_rate=rate,
                batches=1,
                skipped=int(skipped),
                seconds=seconds,
                wait=wait,
                samples=BATCH,
                tokens=tokens.size,
            )
            if skipped:
                self.log("event", level="warning", text="loss is not finite: the batch was skipped", what="skipped")
            if self.count % every == 0:
                self._validate(spent)
                self._interval(losses, spent, norm, every)
                losses = []

    def _interval(self, losses: list[float], spent: dict[str, float], norm: mx.array | None, every: int) -> None:
        whole = sum(spent.values())
        self.log(
            "interval",
            epoch=(self.count - 1) // 20 + 1,
            batch=(self.count - 1) % 20 + 1,
            loss=sum(losses) / len(losses) if losses else None,
            grad_norm=norm,
            learning_rate=self.step.optimizer.learning_rate,
            steps_per_second=every / whole,
            tokens_per_second=every * BATCH * SEQ / whole,
            samples_per_second=every * BATCH / whole,
            seconds=dict(spent),
            memory={
                "active": mx.get_active_memory(),
                "cache": mx.get_cache_memory(),
                "peak": mx.get_peak_memory(),
                "process": 10**8,
            },
            skipped=self.step.stats.skipped,
            traces=self.step.stats.traced,
            padding=None,
            eta=(self.steps - self.count) * whole / every,
        )
        for part in spent:
            spent[part] = 0.0

    def _validate(self, spent: dict[str, float]) -> None:
        began = time.perf_counter()
        loss = loss_fn(self.step.model.eval(), next(self.batches())).item()
        self.step.model.train()
        seconds = time.perf_counter() - began
        best, self.best = loss < self.best, min(self.best, loss)
        spent["validation"] += seconds
        values = {"loss": loss, "batches": 1, "seconds": seconds, "best": best, "metrics": {"perplexity": 2.718**loss}}
        self.log("validation", epoch=(self.count - 1) // 20 + 1, **values)
        path = f"checkpoints/step-{self.count:08}"
        self.log("checkpoint", path=path, pause=0.001, metric=loss)
        spent["checkpoint"] += 0.001
        self.log("checkpoint_written", path=path, seconds=0.01, bytes=10_000)

    def end(self, reason: str = "done", seconds: float = 1.0) -> None:
        """Say how it ended, and close the loggers."""
        self.log("end", reason=reason, seconds=seconds, loss=self.best, best=self.best)
        for logger in self.loggers:
            logger.close()
