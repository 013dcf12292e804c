"""Usage of a config's keys: every key that something reads is taken here, so unused keys are known."""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

from faststep.config._errors import Path, Problem, Source
from faststep.config._section import Section
from faststep.data import seconds_of
from faststep.metrics import direction
from faststep.recipes import METRICS

_NO_VALIDATION = "there is no data.validation"


class Usage:
    """The values of a config by their reader; nothing else reads a config.

    Attributes:
        step: Arguments of `faststep.Step` beside model, optimizer and loss.
        loader: Arguments of the training data's `faststep.data.Loader` beside source and collate.
        validation: The same for the validation data; empty without such data.
        metrics: What is measured beside the loss, by name: components.
        trainer: Arguments of `faststep.training.Trainer` beside what is built.
        top: What the config itself has: model, loss, optimizer and the like.
        unused: The keys that nothing has taken.
    """

    def __init__(self, config: Section) -> None:
        self._config, self._taken, self._reasons = config, set[Path](), dict[Path, str]()
        self._data()
        self._top()
        self._step()
        self._trainer()
        self.unused = [path for path in _keys(config) if path not in self._taken]

    def problems(self, source: Source) -> list[Problem]:
        """Return what does not go together: keys that were set and are not read, and no end of the training."""
        found = []
        for path in self.unused:
            section = reduce(getattr, map(str, path[:-1]), self._config)
            if path[-1] in section.model_fields_set:
                reason = self._reasons.get(path, "it has no effect here")
                found.append(source.problem(path, f"set, but nothing reads it: {reason}"))
        if all(self.trainer[name] is None for name in ("steps", "epochs", "max_time")):
            message = "expected steps, epochs or max_time, got none of them: when is it to end?"
            found.append(source.problem(("train",), message))
        if self.validates:
            try:
                direction(self.trainer["monitor"], self.trainer["mode"])
            except ValueError as error:
                key, _, message = str(error).partition(": ")
                found.append(source.problem(("train", key), message))
        if "loss" in self.metrics:
            found.append(source.problem(("metrics", "loss"), "expected another name than that of the loss itself"))
        return found

    def _take(self, section: str, keys: str, when: bool = True, reason: str = "") -> dict[str, Any]:
        """Read keys of a section; where they mean nothing, note why instead."""
        values: dict[str, Any] = {}
        for key in keys.split():
            path = tuple(filter(None, [*section.split("."), key]))
            if when:
                self._taken.add(path)
                values[key] = reduce(getattr, path, self._config)
            else:
                self._reasons[path] = reason
        return values

    def _data(self) -> None:
        self.components: dict[str, Any] = self._take("data", "train validation test collate")
        shared = self._take("data", "batch_size workers")
        ahead = shared["workers"] > 0
        shared |= self._take("data", "prefetch", ahead, "without data.workers no batch is made ahead")
        shared |= self._take("data", "processes", ahead, "without data.workers there are none")
        self.validates = self.components["validation"] is not None
        self.loader = shared | self._take("data", "shuffle drop_last")
        self.validation = shared if self.validates else {}

    def _top(self) -> None:
        keys = "run folder seed model weights quantize lora loss metrics optimizer callbacks loggers"
        self.top = self._take("", keys)
        usual = METRICS.get(self.top["loss"].use)
        default = {} if usual is None else {usual: type(self.top["loss"])(use=usual)}
        self.metrics: dict[str, Any] = default if self.top["metrics"] is None else self.top["metrics"]
        self.lora: dict[str, Any] = {}
        self.quantize: dict[str, Any] = {}
        if self.top["lora"] is not None:
            self.lora = self._take("lora", "rank scale dropout modules trainable")
        if self.top["quantize"] is not None:
            self.quantize = self._take("quantize", "bits group_size modules")
        reason = "lora freezes all but its adapters and lora.trainable"
        self.top |= self._take("", "frozen", not self.lora, reason)
        self.logs = self._take("logs", "csv tensorboard wandb mlflow trackio")

    def _step(self) -> None:
        self.checkpointed: list[str] = self._take("step", "gradient_checkpointing")["gradient_checkpointing"]
        sometimes = {"gradient_checkpointing", "max_loss", "max_traces"}
        keys = type(self._config.step).model_fields  # type: ignore[attr-defined]
        self.step = self._take("step", " ".join(key for key in keys if key not in sometimes))
        guards = self.step["nonfinite"] != "allow"
        self.step |= self._take("step", "max_loss", guards, "nonfinite: allow takes every step")
        self.step |= self._take(
            "step", "max_traces replay", self.step["compile"], "without compile there are no traces"
        )

    def _trainer(self) -> None:
        self.trainer = self._take(
            "train",
            "steps epochs max_time log_every stop_after_bad overfit_one_batch update_ratio_every memory_limit "
            "hang_timeout",
        )
        hangs = self.trainer["hang_timeout"] is not None
        self.trainer |= self._take("train", "on_hang", hangs, "train.hang_timeout is null")
        keys = "validate_every validate_at_start validation_batches monitor mode patience"
        self.trainer |= self._take("train", keys, self.validates, _NO_VALIDATION)
        stops = self.trainer.get("patience") is not None
        self.trainer |= self._take("train", "min_delta", stops, "train.patience is not set")
        kept = self._take("checkpoints", "every keep_last")
        kept |= self._take("checkpoints", "keep_best", self.validates, _NO_VALIDATION)
        self.trainer |= {"checkpoint_every" if key == "every" else key: value for key, value in kept.items()}
        self.trainer["run"] = self.top["run"]
        self.trainer |= {name: seconds_of(self.trainer[name]) for name in ("max_time", "hang_timeout")}

    def steps(self, epoch: int | None) -> int | None:
        """Return how many steps the training has, where that is known, of so many steps an epoch."""
        ends = [self.trainer["steps"]]
        if epoch is not None and self.trainer["epochs"] is not None:
            ends.append(self.trainer["epochs"] * epoch)
        return min((each for each in ends if each is not None), default=None)


def _keys(section: Section, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every key that holds a value or a component."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _keys(value, (*path, name))
        else:
            yield (*path, name)
