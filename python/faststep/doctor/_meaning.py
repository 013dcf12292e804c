"""Checks of what a loss means: that labels change it, that a right prediction is better, that a copy is not enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from faststep.doctor._finding import Finding
from faststep.doctor._held import Losses, is_floating, is_whole, leaves_of, like, replaced, values_of
from faststep.doctor._modules import arrays_of
from faststep.doctor._subject import Subject

_SURE = 20.0  # a logit of a prediction that is sure
_MOST = 1 << 26  # numbers of outputs that are made up


def findings(subject: Subject) -> Iterator[Finding]:
    """Yield what is found; nothing where the loss is not the same for the same batch."""
    batch = max(subject.some(), key=_variety)
    losses = Losses(subject)
    base = losses.of(batch)
    calls = losses.calls
    if base is None or losses.of(batch) != base:
        return
    look = _Look(subject, batch, losses, base, [call.value for call in calls])
    yield from look.labels([each for call in calls for each in call.inputs])
    yield from look.pairs()
    yield from look.sign()
    yield from look.shift([each for call in calls for each in call.inputs])


def _variety(batch: Any) -> int:
    """Return how many different integers a batch has."""
    return sum(len(np.unique(values_of(leaf))) for _, leaf in leaves_of(batch) if is_whole(leaf))


class _Look:
    """One batch, its loss, and what the model's outer calls have returned for it."""

    def __init__(self, subject: Subject, batch: Any, losses: Losses, base: float, outputs: list[Any]) -> None:
        self._batch, self._losses, self._base, self._outputs = batch, losses, base, outputs
        self._leaves = [(name, leaf) for name, leaf in leaves_of(batch) if leaf.size > 1]
        self._known = {name: _known(subject, place) for place, (name, _) in enumerate(leaves_of(batch))}
        arrays = arrays_of(outputs[-1]) if outputs else []
        self._output = arrays[0] if len(arrays) == 1 and arrays[0].ndim else None
        self._holds = bool(outputs) and losses.with_outputs(batch, outputs) == base
        changed = [(name, self._other(name, leaf)) for name, leaf in self._leaves]
        self._free = {name: losses.of(other) for name, other in changed if other is not None}
        self._held = {name: losses.with_outputs(o, outputs) for name, o in changed if o is not None and self._holds}

    def labels(self, inputs: list[mx.array]) -> Iterator[Finding]:
        """Yield the finding of a loss that no label changes, the model's outputs being what they are."""
        shape = [] if self._output is None else list(self._output.shape)
        if not self._holds or any(self._base != each for name, each in self._held.items() if not self._is_mask(name)):
            return
        if all(each == self._base for each in self._free.values()):
            return  # it depends on nothing at all
        unused = [(name, leaf) for name, leaf in self._leaves if self._free.get(name) == self._base]
        for name, leaf in unused:
            if self._fits(leaf):
                text = (
                    f"the loss does not depend on {name}: {self._base:.6g}, with other values there too, to the bit. "
                    f"The model's outputs have shape {shape}, {name} {list(leaf.shape)}"
                )
                yield Finding("ignores-labels", "failure", text, _LABELS, _LABELS_CODE)
                return
        if tokens := self._tokens(inputs):
            name, leaf, _ = tokens
            text = (
                f"the loss does not depend on its labels: for the same outputs of the model, shape "
                f"{shape}, it is {self._base:.6g} whatever is in {name}"
            )
            yield Finding("ignores-labels", "failure", text, _LABELS, _LABELS_CODE)
            return
        if whole := [name for name, leaf in unused if is_whole(leaf)]:
            text = f"the loss does not depend on {' and '.join(whole)}"
            yield Finding("unused-argument", "note", text, "nothing is wrong, unless it has the labels")

    def pairs(self) -> Iterator[Finding]:
        """Yield the finding of outputs and labels that broadcast to all pairs."""
        out = self._output
        for name, leaf in self._leaves:
            if out is None or leaf.size != out.size or is_whole(leaf) or not self._uses(name):
                continue
            values = values_of(leaf)
            if np.array_equal(values[::-1], values):
                continue
            turned = self._losses.with_outputs(replaced(self._batch, leaf, like(values[::-1], leaf)), self._outputs)
            if turned is None or abs(turned - self._base) > 1e-5 * abs(self._base):
                continue
            shape, both = list(np.broadcast_shapes(tuple(leaf.shape), tuple(out.shape))), list(out.shape)
            level: Any = "failure" if _broadcast(leaf, out) else "warning"
            how = f" broadcast to {shape}" if _broadcast(leaf, out) else ": what is compared is every pair of them"
            text = (
                f"the loss is the same for the labels in another order: the model's output {both} and {name} "
                f"{list(leaf.shape)}{how}"
            )
            remedy = "give both one shape, where they are compared: nn.losses.mse_loss refuses others"
            yield Finding("broadcast", level, text, remedy, "prediction = model(x).squeeze(-1)   # [batch], as y")

    def sign(self) -> Iterator[Finding]:
        """Yield the finding of a loss that is larger for right predictions than for wrong ones."""
        used = [(name, leaf) for name, leaf in self._leaves if self._uses(name) and not self._is_mask(name)]
        if self._output is None or len(used) != 1 or not self._fits(used[0][1]):
            return
        name, leaf = used[0]
        right, wrong = (self._predicting(each) for each in _predictions(values_of(leaf), self._output))
        if right is not None and wrong is not None and right > wrong + 1e-3 * abs(wrong):
            yield _turned(right, wrong, name)

    def shift(self, inputs: list[mx.array]) -> Iterator[Finding]:
        """Yield the finding of a language model's loss that a copy of the input makes small."""
        tokens, out = self._tokens(inputs), self._output
        if not tokens or out is None or out.size > _MOST:
            return
        name, leaf, begin = tokens
        values = values_of(leaf)
        flat = self._predicting(np.zeros(out.shape, np.float32))
        ahead = [self._predicting(_ahead(values, begin + k, out.shape)) for k in range(3)]
        if flat is None or flat <= 0 or None in ahead:
            if flat is not None and ahead[1] is not None and ahead[1] > flat + 1e-3 * abs(flat):
                yield _turned(ahead[1], flat, name)
            return
        copy, following, second = (each / flat for each in ahead if each is not None)
        if copy < 0.3 and following > 3 * copy + 0.05:
            before, at = self._changed_by_last(leaf, values, begin)
            if not at:
                return  # an output does not see the token of its own place, as behind a prefix: nothing can be copied
            level: Any = "note" if before else "failure"
            text = (
                f"the loss of a model that copies its input is {copy * flat:.3g}, that of one that knows the next "
                f"token {following * flat:.3g}: logits and labels are not shifted by one, so that copying is learned"
            )
            yield Finding("not-shifted", level, text, _SHIFT, _SHIFT_CODE)
        elif second < 0.3 and following > 3 * second + 0.05:
            text = (
                f"the loss is small ({second * flat:.3g}) for a model that knows the token after the next one, and "
                f"{following * flat:.3g} for the next one: logits and labels are shifted twice"
            )
            yield Finding("shifted-twice", "failure", text, "shift once: in the data or in the loss", _SHIFT_CODE)
        elif following < 0.3 and copy > 3 * following + 0.05 and self._changed_by_last(leaf, values, begin)[0]:
            text = (
                f"the loss is that of the next token, and the model sees it: the outputs before the last place change "
                f"with the token of {name} there"
            )
            yield Finding("sees-the-future", "failure", text, _FUTURE, _FUTURE_CODE)

    def _other(self, name: str, leaf: Any) -> Any:
        """Return the batch with other values in an array; None where there are none."""
        values = values_of(leaf)
        if is_whole(leaf):
            known = self._known[name]
            if len(known) < 2:
                return None
            other = known[(np.searchsorted(known, values) + 1) % len(known)]
        elif is_floating(leaf):
            other = values[::-1] * 1.25 + 0.25
        else:
            return None
        return replaced(self._batch, leaf, like(other, leaf))

    def _uses(self, name: str) -> bool:
        """Return whether the loss reads an argument beside the model's outputs."""
        return self._held.get(name, self._base) != self._base

    def _is_mask(self, name: str) -> bool:
        """Return whether an array has nothing but 0 and 1, and the shape of another one with integers."""
        leaf = dict(self._leaves)[name]
        values = values_of(leaf)
        others = [each for other, each in self._leaves if other != name and is_whole(each)]
        if not bool(np.isin(values, (0, 1)).all()):
            return False
        return any(list(each.shape) == list(leaf.shape) for each in others)

    def _fits(self, leaf: Any) -> bool:
        """Return whether an array can be the labels of the outputs."""
        out = self._output
        if out is None:
            return False
        if is_floating(leaf):
            return bool(leaf.size == out.size and leaf.size > 1)
        if not is_whole(leaf):
            return False
        top, classes = int(values_of(leaf).max()), out.shape[-1]
        by_class = tuple(leaf.shape) == tuple(out.shape[:-1]) or (leaf.ndim == out.ndim and leaf.shape[-1] == 1)
        return bool((by_class and top < classes <= 2 * (top + 1)) or (leaf.size == out.size and top == 1))

    def _tokens(self, inputs: list[mx.array]) -> tuple[str, Any, int] | None:
        """Return the tokens that the model has read and gives logits for, and where it begins to read them."""
        out = self._output
        if out is None or out.ndim != 3 or len(self._outputs) != 1:
            return None
        for name, leaf in self._leaves:
            if not is_whole(leaf) or leaf.ndim != 2 or int(values_of(leaf).max()) >= out.shape[-1]:
                continue
            values = values_of(leaf)
            for given in inputs:
                if given.ndim == 2 and given.shape[0] == leaf.shape[0] and given.shape == out.shape[:2]:
                    for begin in range(leaf.shape[1] - given.shape[1] + 1):
                        if np.array_equal(values[:, begin : begin + given.shape[1]], np.array(given)):
                            return name, leaf, begin
        return None

    def _predicting(self, prediction: np.ndarray[Any, Any] | None) -> float | None:
        """Return the loss for another output of the last outer call."""
        if prediction is None or self._output is None:
            return None
        made = mx.array(prediction).astype(self._output.dtype)
        last = _put(self._outputs[-1], self._output, made)
        return self._losses.with_outputs(self._batch, [*self._outputs[:-1], last])

    def _changed_by_last(self, leaf: Any, values: np.ndarray[Any, Any], begin: int) -> tuple[bool, bool]:
        """Return whether the last token that the model reads changes outputs before its place, and the one at it."""
        out = self._output
        if out is None:
            return True, True
        last = begin + out.shape[1] - 1
        other = values.copy()
        other[:, last] = values[:, 0] + (values[:, 0] == values[:, last])
        other[:, last] %= max(1, int(values.max()) + 1)
        if self._losses.of(replaced(self._batch, leaf, like(other, leaf))) is None or not self._losses.calls:
            return True, True
        now = arrays_of(self._losses.calls[-1].value)[0]
        before = not mx.allclose(now[:, :-1], out[:, :-1], atol=1e-4)
        return before, not mx.allclose(now[:, -1], out[:, -1], atol=1e-4)


def _known(subject: Subject, place: int) -> np.ndarray[Any, Any]:
    """Return the different values of an array of integers in the first batches."""
    arrays = [leaves_of(batch)[place][1] for batch in subject.some() if len(leaves_of(batch)) > place]
    whole = [np.unique(values_of(each)) for each in arrays if is_whole(each)]
    return np.unique(np.concatenate(whole)) if whole else np.zeros(0, np.int64)


def _broadcast(leaf: Any, out: mx.array) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(tuple(leaf.shape), tuple(out.shape)))) > int(leaf.size)
    except ValueError:
        return False


def _put(value: Any, old: mx.array, new: mx.array) -> Any:
    return replaced(value, old, new)


def _predictions(labels: np.ndarray[Any, Any], out: mx.array) -> tuple[Any, Any]:
    """Return outputs that are right and wrong, of the kind that the outputs are: logits, probabilities or values."""
    shape = tuple(out.shape)
    if out.size > _MOST:
        return None, None
    values = values_of(out)
    if labels.dtype.kind == "f":
        return labels.reshape(shape), labels.reshape(shape) + labels.std() + 1
    if labels.size == out.size and shape[-1] != labels.max() + 1:  # one number each, of two classes
        sure = (2.0 * labels.reshape(shape) - 1) * _SURE
        is_share = bool(((values >= 0) & (values <= 1)).all())
        return (_share(sure), _share(-sure)) if is_share else (sure, -sure)
    flat = labels.reshape(shape[:-1])
    one = np.eye(shape[-1], dtype=np.float32)
    right, wrong = one[np.maximum(flat, 0)], one[(np.maximum(flat, 0) + 1) % shape[-1]]
    if (values >= 0).all() and np.allclose(values.sum(axis=-1), 1, atol=1e-3):
        return right * 0.98 + 0.01, wrong * 0.98 + 0.01
    if (values <= 0).all() and np.allclose(np.exp(values).sum(axis=-1), 1, atol=1e-3):
        return np.log(right * 0.98 + 0.01), np.log(wrong * 0.98 + 0.01)
    return right * _SURE, wrong * _SURE


def _share(sure: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.where(sure > 0, 0.98, 0.02)


def _ahead(tokens: np.ndarray[Any, Any], by: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Return logits that are sure of the token so many places on; of none where there is no such token."""
    found = np.zeros(shape, np.float32)
    there = tokens[:, by : by + shape[1]]
    np.put_along_axis(found[:, : there.shape[1]], there[..., None], _SURE, axis=-1)
    return found


def _turned(right: float, wrong: float, name: str) -> Finding:
    text = (
        f"the sign of the loss is turned: it is {right:.4g} for outputs that predict {name}, and {wrong:.4g} for "
        "others, so that training goes away from the labels and the loss falls without bound"
    )
    return Finding("sign", "failure", text, "turn the sign", "return -(log_probabilities * one_hot).sum(-1).mean()")


_LABELS = "take each output's score of its own label: the built-in cross entropy does; a log-softmax alone has no label"
_LABELS_CODE = (
    'nn.losses.cross_entropy(logits, y, reduction="mean")\n'
    "# a language model: nn.losses.cross_entropy(logits[:, :-1], tokens[:, 1:], reduction='mean')"
)
_SHIFT = "compare each output with the next token"
_FUTURE = "give attention the causal mask, and let nothing else mix places (a mean over the sequence, a convolution)"
_FUTURE_CODE = "mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1])   # for every layer"
_SHIFT_CODE = "nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction='mean')"
