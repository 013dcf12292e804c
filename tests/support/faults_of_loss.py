"""Faults of the loss and of the data: what they mean, not whether they run."""

from __future__ import annotations

from support.fault import Fault

TOKENS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mix, self.head = nn.Embedding(16, 24), nn.Linear(24, 24), nn.Linear(24, 16)
    def __call__(self, tokens):
        h = self.embedding(tokens)
        h = h + nn.relu(self.mix(mx.cumsum(h, axis=1)))
        return self.head(h)
model = Words()
batches = [mx.array(rng.integers(0, 16, (4, 12))) for _ in range(10)]
"""

OF_LOSS: dict[str, Fault] = {
    "a log-softmax without labels": Fault(
        """
def loss_fn(model, x, y):
    z = model(x)
    return (mx.logsumexp(z, axis=-1, keepdims=True) - z).mean()
""",
        "ignores-labels",
        ("does not depend on argument y",),
        "own label",
        "data numbers",
    ),
    "a language model whose loss has no labels": Fault(
        TOKENS
        + """
def loss_fn(model, tokens):
    p = mx.softmax(model(tokens[:, :-1]), axis=-1)
    return -(p * mx.log(p)).sum(axis=-1).mean()
""",
        "ignores-labels",
        ("does not depend on its labels", "[4, 11, 16]"),
        "tokens[:, 1:]",
        "data numbers",
    ),
    "targets that are never read": Fault(
        """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
batches = [(x, x[:, :1] + x[:, 1:2]) for x, _ in batches]
def loss_fn(model, x, y):
    prediction = model(x)
    return mx.square(prediction - prediction.mean()).mean()
""",
        "ignores-labels",
        ("does not depend on argument y",),
        "own label",
        "data numbers",
    ),
    "a language model that copies its input": Fault(
        TOKENS
        + """
def loss_fn(model, tokens):
    return nn.losses.cross_entropy(model(tokens), tokens, reduction="mean")
""",
        "not-shifted",
        ("copying is learned",),
        "tokens[:, 1:]",
        "data numbers",
    ),
    "a language model that sees the next token": Fault(
        TOKENS
        + """
class Seeing(Words):
    def __call__(self, tokens):
        h = self.embedding(tokens)
        return self.head(h + nn.relu(self.mix(h.mean(axis=1, keepdims=True))))
model = Seeing()
def loss_fn(model, tokens):
    return nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], reduction="mean")
""",
        "sees-the-future",
        ("change with the token of argument tokens there",),
        "causal mask",
        "data numbers",
    ),
    "labels that are shifted twice": Fault(
        TOKENS
        + """
batches = [{"tokens": tokens[:, :-1], "labels": tokens[:, 1:]} for tokens in batches]
def loss_fn(model, tokens, labels):
    return nn.losses.cross_entropy(model(tokens)[:, :-1], labels[:, 1:], reduction="mean")
""",
        "shifted-twice",
        ("after the next one",),
        "shift once",
        "data numbers",
    ),
    "a cross entropy with its sign turned": Fault(
        """
def loss_fn(model, x, y):
    return mx.take_along_axis(nn.log_softmax(model(x)), y[:, None], axis=1).mean()
""",
        "sign",
        ("the sign of the loss is turned",),
        "turn the sign",
        "data numbers",
    ),
    "a regression with its sign turned": Fault(
        """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 2))
batches = [(x, x[:, :2]) for x, _ in batches]
def loss_fn(model, x, y):
    return -mx.abs(model(x) - y).mean()
""",
        "sign",
        ("outputs that predict argument y",),
        "turn the sign",
        "data numbers",
    ),
    "a difference that broadcasts to all pairs": Fault(
        """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
batches = [(x, x[:, 0] * 2) for x, _ in batches]
def loss_fn(model, x, y):
    return mx.abs(y - model(x)).mean()
""",
        "broadcast",
        ("the same for the labels in another order", "[16, 1]", "[16]", "[16, 16]"),
        "squeeze(-1)",
        "data numbers",
    ),
    "a squeeze that broadcasts to all pairs": Fault(
        """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
batches = [(x, x[:, :1] * 2) for x, _ in batches]
def loss_fn(model, x, y):
    return mx.square(model(x).squeeze() - y).mean()
""",
        "broadcast",
        ("the same for the labels in another order", "every pair"),
        "squeeze(-1)",
        "data numbers",
    ),
    "probabilities where logits belong": Fault(
        "model.layers.append(nn.Softmax())",
        "probabilities",
        ("nn.losses.cross_entropy gets probabilities",),
        "not mx.softmax",
        "data forward numbers",
    ),
    "a sigmoid before the binary cross entropy": Fault(
        """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1), nn.Sigmoid())
batches = [(x, (y == 1)[:, None].astype(mx.float32)) for x, y in batches]
def loss_fn(model, x, y):
    return nn.losses.binary_cross_entropy(model(x), y, reduction="mean")
""",
        "probabilities",
        ("nn.losses.binary_cross_entropy gets probabilities", "sigmoid"),
        "the last linear layer",
        "data forward numbers",
    ),
    "a softmax over all axes": Fault(
        """
def loss_fn(model, x, y):
    probabilities = mx.softmax(model(x))
    return -mx.log(mx.take_along_axis(probabilities, y[:, None], axis=1) + 1e-9).mean()
""",
        "softmax-axis",
        ("mx.softmax without axis=", "all axes of shape [16, 3]"),
        "axis=-1",
        "data forward numbers",
    ),
    "labels that are floating numbers": Fault(
        "batches = [(x, y.astype(mx.float32)) for x, y in batches]",
        "float-labels",
        ("the 16 labels", "float32"),
        "astype(mx.int32)",
        "data forward numbers",
    ),
    "a label out of range in the last batch": Fault(
        "batches = [(x, y) for x, y in batches[:-1]] + [(batches[-1][0], mx.where(mx.arange(16) == 3, 3, 0))]",
        "labels-out-of-range",
        ("batch 10", "0 to 3", "3 classes"),
        "mask = y >= 0",
        "data forward numbers",
    ),
    "a learning rate that is far too high": Fault(
        "optimizer = optim.SGD(300.0, momentum=0.9)",
        "diverges",
        ("the loss is", "the learning rate is 300"),
        "a smaller learning rate",
        "data numbers",
    ),
    "inputs that are not scaled": Fault(
        "batches = [(x * 3e4, y) for x, y in batches]; mx.eval(batches); optimizer = optim.SGD(0.05)",
        "diverges",
        ("argument x has values around",),
        "divide by the standard deviation",
        "data numbers",
    ),
    "the same batch again and again": Fault(
        "batches = [(mx.array(x[:16]), mx.array(y[:16])) for _ in range(10)]",
        "same-batch",
        ("all 10 batches",),
        "an index that is not used",
        "data numbers",
    ),
    "a generator that yields one object": Fault(
        """
def forever():
    batch = batches_before[0]
    while True:
        yield batch
batches_before, batches = batches, forever()
""",
        "same-batch",
        ("the data never change",),
        "not advanced",
        "data numbers",
    ),
    "one class a batch": Fault(
        """
order = np.argsort(y, kind="stable")
batches = Loader((x[order], y[order]), batch_size=16)
""",
        "sorted-data",
        ("one class", "together they have 3"),
        "shuffle=True",
        "data numbers",
    ),
    "layers in a tuple": Fault(
        """
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = (nn.Linear(8, 32), nn.Linear(32, 32)), nn.Linear(32, 3)
    def __call__(self, x):
        for block in self.blocks:
            x = nn.relu(block(x))
        return self.head(x)
model = Tower()
""",
        "outside-model",
        ("model.blocks[0] (Linear) has 288 parameters",),
        "not a tuple",
        "data numbers",
    ),
    "a head that is no module, and whose name begins with an underscore": Fault(
        """
class Head:
    def __init__(self):
        self.last = nn.Linear(32, 3)
    def __call__(self, x):
        return self.last(x)
class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self._head = nn.Linear(8, 32), Head()
    def __call__(self, x):
        return self._head(nn.relu(self.body(x)))
model = Tower()
""",
        "outside-model",
        ("model._head.last (Linear) has 99 parameters",),
        "not self._layers",
        "data numbers",
    ),
    "a loss that computes in Python": Fault(
        """
def loss_fn(model, x, y):
    z = model(x)
    weights = [sum(ord(letter) for letter in str(n * n)) for n in range(40_000)]
    return nn.losses.cross_entropy(z, y, reduction="mean") * (weights[3] / weights[3])
""",
        "python-loss",
        ("Python in the loss takes", "train.py:"),
        "once, before the training",
        "data native",
    ),
}
