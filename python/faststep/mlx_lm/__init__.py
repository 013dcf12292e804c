"""Language models of mlx-lm (extra `llm`): loaded from a local folder, quantized, adapted, fed JSON lines, exported.

`_folder` reads and checks a model's folder, `_load` is the recipe over it, `_lora` its adapters, `_model` and
`_segments` what losses and trainer need of a model. Data: `_jsonl` over `_records` (files), `_layouts` (records),
`_chat` (templates), `_tokens`, `_samples`, `_cache`, `_progress`. `_adapters`, `_config`, `_export` are mlx-lm's
files; `_train` is mlx-lm's trainer with our step, `_llama` makes a small model. Uses `_step`, `_files`, `_optional`,
`recipes` and `training`.
"""

from faststep.mlx_lm._config import from_mlx_lm
from faststep.mlx_lm._export import Adapters, export_adapters, export_fused
from faststep.mlx_lm._jsonl import Jsonl
from faststep.mlx_lm._llama import new_llama
from faststep.mlx_lm._load import Quantize, load
from faststep.mlx_lm._lora import Lora
from faststep.mlx_lm._model import LanguageModel
from faststep.mlx_lm._train import train

MODELS = {"mlx_lm": load}
DATASETS = {"jsonl": Jsonl}
CALLBACKS = {"adapters": Adapters}

__all__ = [
    "CALLBACKS",
    "DATASETS",
    "MODELS",
    "Adapters",
    "Jsonl",
    "LanguageModel",
    "Lora",
    "Quantize",
    "export_adapters",
    "export_fused",
    "from_mlx_lm",
    "load",
    "new_llama",
    "train",
]
