"""Write the series that the configs beside this file train on: BasicMotions, as the package aeon ships it.

Accelerometer and gyroscope of a watch, 6 channels, 100 values of each: standing, running, walking, badminton;
40 series to train on and 40 held out (Bagnall et al., "The UEA multivariate time series classification archive",
2018). Of the package nothing but two text files is read::

    pip install --no-deps aeon
    python configs/mlx/prepare.py
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path

import numpy as np

LABELS = ["Standing", "Running", "Walking", "Badminton"]
Split = tuple[np.ndarray, np.ndarray]


def find() -> Path:
    """Return the folder of the set in the installed package."""
    found = importlib.util.find_spec("aeon")
    if found is None or found.origin is None:
        sys.exit("aeon is not installed, whose files these series are: pip install --no-deps aeon")
    return Path(found.origin).parent / "datasets" / "data" / "BasicMotions"


def read(file: Path) -> Split:
    """Read series, float32 [items, channels, length], and labels, int32 [items]."""
    lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
    rows = [line.split(":") for line in lines if line and line[0] not in "#@"]
    series = [[np.fromstring(channel, sep=",") for channel in row[:-1]] for row in rows]
    return np.array(series, dtype=np.float32), np.array([LABELS.index(row[-1]) for row in rows], dtype=np.int32)


def nearest(train: Split, held_out: Split) -> float:
    """Return the accuracy of the label of the nearest series to train on, by Euclidean distance."""
    distances = ((held_out[0][:, None] - train[0][None]) ** 2).sum(axis=(2, 3))
    return float((train[1][distances.argmin(axis=1)] == held_out[1]).mean())


def main() -> None:
    """Write the files and print what a simple baseline reaches."""
    parser = argparse.ArgumentParser(description="Write the series of BasicMotions as npz files.")
    parser.add_argument("--out", type=Path, default=Path("runs/series"), help="the folder (default: %(default)s)")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    train, held_out = (read(find() / f"BasicMotions_{name}.ts") for name in ("TRAIN", "TEST"))
    mean, deviation = train[0].mean(axis=(0, 2), keepdims=True), train[0].std(axis=(0, 2), keepdims=True)
    for name, (series, labels) in {"train": train, "held_out": held_out}.items():
        np.savez(out / f"{name}.npz", series=(series - mean) / deviation, labels=labels)
    print(f"{len(train[1])} series to train on and {len(held_out[1])} held out, [channels, length] each, in {out}")
    print(f"answers: the most frequent one {np.bincount(held_out[1]).max() / len(held_out[1]):.3f} right,", end=" ")
    print(f"that of the nearest series {nearest(train, held_out):.3f}")


if __name__ == "__main__":
    main()
