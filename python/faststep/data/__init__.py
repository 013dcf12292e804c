"""Datasets in batches: evaluated, resumable, made ahead of the step by threads."""

from faststep.data._loader import Loader
from faststep.data._pack import Pack
from faststep.data._pad import Pad
from faststep.data._stack import stack
from faststep.data._stats import LoaderStats

__all__ = ["Loader", "LoaderStats", "Pack", "Pad", "stack"]
