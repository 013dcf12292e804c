"""Datasets in batches: evaluated, resumable, made ahead of the step by threads.

`_source` reads, `_order` and `_epoch` plan an epoch of a sequence, `_reader` follows a stream, `_make` makes a batch,
`_pipeline` and `_workers` do it ahead, `_processes` reads elsewhere; `_stack`, `_pad` and `_pack` collate; `_units`
reads "2 epochs" and "90m". Uses MLX and NumPy, and no other room.
"""

from faststep.data._errors import Interrupted, TooLong
from faststep.data._loader import Loader
from faststep.data._pack import Pack
from faststep.data._pad import Pad
from faststep.data._stack import stack
from faststep.data._stats import LoaderStats
from faststep.data._units import epochs_of, seconds_of

__all__ = ["Interrupted", "Loader", "LoaderStats", "Pack", "Pad", "TooLong", "epochs_of", "seconds_of", "stack"]
