"""The problem that this began with: an encoder of ModernBERT's kind, trained out of a prefetching loader."""

from __future__ import annotations

from support.places import Child

ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1"}  # more of them are in each other's way where other tests run beside

TRAIN = """
    import mlx.core as mx
    import mlx.optimizers as optim
    from support.encoder import Encoder, MaskedTexts, loss_fn
    from faststep import Step
    from faststep.data import Loader, Pad

    mx.random.seed(0)
    model, optimizer = Encoder(), optim.AdamW(3e-3)
    step = Step(model, optimizer, loss_fn, max_grad_norm=1.0)
    pad = Pad(buckets=[16, 32, 48], window=4, value={{"targets": -100}}, lengths=False)
    loader = Loader(MaskedTexts(128), batch_size=16, shuffle=True, collate=pad, workers={workers})
    losses = [step(**batch).loss for _ in range(12) for batch in loader]
    losses = [float(loss) for loss in losses]
    print(*(loss.hex() for loss in losses))
    print(sum(losses[:8]) / 8, sum(losses[-8:]) / 8)
    print(step.stats.mode, len(step.stats.traces), loader.stats.batches, loader.epoch)
"""


def test_an_encoder_learns_out_of_a_prefetching_loader(child: Child) -> None:
    outputs = {n: child(TRAIN.format(workers=n), **ONE_THREAD).stdout.splitlines() for n in (0, 2)}
    assert outputs[0] == outputs[2]  # the same losses, to the bit
    first, last = map(float, outputs[2][1].split())
    assert last < 0.7 * first
    way, traces, batches, epochs = outputs[2][2].split()
    assert (way, batches, epochs) == ("native", "96", "12")
    assert int(traces) <= 3  # one for each bucket


LAZY = """
    import threading
    import mlx.core as mx
    import mlx.optimizers as optim
    from support.encoder import Encoder, MaskedTexts, loss_fn
    from faststep import fast_step
    from faststep.data import Loader, Pad

    class Dataset(MaskedTexts):
        '''Makes MLX arrays, and leaves them lazy.'''

        def __getitem__(self, index):
            return {name: mx.array(array) + 0 for name, array in super().__getitem__(index).items()}

    scale = mx.ones(()) * 1.0  # made in the main thread, and never evaluated

    def collate(items):
        batch = Pad(lengths=False)(items)
        return {**batch, "mask": batch["mask"] * scale > 0} if SCALED else batch

    model, optimizer = Encoder(), optim.AdamW(1e-3)
    for batch in Loader(Dataset(64), batch_size=16, collate=collate, workers=2):
        loss = fast_step(model, optimizer, loss_fn, **batch)
    print("loss", loss.item())
"""


def test_lazy_arrays_of_a_users_dataset_are_trained_on(child: Child) -> None:
    assert child(LAZY.replace("SCALED", "False"), **ONE_THREAD).stdout.startswith("loss")


def test_a_lazy_array_of_another_thread_is_named_and_does_not_hang(child: Child) -> None:
    done = child(LAZY.replace("SCALED", "True"), check=False)
    assert done.returncode == 1
    assert "ValueError: batch['mask']: expected an array that can be evaluated here, got one that still" in done.stderr
    assert "call mx.eval() on what it is made of in the thread that makes that" in done.stderr
