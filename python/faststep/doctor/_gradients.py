"""Gradients by parameter over the first steps: none, zero, vanishing, exploding; updates that round away; the rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.optimizers import Optimizer
from mlx.utils import tree_flatten

from faststep._step import call_with
from faststep.doctor import _divergence
from faststep.doctor._finding import Finding
from faststep.doctor._graph import graph
from faststep.doctor._rungs_plain import first, value_and_gradients
from faststep.doctor._subject import Subject

_HALF = (mx.float16, mx.bfloat16)
_VANISHED = 1e-9  # of the largest gradient among the parameters, by root mean square
_EXPLODED = 1e6  # of a global norm


class Tracked:
    """Record of each parameter over the steps so far."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [name for name, _ in tree_flatten(model.trainable_parameters())]  # type: ignore[str-unpack]
        self._largest = dict.fromkeys(self._names, 0.0)  # root mean square of the gradient
        self.losses: list[float] = []
        self._updates: dict[str, float] = {}  # the largest of each module, by its weights
        self._norms: list[float] = []
        self._rates: list[float] = []
        self._unchanged: dict[str, float] = {}
        self._sums: dict[str, list[float]] = {}  # by parameter: squares of gradient, weights and update, and the size

    def cut_off(self, subject: Subject) -> list[Finding]:
        """Find the parameters that the loss does not depend on, and those that something cuts off."""
        batch = subject.some()[0]
        named: dict[str, mx.array] = dict(tree_flatten(subject.model.trainable_parameters()))
        places = {f"p{number}_": name for number, name in enumerate(named)}
        before = subject.model.parameters()
        loss = first(call_with(batch, subject.loss_fn, subject.model))
        subject.model.update(before)
        forward = graph(loss, **{place: named[name] for place, name in places.items()})
        used = {name for place, name in places.items() if f'"{place}" ->' in forward}
        _, gradients = value_and_gradients(subject, batch)
        subject.model.update(before)
        flat: dict[str, mx.array] = dict(tree_flatten(gradients))
        constant = {name for name, each in flat.items() if _is_constant(graph(each))}
        if not used and "[label" not in forward and constant == set(named):
            return [_constant_loss()]
        # a loss that reads values ends the graph of its forward pass where it does: gradients decide
        unused, cut = sorted(constant - used), sorted(used & constant)
        found = []
        if unused:
            text = f"the loss does not depend on {_listed(unused)}: they get no gradient"
            remedy = "freeze what is not to be trained, or call the layer"
            found.append(Finding("no-gradient", "warning", text, remedy, f"model.{_module(unused[0])}.freeze()"))
        if cut:
            level: Any = "failure" if len(cut) == len(named) else "warning"
            text = f"no gradient reaches {_listed(cut)}, though the loss is computed with them: something cuts them off"
            remedy = (
                "look for mx.stop_gradient, an argmax, a comparison or a cast to integers between them and the loss"
            )
            found.append(Finding("cut-off", level, text, remedy, "h = encoder(x)   # not mx.stop_gradient(encoder(x))"))
        return found

    def step(
        self,
        loss: float,
        gradients: dict[str, mx.array],
        before: dict[str, Any],
        after: dict[str, Any],
        optimizer: Optimizer,
    ) -> None:
        """Take note of a step."""
        self.losses.append(loss)
        squares = {name: each.astype(mx.float32).square().mean() for name, each in gradients.items()}
        mx.eval(squares)
        for name, each in squares.items():
            self._largest[name] = max(self._largest.get(name, 0.0), math.sqrt(float(each)))
        whole = sum(float(each) * gradients[name].size for name, each in squares.items())
        self._norms.append(math.sqrt(whole))
        rate = _rate(optimizer)
        self._rates += [] if rate is None else [rate]
        for name in gradients:
            self._sums[name] = _sums(gradients[name], before[name], after[name])
        for module in self.by_module():
            self._updates[module["module"]] = max(self._updates.get(module["module"], 0.0), module["update"] or 0.0)
        for name, each in gradients.items():
            if each.dtype in _HALF and name in after:
                moved, there = (after[name] != before[name]).sum(), (each != 0).sum()
                self._unchanged[name] = 1 - int(moved) / max(1, int(there))

    def diverges(self, begin: float | None, subject: Subject) -> Finding | None:
        """Return what is to be said where the loss rises above what it was before the first step."""
        return _divergence.finding(begin, self.losses, self._updates, self._rates[-1] if self._rates else None, subject)

    def by_module(self) -> list[dict[str, Any]]:
        """Return the last step by module: the root mean squares of gradient and weights, the update by the weights."""
        modules: dict[str, list[float]] = {}
        for name, sums in self._sums.items():
            before = modules.setdefault(name.rpartition(".")[0] or "model", [0.0] * 4)
            modules[name.rpartition(".")[0] or "model"] = [a + b for a, b in zip(before, sums, strict=True)]
        return [
            {
                "module": name,
                "parameters": int(size),
                "gradient": math.sqrt(gradient / size),
                "weights": math.sqrt(weights / size),
                "update": math.sqrt(update / weights) if weights else None,
            }
            for name, (gradient, weights, update, size) in modules.items()
        ]

    def findings(self, known: Iterable[Finding]) -> list[Finding]:
        """Return what the steps have shown, without what is known to be cut off."""
        told = " ".join(each.text for each in known)
        zero = [name for name in self._largest if self._of_module(name) == 0 and name not in told]
        found = []
        if zero and not any(each.level == "failure" for each in known) and len(self._norms) > 2:
            every = len(zero) == len(self._largest)
            which = "every parameter" if every else _listed(zero)
            text = f"the gradient of {which} is zero in all of {len(self._norms)} steps"
            remedy = (
                "look for activations that are zero for every input (a ReLU behind a large negative bias), a layer "
                "whose weights begin at zero, a mask or a weight of zero in the loss"
            )
            found.append(Finding("zero-gradient", "failure" if every else "warning", text, remedy, _CODE))
        found += self._sizes(zero)
        if rounded := sorted(name for name, each in self._unchanged.items() if each > 0.9):
            if self._steady():
                share = min(self._unchanged[name] for name in rounded)
                text = (
                    f"updates are rounded away: at least {share:.0%} of the weights of {_listed(rounded)} do not change"
                )
                remedy = "keep float32 masters, or raise the learning rate"
                code = "Step(model, optimizer, loss_fn, compute_dtype=mx.bfloat16)   # float32 masters"
                found.append(Finding("rounds-away", "warning", text, remedy, code))
        return found

    def _sizes(self, zero: list[str]) -> list[Finding]:
        top = max(self._largest.values(), default=0.0)
        tiny = [name for name in self._largest if 0 < self._of_module(name) < _VANISHED * top and name not in zero]
        found = []
        if tiny:
            least = min(self._largest[name] for name in tiny)
            text = f"gradients vanish: {_listed(tiny)} get {least:.1e} (root mean square), others {top:.1e}"
            remedy = "normalize between the layers (LayerNorm), add residual connections, use ReLU in place of sigmoid"
            found.append(Finding("vanishing", "warning", text, remedy, "x = x + layer(self.norm(x))"))
        if self._norms and max(self._norms) > _EXPLODED:
            worst = max(self._largest, key=lambda name: self._largest[name])
            text = f"gradients explode: their norm is up to {max(self._norms):.1e}, most of it in {worst}"
            remedy = "clip by the global norm, warm the learning rate up, scale the inputs, and take means, not sums"
            found.append(Finding("exploding", "warning", text, remedy, "Step(..., max_grad_norm=1.0)"))
        return found

    def rates(self, optimizer: Optimizer) -> list[Finding]:
        """Return what is to be said about the learning rate."""
        if len(self._rates) > 2 and not any(self._rates):
            text = f"the learning rate is 0 in all of {len(self._rates)} steps: nothing is learned"
            remedy = "give a rate above zero; a schedule that begins at zero has to rise"
            return [Finding("rate-zero", "failure", text, remedy, "optim.AdamW(learning_rate=1e-3)")]
        if len(self._rates) > 2 and not any(self._rates[-2:]):
            last = max(number for number, rate in enumerate(self._rates, 1) if rate)
            text = f"the learning rate is 0 from step {last + 1} on: nothing is learned after step {last}"
            remedy = "give the schedule the number of steps of the whole training, counted in updates"
            return [Finding("rate-zero", "failure", text, remedy, "optim.cosine_decay(1e-3, epochs * len(batches))")]
        adams = [each for each in getattr(optimizer, "optimizers", [optimizer]) if isinstance(each, optim.Adam)]
        if any(not getattr(each, "bias_correction", True) for each in adams) and self._rates and self._rates[0] > 0:
            beta_1, beta_2 = adams[0].betas
            factor = (1 - beta_1) / math.sqrt(1 - beta_2)
            if factor > 1.5 and self._rates[0] >= 0.5 * max(self._rates):
                text = (
                    f"Adam without bias correction, and no warm-up: its first step is {factor:.2f} x the learning rate"
                )
                remedy = "switch it on, or warm up; PyTorch corrects by default, MLX does not"
                return [Finding("adam-first-step", "note", text, remedy, "optim.AdamW(..., bias_correction=True)")]
        return []

    def _of_module(self, name: str) -> float:
        """Return the largest gradient of the parameter's module: the bias of an attention's keys alone has none."""
        inside = name.rpartition(".")[0]
        return max(each for other, each in self._largest.items() if other.rpartition(".")[0] == inside)

    def _steady(self) -> bool:
        """Return whether the learning rate is no longer rising, so that later updates are no larger."""
        return bool(self._rates) and self._rates[-1] <= self._rates[0] * 1.01 and self._rates[-1] > 0


_CODE = "print({name: g.abs().max().item() for name, g in tree_flatten(step.gradients(*batch)[1])})"


def _sums(gradient: mx.array, before: mx.array, after: mx.array) -> list[float]:
    old, new = before.astype(mx.float32), after.astype(mx.float32)
    squares = [gradient.astype(mx.float32).square().sum(), old.square().sum(), (new - old).square().sum()]
    return [*(float(each) for each in squares), float(gradient.size)]


def _constant_loss() -> Finding:
    text = "the loss is a constant: no parameter leads to it, though it has a value"
    remedy = "compute it with arrays of MLX from the model's output to the end: .item(), float() and numpy cut it off"
    return Finding("loss-from-item", "failure", text, remedy, "return loss   # not mx.array(loss.item())")


def _is_constant(dot: str) -> bool:
    """Return whether a graph has nothing but the filling of an array."""
    rest = dot
    for name in ("Broadcast", "Full", "AsType", "Reshape", "Copy"):
        rest = rest.replace(f'[label ="{name}"', "")
    return "[label" not in rest


def _rate(optimizer: Optimizer) -> float | None:
    optimizers = getattr(optimizer, "optimizers", [optimizer])
    rates = [each.learning_rate for each in optimizers if "learning_rate" in each.state]
    return max((float(each) for each in rates), default=None)


def _module(path: str) -> str:
    return path.rpartition(".")[0] or path


def _listed(names: list[str]) -> str:
    shown = ", ".join(f"model.{name}" for name in names[:4])
    return shown + (f" and {len(names) - 4} more" if len(names) > 4 else "")
