"""mlx-lm's trainer with our step: for scripts that call `mlx_lm.tuner.trainer.train`, whose arguments are the same."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from faststep._optional import need
from faststep._step import Step
from faststep.mlx_lm._folder import EXTRA
from faststep.recipes import checkpoint_gradients

MAX_LOSS = 1e6  # a batch with a loss above it, or a NaN, changes nothing


def train(
    model: nn.Module,
    optimizer: Optimizer,
    train_dataset: Any,
    val_dataset: Any = None,
    args: Any = None,
    loss: Callable[..., Any] | None = None,
    iterate_batches: Callable[..., Iterator[Any]] | None = None,
    training_callback: Any = None,
) -> Step:
    """Train a model as `mlx_lm.tuner.trainer.train` does, by `faststep.Step`; its arguments, in its order.

    With one batch for each update the numbers are the same. Otherwise they are not, on purpose: batches are averaged by
    the tokens that their losses are means over, the last window is applied when it is not full, and a batch whose loss
    is NaN, infinite or above 1e6 is skipped. The reported loss is averaged by tokens too. Under `mlx.launch` all
    processes train one model: what is averaged is averaged over the tokens of all ranks, not over the ranks.

    Example:
        >>> from faststep.mlx_lm import train              # in place of mlx_lm.tuner.trainer.train

    Args:
        model: The model, with what trains unfrozen.
        optimizer: The optimizer.
        train_dataset: What `iterate_batches` takes.
        val_dataset: The same for validation; None or empty: none.
        args: An `mlx_lm.tuner.trainer.TrainingArgs`; None: its defaults.
        loss: `loss(model, *batch)` gives a mean and the tokens that it is a mean over; None: mlx-lm's `default_loss`.
        iterate_batches: What makes batches of a dataset; None: mlx-lm's.
        training_callback: An mlx-lm `TrainingCallback`.

    Returns:
        The step, whose `stats` tell more.

    Raises:
        ImportError: mlx-lm is not installed.
        ValueError: `grad_accumulation_steps` is not positive.
        RankError: Another rank has failed, is gone, or has another model.
    """
    trainer = need("mlx_lm.tuner.trainer", EXTRA)
    return _Training(trainer, model, optimizer, args or trainer.TrainingArgs(), loss, iterate_batches)(
        train_dataset, val_dataset, training_callback or trainer.TrainingCallback()
    )


class _Training:
    """A training with mlx-lm's arguments."""

    def __init__(
        self, trainer: Any, model: nn.Module, optimizer: Optimizer, args: Any, loss: Any, iterate_batches: Any
    ) -> None:
        if args.grad_accumulation_steps < 1:
            raise ValueError(f"grad_accumulation_steps: expected 1 or more, got {args.grad_accumulation_steps}")
        self.trainer, self.model, self.args = trainer, model, args
        self.loss, self.batches = loss or trainer.default_loss, iterate_batches or trainer.iterate_batches
        if args.grad_checkpoint:
            blocks = {id(each) for each in model.layers}
            checkpoint_gradients(model, [name for name, each in model.named_modules() if id(each) in blocks])
        accumulate = args.grad_accumulation_steps
        group = mx.distributed.init()
        self.step = Step(
            model, optimizer, self.loss, weighted=True, accumulate=accumulate, max_loss=MAX_LOSS, group=group
        )
        self.tokens = 0  # trained on so far

    def __call__(self, data: Any, validation: Any, callback: Any) -> Step:
        """Train."""
        args = self.args
        options = {"batch_size": args.batch_size, "max_seq_length": args.max_seq_length, "loop": True}
        options |= {"comm_group": self.step.ranks.group} if self.step.ranks.size > 1 else {}
        outputs: list[Any] = []
        self.model.train()
        start = time.perf_counter()
        for number, batch in zip(range(1, args.iters + 1), self.batches(dataset=data, **options), strict=False):
            if validation and (number in (1, args.iters) or number % args.steps_per_eval == 0):
                start += self._validate(validation, number, callback)
            outputs.append(self.step(*batch))
            if number == args.iters:
                self.step.flush()
            if number % args.steps_per_report == 0 or number == args.iters:
                self._report(outputs, number, start, callback)
                outputs, start = [], time.perf_counter()
            if number % args.steps_per_save == 0:
                self._save(Path(args.adapter_file).parent / f"{number:07d}_adapters.safetensors")
        self._save()
        return self.step

    def _validate(self, data: Any, number: int, callback: Any) -> float:
        """Validate as mlx-lm does; return the seconds that it took."""
        start, args = time.perf_counter(), self.args
        self.step.synchronize()
        found = self.trainer.evaluate(
            model=self.model,
            dataset=data,
            loss=self.loss,
            batch_size=args.batch_size,
            num_batches=args.val_batches,
            max_seq_length=args.max_seq_length,
            iterate_batches=self.batches,
        )
        self.model.train()
        seconds = time.perf_counter() - start
        self._print(f"Iter {number}: Val loss {found:.3f}, Val took {seconds:.3f}s")
        callback.on_val_loss_report({"iteration": number - 1, "val_loss": found, "val_time": seconds})
        return seconds

    def _report(self, outputs: list[Any], number: int, start: float, callback: Any) -> None:
        """Print and report what mlx-lm reports; it waits for the steps."""
        good = [each for each in outputs if not bool(each.skipped)]
        tokens = [float(each.weight) for each in good]
        mine = sum(float(each.local_loss) * count for each, count in zip(good, tokens, strict=True)), sum(tokens)
        losses, total = map(sum, zip(*self.step.ranks.gather(mine, "comparison"), strict=True))
        mean = losses / total if total else 0.0
        seconds = time.perf_counter() - start
        self.tokens += int(total)
        rate: Any = self.step.optimizer.learning_rate
        report = {
            "iteration": number,
            "train_loss": mean if good else float("nan"),
            "learning_rate": float(rate),
            "iterations_per_second": len(outputs) / seconds,
            "tokens_per_second": total / seconds,
            "trained_tokens": self.tokens,
            "peak_memory": mx.get_peak_memory() / 1e9,
        }
        skipped = f", {len(outputs) - len(good)} batches skipped" if len(good) < len(outputs) else ""
        self._print(
            f"Iter {number}: Train loss {report['train_loss']:.3f}, Learning Rate {report['learning_rate']:.3e}, "
            f"It/sec {report['iterations_per_second']:.3f}, Tokens/sec {report['tokens_per_second']:.3f}, "
            f"Trained Tokens {self.tokens}, Peak mem {report['peak_memory']:.3f} GB{skipped}"
        )
        callback.on_train_loss_report(report)

    def _print(self, line: str) -> None:
        if self.step.ranks.rank == 0:
            print(line, flush=True)

    def _save(self, beside: Path | None = None) -> None:
        """Save what trains, as mlx-lm does."""
        if self.step.ranks.rank > 0:
            return
        weights = dict(tree_flatten(self.model.trainable_parameters()))
        for file in filter(None, [Path(self.args.adapter_file), beside]):
            mx.save_safetensors(str(file), weights)
