"""Tests that need an NVIDIA GPU: when they are skipped."""

from __future__ import annotations

import mlx.core as mx
import pytest

IS_CUDA = mx.default_device() == mx.gpu and mx.cuda.is_available()
NEEDS_CUDA = pytest.mark.skipif(not IS_CUDA, reason="needs an NVIDIA GPU")
