"""Changes that a program makes to model, optimizer and random state between two steps."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_map

from support.helpers import Tree, copy_tree
from support.models import CLASSES

Change = Callable[[nn.Module, optim.Optimizer], object]


def halve(model: nn.Module, _: optim.Optimizer) -> None:
    model.update(tree_map(lambda p: p * 0.5, model.trainable_parameters()))


def load_weights(model: nn.Module, _: optim.Optimizer) -> None:
    rng = np.random.default_rng(1)
    model.load_weights([("head.weight", mx.array(rng.standard_normal((CLASSES, 4), dtype=np.float32)))], strict=False)


def add_in_place(model: nn.Module, _: optim.Optimizer) -> None:
    model.head.weight += 1


def assign_a_row(model: nn.Module, _: optim.Optimizer) -> None:
    model.head.weight[0] = 3.0


def replace_a_buffer(model: nn.Module, _: optim.Optimizer) -> None:
    model.norm.running_mean = mx.full((4,), 0.25)


def replace_a_module(model: nn.Module, _: optim.Optimizer) -> None:
    mx.random.seed(21)
    model.head = nn.Linear(4, CLASSES)


def drop_less(model: nn.Module, _: optim.Optimizer) -> None:
    model.dropout = nn.Dropout(0.05)


def change_a_number(model: nn.Module, _: optim.Optimizer) -> None:
    model.norm.momentum = 0.7


def swap_state(_: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state = copy_tree(tree_map(lambda a: a * 2 if a.dtype == mx.float32 else a, optimizer.state))


def edit_state(_: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state["head"]["weight"]["m"] = mx.full((CLASSES, 4), 0.1)


def reset_step(_: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer.state["step"] = mx.array(0, mx.uint64)


def new_schedule(_: nn.Module, optimizer: optim.Optimizer) -> None:
    optimizer._maybe_schedule("learning_rate", optim.cosine_decay(0.1, 5))


def setting(name: str, value: Tree) -> Change:
    """Change an attribute of the optimizer."""
    return lambda model, optimizer: setattr(optimizer, name, value)


CHANGES: dict[str, Change] = {
    "update": halve,
    "load-weights": load_weights,
    "add-in-place": add_in_place,
    "assign-a-row": assign_a_row,
    "buffer": replace_a_buffer,
    "submodule": replace_a_module,
    "dropout": drop_less,
    "number": change_a_number,
    "dtype": lambda model, optimizer: model.head.set_dtype(mx.float16),
    "eval": lambda model, optimizer: model.eval(),
    "part-eval": lambda model, optimizer: model.norm.eval(),
    "freeze": lambda model, optimizer: model.conv.freeze(),
    "freeze-keys": lambda model, optimizer: model.head.freeze(keys="bias"),
    "learning-rate": setting("learning_rate", 0.05),
    "schedule": new_schedule,
    "betas": setting("betas", [0.5, 0.6]),
    "eps": setting("eps", 1e-3),
    "weight-decay": setting("weight_decay", 0.5),
    "state": swap_state,
    "part-of-state": edit_state,
    "step": reset_step,
    "seed": lambda model, optimizer: mx.random.seed(99),
}
