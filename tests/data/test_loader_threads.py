"""Threads: lazy arrays are caught, errors arrive, nothing is left behind, and Ctrl-C works."""

from __future__ import annotations

import gc
import io
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from faststep.data import Loader, Pad
from support.places import Child


def operations(array: mx.array) -> int:
    """Return how many operations an array still waits for."""
    graph = io.StringIO()
    mx.export_to_dot(graph, array)
    return graph.getvalue().count("shape=rectangle")


WORKERS = pytest.mark.parametrize("workers", [0, 1, 3])


def threads() -> list[str]:
    """Return the names of the loader's threads that run."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("faststep")]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    assert threads() == []


def made_elsewhere(make: Callable[[], Any]) -> Any:
    """Return what another thread makes."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(make()))
    thread.start()
    thread.join()
    return made[0]


@WORKERS
@pytest.mark.parametrize("size", [1, 100_000])
def test_lazy_arrays_are_evaluated_where_they_are_made(workers: int, size: int) -> None:
    def collate(items: list[int]) -> dict[str, mx.array]:
        x = mx.array(items)[:, None] * mx.ones((1, size))
        return {"x": x, "y": mx.fast.rms_norm(x, None, 1e-5)}

    loader = Loader(list(range(1, 9)), batch_size=2, collate=collate, workers=workers)
    batches = list(loader)
    assert [operations(array) for batch in batches for array in batch.values()] == [0] * 8
    total = made_elsewhere(lambda: sum(batch["x"][0, 0] + 0 * batch["y"][0, 0] for batch in batches).item())
    assert total == 1 + 3 + 5 + 7
    assert [batch["x"][0, 0].item() for batch in batches] == [1, 3, 5, 7]


@WORKERS
def test_a_lazy_array_of_another_thread_is_named(workers: int) -> None:
    lazy = made_elsewhere(lambda: {"mean": mx.ones(2) * 3})

    def collate(items: list[Any]) -> dict[str, Any]:
        return {"x": mx.array(items), "deep": [{"mean": lazy["mean"] + 1}]}

    with pytest.raises(ValueError, match=r"^batch\['deep'\]\[0\]\['mean'\]: expected an array that can.*mx.eval\(\)"):
        next(iter(Loader([1, 2], batch_size=2, collate=collate, workers=workers)))

    with pytest.raises(ValueError, match=r"^item 1\['mean'\]: expected an array that can be evaluated here") as caught:
        next(iter(Loader([{"mean": mx.array([1])}, lazy], batch_size=2, workers=workers)))
    assert caught.value.__notes__ == ["faststep.data: item 1"]

    with pytest.raises(ValueError, match=r"^source\['mean'\]: expected an array"):
        Loader(lazy)


def test_lazy_items_of_the_main_thread_are_named_by_workers_and_evaluated_without() -> None:
    def data() -> list[dict[str, mx.array]]:
        return [{"x": mx.ones(2) * i} for i in range(4)]

    assert len(list(Loader(data(), batch_size=2))) == 2
    for source in (data(), iter(data())):
        with pytest.raises(ValueError, match=r"^item 0\['x'\]: expected an array that can be evaluated here"):
            next(iter(Loader(source, batch_size=2, workers=1)))


class Broken(list[int]):
    """A dataset with one bad item."""

    def __getitem__(self, index: Any) -> Any:
        if index == 7:
            raise KeyError("a user's message")
        return super().__getitem__(index)


@WORKERS
def test_an_error_of_the_dataset_arrives_as_it_is_in_its_place(workers: int) -> None:
    loader = Loader(Broken(range(12)), batch_size=3, workers=workers)
    batches = iter(loader)
    assert [next(batches).tolist() for _ in range(2)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(KeyError, match="a user's message") as caught:
        next(batches)
    assert caught.value.__notes__ == ["faststep.data: item 7"]
    frames = [frame.name for frame in traceback.extract_tb(caught.tb)]
    assert frames[-1] == "__getitem__"
    assert (loader.position, threads()) == (2, [])


@WORKERS
def test_an_error_of_the_collate_says_which_items(workers: int) -> None:
    def collate(items: list[int]) -> Any:
        return {"x": mx.array(items) @ mx.ones((3, 3))} if 4 in items else mx.array(items)

    with pytest.raises(ValueError, match="matmul") as caught:
        list(Loader(range(6), batch_size=2, collate=collate, workers=workers))
    assert caught.value.__notes__ == ["faststep.data: the batch of items 4, 5"]


@WORKERS
def test_an_error_of_an_iterable_arrives(workers: int) -> None:
    def lines() -> Iterator[int]:
        yield from range(3)
        raise OSError("the file is gone")

    batches = iter(Loader(lines(), batch_size=2, workers=workers))
    assert next(batches).tolist() == [0, 1]
    with pytest.raises(OSError, match="the file is gone") as caught:
        next(batches)
    assert caught.value.__notes__ == ["faststep.data: item 3 of the iterable"]


@WORKERS
def test_a_stray_stop_iteration_does_not_end_the_epoch(workers: int) -> None:
    def collate(items: list[int]) -> Any:
        return next(iter([]))

    with pytest.raises(RuntimeError, match="StopIteration"):
        list(Loader(range(4), collate=collate, workers=workers))


def fail_in_a_loop(loader: Loader) -> None:
    for _ in loader:
        raise ZeroDivisionError


def test_leaving_a_loop_in_any_way_leaves_no_thread() -> None:
    loader = Loader(range(100), batch_size=2, workers=3)
    for _ in loader:
        assert len(threads()) == 3
        break
    assert threads() == []
    with pytest.raises(ZeroDivisionError):
        fail_in_a_loop(loader)
    assert threads() == []
    with loader:
        batches = iter(loader)
        next(batches)
        assert len(threads()) == 3
    assert threads() == []
    batches = iter(Loader(iter(range(100)), workers=1))
    next(batches)
    assert len(threads()) == 2
    del batches
    gc.collect()
    assert threads() == []


def test_a_loop_waits_for_the_item_of_the_loop_before() -> None:
    """An iterable is read in one place, however long an item takes when the loop over it is left."""
    reached, goes_on, inside, most = threading.Event(), threading.Event(), [0], [0]

    class Items:
        def __iter__(self) -> Iterator[int]:
            for item in range(4):
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                if item == 2:
                    reached.set()
                    goes_on.wait()
                inside[0] -= 1
                yield item

    loader = Loader(Items(), batch_size=1, workers=1, prefetch=1)
    for _ in loader:
        reached.wait()
        break  # the third item takes longer than a loop that is left waits
    assert threads() != []
    threading.Timer(0.2, goes_on.set).start()
    assert [batch.item() for batch in loader] == [1, 2, 3]
    assert (most, threads()) == ([1], [])


def test_the_end_of_an_epoch_leaves_no_thread() -> None:
    loader = Loader(range(5), workers=2)
    list(loader)
    assert threads() == []


def test_a_loop_in_a_circle_of_references_is_collected() -> None:
    class Holder:
        pass

    holder = Holder()
    holder.itself, holder.batches = holder, iter(Loader(range(50), workers=2))  # type: ignore[attr-defined]
    next(holder.batches)  # type: ignore[attr-defined]
    del holder
    gc.collect()
    assert threads() == []


def test_no_more_than_workers_and_prefetch_are_made_ahead() -> None:
    made: list[int] = []
    loader = Loader(range(100), collate=lambda items: made.append(items[0]) or mx.array(items), workers=2, prefetch=3)
    with loader:
        batches = iter(loader)
        next(batches)
        while len(made) < 6:  # however slow the machine is
            time.sleep(0.001)
        for _ in range(100):
            time.sleep(0.001)
            assert len(made) == 6
        assert sorted(made) == [0, 1, 2, 3, 4, 5]


def test_threads_of_mlx_do_not_grow_with_epochs() -> None:
    tasks = Path("/proc/self/task")
    if not tasks.exists():
        pytest.skip("threads of a process are counted in /proc, which this system has not")
    loader = Loader(range(4), batch_size=2, collate=lambda items: mx.array(items) + 1, workers=2)
    list(loader)
    before = len(list(tasks.iterdir()))
    for _ in range(20):
        list(loader)
    assert len(list(tasks.iterdir())) < before + 20  # 40 threads have come and gone, a few are still on their way


def test_a_worker_computes_with_the_device_of_the_caller() -> None:
    seen = []
    loader = Loader(range(2), collate=lambda items: seen.append(mx.default_device()) or mx.array(items), workers=1)
    list(loader)
    assert seen == [mx.default_device()] * 2


def test_the_last_batch_is_not_kept() -> None:
    loader = Loader(np.zeros((8, 1 << 18), dtype=np.float32), batch_size=2, workers=1, prefetch=1)
    active = mx.get_active_memory()
    for batch in loader:
        del batch
    assert mx.get_active_memory() <= active


HANGING = """
    import signal, sys, threading, time
    import mlx.core as mx
    from faststep.data import Loader

    reached = threading.Event()

    def item(i):
        if i == 3:
            print("waiting", flush=True)
            reached.set()
            time.sleep({seconds})
        return i

    class Slow(list):
        __getitem__ = lambda self, i: item(i)

    loader = Loader(Slow(range(10)), workers={workers})
"""


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_ctrl_c_while_waiting_works_at_once(workers: int, tmp_path: Path) -> None:
    code = (
        HANGING.format(seconds=1000, workers=workers)
        + """
    try:
        for batch in loader:
            pass
    except KeyboardInterrupt:
        print("interrupted", loader.position, flush=True)
    """
    )
    command = [sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "waiting\n"
        time.sleep(0.2)  # for the main thread to take what is ready; sooner, and the interrupt comes while it does
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline().startswith("interrupted")
        assert process.wait(60) == 0


def test_a_loop_left_open_does_not_hold_up_the_exit(child: Child) -> None:
    code = """
        import mlx.core as mx
        from faststep.data import Loader

        loader = Loader(range(1000), collate=lambda items: mx.array(items) * 2, workers=3)
        batches = iter(loader)
        next(batches)
        stream = iter(Loader(iter(range(1000)), workers=2))
        next(stream)
        print("end")
    """
    for _ in range(5):
        done = child(code)
        assert (done.stdout, done.stderr) == ("end\n", "")


def test_a_worker_that_hangs_does_not_hold_up_the_exit(child: Child) -> None:
    code = (
        HANGING.format(seconds=1000, workers=2)
        + """
    batches = iter(loader)
    next(batches)
    reached.wait()
    """
    )
    assert "waiting" in child(code).stdout


def test_padding_in_workers() -> None:
    loader = Loader([np.ones(n) for n in range(1, 30)], 4, shuffle=True, collate=Pad(multiple=8, window=2), workers=3)
    assert sum(int(mask.sum().item()) for _, mask, _ in loader) == sum(range(1, 30))
