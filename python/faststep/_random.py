"""The random states of a process: MLX's, Python's and numpy's, as plain values and back."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np


def mlx_key() -> mx.array:
    """Return this thread's random state of MLX, uint32 [2]."""
    state: Any = mx.random.state
    key: mx.array = state[0]
    return key


def seed_of(key: mx.array) -> int:
    """Return the number with which `mx.random.seed` gives this key."""
    words: Any = key.tolist()
    return int(words[0]) << 32 | int(words[1])


def mlx_seed() -> int:
    """Return the number that gives this thread's random state of MLX when it is given to `mx.random.seed`."""
    return seed_of(mlx_key())


def states() -> dict[str, Any]:
    """Return the states of `random` and `numpy.random` as JSON can hold them."""
    version, words, gauss = random.getstate()
    return {"python": [version, list(words), gauss], "numpy": _plain(np.random.get_state(legacy=False))}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else value


def restorers(states: Any) -> list[Callable[[], None]]:
    """Return what puts back the states of `states`.

    Raises:
        ValueError: They are none. Nothing has changed.
    """
    try:
        version, words, gauss = states["python"]
        python = (version, tuple(words), gauss)
        numpy = states["numpy"]
        if not 0 <= numpy["state"].get("pos", 0) <= 624:  # numpy does not check it
            raise ValueError(f"position {numpy['state']['pos']}")
        random.Random().setstate(python)
        name = np.random.get_state(legacy=False)["bit_generator"]
        if numpy["bit_generator"] != name:
            raise ValueError(f"numpy.random is of {name}, the state of {numpy['bit_generator']}")
        if name == "MT19937":
            np.random.RandomState().set_state(numpy)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ValueError(f"expected states of `random` and `numpy.random`, got others ({error!r})") from error
    return [lambda: random.setstate(python), lambda: np.random.set_state(numpy)]
