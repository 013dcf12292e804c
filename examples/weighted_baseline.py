"""Loss of counting bytes on the validation data of examples/weighted_lm.yaml: a number for its training to beat.

The probability of a byte is how often it came behind the one before it in the texts to train on, with one added to each
count; the loss is weighed as `weighted_lm` weighs it::

    python examples/weighted_baseline.py
"""

from __future__ import annotations

import numpy as np
from faststep.recipes import Sources

WINDOWS = 16 * 16  # of the held-out texts, as many as the config's validation_batches have


def main() -> None:
    """Count, and print the loss."""
    train, held_out = (Sources(split=split, context=64) for split in ("train", "held_out"))
    pairs, singles = np.ones((256, 256)), np.ones(256)
    for item in train:
        ids = item["input_ids"]
        np.add.at(pairs, (ids[:-1], ids[1:]), 1)
        np.add.at(singles, ids, 1)
    of_pairs, of_singles = np.log(pairs / pairs.sum(axis=1, keepdims=True)), np.log(singles / singles.sum())
    weights, by_pairs, by_singles = [], [], []
    for item in (held_out[i] for i in range(min(WINDOWS, len(held_out)))):
        ids = item["input_ids"]
        weights.append(item["auth_weights"] / 2 ** item["prov_entropies"])
        by_pairs.append(-of_pairs[ids[:-1], ids[1:]].mean())
        by_singles.append(-of_singles[ids[1:]].mean())
    for name, losses in {"each byte by its frequency": by_singles, "by the byte before it": by_pairs}.items():
        print(f"{name}: {np.average(losses, weights=weights):.3f} nats a byte")


if __name__ == "__main__":
    main()
