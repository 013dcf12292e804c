"""The peak of a step on the CPU, first and later: at most the compiled plain loop's, and twice what shares buffers."""

from __future__ import annotations

import json

import mlx.core as mx
import pytest
from support.places import Child
from support.plans import ADAMW, BLOCKS, GPT3, GPT24

pytestmark = pytest.mark.skipif(mx.default_device() != mx.cpu, reason="a GPU's buffers are laid out otherwise")

OWN_BYTES = 128 << 10  # tensors of so many bytes share none, see layout.rs

# Run in a child of its own: the peaks of one way, of the first step and in the steady state, and the bytes of what
# shares buffers.
MEASURE = """
    import functools, json
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim
    from mlx.utils import tree_flatten, tree_map
    from support.plans import *

    mx.random.seed(0)
    model, batch = {model}
    optimizer = {optimizer}
    mx.eval(model.parameters(), batch)
    shared = sum(p.nbytes for _, p in tree_flatten(model.trainable_parameters()) if p.nbytes < {own_bytes})

    def plain(batch, summed, closes):
        loss, grads = nn.value_and_grad(model, {loss})(model, *batch)
        if summed is not None:
            grads = tree_map(mx.add, grads, summed)
        if not closes:
            return loss, grads
        if {accumulate} > 1:
            grads = tree_map(lambda grad: grad / {accumulate}, grads)
        if {max_grad_norm} is not None:
            grads, _ = optim.clip_grad_norm(grads, {max_grad_norm})
        optimizer.update(model, grads)
        return loss, None

    if {ours}:
        options = {{"max_grad_norm": {max_grad_norm}, "accumulate": {accumulate}, "replay": False}}
        step = faststep.Step(model, optimizer, {loss}, **options, {options})
    else:
        optimizer.init(model.trainable_parameters())
        state = [model.state, optimizer.state, mx.random.state]
        compiled = functools.partial(mx.compile, inputs=state, outputs=state)(plain)
        taken, summed = 0, None

        def step(*batch):
            global taken, summed
            taken += 1
            loss, summed = compiled(batch, summed, taken % {accumulate} == 0)
            # mx.eval waits for each batch, so that the worker has nothing to do before the next
            keep_busy(100_000 if taken // {accumulate} == 1 else 10_000)
            mx.eval(loss, summed, state)

    one = mx.array(1.0)

    def keep_busy(rows):
        # 3 ms of work for 1,000 rows, without memory: the worker is behind, however slowly it is fed
        mx.async_eval(mx.broadcast_to(one, (rows, 1_000)).sum())

    def take(steps):
        keep_busy(100_000 if steps == 1 else 10_000)
        for _ in range(steps * {accumulate}):
            step(*batch)
        mx.synchronize()

    if not {ours}:  # a compiler runs while MLX hands over the first step: the worker would be done with parts of it
        take(1)
    peaks = []
    for steps in (1, 3, 4):
        mx.reset_peak_memory()
        take(steps)
        peaks.append(mx.get_peak_memory())
    print(json.dumps([peaks[0], peaks[-1], shared]))
"""
SGD = "optim.SGD(1e-2)"
ADAFACTOR = "optim.Adafactor(1e-3)"
LOSS = "cross_entropy"
GPT3_CHECKPOINT = GPT3.replace("))", "), checkpoint=True)")
GPT4 = "transformer(256, 128, 4, (4, 64))"
# Model and batch, optimizer, loss, options, and the share of the compiled loop's peak, in the
# first step and later. Small steps overlap, and hold the activations of two then.
CASES = {
    "gpt-24x64": (GPT24, ADAMW, LOSS, "in_flight=2", 1.02, 1.02),
    "gpt-4x128": (GPT4, ADAMW, LOSS, "in_flight=2", 1.02, 1.02),
    # nobody asks for the gradients of a first step that is good
    "gpt-24x64-raise": (GPT24, ADAMW, LOSS, "in_flight=2, nonfinite='raise'", 1.02, 1.02),
    "mlp-4x128": ("mlp(128, 128, 64)", ADAMW, LOSS, "in_flight=1", 1.02, 1.02),
    "mlp-4x512": ("mlp(512, 512, 64)", ADAMW, LOSS, "in_flight=2", 1.02, 1.02),
    # weight gradients are computed when they can be: what is computed once more for a layer is gone before the next
    "blocks": (BLOCKS, SGD, LOSS, "in_flight=2", 0.7, 0.7),
    "keywords": ("keywords(64, 6, 8)", SGD, LOSS, "in_flight=1", 1.02, 1.02),
    # what one convolution unfolds is gone before the next
    "resnet20": ("resnet20(8)", SGD, LOSS, "in_flight=1", 1.02, 0.9),
    "one-convolution": ("one_convolution(16)", SGD, LOSS, "in_flight=2", 1.02, 0.8),
    "cifar": ("small_cifar(32)", ADAMW, LOSS, "in_flight=2", 1.02, 0.8),
    "autoencoder": ("autoencoder(32)", ADAMW, "reconstruction", "in_flight=1", 1.02, 0.8),
    "variational": ("variational(8)", ADAMW, "reconstruction", "in_flight=2", 1.02, 0.8),
    "unet": ("unet(4)", ADAMW, "reconstruction", "in_flight=1", 1.02, 0.8),
    # what one matrix takes while its update is computed is gone before the next
    "muon": (GPT3, "optim.Muon(1e-3)", LOSS, "in_flight=2", 1.02, 1.02),
    "adafactor": (GPT3, ADAFACTOR, LOSS, "in_flight=2", 1.02, 1.02),
    # one kernel writes over parameters and moments
    "lion": (GPT3, "optim.Lion(1e-4)", LOSS, "in_flight=2", 0.9, 1.02),
    "one-linear-lion": ("one_linear(1024, 64)", "optim.Lion(1e-4)", "squares", "in_flight=2", 1.02, 1.02),
    # the next step is handed over before this one is done, and its update writes over the parameters nevertheless
    "one-linear": ("one_linear(1024, 64)", ADAMW, "squares", "in_flight=2", 1.02, 1.02),
    "one-linear-allow": ("one_linear(1024, 64)", ADAMW, "squares", "in_flight=2, nonfinite='allow'", 1.02, 1.02),
    # products for each token are gone before those of the next weight
    "experts": ("experts(128, 8, 2)", ADAMW, LOSS, "in_flight=2", 1.02, 0.5),
    # a table's gradient is made of the rows that there are
    "sides": ("sides(20_000, 32, 32)", SGD, LOSS, "in_flight=2", 1.02, 0.9),
}
# The same of windows of two and four batches: the compiled loop needs no norm to know that all gradients are numbers.
WINDOWS = {
    "gpt-4x128": (GPT4, ADAMW, LOSS, "in_flight=2", 1.02, 1.02),
    "muon": (GPT3, "optim.Muon(1e-3)", LOSS, "in_flight=2", 1.02, 1.02),
    "adafactor": (GPT3, ADAFACTOR, LOSS, "in_flight=2", 1.02, 1.02),
    "lion": (GPT3, "optim.Lion(1e-4)", LOSS, "in_flight=2", 1.02, 1.02),
    "one-linear": ("one_linear(1024, 64)", ADAMW, "squares", "in_flight=2", 1.02, 1.02),
    # means of squares are taken without them
    "one-linear-adafactor": ("one_linear(1024, 64)", ADAFACTOR, "squares", "in_flight=2", 0.8, 0.8),
    # parameters, sums and gradients are there at once until all gradients are known to be numbers; compiled, sums are
    # written over gradient by gradient, and there is little else
    "gpt-24x64-adafactor": (GPT24, ADAFACTOR, LOSS, "in_flight=2", 0.65, 0.65),
    "gpt-8x256-adafactor": ("transformer(256, 256, 8, (1, 16))", ADAFACTOR, LOSS, "in_flight=2", 1.3, 1.3),
    "one-linear-lion": ("one_linear(1024, 64)", "optim.Lion(1e-4)", "squares", "in_flight=2", 1.02, 1.02),
    # compiled, sums and one gradient are there at once: ours and all gradients, of which none is there twice
    "adafactor-checkpoint": (GPT3_CHECKPOINT, ADAFACTOR, LOSS, "in_flight=2", 1.02, 1.02),
    "momentum-checkpoint": (GPT3_CHECKPOINT, "optim.SGD(1e-2, momentum=0.9)", LOSS, "in_flight=2", 1.02, 1.02),
    "convolutions": ("convolutions(16, 16, 32)", ADAMW, LOSS, "in_flight=2", 1.02, 1.02),
}


@pytest.mark.parametrize("max_grad_norm", [None, 1.0], ids=["", "clip"])
@pytest.mark.parametrize("name", CASES)
def test_peak_is_the_compiled_loop_s_and_two_shared_buffers(
    name: str, max_grad_norm: float | None, child: Child
) -> None:
    """Joined buffers cost no more than themselves and one copy; activations as compiled."""
    ours, compiled, shared = peaks(CASES[name], max_grad_norm, 1, child)
    for mine, theirs, share in zip(ours, compiled, CASES[name][4:], strict=True):
        assert mine <= share * theirs + 2 * shared, f"{ours=} {compiled=} {shared=}"


@pytest.mark.parametrize(("accumulate", "max_grad_norm"), [(2, 1.0), (4, None)], ids=["2-clip", "4"])
@pytest.mark.parametrize("name", WINDOWS)
def test_peak_of_a_window_is_the_compiled_loop_s_and_two_shared_buffers(
    name: str, max_grad_norm: float | None, accumulate: int, child: Child
) -> None:
    """The sums are written over by the next ones, and the update takes no more than without a window."""
    ours, compiled, shared = peaks(WINDOWS[name], max_grad_norm, accumulate, child)
    for mine, theirs, share in zip(ours, compiled, WINDOWS[name][4:], strict=True):
        assert mine <= share * theirs + 2 * shared, f"{ours=} {compiled=} {shared=}"


def peaks(
    case: tuple[str, str, str, str, float, float], max_grad_norm: float | None, accumulate: int, child: Child
) -> tuple[list[int], list[int], int]:
    """Return the first and the steady peak, ours and the compiled loop's, and the bytes of what shares buffers."""
    model, optimizer, loss, options, *_ = case
    given = {"max_grad_norm": max_grad_norm, "options": options, "own_bytes": OWN_BYTES, "loss": loss}
    given |= {"model": model, "optimizer": optimizer, "accumulate": accumulate}
    code = [MEASURE.format(ours=ours, **given) for ours in (True, False)]
    (*ours, shared), (*compiled, _) = (json.loads(child(each).stdout) for each in code)
    return ours, compiled, shared


CALLED = """
    import json, warnings
    import faststep, mlx.core as mx, mlx.nn as nn, mlx.optimizers as optim

    warnings.simplefilter("ignore")

    class Reading(optim.Adam):
        def apply_single(self, gradient, parameter, state):
            self.largest = mx.abs(gradient).max().item()
            return super().apply_single(gradient, parameter, state)

    def loss_fn(model, x):
        loss = model(x).square().mean()
        return loss if loss.item() > 0 or {reads} else loss

    def whole(model, x):
        return model(x).square().mean()

    peaks = []
    for ours in (False, True):
        mx.random.seed(0)
        model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1))
        optimizer, loss = {optimizer}, loss_fn if {reads} else whole
        x = mx.random.normal((32, 64))
        mx.eval(model.parameters(), x)
        if ours:
            step = faststep.Step(model, optimizer, loss)
        else:
            gradients_of = nn.value_and_grad(model, loss)

            def step(x):
                _, gradients = gradients_of(model, x)
                optimizer.update(model, gradients)
                mx.eval(model.parameters(), optimizer.state)

        for count in (1, 4):
            mx.synchronize()
            mx.reset_peak_memory()
            for _ in range(count):
                step(x)
            mx.synchronize()
            peaks.append(mx.get_peak_memory())
        if ours:
            assert step.stats.mode == "called", step.stats.reason
        del model, optimizer, step
        gradients_of = None
    print(json.dumps(peaks))
"""


@pytest.mark.parametrize(
    ("reads", "optimizer", "share"),
    [(True, "optim.Adam(1e-3)", 0.75), (True, "optim.SGD(1e-2)", 0.9), (False, "Reading(1e-3)", 1.02)],
    ids=["adam", "sgd", "own"],
)
def test_a_step_whose_loss_reads_values_peaks_below_the_plain_loop(
    reads: bool, optimizer: str, share: float, child: Child
) -> None:
    """The step is compiled nevertheless; an update by Python code waits until it is known whether it is taken."""
    done = child(CALLED.format(reads=reads, optimizer=optimizer))
    first, later, our_first, ours = json.loads(done.stdout)
    assert our_first <= 1.02 * first, done.stdout
    assert ours <= share * later, done.stdout
