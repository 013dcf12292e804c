"""Checkpoints of a training step: written off its path, whole or not at all, and restored exactly.

`_checkpoints` is the folder, `_checkpoint` one of it; `_snapshot` takes its contents, `_write` writes them,
`_manifest` reads and checks them, `_apply` restores them, `_tensors` has the safetensors format. Uses `_step`,
`_random`, `_files` and `_native`.
"""

from faststep.checkpoints._checkpoint import Checkpoint
from faststep.checkpoints._checkpoints import Checkpoints, Written
from faststep.checkpoints._errors import CheckpointError, CheckpointWarning

__all__ = ["Checkpoint", "CheckpointError", "CheckpointWarning", "Checkpoints", "Written"]
