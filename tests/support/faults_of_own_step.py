"""Faults of the user's own step: what it does to the parameters, beside the plain loop."""

from __future__ import annotations

from support.fault import Fault


def own_step(body: str, before: str = "") -> str:
    """Return a program's own step of x and y with this body, and what stands before it."""
    head = "from mlx.utils import tree_flatten, tree_map\n"
    return f"{head}{before}\ndef train(x, y):{body}options['own_step'] = train\n"


OF_OWN_STEP: dict[str, Fault] = {
    "a step that updates nothing": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    mx.eval(loss, optimizer.apply_gradients(gradients, model.trainable_parameters()))
    return loss
""",
        ),
        "nothing-moves",
        ("no parameter has changed in", "the model does not get"),
        "optimizer.update(model, gradients)",
        "data own",
    ),
    "a step that updates the head alone": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model.layers[2], gradients["layers"][2])
    mx.eval(loss, model.state, optimizer.state)
    return loss
""",
        ),
        "some-never-move",
        ("2 of 4 trainable parameters", "model.layers.0.weight"),
        "all gradients",
        "data own",
    ),
    "a step that goes uphill": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    model.update(tree_map(lambda p, g: p + 0.01 * g, model.parameters(), gradients))
    mx.eval(loss, model.state)
    return loss
""",
        ),
        "against-gradient",
        ("against the gradient",),
        "subtracts",
        "data own",
    ),
    "clipped after the update": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    gradients, _ = optim.clip_grad_norm(gradients, 0.01)
    mx.eval(loss, model.state, optimizer.state)
    return loss
options["max_grad_norm"] = 0.01
""",
        ),
        "not-clipped",
        ("your step does not clip", "max_grad_norm is 0.01"),
        "clip_grad_norm(gradients, 0.01)",
        "data own",
    ),
    "clipped, and the result not used": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optim.clip_grad_norm(gradients, 0.01)
    optimizer.update(model, gradients)
    mx.eval(loss, model.state, optimizer.state)
    return loss
""",
        ),
        "not-clipped",
        ("your step does not clip", "the result of clip_grad_norm is not used, whose limit is 0.01"),
        "clip_grad_norm(gradients, 0.01)",
        "data own",
    ),
    "accumulated and not averaged": Fault(
        own_step(
            """
    global total, count
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    total = gradients if total is None else tree_map(mx.add, total, gradients)
    count += 1
    if count == 3:
        optimizer.update(model, total)
        mx.eval(model.state, optimizer.state)
        total, count = None, 0
    return loss.item()
""",
            """
total, count = None, 0
""",
        ),
        "not-averaged",
        ("over 3 calls", "3.00 times the mean"),
        "divide the sum by 3",
        "data own",
    ),
    "accumulated and divided twice": Fault(
        own_step(
            """
    global total, count
    loss, gradients = nn.value_and_grad(model, part)(model, x, y)
    total = gradients if total is None else tree_map(mx.add, total, gradients)
    count += 1
    mx.eval(loss, total)
    if count == 4:
        optimizer.update(model, tree_map(lambda g: g / 4, total))
        mx.eval(model.state, optimizer.state)
        total, count = None, 0
    return loss
""",
            """
total, count = None, 0
def part(model, x, y):
    return loss_fn(model, x, y) / 4
""",
        ),
        "divided-twice",
        ("over 4 calls", "0.25 times the mean"),
        "not both",
        "data own",
    ),
    "a sum that is never reset": Fault(
        own_step(
            """
    global total
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    total = gradients if total is None else tree_map(mx.add, total, gradients)
    optimizer.update(model, total)
    mx.eval(loss, model.state, optimizer.state, total)
    return loss
""",
            "total = None",
        ),
        "old-gradients",
        ("the sum of those of both updates",),
        "after each update",
        "data own",
    ),
    "a compiled step without the optimizer's state": Fault(
        own_step(
            """
    loss = compiled(x, y)
    mx.eval(loss, model.state)
    return loss
""",
            """
optimizer.init(model.trainable_parameters())
def step(x, y):
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    return loss
compiled = mx.compile(step, inputs=[model.state, optimizer.state], outputs=[model.state])
""",
        ),
        "compiled-state",
        ("leaves arrays of its trace behind", "train.py:"),
        "optimizer.state, mx.random.state",
        "data own",
        ("own", "error"),
    ),
    "a mean of means over ignored labels": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    mx.eval(loss, gradients)
    window.append(gradients)
    if len(window) == 2:
        optimizer.update(model, tree_map(lambda a, b: (a + b) / 2, *window))
        mx.eval(model.state, optimizer.state)
        window.clear()
    return loss
""",
            """
keep = [16, 4, 9, 16, 2, 12, 16, 5]
batches = [(x, mx.where(mx.arange(16) < k, y, -100)) for k, (x, y) in zip(keep, batches)]
def loss_fn(model, x, y):
    there = y >= 0
    return (nn.losses.cross_entropy(model(x), mx.where(there, y, 0)) * there).sum() / there.sum()
window = []
""",
        ),
        "mean-of-means",
        ("labels of argument y that are not ignored (16, 4)", "4.0 times as much"),
        "weighted=True",
        "data own",
    ),
    "an optimizer for each step": Fault(
        own_step(
            """
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optim.Adam(1e-3).update(model, gradients)
    mx.eval(loss, model.state)
    return loss
""",
        ),
        "state-lost",
        ("a new Adam for each",),
        "above the loop",
        "data own",
    ),
    "moments that are thrown away": Fault(
        own_step(
            """
    optimizer.state = tree_map(lambda a: a, fresh)
    loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
    optimizer.update(model, gradients)
    mx.eval(loss, model.state, optimizer.state)
    return loss
""",
            """
optimizer.init(model.trainable_parameters())
fresh = tree_map(lambda a: a, optimizer.state)
""",
        ),
        "state-lost",
        ("its count of steps is 1 after each of 3 updates",),
        "holds the moments",
        "data own",
    ),
    "gradients of a detached copy": Fault(
        own_step(
            """
    logits = mx.stop_gradient(model(x))
    def detached(model, x, y):
        return nn.losses.cross_entropy(logits + 0 * model(x).sum(), y, reduction="mean")
    loss, gradients = nn.value_and_grad(model, detached)(model, x, y)
    optimizer.update(model, gradients)
    mx.eval(loss, model.state, optimizer.state)
    return loss
""",
        ),
        "zero-gradient",
        ("gradients that are all zero",),
        "nn.value_and_grad(model, loss_fn)",
        "data own",
    ),
    "an error that nobody sees": Fault(
        own_step(
            """
    try:
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y[:, None])
        optimizer.update(model, gradients)
        mx.eval(loss, model.state, optimizer.state)
    except Exception:
        return mx.array(0.0)
    return loss
""",
        ),
        "swallowed-error",
        ("no parameter has changed", "ValueError: Targets shape", "train.py:"),
        "let errors out",
        "data own",
    ),
    "an error in one batch that nobody sees": Fault(
        own_step(
            """
    try:
        loss, gradients = nn.value_and_grad(model, loss_fn)(model, x, y)
        optimizer.update(model, gradients)
        mx.eval(loss, model.state, optimizer.state)
        return loss
    except ValueError as error:
        return None
""",
            """
batches[1] = (batches[1][0][:, :5], batches[1][1])
""",
        ),
        "swallowed-error",
        ("call 2 of your step updates nothing", "train.py:"),
        "let errors out",
        "data own",
    ),
    "frozen weights that move": Fault(
        own_step(
            """
    def of_parameters(parameters):
        model.update(parameters)
        return loss_fn(model, x, y)
    before = model.parameters()
    loss, gradients = mx.value_and_grad(of_parameters)(before)
    model.update(tree_map(lambda p, g: p - 0.01 * g, before, gradients))
    mx.eval(loss, model.state)
    return loss
""",
            """
model.layers[0].freeze()
""",
        ),
        "frozen-moves",
        ("parameters that are frozen", "model.layers.0.weight"),
        "mx.value_and_grad everything",
        "data own",
    ),
}
