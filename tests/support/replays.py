"""How a step is captured on this machine's device, and when it cannot be: what tests of replay have in common."""

from __future__ import annotations

import sys

import mlx.core as mx
import pytest
from faststep import Step

from support.cuda import IS_CUDA

IS_CPU = mx.default_device() == mx.cpu and not mx.is_available(mx.gpu) and sys.platform.startswith("linux")
NEEDS_REPLAY = pytest.mark.skipif(not (IS_CUDA or IS_CPU), reason="needs an NVIDIA GPU, or Linux on a CPU")
NEEDS_CPU = pytest.mark.skipif(not IS_CPU, reason="needs Linux on a CPU")
# The first evaluation, one that is measured, one more, one with the capture, on a CPU one beside it, and replays.
STEPS = 9


def replayed(step: Step) -> list[str]:
    """Say of each trace how it is replayed."""
    return [str(trace.replay) for trace in step.stats.traces]


def is_captured(step: Step) -> bool:
    """Tell whether every trace has been captured."""
    return all(text.startswith("captured") for text in replayed(step))


def tolerance(on_cuda: float) -> float:
    """Return how far a replayed run may be from the ordinary one: on a CPU it has the same bits."""
    return on_cuda if IS_CUDA else 0
