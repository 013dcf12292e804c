"""PyTorch's side of ``ranks.py``: DistributedDataParallel, run by the Python that has PyTorch, one process a rank.

The folder of its argument has the case, as ``torch_peer.py`` takes it. Rank 0 prints a line of JSON: milliseconds and
bytes by way.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, no-untyped-call"

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch_peer import Batches, Peak, StepFn, new_model, run_block, step_by


class WithLoss(nn.Module):
    """A model with its loss, which are compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean cross entropy, in nats."""
        return F.cross_entropy(self.model(x).float().flatten(0, -2), y.flatten())


def new_step(case: dict[str, Any], arrays: dict[str, Tensor], precision: str, size: int) -> StepFn:
    """Return the step as PyTorch's documentation writes it."""
    model = new_model(case, arrays, torch.bfloat16 if precision == "bfloat16" else torch.float32)
    whole: nn.Module = WithLoss(model)
    if size > 1:
        whole = DistributedDataParallel(whole, gradient_as_bucket_view=True)
    loss_of = torch.compile(whole, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    return step_by(case, model, optimizer, loss_of, precision == "autocast")


def main() -> None:
    """Measure all precisions, one after the other."""
    folder = Path(sys.argv[1])
    rank, size = (int(os.environ.get(name, default)) for name, default in (("MLX_RANK", "0"), ("MLX_WORLD_SIZE", "1")))
    if size > 1:
        address = f"tcp://{os.environ['NCCL_HOST_IP']}:{os.environ['NCCL_PORT']}"
        torch.distributed.init_process_group("nccl", init_method=address, rank=rank, world_size=size)
    case = json.loads((folder / "case.json").read_text())
    arrays = {name: torch.from_numpy(array) for name, array in np.load(folder / "arrays.npz").items()}
    torch.set_float32_matmul_precision(case["matmul precision"])
    xs, ys = (arrays.pop(name).to(case["device"]) for name in ("x", "y"))
    xs = xs if xs.is_floating_point() else xs.long()
    batches: Batches = list(zip(xs, ys.long(), strict=True))
    found = {}
    for precision in case["precisions"]:
        with Peak(case["device"]) as peak:
            step = new_step(case, arrays, precision, size)
            run_block(step, batches, case["warm"])
        times = [run_block(step, batches, case["block"]) for _ in range(case["rounds"])]
        found[f"DDP, compiled, {precision}"] = {"ms": times, "peak": peak.bytes}
    if rank == 0:
        print(json.dumps(found), flush=True)
    if size > 1:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
