"""Trainings in which nothing is wrong, each with something that looks like a fault."""

from __future__ import annotations

from support.faults_of_own_step import own_step

PLAIN = """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    mx.eval(loss, model.state, optimizer.state)
    return loss
"""
WORDS = """
class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(32, 24), nn.LayerNorm(24)
        self.attention, self.head = nn.MultiHeadAttention(24, 2), nn.Linear(24, 32)
    def __call__(self, tokens, causal=True):
        h = self.embedding(tokens)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(tokens.shape[1]) if causal else None
        return self.head(self.norm(h + self.attention(h, h, h, mask)))
model = Words()
tokens = rng.integers(1, 32, (40, 12))
"""
HEALTHY: dict[str, str] = {
    "an own step, plain": own_step(PLAIN),
    "an own step, compiled, with dropout": own_step(
        """
    loss = compiled(x, y)
    mx.eval(loss, state)
    return loss
""",
        """
model.layers.append(nn.Dropout(0.2)); model.layers.append(nn.Linear(3, 3))
optimizer.init(model.trainable_parameters())
state = [model.state, optimizer.state, mx.random.state]
def step(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    return loss
compiled = mx.compile(step, inputs=state, outputs=state)
""",
    ),
    "an own step that is ours": own_step(
        "\n    return faststep.fast_step(model, optimizer, loss_fn, x, y, max_grad_norm=0.1)\n"
    ),
    "an own step that accumulates": own_step(
        "\n    return step(x, y).loss\n",
        "step = faststep.Step(model, optimizer, loss_fn, accumulate=4, max_grad_norm=1.0)",
    ),
    "an own step that averages and clips": own_step(
        """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    window.append(gradients)
    mx.eval(loss, gradients)
    if len(window) == 5:
        mean = tree_map(lambda *g: sum(g) / 5, *window)
        window.clear()
        mean, _ = optim.clip_grad_norm(mean, 0.05)
        optimizer.update(model, mean)
        mx.eval(model.state, optimizer.state)
    return loss
""",
        "window = []",
    ),
    "an own step that warms up": own_step(
        PLAIN, "optimizer = optim.AdamW(optim.linear_schedule(0.0, 1e-3, 10), bias_correction=True)"
    ),
    "an own step by hand": own_step(
        """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    moments.update(tree_map(lambda m, g: 0.9 * m + g, dict(moments), gradients))
    model.update(tree_map(lambda p, m: p - 0.01 * m, model.parameters(), dict(moments)))
    mx.eval(loss, model.state, moments)
    return loss
""",
        "moments = tree_map(mx.zeros_like, model.parameters())",
    ),
    "an own step with a try": own_step(
        """
    try:
        scale = settings["scale"]
    except KeyError:
        scale = 1.0
"""
        + PLAIN.lstrip("\n"),
        "settings = {}",
    ),
    "an own step with two optimizers": own_step(
        PLAIN,
        """
optimizer = optim.MultiOptimizer([optim.SGD(0.1, momentum=0.9), optim.AdamW(1e-3, bias_correction=True)],
                                 [lambda _, weight: weight.ndim > 1])
""",
    ),
    "an own step on a part of the model": own_step(PLAIN, "model.layers[0].freeze()"),
    "an autoencoder with labels in its batches": """
model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 8))
def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), x)
""",
    "contrastive, with labels in its batches": """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
def loss_fn(model, x, y):
    a, b = model(x + 0.1 * mx.random.normal(x.shape)), model(x + 0.1 * mx.random.normal(x.shape))
    a, b = (each / mx.linalg.norm(each, axis=-1, keepdims=True) for each in (a, b))
    return nn.losses.cross_entropy(a @ b.T / 0.2, mx.arange(len(x)), reduction="mean")
""",
    "numbers that nothing reads": """
batches = [(x, mx.arange(16) + 16 * n, y) for n, (x, y) in enumerate(batches)]
def loss_fn(model, x, numbers, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")
""",
    "one output a sample": """
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
def loss_fn(model, x, y):
    return nn.losses.binary_cross_entropy(model(x).squeeze(-1), (y == 1).astype(mx.float32), reduction="mean")
""",
    "many labels a sample": """
batches = [(x, (x[:, :3] > 0.5).astype(mx.float32)) for x, _ in batches]
def loss_fn(model, x, y):
    return nn.losses.binary_cross_entropy(model(x), y, reduction="mean")
""",
    "probabilities, and their logarithm": """
model.layers.append(nn.Softmax())
def loss_fn(model, x, y):
    return -mx.log(mx.take_along_axis(model(x), y[:, None], axis=1) + 1e-9).mean()
""",
    "a language model with a mask": WORDS
    + """
lengths = rng.integers(4, 13, 40)
rows = np.where(np.arange(12) < lengths[:, None], tokens, 0)
batches = [{"tokens": mx.array(rows[i : i + 4]), "mask": mx.array(np.arange(12) < lengths[i : i + 4, None])}
           for i in range(0, 40, 4)]
def loss_fn(model, tokens, mask):
    losses = nn.losses.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]) * mask[:, 1:]
    return losses.sum() / mask[:, 1:].sum()
""",
    "a masked language model": WORDS
    + """
hidden = rng.random((40, 12)) < 0.3
batches = [(mx.array(np.where(hidden, 0, tokens)[i : i + 4]), mx.array(np.where(hidden, tokens, -100)[i : i + 4]))
           for i in range(0, 40, 4)]
def loss_fn(model, tokens, labels):
    there = labels >= 0
    losses = nn.losses.cross_entropy(model(tokens, causal=False), mx.where(there, labels, 0)) * there
    return losses.sum() / there.sum()
""",
    "tokens behind a prefix": WORDS
    + """
class Prefixed(Words):
    def __init__(self):
        super().__init__()
        self.prefix = nn.Linear(8, 24)
    def __call__(self, x, tokens):
        h = mx.concatenate([self.prefix(x)[:, None], self.embedding(tokens)], axis=1)
        mask = nn.MultiHeadAttention.create_additive_causal_mask(h.shape[1])
        return self.head(self.norm(h + self.attention(h, h, h, mask)))[:, :-1]
model = Prefixed()
rows = rng.standard_normal((40, 8)).astype(np.float32)
batches = [(mx.array(rows[i : i + 4]), mx.array(tokens[i : i + 4])) for i in range(0, 40, 4)]
def loss_fn(model, x, tokens):
    return nn.losses.cross_entropy(model(x, tokens), tokens, reduction="mean")
""",
    "labels that are shifted in the data": WORDS
    + """
batches = [(mx.array(tokens[i : i + 4, :-1]), mx.array(tokens[i : i + 4, 1:])) for i in range(0, 40, 4)]
def loss_fn(model, tokens, labels):
    return nn.losses.cross_entropy(model(tokens), labels, reduction="mean")
""",
    "a loss that the model computes": """
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
    def __call__(self, x, y):
        return nn.losses.cross_entropy(self.body(x), y, reduction="mean")
model = Whole()
def loss_fn(model, x, y):
    return model(x, y)
""",
    "a rare class": """
y = (rng.random(160) < 0.03).astype(np.int32)
batches = [(mx.array(x[i : i + 16]), mx.array(y[i : i + 16])) for i in range(0, 160, 16)]
""",
    "batches of one": "batches = Loader((x, y), batch_size=1, shuffle=True)",
    "the whole data in each step": "batches = [(mx.array(x), mx.array(y))]",
    "a policy gradient, whose loss is below zero": """
batches = [(x, y, mx.random.normal((16,))) for x, y in batches]
def loss_fn(model, x, action, advantage):
    chosen = mx.take_along_axis(nn.log_softmax(model(x)), action[:, None], axis=1).squeeze(1)
    return -(chosen * advantage).mean()
""",
    "a likeness, whose loss is below zero": """
batches = [(x, x[:, :3]) for x, _ in batches]
def loss_fn(model, x, y):
    return -nn.losses.cosine_similarity_loss(model(x), y, reduction="mean")
""",
    "a frozen teacher": """
teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 3))
teacher.freeze()
def loss_fn(model, x, y):
    return nn.losses.kl_div_loss(nn.log_softmax(model(x)), nn.log_softmax(teacher(x)), reduction="mean")
""",
    "a frozen teacher that the model holds": """
class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self._teacher = nn.Linear(8, 3), nn.Linear(8, 3)
        self._teacher.freeze()
    def __call__(self, x):
        return self.body(x)
model = Student()
def loss_fn(model, x, y):
    return nn.losses.mse_loss(model(x), model._teacher(x)) + nn.losses.cross_entropy(model(x), y, reduction="mean")
""",
    "BatchNorm, convolutions and a warm rate": """
model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm(8), nn.ReLU(), lambda h: h.mean(axis=(1, 2)), nn.Linear(8, 3))
batches = [(mx.random.normal((16, 12, 12, 1)), y) for _, y in batches]
optimizer = optim.SGD(0.5, momentum=0.9)
""",
    "windows of a series, in their order": """
wave = np.cumsum(rng.standard_normal(200)).astype(np.float32) / 5
batches = [(mx.array(np.stack([wave[i + k : i + k + 8] for k in range(16)])),
            mx.array(np.stack([wave[i + k + 8 : i + k + 9] for k in range(16)]))) for i in range(0, 160, 16)]
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
def loss_fn(model, x, y):
    return nn.losses.huber_loss(model(x), y, reduction="mean")
""",
    "ratings of users and items": """
class Ratings(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(20, 8), nn.Embedding(30, 8)
    def __call__(self, user, item):
        return (self.user(user) * self.item(item)).sum(axis=-1)
model = Ratings()
batches = [{"user": mx.array(rng.integers(0, 20, 16)), "item": mx.array(rng.integers(0, 30, 16)),
            "rating": mx.array(rng.integers(1, 6, 16))} for _ in range(10)]
def loss_fn(model, user, item, rating):
    return mx.square(model(user, item) - rating).mean()
""",
}
