"""Restoring a checkpoint into a step and a loader: all is checked first, and on an error nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.optimizers import MultiOptimizer
from mlx.utils import tree_flatten, tree_map, tree_map_with_path, tree_unflatten

from faststep import _random
from faststep._step import Step, like, shows_average
from faststep.checkpoints._errors import CheckpointError
from faststep.checkpoints._folder import MODEL, OPTIMIZER, STEP
from faststep.checkpoints._manifest import Contents, read_manifest, read_tensors, read_training
from faststep.checkpoints._snapshot import Arrays, Stateful, decoded, split

MOST_DIFFERENCES = 10
# moments in the dtypes of MLX, and in 8 bits (`Step(..., state_bits=8)`): a step takes either over
PLAIN, CODED = ("m", "v"), ("m_codes", "m_scales", "v_codes", "v_scales")
Change = tuple[Callable[[], object], Callable[[], object]]  # a function that makes it, and one that takes it back


def restore(path: Path, step: Step, loader: Stateful | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read a checkpoint, check it, and put it in place.

    Returns:
        Its manifest, and the numbers that it was saved with.

    Raises:
        Damaged: It is not what was written.
        CheckpointError: It is of another model, optimizer, step or loader. Nothing has changed.
    """
    if shows_average(step.model):
        raise CheckpointError("the model shows its average: expected a restore after the `with step.average()` block")
    manifest = read_manifest(path)
    training = read_training(path, manifest)
    read = {name: _own_part(step, read_tensors(path, name, manifest)) for name in (MODEL, OPTIMIZER, STEP)}
    state, attributes = Arrays(), Arrays()
    for name, array in read[OPTIMIZER][0].items():
        (attributes if name.startswith("@") else state)[name] = array
    changes = [
        *_loader_changes(path, loader, training),
        _model_change(path, step, read[MODEL][0]),
        _optimizer_change(path, step, state, training["values"]),
        _attributes_change(path, step, training.get("attributes", {}), attributes),
        *_step_changes(path, step, read[STEP]),
        *_random_changes(path, training),
    ]
    _make(changes, path)
    return manifest, training["numbers"]


def _own_part(step: Step, contents: Contents) -> Contents:
    arrays, texts = contents
    return {name: step.own_part(name, array) for name, array in arrays.items()}, texts


def _make(changes: Iterable[Change], path: Path) -> None:
    made: list[Callable[[], object]] = []
    try:
        for change, back in changes:
            made.append(back)
            change()
    except BaseException as error:
        for back in reversed(made):
            back()
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            raise CheckpointError(f"{path}: {error}") from error
        raise


def _loader_changes(path: Path, loader: Stateful | None, training: dict[str, Any]) -> list[Change]:
    if loader is None:
        return []
    state, before = training.get("loader"), loader.state
    if state is None:
        raise CheckpointError(f"{path}: expected the state of a loader, found none: it was saved without")
    return [(lambda: loader.load_state(state), lambda: loader.load_state(before))]


def _model_change(path: Path, step: Step, arrays: Arrays) -> Change:
    before = step.model.parameters()
    trained: Arrays = dict(tree_flatten(step.model.trainable_parameters()))

    def same(name: str, wanted: mx.Dtype, found: mx.Dtype) -> bool:
        return wanted == found or (
            name not in trained and _same_kind(name, wanted, found)
        )  # BatchNorm's become float32

    differences(path, "model", split(before, "model")[0], arrays, same)
    after = tree_map_with_path(lambda name, _: arrays[name], before)
    return (lambda: step.model.update(after), lambda: step.model.update(before))


def _optimizer_change(path: Path, step: Step, arrays: Arrays, values: dict[str, Any]) -> Change:
    optimizer: Any = step.optimizer
    before = _copied(optimizer.state)
    template = before
    if split(before, "optimizer")[0].keys() != arrays.keys():
        template = _initialised(step, before, arrays)
    template = _recoded(template, arrays)
    wanted, others = split(template, "optimizer")
    if any(not type(each).__module__.startswith("mlx.") for each in _members(optimizer)):
        late = {name: leaf for name, leaf in (values | arrays).items() if name not in wanted | others}
        template = _with(_copied(template), late)
        wanted, others = split(template, "optimizer")
    differences(path, "optimizer", wanted, arrays, _same_kind)
    if values.keys() != others.keys():
        raise CheckpointError(f"{path}: optimizer: expected the values {sorted(others)}, found {sorted(values)}")
    found = values | arrays
    after = tree_map_with_path(lambda name, _: found[name], template)
    return (lambda: setattr(optimizer, "state", after), lambda: setattr(optimizer, "state", before))


def _recoded(tree: Any, found: Arrays, path: str = "") -> Any:
    """Return a tree with codes in the place of moments, or moments in that of codes, where those are found."""
    if isinstance(tree, list | tuple):
        return type(tree)(_recoded(part, found, f"{path}{index}.") for index, part in enumerate(tree))
    if not isinstance(tree, dict):
        return tree
    for here, there in ((PLAIN, CODED), (CODED, PLAIN)):
        others = {name: found[f"{path}{name}"] for name in there if f"{path}{name}" in found}
        if tree.keys() >= set(here) and len(others) == len(there) and others[there[0]].size == tree[here[0]].size:
            return {name: leaf for name, leaf in tree.items() if name not in here} | others
    return {name: _recoded(part, found, f"{path}{name}.") for name, part in tree.items()}


def _attributes_change(path: Path, step: Step, values: dict[str, Any], arrays: Arrays) -> Change:
    before = step.attributes
    try:
        after = {name: decoded(value, arrays) for name, value in values.items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: expected the optimizer's attributes, found others ({error!r})") from error
    return (lambda: setattr(step, "attributes", after), lambda: setattr(step, "attributes", before))


def _members(optimizer: Any) -> list[Any]:
    """Return the optimizer, and those that it delegates to."""
    within = optimizer.optimizers if isinstance(optimizer, MultiOptimizer) else []
    return [optimizer, *(member for each in within for member in _members(each))]


def _with(tree: Any, leaves: dict[str, Any]) -> Any:
    """Put in what an optimizer of a user's own makes at its first update, where there is a dict for it."""
    for name, leaf in leaves.items():
        *parts, last = name.split(".")
        at = tree
        for part in parts:
            within = at if isinstance(at, dict) else {str(index): each for index, each in enumerate(at)}
            at = within.get(part, ())
            if not isinstance(at, dict | list | tuple):
                break
        if isinstance(at, dict):
            at[last] = leaf
    return tree


def _initialised(step: Step, before: Any, found: Arrays) -> Any:
    """Return the optimizer's state once it is initialised for what is trainable or found, and leave it as it was."""
    optimizer: Any = step.optimizer
    parameters: Arrays = dict(tree_flatten(step.model.parameters()))
    trainable = step.model.trainable_parameters()
    names = {name for name, _ in tree_flatten(trainable)}  # type: ignore[str-unpack]
    more = {_parameter(optimizer, name, parameters) for name in found} - names  # trained before they were frozen
    optimizer.init(trainable)
    optimizer.init(like(step.model.parameters(), {name: parameters[name] for name in names | more if name}))
    template = _copied(optimizer.state)
    optimizer.state = before
    leaves: Any = tree_flatten(template)
    known = names | more | {""}
    return _without(template, {name for name, _ in leaves if _parameter(optimizer, name, parameters) not in known})


def _without(tree: Any, gone: set[str], path: str = "") -> Any:
    """Return a tree without these leaves, and without the dicts that held them alone; other containers stay."""
    if isinstance(tree, dict):
        parts = {key: _without(part, gone, f"{path}.{key}") for key, part in tree.items()}
        kept = {key: part for key, part in parts.items() if part is not None}
        held = bool(tree) and not any(isinstance(part, dict | list | tuple) for part in tree.values())
        return None if held and not kept else kept
    if isinstance(tree, list | tuple):
        return type(tree)(_without(part, gone, f"{path}.{index}") for index, part in enumerate(tree))
    return None if path[1:] in gone else tree


def _parameter(optimizer: Any, name: str, parameters: Arrays) -> str:
    """Return the parameter to which an entry of the optimizer's state belongs, an empty string for those of none."""
    parts = name.split(".")
    while isinstance(optimizer, MultiOptimizer) and len(parts) > 2:
        within = {str(number): each for number, each in enumerate(optimizer.optimizers)}
        optimizer, parts = within.get(parts[1]), parts[2:]  # "states", its number, the rest
    heads = (".".join(parts[:end]) for end in range(len(parts) - 1, 0, -1))
    return next((head for head in heads if head in parameters), "")


def _copied(tree: Any) -> Any:
    """Copy the containers of a tree."""
    return tree_map(lambda leaf: leaf, tree)


def _step_changes(path: Path, step: Step, contents: Contents) -> list[Change]:
    arrays, texts = contents
    try:
        numbers = {name: int(text) for name, text in texts.items()}
        seed, before_seed = numbers.pop("random"), _random.mlx_seed()
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{path / STEP}: expected whole numbers and `random` among its metadata ({error})"
        ) from error
    if not 0 <= seed < 1 << 64:
        raise CheckpointError(f"{path / STEP}: expected a seed of 64 bits as `random`, found {seed}")
    after: Any = tree_unflatten(list(arrays.items())) if arrays else {}
    before = step.state
    return [
        (lambda: step.load_state(after | numbers), lambda: step.load_state(before)),
        (lambda: mx.random.seed(seed), lambda: mx.random.seed(before_seed)),
    ]


def _random_changes(path: Path, training: dict[str, Any]) -> list[Change]:
    before = _random.restorers(_random.states())
    try:
        after = _random.restorers(training["random"])
    except ValueError as error:
        raise CheckpointError(f"{path}: training.json: {error}") from error
    return list(zip(after, before, strict=True))


def _same_kind(name: str, wanted: mx.Dtype, found: mx.Dtype) -> bool:
    """Compare dtypes of what training may have turned into other floats: an optimizer's state, a model's buffers."""
    return wanted == found or all(mx.issubdtype(dtype, mx.floating) for dtype in (wanted, found))


def differences(
    path: Path, what: str, wanted: Arrays, found: Arrays, same: Callable[[str, mx.Dtype, mx.Dtype], bool]
) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        CheckpointError: They differ; it names up to ten differences.
    """
    lines = [f"missing: {name}" for name in wanted if name not in found]
    lines += [f"unknown: {name!r}" for name in found if name not in wanted]
    for name, array in wanted.items():
        if name in found and not (array.shape == found[name].shape and same(name, array.dtype, found[name].dtype)):
            lines.append(f"{name}: expected {_kind(array)}, found {_kind(found[name])}")
    if lines:
        more = [f"and {len(lines) - MOST_DIFFERENCES} more"] if len(lines) > MOST_DIFFERENCES else []
        listed = "\n  ".join(lines[:MOST_DIFFERENCES] + more)
        raise CheckpointError(f"{path}: expected the checkpoint of this {what}, found differences:\n  {listed}")


def _kind(array: mx.array) -> str:
    return f"{str(array.dtype).removeprefix('mlx.core.')} {list(array.shape)}"
