"""PyTorch's side of ``step.py``: the same models, optimizer and clipping, run by the Python that has PyTorch.

``step.py --torch`` starts it with one argument, the folder in which ``frameworks.py`` has put the case (``case.json``)
and MLX's initial weights and batches (``arrays.npz``). It prints what it has built, a line of JSON, and then takes a
block of steps for every line ``["way", steps]`` that it reads, and prints its milliseconds a step.
"""

# mypy: disable-error-code="import-not-found, misc, no-any-return, no-untyped-call"
# PyTorch is not in the environment that MLX is in, and where it is missing everything in it is of type Any.

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor]
Batches = list[Batch]
StepFn = Callable[[Tensor, Tensor], Tensor]
MODES: dict[str, dict[str, Any] | None] = {
    "PyTorch": None,
    "PyTorch, compiled": {},
    "PyTorch, compiled, reduce-overhead": {"mode": "reduce-overhead"},
    "PyTorch, one CUDA graph": None,
    "PyTorch, compiled, one CUDA graph": {},
}
ON_CUDA = tuple(MODES)[2:]
WHOLE_STEP = tuple(MODES)[3:]  # in one CUDA graph
WARM_UP = 3  # steps before a capture, as PyTorch's documentation has it


class MLP(nn.Module):
    """The MLP of ``models.py``."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers - 1))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, width] to logits, [batch, 10]."""
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.head(x)


class Attention(nn.Module):
    """``mlx.nn.MultiHeadAttention``, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query_proj, self.key_proj, self.value_proj, self.out_proj = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same."""
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in self.projections())
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))

    def projections(self) -> tuple[nn.Module, ...]:
        """Return what makes queries, keys and values."""
        return self.query_proj, self.key_proj, self.value_proj


class Layer(nn.Module):
    """``mlx.nn.TransformerEncoderLayer``, the norms first."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(width, heads)
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.linear1, self.linear2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same."""
        x = x + self.attention(self.ln1(x))
        return x + self.linear2(F.relu(self.linear1(self.ln2(x))))


class Encoder(nn.Module):
    """``mlx.nn.TransformerEncoder``."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(layers))
        self.ln = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [batch, seq, width] to the same."""
        for layer in self.layers:
            x = layer(x)
        return self.ln(x)


class GPT(nn.Module):
    """The GPT of ``models.py``; its parameters have the same names."""

    def __init__(self, layers: int, width: int, heads: int, seq: int, vocab: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(seq, width)
        self.blocks = Encoder(layers, width, heads)
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Map tokens, int64 [batch, seq], to logits, [batch, seq, vocab]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.blocks(self.tokens(tokens) + self.positions(positions)))


def new_model(case: dict[str, Any], arrays: dict[str, Tensor], dtype: torch.dtype) -> nn.Module:
    """Build the model with MLX's weights; every name and shape has to be the same there."""
    model: nn.Module = {"MLP": MLP, "GPT": GPT}[case["model"]](**case["shape"])
    model.load_state_dict({name[2:]: array for name, array in arrays.items() if name.startswith("p.")})
    return model.to(case["device"], dtype)


def new_step(
    case: dict[str, Any],
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    options: dict[str, Any] | None,
    autocast: bool,
) -> StepFn:
    """Return the step as PyTorch's documentation writes it; with options, model and loss are compiled."""

    def loss_fn(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x).float().flatten(0, -2), y.flatten())

    loss_of = loss_fn if options is None else torch.compile(loss_fn, dynamic=False, **options)
    return step_by(case, model, optimizer, loss_of, autocast)


def step_by(
    case: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: StepFn, autocast: bool
) -> StepFn:
    """Return the step of a model by its loss of a batch."""

    def step(x: Tensor, y: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()  # the graphs may overwrite what the last step returned
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(case["device"], torch.bfloat16, enabled=autocast):
            loss: Tensor = loss_of(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), case["max_grad_norm"])
        optimizer.step()
        return loss.detach()

    return step


class Captured:
    """The whole step as one CUDA graph: gradients, clipping and update.

    Captured as PyTorch's documentation has it, behind some steps on a stream of its own; parameters and moments are
    then as they were.
    """

    def __init__(self, step: StepFn, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
        self.model, self.optimizer = model, optimizer  # whose arrays the graph reads and writes
        self.batch = tuple(array.clone() for array in batch)
        initial = [parameter.detach().clone() for parameter in model.parameters()]
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            for _ in range(WARM_UP):
                step(*self.batch)
        torch.cuda.current_stream().wait_stream(aside)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.loss = step(*self.batch)
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), initial, strict=True):
                parameter.copy_(value)
                for array in optimizer.state[parameter].values():
                    array.zero_()

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Take a step; the next one writes over the loss."""
        for array, value in zip(self.batch, (x, y), strict=True):
            array.copy_(value)
        self.graph.replay()
        return self.loss


def run_block(step: StepFn, batches: Batches, count: int) -> float:
    """Do what ``timing.run_block`` does."""
    step(*batches[0])
    synchronize()
    start = time.perf_counter()
    for i in range(count):
        step(*batches[i % len(batches)])
    synchronize()
    return 1e3 * (time.perf_counter() - start) / count


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def build(
    case: dict[str, Any], arrays: dict[str, Tensor], batches: Batches
) -> tuple[dict[str, StepFn], dict[str, Any]]:
    """Build every way and take its first steps; return them, with the first loss and the peak of the memory of each."""
    steps: dict[str, StepFn] = {}
    built: dict[str, Any] = {}
    for precision, (mode, options) in itertools.product(case["precisions"], MODES.items()):
        if mode in ON_CUDA and case["device"] == "cpu":
            continue
        name = mode + (", autocast" if precision == "autocast" else "")
        with Peak(case["device"]) as peak:
            model = new_model(case, arrays, torch.bfloat16 if precision == "bfloat16" else torch.float32)
            graph = mode in WHOLE_STEP
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, fused=True, capturable=graph)
            step = new_step(case, model, optimizer, options, precision == "autocast")
            steps[name] = Captured(step, model, optimizer, batches[0]) if graph else step
            losses = [float(steps[name](*batch)) for batch in batches]
        built[name] = {"losses": losses[:1], "peak": peak.bytes}  # MLX's AdamW does not correct the bias
    return steps, built


class Peak:
    """The most memory that was allocated meanwhile, above what had been before; None on a CPU."""

    bytes: int | None = None

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"

    def __enter__(self) -> Peak:
        """Begin."""
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *_: object) -> None:
        """End."""
        if self.on_gpu:
            self.bytes = torch.cuda.max_memory_allocated() - self.before


def main() -> None:
    """Build, say what was built, and take blocks of steps as asked."""
    folder = Path(sys.argv[1])
    case = json.loads((folder / "case.json").read_text())
    arrays = {name: torch.from_numpy(array) for name, array in np.load(folder / "arrays.npz").items()}
    torch.set_float32_matmul_precision(case["matmul precision"])
    dtype = torch.bfloat16 if "bfloat16" in case["precisions"] else torch.float32
    xs, ys = (arrays.pop(name).to(case["device"]) for name in ("x", "y"))
    xs = xs.to(dtype) if xs.is_floating_point() else xs.long()
    batches = list(zip(xs, ys.long(), strict=True))
    steps, built = build(case, arrays, batches)
    precision = torch.get_float32_matmul_precision()
    about = {"framework": "PyTorch", "version": torch.__version__, "matmul precision": precision}
    print(json.dumps({**about, "ways": built}), flush=True)
    for line in sys.stdin:
        way, count = json.loads(line)
        print(json.dumps(run_block(steps[way], batches, count)), flush=True)


if __name__ == "__main__":
    main()
