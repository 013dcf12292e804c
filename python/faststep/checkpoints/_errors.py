"""Errors and warnings about checkpoints."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be written, read or used; nothing that was there before has changed."""


class Damaged(CheckpointError):
    """Files on the disk that differ from what was written."""


class CheckpointWarning(RuntimeWarning):
    """A damaged checkpoint was passed over, an old one could not be removed, or a value is not in a checkpoint."""
