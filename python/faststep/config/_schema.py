"""The sections of a config, with their types, ranges and defaults."""

# ruff: noqa: RUF012, pydantic copies defaults that can change

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    PrivateAttr,
    Tag,
    WithJsonSchema,
    create_model,
)

from faststep._step import Options
from faststep.config._errors import Source
from faststep.config._section import Section
from faststep.config._usage import Usage
from faststep.config._yaml import write
from faststep.data import epochs_of, seconds_of

ONE, SEVERAL = "(one)", "(several)"  # pydantic puts a union's tag into the path of an error

Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]
Limit = Annotated[float, Field(ge=0)]
Pattern = Annotated[str, Field(min_length=1)]
Patterns = list[Pattern]


def _cadence(value: Any) -> int | str:
    if (type(value) is int and value >= 0) or epochs_of(value) is not None:
        return value  # type: ignore[no-any-return]
    raise ValueError("a whole number of steps from 0 on, or a number of epochs such as '1 epoch'")


def _time(value: Any) -> float | str:
    if seconds_of(value) is not None:
        return value  # type: ignore[no-any-return]
    raise ValueError("a number of seconds above 0, or a time such as '90s', '45m', '1.5h' or '2d'")


_STEPS_OR_EPOCHS = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": "^[1-9][0-9]* epochs?$"}]
}
_TIMES = {"type": "string", "pattern": "^[0-9]+([.][0-9]+)? ?[smhd]$"}
Cadence = Annotated[Any, PlainValidator(_cadence), WithJsonSchema(_STEPS_OR_EPOCHS)]
Time = Annotated[Any, PlainValidator(_time), WithJsonSchema({"anyOf": [{"type": "number"}, _TIMES]})]


class Component(BaseModel):
    """An object to be made: `{use: NAME, key: value, ...}`; the other keys are arguments of what has that name."""

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)
    use: str = Field(min_length=1)

    @property
    def arguments(self) -> dict[str, Any]:
        """The other keys."""
        return self.__pydantic_extra__ or {}


class Data(Section):
    """Datasets, and the loader's options. `shuffle` is true by default, except for iterables.

    `test` is not used in training: `faststep eval RUN --test` computes its loss and metrics.
    """

    train: Component
    validation: Component | None = None
    test: Component | None = None
    batch_size: Positive = 32
    shuffle: bool | None = None
    drop_last: bool = False
    collate: Component = Component(use="stack")
    workers: Count = 0
    prefetch: Count = 2
    processes: bool = False


class Quantize(Section):
    """Quantized weights: `mlx.nn.quantize`, for modules by pattern."""

    bits: Literal[2, 3, 4, 5, 6, 8] = 4
    group_size: Literal[32, 64, 128] = 64
    modules: Patterns = ["*"]


class Lora(Section):
    """LoRA adapters. All other parameters are frozen, except those that `trainable` names."""

    rank: Positive = 8
    scale: float = 20.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    modules: Patterns = ["*"]
    trainable: Patterns = []


_OWN_TYPES = {"compute_dtype": Literal["bfloat16", "float16", "float32"] | None}  # of options whose type no YAML has


def _options() -> dict[str, Any]:
    """Return the options of a step but for `transform` as fields: their types, ranges and defaults."""
    fields: dict[str, Any] = {}
    kinds = get_type_hints(Options, include_extras=True) | _OWN_TYPES
    for name in [name for name in kinds if name != "transform"]:
        kind = kinds[name]
        default = Options._field_defaults[name]
        if get_origin(kind) is Annotated:
            plain, limits = get_args(kind)
            fields[name] = (plain, Field(default, ge=limits.least, lt=limits.below))
        else:
            fields[name] = (kind, default)
    return fields


if TYPE_CHECKING:

    class _Options(Section):
        def __getattr__(self, name: str) -> Any: ...
else:
    _Options = create_model("_Options", __base__=Section, **_options())


class Step(_Options):
    """The options of `faststep.Step`, and `gradient_checkpointing` of modules by pattern."""

    max_grad_norm: Limit | None = 1.0
    max_loss: float | None = 1e6
    accumulate: Positive = 1
    cache_limit: Count | None = None
    shard_optimizer: bool = False
    gradient_checkpointing: Patterns = []


class Train(Section):
    """The length of the training, and the intervals of its events, in steps.

    `validate_every` may be a number of epochs (`1 epoch`), and 0: at the end only. `max_time` is the time of training
    in all, in seconds or as `90m`; after `hang_timeout` without progress a report is written, and `on_hang: exit` ends
    the process. `overfit_one_batch` trains on the first batch again and again, without validation.
    """

    steps: Positive | None = None
    epochs: Positive | None = None
    max_time: Time | None = None
    log_every: Positive = 20
    validate_every: Cadence = 100
    validate_at_start: bool = False
    validation_batches: Positive | None = None
    monitor: Annotated[str, Field(min_length=1)] = "val/loss"
    mode: Literal["min", "max"] | None = None
    patience: Positive | None = None
    min_delta: Limit = 0.0
    stop_after_bad: Count = 10
    overfit_one_batch: bool = False
    update_ratio_every: Count = 0
    memory_limit: Positive | None = None
    hang_timeout: Time | None = 600.0
    on_hang: Literal["report", "exit"] = "report"


class Checkpoints(Section):
    """The interval of checkpoints, in steps or epochs (`1 epoch`; 0: only at the end), and how many are kept."""

    every: Cadence = 200
    keep_last: Positive = 3
    keep_best: Count = 1


class Logs(Section):
    """Built-in loggers, in addition to `log.jsonl`."""

    csv: bool = False
    tensorboard: bool = False
    wandb: dict[str, Any] | None = None
    mlflow: dict[str, Any] | None = None
    trackio: dict[str, Any] | None = None


def _which(value: Any) -> str:
    return SEVERAL if isinstance(value, list) else ONE


Optimizers = Annotated[
    Annotated[Component, Tag(ONE)] | Annotated[list[Component], Field(min_length=1), Tag(SEVERAL)],
    Discriminator(_which),
]


class Config(Section):
    """The config of a run.

    Attributes:
        run: The folder of the run, relative to the working directory; `{n}` in its name is the next free number.
        folder: What `file.py:attribute` and files of data and weights are relative to: the config's folder.
        weights: What the model begins with: a safetensors file; or a run or one of its checkpoints, of which nothing
            but the weights is taken.
        metrics: What is measured beside the loss, by name; None: the accuracy with `cross_entropy`, the perplexity with
            `next_token`.
    """

    run: str = Field("runs/run", min_length=1)
    folder: str = "."
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    model: Component
    weights: Annotated[str, Field(min_length=1)] | None = None
    quantize: Quantize | None = None
    frozen: Patterns = []
    lora: Lora | None = None
    loss: Component
    metrics: dict[Annotated[str, Field(min_length=1)], Component] | None = None
    data: Data
    optimizer: Optimizers
    step: Step = Step()
    train: Train = Train()
    checkpoints: Checkpoints = Checkpoints()
    logs: Logs = Logs()
    callbacks: list[Component] = []
    loggers: list[Component] = []
    _source: Source = PrivateAttr(default_factory=Source)

    @property
    def source(self) -> Source:
        """Places of its values."""
        return self._source

    def resolved(self) -> dict[str, Any]:
        """Return all that is in effect, defaults included, as plain values; keys that nothing reads are left out."""
        values = self.model_dump()
        for *way, last in Usage(self).unused:
            holder: Any = values
            for key in way:
                holder = holder[key]
            del holder[last]
        return values

    def text(self) -> str:
        """Return `resolved()` as YAML, which loads to an equal config."""
        return write(self.resolved())
