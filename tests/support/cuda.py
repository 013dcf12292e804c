"""Tests that need an NVIDIA GPU: when they are skipped, and how a step is replayed there."""

from __future__ import annotations

import mlx.core as mx
import pytest
from faststep import Step

IS_CUDA = mx.default_device() == mx.gpu and mx.cuda.is_available()
NEEDS_CUDA = pytest.mark.skipif(not IS_CUDA, reason="needs an NVIDIA GPU")
STEPS = 9  # the first evaluation, one that is measured, one more, one with the capture, and replays


def replayed(step: Step) -> list[str]:
    """Say of each trace how it is replayed."""
    return [str(trace.replay) for trace in step.stats.traces]


def is_captured(step: Step) -> bool:
    """Tell whether every trace has been captured."""
    return all(text.startswith("captured") for text in replayed(step))
