"""Losses around which something changes: weights in a dict, a mask, numbers on a model, what counts, a graph."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from support.programs.parts import BATCHES, Losses, Make, Net, integers, normals

IMAGE, CLASSES, BATCH, NODES = 32, 10, 32, 60


class Curriculum:
    """Weights of the loss in a dict, a difficulty mask that is changed in place, batches of NumPy."""

    def __init__(self, make: Make, width: int) -> None:
        model = Net([IMAGE, width, width, CLASSES + 1])
        self.models = [model]
        self.config = config = {"auxiliary": 1.0, "smoothing": 0.1, "classes": mx.ones((CLASSES,))}
        self.mask = mask = mx.zeros((IMAGE,))

        def loss(model: nn.Module, x: np.ndarray, y: np.ndarray) -> mx.array:
            out = model(mx.array(x) * mask)
            y = mx.array(y)
            each = nn.losses.cross_entropy(out[:, :-1], y, label_smoothing=config["smoothing"])
            return (config["classes"][y] * each).mean() + config["auxiliary"] * out[:, -1].square().mean()

        self.learn = make(model, optim.Adam(1e-3), loss)
        drawn = zip(normals(BATCH, IMAGE), integers(CLASSES, BATCH), strict=True)
        self.batches = [(np.array(x), np.array(y)) for x, y in drawn]

    def round(self, number: int) -> Losses:
        self.mask[: min(IMAGE, 4 * number + 4)] = 1.0
        self.config["auxiliary"] = 1.0 / (1 + number)
        if number % 3 == 2:
            self.config["classes"] = mx.linspace(0.5, 1.5, CLASSES) ** (number % 12 / 3)  # bounded: training goes on
            self.config["smoothing"] = 0.0
        return [self.learn(*self.batches[number % BATCHES])]


class Annealed:
    """Temperature and rate of dropout, attributes of the model, are set before each step; a batch is a dict."""

    def __init__(self, make: Make, width: int) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body, self.temperature = nn.TransformerEncoder(2, width, 4, dropout=0.1), 1.0
                self.first, self.last = nn.Linear(IMAGE, width), nn.Linear(width, CLASSES)

            def __call__(self, x: mx.array) -> mx.array:
                return self.last(self.body(self.first(x), None)) / self.temperature

        self.model = Model()
        self.models = [self.model]

        def loss(model: nn.Module, batch: dict[str, mx.array]) -> mx.array:
            y = batch.pop("y")
            return nn.losses.cross_entropy(model(**batch), y, reduction="mean")

        self.learn = make(self.model, optim.AdamW(1e-3), loss)
        self.batches = list(zip(normals(4, BATCH, IMAGE), integers(CLASSES, 4, BATCH), strict=True))

    def round(self, number: int) -> Losses:
        self.model.temperature = 1 + 1 / (1 + number)
        for layer in self.model.body.layers:
            layer.dropout1._p_1 = 0.9 + 0.1 / (1 + number)
        x, y = self.batches[number % BATCHES]
        return [self.learn({"x": x, "y": y})]


class Accuracy:
    """A metric that counts what it has seen."""

    def __init__(self) -> None:
        self.seen, self.names = 0, ["top1"]

    def update(self, logits: mx.array, y: mx.array) -> dict[str, mx.array]:
        """Return the share of right answers, and count."""
        self.seen += len(y)
        return {self.names[0]: (logits.argmax(axis=-1) == y).mean()}


class Trainer:
    """A trainer's step is its method, which reaches criterion, their arguments and a metric by `self`."""

    def __init__(self, make: Make, width: int) -> None:
        self.model = Net([IMAGE, width, width, CLASSES])
        self.models = [self.model]
        self.criterion, self.arguments = nn.losses.cross_entropy, {"label_smoothing": 0.1}
        self.metric = Accuracy()
        self.learn = make(self.model, optim.SGD(0.1, momentum=0.9), self.train_step)
        self.batches = list(zip(normals(BATCH, IMAGE), integers(CLASSES, BATCH), strict=True))

    def train_step(self, _model: nn.Module, x: mx.array, y: mx.array) -> tuple[mx.array, dict[str, mx.array]]:
        logits = self.model(x)
        return self.criterion(logits, y, **self.arguments).mean(), self.metric.update(logits, y)

    def round(self, number: int) -> Losses:
        loss, metrics = self.learn(*self.batches[number % BATCHES])
        return [loss, metrics["top1"]]


@dataclass
class Graph:
    """Nodes, float32 [nodes, features], edges, int32 [2, edges], and classes, int32 [nodes]."""

    nodes: mx.array
    edges: mx.array
    classes: mx.array
    name: str = "graph"


class GraphConvolution(nn.Module):
    """A layer that adds up what a node's neighbours send (Kipf and Welling, 2017)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def __call__(self, x: mx.array, edges: mx.array) -> mx.array:
        sent = self.linear(x)
        return mx.zeros_like(sent).at[edges[1]].add(sent[edges[0]]) / len(x) ** 0.5


class GraphNetwork:
    """Graph convolutions with dropout; the graph is a dataclass and the penalty is over all parameters."""

    def __init__(self, make: Make, width: int) -> None:
        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layers = [GraphConvolution(IMAGE, width), GraphConvolution(width, CLASSES)]
                self.dropout = nn.Dropout(0.5)

            def __call__(self, graph: Graph) -> mx.array:
                x = nn.relu(self.layers[0](graph.nodes, graph.edges))
                return self.layers[1](self.dropout(x), graph.edges)

        model = Model()
        self.models = [model]
        train = mx.arange(NODES // 2)  # which nodes are labelled

        def loss(model: nn.Module, graph: Graph, decay: float) -> tuple[mx.array, mx.array]:
            logits = model(graph)
            error = nn.losses.cross_entropy(logits[train], graph.classes[train], reduction="mean")
            weights = [layer.linear.weight for layer in model.layers]
            return error + decay * sum(weight.square().sum() for weight in weights), logits

        self.learn = make(model, optim.Adam(1e-2), functools.partial(loss, decay=5e-3))
        drawn = normals(NODES, IMAGE), integers(NODES, 2, 4 * NODES), integers(CLASSES, NODES, seed=2)
        self.graphs = [Graph(*each) for each in zip(*drawn, strict=True)]

    def round(self, number: int) -> Losses:
        loss, logits = self.learn(self.graphs[number % BATCHES])
        return [loss, logits.square().mean()]
