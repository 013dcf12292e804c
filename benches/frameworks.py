"""Other frameworks' ways to take the step, in processes of other Pythons, which take turns with those of ``ways``."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import peers
from cases import MAX_GRAD_NORM, Case
from machine import ROOT
from mlx.utils import tree_flatten
from models import GPT, MLP, Checkpointed, Llama, Recurrent, ResNet
from samples import on_gpu

PEERS = {"PyTorch": "torch_peer.py", "JAX": "jax_peer.py"}
MODELS: dict[str, tuple[type, ...]] = {
    "PyTorch": (MLP, GPT),
    "JAX": (MLP, GPT, Checkpointed, ResNet, Recurrent, Llama),
}  # that a peer has


@contextlib.contextmanager
def start(framework: str, python: str, case: Case) -> Iterator[peers.Peer]:
    """Run a framework's peer on a case; it ends with the context.

    Args:
        framework: A key of ``PEERS``.
        python: Path of a Python that has the framework.
        case: What to measure; its initial weights and batches go along as float32.
    """
    with tempfile.TemporaryDirectory() as folder:
        np.savez(Path(folder, "arrays.npz"), allow_pickle=False, **arrays(case))
        Path(folder, "case.json").write_text(json.dumps(description(case)), encoding="utf-8")
        with peers.start([python, str(ROOT / "benches" / PEERS[framework]), folder], environment()) as peer:
            yield peer


def description(case: Case) -> dict[str, Any]:
    """Return what the peer has to know."""
    return {
        "model": case.model.__name__,
        "shape": case.shape,
        "precisions": ["bfloat16", "autocast"] if case.dtype == mx.bfloat16 else ["float32"],
        "max_grad_norm": MAX_GRAD_NORM,
        "device": "cuda" if on_gpu() else "cpu",
        "matmul precision": matmul_precision(),
    }


def matmul_precision() -> str:
    """Return PyTorch's name for how MLX multiplies float32 on a GPU: in TF32 unless told otherwise (mlx/utils.h)."""
    return "high" if os.environ.get("MLX_ENABLE_TF32", "1") != "0" else "highest"


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Return the initial weights by name, behind ``p.``, and the batches, stacked, as x and y."""
    weights = dict(tree_flatten(case.new_run().model.parameters(), prefix=".p"))
    xs, ys = zip(*case.batches(), strict=True)
    stacked = {"x": mx.stack(list(xs)), "y": mx.stack(list(ys))}
    return {name: as_numpy(array) for name, array in {**weights, **stacked}.items()}


def as_numpy(array: mx.array) -> np.ndarray:
    """Return a copy that NumPy can hold: it has no bfloat16."""
    return np.array(array.astype(mx.float32) if array.dtype == mx.bfloat16 else array)


def environment() -> dict[str, str]:
    """Return our environment without what is meant for our Python."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
