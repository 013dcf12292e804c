"""The trainer: the loop around the step, with validation, checkpoints and logs. Needs the extra `train`."""

from faststep.training._bundle import Reproduction, reproduce
from faststep.training._callbacks import Callback
from faststep.training._errors import TrainingError
from faststep.training._trainer import Result, Trainer
from faststep.training._validate import validate

__all__ = ["Callback", "Reproduction", "Result", "Trainer", "TrainingError", "reproduce", "validate"]
