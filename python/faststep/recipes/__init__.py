"""Models, losses and datasets by name, and changes of a model before it trains: each is usable alone.

A file for each model; `_losses` (`_head` for those in chunks), `_datasets`, `_schedules`; `_models`, `_lora` and
`_checkpointing` change a model, chosen by `_patterns`. Uses `losses`.
"""

from faststep.recipes._checkpointing import checkpoint_gradients
from faststep.recipes._datasets import Arrays, Bytes
from faststep.recipes._gpt import GPT
from faststep.recipes._lora import LoRALinear, add_lora, fuse
from faststep.recipes._losses import LOSSES, METRICS, cross_entropy, mse, next_token
from faststep.recipes._mlp import MLP
from faststep.recipes._models import freeze, load_weights, quantize
from faststep.recipes._patterns import check_matched, listed, matches
from faststep.recipes._schedules import constant, warm_up

MODELS = {"gpt": GPT, "mlp": MLP}
DATASETS = {"bytes": Bytes, "arrays": Arrays}

__all__ = [
    "DATASETS",
    "GPT",
    "LOSSES",
    "METRICS",
    "MLP",
    "MODELS",
    "Arrays",
    "Bytes",
    "LoRALinear",
    "add_lora",
    "check_matched",
    "checkpoint_gradients",
    "constant",
    "cross_entropy",
    "freeze",
    "fuse",
    "listed",
    "load_weights",
    "matches",
    "mse",
    "next_token",
    "quantize",
    "warm_up",
]
