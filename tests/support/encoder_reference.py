"""Write tests/recipes/encoders.npz: what `transformers` and PyTorch compute for the cases of `encoder_cases`.

Run it in an environment of its own with torch and transformers:

    python tests/support/encoder_reference.py tests/recipes/encoders.npz
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from encoder_cases import CASES, IGNORED, Case, texts, weight


def build(case: Case) -> Any:
    """Make a model with the weights of the case."""
    kind = getattr(transformers, case.architecture)
    sizes = case.config | ({} if case.classes is None else {"num_labels": case.classes})
    model = kind(kind.config_class(**sizes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(weight(name, tuple(parameter.shape))))
    return model


def compute(case: Case) -> dict[str, Any]:
    """Return hidden states, logits, loss and gradients; and what the model's folder says."""
    model, batch = build(case), texts(case)
    inputs = {"input_ids": torch.from_numpy(batch["tokens"]), "attention_mask": torch.from_numpy(batch["mask"]).long()}
    out = model(**inputs, output_hidden_states=True)
    targets = torch.from_numpy(batch["targets" if case.classes is None else "labels"])
    loss = torch.nn.functional.cross_entropy(out.logits.flatten(0, -2), targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        names = sorted(safetensors_names(Path(folder) / "model.safetensors"))
    found: dict[str, Any] = {"config": json.dumps(config), "names": json.dumps(names)}
    found |= {"logits": out.logits, "loss": loss, "hidden": out.hidden_states[-1]}
    found |= {f"gradient {name}": each.grad for name, each in model.named_parameters()}
    return found


def safetensors_names(file: Path) -> list[str]:
    """Read the names in a file."""
    with file.open("rb") as stream:
        head = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return [name for name in head if name != "__metadata__"]


def as_numpy(value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor or a text as an array."""
    return value.detach().numpy().astype(np.float32) if isinstance(value, torch.Tensor) else np.array(value)


if __name__ == "__main__":
    arrays = {f"{name}/{what}": as_numpy(each) for name, case in CASES.items() for what, each in compute(case).items()}
    arrays["versions"] = np.array(f"torch {torch.__version__}, transformers {transformers.__version__}")
    np.savez_compressed(sys.argv[1], **arrays)
