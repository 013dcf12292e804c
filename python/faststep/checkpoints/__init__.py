"""Checkpoints of a training step: written off its path, whole or not at all, and restored exactly."""

from faststep.checkpoints._checkpoint import Checkpoint
from faststep.checkpoints._checkpoints import Checkpoints, Written
from faststep.checkpoints._errors import CheckpointError, CheckpointWarning

__all__ = ["Checkpoint", "CheckpointError", "CheckpointWarning", "Checkpoints", "Written"]
