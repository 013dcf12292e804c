"""Models, losses and datasets by name, and changes of a model before it trains: each is usable alone.

A file for each small model, a folder for each larger system (`encoders`, `text`, `time_series`); `_losses` (`_head` for
those in chunks), `_datasets`, `_schedules`; `_models`, `_lora` and `_checkpointing` change a model, chosen by
`_patterns`. Uses `losses` and `_optional`.
"""

from collections.abc import Callable
from typing import Any

from faststep.recipes._checkpointing import checkpoint_gradients
from faststep.recipes._datasets import Arrays, Bytes
from faststep.recipes._gpt import GPT
from faststep.recipes._lora import LoRALinear, add_lora, fuse
from faststep.recipes._losses import LOSSES as _LOSSES
from faststep.recipes._losses import METRICS, cross_entropy, mse, next_token
from faststep.recipes._mixture import Mixture
from faststep.recipes._mlp import MLP
from faststep.recipes._models import freeze, load_weights, quantize
from faststep.recipes._patterns import check_matched, listed, matches
from faststep.recipes._resampled import Resampled
from faststep.recipes._schedules import constant, one_cycle, warm_up
from faststep.recipes._sources import Sources
from faststep.recipes._weighted_lm import weighted_lm
from faststep.recipes.encoders import bert, masked_lm, modernbert, text_classification
from faststep.recipes.text import LabelledText, MaskedText
from faststep.recipes.time_series import Series, SeriesToText, series_model, series_to_text

MODELS: dict[str, Callable[..., Any]] = {
    "gpt": GPT,
    "mlp": MLP,
    "modernbert": modernbert,
    "bert": bert,
    "series": series_model,
}
DATASETS: dict[str, Callable[..., Any]] = {
    "bytes": Bytes,
    "arrays": Arrays,
    "mixture": Mixture,
    "resampled": Resampled,
    "masked_text": MaskedText,
    "labelled_text": LabelledText,
    "series": Series,
    "sources": Sources,
}
LOSSES: dict[str, Callable[..., Any]] = {
    **_LOSSES,
    "masked_lm": masked_lm,
    "text_classification": text_classification,
    "series_to_text": series_to_text,
    "weighted_lm": weighted_lm,
}

__all__ = [
    "DATASETS",
    "GPT",
    "LOSSES",
    "METRICS",
    "MLP",
    "MODELS",
    "Arrays",
    "Bytes",
    "LabelledText",
    "LoRALinear",
    "MaskedText",
    "Mixture",
    "Resampled",
    "Series",
    "SeriesToText",
    "Sources",
    "add_lora",
    "bert",
    "check_matched",
    "checkpoint_gradients",
    "constant",
    "cross_entropy",
    "freeze",
    "fuse",
    "listed",
    "load_weights",
    "masked_lm",
    "matches",
    "modernbert",
    "mse",
    "next_token",
    "one_cycle",
    "quantize",
    "series_model",
    "series_to_text",
    "text_classification",
    "warm_up",
    "weighted_lm",
]
