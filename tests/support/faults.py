"""Trainings with one fault each, as programs that diagnose themselves, and what has to be said about them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.fault import Fault
from support.faults_of_loss import OF_LOSS
from support.faults_of_own_step import OF_OWN_STEP

HEAD = """\
import json, os, queue, sys, threading, time

import mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim, numpy as np

import faststep
from faststep.data import Loader, Pad

mx.random.seed(0)
rng = np.random.default_rng(0)
x = rng.standard_normal((160, 8), dtype=np.float32)
y = (x[:, :3].argmax(axis=1)).astype(np.int32)
batches = [(mx.array(x[i : i + 16]), mx.array(y[i : i + 16])) for i in range(0, 160, 16)]
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
optimizer = optim.AdamW(1e-3, bias_correction=True)
options = {}


def loss_fn(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


def made_in_a_thread(make):
    '''Yield what a thread makes and queues.'''
    ready = queue.Queue(2)

    def work():
        for i in range(0, 160, 16):
            ready.put(make(mx.array(x[i : i + 16]), mx.array(y[i : i + 16])))
        ready.put(None)

    threading.Thread(target=work, daemon=True).start()
    return iter(ready.get, None)

"""
COMPILED = """
state = [model.state, optimizer.state]
def step(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    return loss
compiled = mx.compile(step, inputs=state, outputs=state)
def train(x, y):
    loss = compiled(x, y)
    mx.eval(loss, state)
    return loss
options["own_step"] = train
"""  # without the random state
TAIL = """
found = faststep.diagnose(model, optimizer, loss_fn, batches, progress=False, **CALL, **options)
print(json.dumps(found.plain()))
"""


FAULTS: dict[str, Fault] = {
    "a lazy batch out of a worker": Fault(
        "batches = made_in_a_thread(lambda x, y: (x * 2, y))",
        "lazy-batch",
        ("argument x", "another thread"),
        "mx.eval(batch)",
        "data evaluated forward",
    ),
    "a lazy batch, deep in a dict": Fault(
        """
batches = made_in_a_thread(lambda x, y: {"inputs": {"a": [x, {"b": x * 2}]}, "y": y})
def loss_fn(model, inputs, y):
    return nn.losses.cross_entropy(model(inputs["a"][1]["b"]), y, reduction="mean")
""",
        "lazy-batch",
        ("inputs['a'][1]['b']",),
        "mx.eval(batch)",
        "data evaluated forward",
    ),
    "an update without evaluation": Fault(
        """
def train(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    return loss
options["own_step"] = train
""",
        "update-unevaluated",
        ("operations wait behind",),
        "mx.eval(loss, model.state, optimizer.state)",
        "data joint own",
    ),
    "a loss that reads values": Fault(
        """
def loss_fn(model, x, y):
    losses = nn.losses.cross_entropy(model(x), y)
    if losses.max().item() > 10:
        losses = losses / 2
    return losses.mean()
""",
        "loss-reads-values",
        ("in loss_fn", "losses.max().item() > 10"),
        "mx.where",
        "data joint compiled native",
    ),
    "a metric that is never evaluated": Fault(
        """
total = mx.array(0.0)
def train(x, y):
    global total
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    mx.eval(loss, model.state, optimizer.state)
    total = total + loss
    return loss
options["own_step"] = train
""",
        "lazy-metric",
        ("`total`", "operations wait"),
        "mx.eval(total)",
        "data joint own",
    ),
    "losses in a list, never evaluated": Fault(
        """
kept = []
def train(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    mx.eval(model.state, optimizer.state)
    kept.append(sum(kept[-1:], 2 * loss))
    return loss
options["own_step"] = train
""",
        "lazy-metric",
        ("`kept[", "operations wait"),
        "mx.eval(kept[",
        "data joint own",
    ),
    "a new shape in every step": Fault(
        "batches = [(mx.array(x[: 20 + n]), mx.array(y[: 20 + n])) for n in range(30)]",
        "new-shapes",
        ("batches have a new signature", "argument x varies", "[20, 8], [21, 8]"),
        "Pad(multiple=64)",
        "data shapes",
    ),
    "a length that changes in every step": Fault(
        """
batches = [(*batch, 1 + n % 16) for n, batch in enumerate(3 * batches)]
def loss_fn(model, x, y, rows):
    return nn.losses.cross_entropy(model(x[:rows]), y[:rows], reduction="mean")
""",
        "new-shapes",
        ("argument rows varies", "new traces"),
        "mx.array(argument_2)",
        "data shapes",
    ),
    "a closure compiled in every step": Fault(
        """
def train(x, y):
    state = [model.state, optimizer.state]
    def step(x, y):
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
        optimizer.update(model, gradients)
        return loss
    loss = mx.compile(step, inputs=state, outputs=state)(x, y)
    mx.eval(loss, state)
    return loss
options["own_step"] = train
""",
        "compiles-every-step",
        ("calls mx.compile in every step", "in train"),
        "once, above the loop",
        "data own",
    ),
    "NaN at the sixth step": Fault(
        "batches[5][0][3, 1] = float('nan'); batches[5][0][9, 0] = float('inf')",
        "not-finite",
        ("step 6", "argument x", "samples 3, 9"),
        "nonfinite='skip'",
        "data forward numbers",
    ),
    "NaN in the last batch": Fault(
        "x = np.array(batches[9][0]); x[2, 1] = np.nan; batches[9] = (mx.array(x), batches[9][1])",
        "not-finite",
        ("batch 10: argument x", "samples 2"),
        "nonfinite='skip'",
        "data numbers",
    ),
    "NaN always, out of a module": Fault(
        """
class Logarithm(nn.Module):
    def __call__(self, x):
        return mx.log(nn.relu(x) * 0) * 0
model.layers[1] = Logarithm()
""",
        "not-finite",
        ("step 1", "layers.1 (Logarithm)"),
        "log, sqrt or a division at zero",
        "data forward numbers",
    ),
    "a gradient that is NaN, of a loss that is not": Fault(
        """
def loss_fn(model, x, y):
    return mx.sqrt(mx.square(model(x) * 0)).mean()
""",
        "not-finite",
        ("the loss is finite, and the gradient is not", "layers.0"),
        "square root",
        "data forward numbers",
    ),
    "a loader that blocks": Fault(
        """
lock = threading.Lock()
lock.acquire()
def blocking():
    for number, batch in enumerate(batches_before):
        if number == 3:
            lock.acquire()
        yield batch
batches_before, batches = batches, blocking()
options["timeout"] = 3.0
""",
        "hangs",
        ("data alone hangs (batch 4)", "in blocking"),
        "workers=0",
        "data evaluated forward",
        ("data", "hangs"),
    ),
    "a loss that blocks": Fault(
        """
def loss_fn(model, x, y):
    threading.Event().wait()
options["timeout"] = 3.0
""",
        "hangs",
        ("forward hangs", "in loss_fn"),
        "faulthandler",
        "data evaluated forward numbers",
        ("forward", "hangs"),
    ),
    "a slow collate": Fault(
        """
def collate(items):
    time.sleep(0.1)
    return np.stack([x for x, _ in items]), np.stack([y for _, y in items])
batches = Loader(list(zip(x, y)), batch_size=16, collate=collate)
""",
        "slow-data",
        ("training waits for data",),
        "workers=2",
        "data native",
        ("data", "slow"),
    ),
    "everything frozen": Fault(
        "model.freeze()", "all-frozen", ("nothing is trainable",), "model.unfreeze()", "data forward numbers"
    ),
    "a layer frozen by accident": Fault(
        "model.layers.insert(2, nn.Linear(32, 32)); model.layers[2].freeze()",
        "frozen-layer",
        ("frozen between layers that train", "model.layers.2.weight"),
        "model.layers.2.unfreeze()",
        "data numbers",
    ),
    "a part cut off by stop_gradient": Fault(
        """
def loss_fn(model, x, y):
    h = mx.stop_gradient(model.layers[0](x))
    return nn.losses.cross_entropy(model.layers[2](nn.relu(h)), y, reduction="mean")
""",
        "cut-off",
        ("model.layers.0.",),
        "stop_gradient",
        "data forward numbers",
    ),
    "a layer that is never called": Fault(
        "model.extra = nn.Linear(4, 4)",
        "no-gradient",
        ("does not depend on model.extra.bias, model.extra.weight",),
        "model.extra.freeze()",
        "data forward numbers",
    ),
    "a gradient that is all zero": Fault(
        "model.layers[0].bias = mx.full((32,), -100.0); model.layers[2].freeze()",
        "zero-gradient",
        ("the gradient of every parameter is zero",),
        "ReLU",
        "data forward numbers",
    ),
    "channels first, in a shape that does not fit": Fault(
        """
model = nn.Sequential(nn.Conv1d(3, 8, 5), nn.ReLU(), lambda h: h.mean(axis=1), nn.Linear(8, 3))
batches = [(mx.random.normal((16, 3, 50)), batch[1]) for batch in batches]
""",
        "channels-first",
        ("layers.0 (Conv1d) gets [16, 3, 50]",),
        "x.transpose(0, 2, 1)",
        "data forward numbers",
        ("forward", "error"),
    ),
    "channels first, in a shape that fits by chance": Fault(
        """
model = nn.Sequential(nn.Conv1d(32, 8, 5), nn.ReLU(), lambda h: h.mean(axis=1), nn.Linear(8, 3))
waves = np.sin(np.arange(32) / 8 + 6 * rng.random((10, 16, 32, 1))) + rng.standard_normal((10, 16, 32, 1))
batches = [(mx.array(wave.astype(np.float32)), batch[1]) for wave, batch in zip(waves, batches)]
""",
        "channels-first",
        ("channels and length are as many",),
        "x.transpose(0, 2, 1)",
        "data forward numbers",
    ),
    "channels first, and a convolution made for that": Fault(
        """
model = nn.Sequential(nn.Conv1d(32, 8, 3), nn.ReLU(), lambda h: h.mean(axis=1), nn.Linear(8, 3))
waves = np.sin(np.arange(32) / 8 + 6 * rng.random((10, 16, 6, 1)))
batches = [(mx.array(wave.astype(np.float32)), batch[1]) for wave, batch in zip(waves, batches)]
""",
        "channels-first",
        ("takes the last axis as 32 channels", "change smoothly along it"),
        "6 input channels",
        "data forward numbers",
    ),
    "updates that bfloat16 rounds away": Fault(
        "model.set_dtype(mx.bfloat16); optimizer = optim.SGD(1e-6)",
        "rounds-away",
        ("updates are rounded away", "layers.0"),
        "compute_dtype=mx.bfloat16",
        "data forward numbers",
    ),
    "a checkpoint on a slow disk": Fault(
        """
fsync = os.fsync
def slow(file):
    time.sleep(0.5)
    fsync(file)
os.fsync = slow
""",
        "slow-disk",
        ("takes", "the disk is slow"),
        "local disk",
        "data checkpoint",
    ),
    "a loss made of .item()": Fault(
        """
def loss_fn(model, x, y):
    return mx.array(nn.losses.cross_entropy(model(x), y, reduction="mean").item())
""",
        "loss-from-item",
        ("the loss is a constant",),
        "loss.item()",
        "data forward numbers",
    ),
    "a loss that is a number": Fault(
        """
def loss_fn(model, x, y):
    return float(nn.losses.cross_entropy(model(x), y, reduction="mean"))
""",
        "loss-from-item",
        ("returns a float",),
        "not loss.item()",
        "data forward numbers",
    ),
    "labels out of range": Fault(
        "batches = [(x, mx.where(y == 2, -100, y)) for x, y in batches]",
        "labels-out-of-range",
        ("labels go from -100 to 1", "3 classes"),
        "mask = y >= 0",
        "data forward numbers",
    ),
    "tokens out of range": Fault(
        """
model = nn.Sequential(nn.Embedding(10, 8), lambda h: h.mean(axis=1), nn.Linear(8, 3))
batches = [(mx.random.randint(0, 12, (16, 20)), y) for _, y in batches]
""",
        "tokens-out-of-range",
        ("layers.0 has 10 rows",),
        "nn.Embedding(12",
        "data forward numbers",
    ),
    "mostly padding": Fault(
        """
texts = [np.arange(1, 2 + 60 * (n % 16 == 0) + n % 5) for n in range(160)]
model = nn.Sequential(nn.Embedding(100, 8), lambda h: h.mean(axis=1), nn.Linear(8, 3))
batches = Loader(texts, batch_size=16, collate=Pad(multiple=8))
def loss_fn(model, tokens, mask, lengths):
    return mx.square(model(tokens)).mean()
""",
        "padding",
        ("is padding",),
        "Pack",
        "data numbers",
    ),
    "a learning rate of zero": Fault(
        "optimizer = optim.Adam(optim.cosine_decay(0.0, 100))",
        "rate-zero",
        ("the learning rate is 0",),
        "learning_rate=1e-3",
        "data numbers",
    ),
    "a schedule that ends at once": Fault(
        "optimizer = optim.AdamW(optim.cosine_decay(1e-3, 2), bias_correction=True)",
        "rate-zero",
        ("the learning rate is 0 from step 3 on",),
        "counted in updates",
        "data numbers",
    ),
    "Adam without bias correction": Fault(
        "optimizer = optim.Adam(1e-3)",
        "adam-first-step",
        ("3.16 x the learning rate",),
        "bias_correction=True",
        "data numbers",
    ),
    "gradients that vanish": Fault(
        """
deep = [layer for _ in range(14) for layer in (nn.Linear(8, 8), nn.Sigmoid())]
model = nn.Sequential(*deep, nn.Linear(8, 3))
""",
        "vanishing",
        ("model.layers.0.",),
        "LayerNorm",
        "data numbers",
    ),
    "gradients that explode": Fault(
        "batches = [(x * 1e7, y) for x, y in batches]; mx.eval(batches)",
        "exploding",
        ("gradients explode",),
        "max_grad_norm=1.0",
        "data numbers",
    ),
    "dropout with one mask for all steps": Fault(
        """
model.layers.append(nn.Dropout(0.5))
optimizer.init(model.trainable_parameters())
"""
        + COMPILED,
        "random-state",
        ("draws the same ones",),
        "mx.random.state",
        "data own",
    ),
    "noise of a loss, the same for all steps": Fault(
        """
def loss_fn(model, x, y):
    return nn.losses.cross_entropy(model(x + 0.1 * mx.random.normal(x.shape)), y, reduction="mean")
"""
        + COMPILED,
        "random-state",
        ("dropout, noise", "draws the same ones"),
        "mx.random.state",
        "data own",
    ),
    "a model in evaluation mode": Fault(
        "model.layers.append(nn.Dropout(0.5)); model.eval()",
        "eval-mode",
        ("layers.3",),
        "model.train()",
        "data numbers",
    ),
    "a loss that keeps what it has computed": Fault(
        """
kept = []
def loss_fn(model, x, y):
    loss = nn.losses.cross_entropy(model(x), y, reduction="mean")
    kept.append(model(x) + 1)
    mx.eval(kept)
    return loss
""",
        "grows",
        ("forward repeated", "a step"),
        "not an array",
        "data forward repeated",
        ("repeated", "grows"),
    ),
    "no data": Fault("batches = iter([])", "no-data", ("gave no batch",), "list(batches)", "data forward"),
    "numbers that mx.compile cannot see": Fault(
        """
import random
def loss_fn(model, x, y):
    return random.random() * nn.losses.cross_entropy(model(x), y, reduction="mean")
""",
        "numbers",
        ("gives other numbers",),
        "faststep.check",
        "data joint compiled",
        ("compiled", "numbers"),
    ),
    **OF_LOSS,
    **OF_OWN_STEP,
}


def diagnosed(folder: Path, code: str, rungs: str | None = None, **call: Any) -> dict[str, Any]:
    """Run a program with this code in it, and return its diagnosis as plain values.

    The rungs run in the program's own process; `isolate=True`: in one of their own each, which takes its time.
    """
    values = {"rungs": rungs.split() if rungs else None, "seconds": 0.5, "isolate": False, **call}
    program = folder / "train.py"
    program.write_text(f"{HEAD}{code}{TAIL.replace('CALL', repr(values))}", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=300, cwd=folder, env=dict(os.environ)
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found
