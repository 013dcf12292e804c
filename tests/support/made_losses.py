"""Losses made at random, as source: they read, count in and store to what they reach in many ways."""

from __future__ import annotations

import collections
import random
import re
import sys
import types
from typing import Any

import mlx.core as mx
import numpy as np

# what a program may have, by kind: an expression that reads it, and the statements that make it
PLACES: dict[str, list[tuple[str, str]]] = {
    "number": [
        ("AGENT.steps", "AGENT.steps = 0"),
        ("AGENT.inner.beta", "AGENT.inner.beta = 1.0"),
        ("AGENT.config.weight", ""),
        ("model.scale", "model.scale = 1.0"),
        ("model.steps", "model.steps = 0"),
        ("model.owner.epoch", "model.owner.epoch = 0"),
        ("model.inner.calls", ""),
        ("COUNT", ""),
        ("calls", "calls = 0"),
    ],
    "text": [
        ("AGENT.mode", "AGENT.mode = 'a'"),
        ("model.owner.mode", "model.owner.mode = 'a'"),
        ("KIND", ""),
    ],
    "flag": [("AGENT.ready", "AGENT.ready = False"), ("model.owner.ready", "model.owner.ready = False")],
    "array": [
        ("AGENT.mean", "AGENT.mean = mx.zeros((2,))"),
        ("AGENT.inner.mean", "AGENT.inner.mean = mx.zeros((2,))"),
        ("model.mean", "model.mean = mx.zeros((2,)); model.freeze(keys=['mean'], recurse=False)"),
        ("model.owner.mean", "model.owner.mean = mx.zeros((2,))"),
        ("model.inner.seen", ""),
        ("MEAN", ""),
    ],
    "table": [
        ("AGENT.table", "AGENT.table = {'w': mx.zeros((2,)), 'n': 0, 'a': 0, 'b': 0}"),
        ("cell[0]", "cell[0] = {'w': mx.zeros((2,)), 'n': 0, 'a': 0, 'b': 0}"),
        ("model._table", "model._table = {'w': mx.zeros((2,)), 'n': 0, 'a': 0, 'b': 0}"),
        ("model.owner.table", "model.owner.table = {'w': mx.zeros((2,)), 'n': 0, 'a': 0, 'b': 0}"),
    ],
    "log": [
        ("AGENT.log", "AGENT.log = []"),
        ("model.owner.log", "model.owner.log = []"),
        ("model._log", "model._log = []"),
    ],
    "queue": [("AGENT.queue", "AGENT.queue = collections.deque([mx.zeros((2,))] * 2, maxlen=2)")],
    "buffer": [("AGENT.buffer", "AGENT.buffer = np.zeros(2)")],
    "set": [("AGENT.met", "AGENT.met = set()")],
    "rows": [("AGENT.rows", "AGENT.rows = [{'n': 0, 'w': mx.zeros((2,))}, {'n': 1, 'w': mx.ones((2,))}]")],
}
CONDITIONS = """
{number} > 5
{number} > 11
{number} % 3 == 1
{number} % 7 == 2
{number} < 17
{text} == 'a'
{text} != 'b'
{flag}
not {flag}
{table}['n'] > 4
'c' in {table}
len({log}) > 3
len({set}) > 2
{rows}[0]['n'] > 9
{buffer}[0] > 6
len(x) > 6
model.training
AGENT.total > 12
hasattr(AGENT, 'extra')
"""
READS = """
loss = loss * (1 + 0.01 * {number})
loss = loss + {number} * 0.001 * mx.square(model.first.weight).sum()
loss = loss + 0.02 * mx.abs(out).mean()
loss = loss + 0.1 * ({array} * out).mean()
loss = loss + 0.1 * ({table}['w'] * out).mean()
loss = loss * (1 + 0.001 * sum({log}))
loss = loss + 0.1 * ({queue}[0] * out).mean()
loss = loss * (1 + 0.01 * float({buffer}[0]))
loss = loss + 0.01 * (mx.array({buffer}) * out).mean()
loss = loss + 0.1 * (sum(row['w'] for row in {rows}) * out).mean()
loss = AGENT.scaled(loss)
loss = loss * (1 + 0.01 * len(model._history))
loss = loss * (1 + 0.01 * model.step)
loss = loss * (1 + 0.01 * sum(getattr(model, name) for name in ("step",)))
loss = loss * AGENT.warm
loss = loss * (1 + 0.01 * sum(n for n in {table}.values() if isinstance(n, int)))
"""
WRITES = """
{number} += 1
{number} += 1
{number} += len(x)
{number} += 0.1
{number} *= 0.99
{number} = 3
{text} = 'b'
{flag} = True
{array} = row
{array} = 0.9 * {array} + 0.1 * row
{array}[0] = row[1]
{array} = {array} + 1
{table}['n'] += 1
{table}['w'] = row
{table}['w'] = 0.5 * {table}['w'] + row
{table}['c'] = {table}.get('c', 0) + 1
{table} = {**{table}, 'w': row}
{table} = dict({table}, n={table}['n'] + 1)
{table}[{text}] += 1
{table}.pop('c', None)
{table}.setdefault('z', 0)
{table}.update(n=len(x))
{log}.append(len(x))
{log}.append(AGENT.total)
{log}[:] = {log}[-3:]
{queue}.append(row)
{queue}[-1] = row
{buffer}[0] += 1
{set}.add(len(x))
{set}.add(AGENT.total)
{rows}[0]['n'] += 1
{rows}[1]['w'] = row
{rows}[1] = {'n': 5, 'w': row}
AGENT.add()
AGENT.add(len(x))
AGENT.gain = 2.0
AGENT.extra = row
"""
INNER = """
self.calls += 1
self.seen = mx.stop_gradient(y.mean(0))
self.seen = 0.9 * self.seen + 0.1 * mx.stop_gradient(y.mean(0))
y = y * (1 + 0.001 * self.calls)
y = y + 0.01 * self.seen
"""
BETWEEN = """
{number} = i // 5
{number} = 1 - i / 100
{number} += 1
{text} = 'ab'[i // 3 % 2]
{flag} = i // 4 % 2 == 0
{array} = mx.ones((2,)) * i
{array}[1] = 0.5
{table}['n'] = 0
{table}['w'] = mx.ones((2,)) * 0.1 * i
{log}.clear()
{log}.append(i)
model._history.append(float(i))
model._memory[i % 4] = mx.ones((2,)) * i
model.step = i
{log}.append(i)
{table} = {'w': mx.ones((2,)), 'n': 0, 'a': 0, 'b': 0}
{set}.clear()
{buffer}[1] = i
model.train(i % 2 == 0)
model.first.freeze()
model.first.unfreeze()
AGENT.gain = 0.5 * i
loss_fn(model, mx.ones((8, 4)))
"""
SOURCE = """
import collections, dataclasses, functools
import mlx.core as mx, mlx.nn as nn, numpy as np

COUNT, KIND, MEAN, AGENT = 0, "a", mx.zeros((2,)), None

@dataclasses.dataclass
class Config:
    weight: float = 0.5

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.calls, self.seen = nn.Linear(2, 2), 0, mx.zeros((2,))
        self.freeze(keys=["seen"], recurse=False)
    def __call__(self, x):
        y = self.linear(x)
        INNER
        return y

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last, self.inner, self.dropout = nn.Linear(4, 3), nn.Linear(3, 2), Inner(), nn.Dropout(DROPPED)
    def __call__(self, x):
        return self.inner(self.last(self.dropout(nn.relu(self.first(x)))))

class Agent:
    total, gain = 0, 1.0
    def __init__(self):
        self.inner, self.config = Bag(), Config()
    def add(self, by=1):
        self.total += by
    def scaled(self, loss):
        return loss * (1 + 0.01 * self.gain)
    @property
    def warm(self):
        return min(1.0, self.total / 20)
    METHOD

class Bag:
    pass

def make():
    global AGENT
    model, agent, cell = Net(), Agent(), [None]
    model.owner, model.agent, AGENT = Bag(), agent, agent
    model._history, model._memory, model.step = [], {}, 0
    calls = 0
    STATE
    FUNCTION
    loss_fn = RETURNED
    def between(i):
        global COUNT, KIND, MEAN
        nonlocal calls
        BETWEEN
    def shown():
        return SHOWN
    def objects():
        return OBJECTS
    return model, loss_fn, between, shown, objects
"""
LOSS = """
def loss(GIVEN, x):
    global COUNT, KIND, MEAN
    nonlocal calls
    RAISES
    out = model(x)
    loss, row = mx.square(out).mean(), mx.stop_gradient(out.mean(0))
    BODY
    return loss
"""
_ENCLOSED = ("calls", "cell[0]")
_OF_MODEL = ("model.mean", "model.inner.seen", "model._table")  # `nn.value_and_grad` puts others in their places
WAYS = {  # the expression for the agent in the loss, its parameters, and what `make` returns
    "closure": ("agent", "model", "loss"),
    "global": ("AGENT", "model", "loss"),
    "model": ("model.agent", "model", "loss"),
    "partial": ("agent", "agent, model", "functools.partial(loss, agent)"),
    "method": ("self", "self, model", "agent.loss"),
}


_COMPARED = ("array", "table", "log", "queue", "buffer", "set", "rows")  # kinds whose objects stay, or are replaced


class MadeLoss:
    """A program by its seed.

    Attributes:
        source: The program, whose `make` returns a model, a loss, what changes between steps, and what is compared.
        sizes: Rows of the batches, in turns.
        optimizer: The name of one of MLX's.
        options: Those of the step.
        way: By which the step is called.
    """

    def __init__(self, seed: int) -> None:
        self._draw = draw = random.Random(seed)
        self.sizes = draw.choice([[8], [8], [8, 5], [8, 5, 8, 8]])
        self.optimizer = draw.choice(["SGD", "Adam", "Lion"])
        self.options: dict[str, Any] = draw.choice([{}, {}, {"max_grad_norm": 1.0}])
        self.way = draw.choice(["Step", "Step", "fast_step", "fast_step by a new lambda"])
        where = draw.choice(list(WAYS))
        is_method = where == "method"  # which encloses nothing
        self._agent, given, returned = WAYS[where]
        self._places = {
            kind: [each for each in known if draw.random() < 0.6 and not (is_method and each[0] in _ENCLOSED)]
            for kind, known in PLACES.items()
        }
        body = [line for _ in range(draw.randint(2, 7)) for line in self._statement()]
        loss = _filled(LOSS, GIVEN=[given], BODY=body, RAISES=self._raises())
        loss = loss.replace("    nonlocal calls\n", "") if is_method else loss
        lines = loss.strip().split("\n")
        names = {kind: [_of_agent(name, "agent") for name, _ in known] for kind, known in self._places.items()}
        objects = [name for kind in _COMPARED for name in names[kind]]
        kept = [name for name in objects if name not in _OF_MODEL]
        shown = [*names["number"], *names["text"], *names["flag"], "agent.total", "agent.gain"]
        self.source = _filled(
            SOURCE,
            METHOD=lines if is_method else [],
            FUNCTION=[] if is_method else lines,
            INNER=[self._one(INNER) for _ in range(draw.randint(0, 3))],
            DROPPED=[str(draw.choice([0.0, 0.0, 0.2]))],
            STATE=[_of_agent(made, "agent") for known in self._places.values() for _, made in known],
            BETWEEN=[line for _ in range(draw.randint(0, 4)) for line in self._change()],
            SHOWN=[f"[{', '.join([*shown, *(f'plain({name})' for name in objects)])}]"],
            OBJECTS=[f"[{', '.join(['model.owner', 'agent.inner', *kept])}]"],
            RETURNED=[returned],
        )

    def made(self) -> Any:
        """Run the source and return what its `make` returns."""
        module = sys.modules["made_loss"] = types.ModuleType("made_loss")
        module.__dict__["plain"] = _plain
        exec(compile(self.source, "<made loss>", "exec", dont_inherit=True), module.__dict__)
        return module.__dict__["make"]()

    def _raises(self) -> list[str]:
        if self._draw.random() >= 0.2:
            return []
        of = self._draw.choice(["True", f"{self._agent}.total > 3", "model.training"])
        return [f"{self._agent}.add()", f"if len(x) == 5 and {of}:", "    raise ArithmeticError('a bad batch')"]

    def _one(self, templates: str) -> str:
        """Draw a line of which the program has all places."""
        lines = templates.strip().split("\n")
        while True:
            line = self._draw.choice(lines)
            kinds = sorted(set(re.findall(r"{(\w+)}", line)))
            if all(self._places[kind] for kind in kinds):
                for kind in kinds:
                    line = line.replace(f"{{{kind}}}", self._draw.choice(self._places[kind])[0])
                return _of_agent(line, self._agent)

    def _statement(self, depth: int = 0) -> list[str]:
        if depth < 2 and self._draw.random() < 0.35:
            inside = [f"    {line}" for _ in range(self._draw.randint(1, 2)) for line in self._statement(depth + 1)]
            other = [f"    {line}" for line in self._statement(depth + 1)] if self._draw.random() < 0.5 else []
            return [f"if {self._one(CONDITIONS)}:", *inside, *(["else:", *other] if other else [])]
        return [self._one(READS if self._draw.random() < 0.35 else WRITES)]

    def _change(self) -> list[str]:
        every = self._draw.choice([1, 3, 5, 8])
        when = self._draw.choice([f"i % {every} == {self._draw.randrange(every)}", "i in (6, 27)", "i == 12"])
        agent, self._agent = self._agent, "agent"
        line = self._one(BETWEEN)
        self._agent = agent
        return [f"if {when}:", f"    {line}"]


def _of_agent(line: str, agent: str) -> str:
    return re.sub(r"\bAGENT\b", agent, line)


def _filled(template: str, **parts: list[str]) -> str:
    """Put lines in the places of names, indented as these are; none: the place goes."""
    for name, lines in parts.items():
        for found in reversed(list(re.finditer(rf"^( *){name}\n", template, re.M))):
            filled = "".join(f"{found[1]}{line}\n" for line in lines)
            template = template[: found.start()] + filled + template[found.end() :]
        template = re.sub(rf"\b{name}\b", lambda _, lines=lines: " ".join(lines), template)
    return template


def _plain(value: Any) -> Any:
    """Copy a value, arrays as lists of numbers."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, (mx.array, np.ndarray)):
        return value.tolist()
    if isinstance(value, (list, tuple, set, collections.deque)):
        return [_plain(each) for each in (sorted(value) if isinstance(value, set) else value)]
    return value
