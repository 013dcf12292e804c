"""What a loss leaves on Python objects is what the plain loop leaves: arrays, containers, and who holds them."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import pytest
from faststep import Step
from support.left import Case, Slotted, check

WINDOWS = pytest.mark.parametrize("window", [1, 3])


def holding(value: Any) -> Callable[[], Any]:
    """Return a function that holds a value, which no loss reaches."""
    return lambda: value


def rebind(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    kept.it *= 0.5
    kept.it = kept.it + mean
    return loss


def rebind_beside(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    return rebind(kept, model, loss * (1 + kept.other[0]), mean)


def rebind_in_dict(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    kept.it["a"] *= 0.5
    kept.it = {"a": mean, "b": kept.it["b"]}
    return loss


def add_to_the_other(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    loss = loss * (1 + kept.it[1])
    kept.it[0] = mean
    kept.it[1] += 1
    return loss


def in_turns(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    kept.it += 1
    if kept.now:
        kept.it = mean
    return loss * (1 + kept.other[0])


def shift(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
    kept.it[-1] *= 0.5
    kept.it.appendleft(mean)
    return loss * (1 + kept.it[-1])


UNREACHED: list[Callable[[], Any]] = []  # which no loss reaches


def hold_it(kept: Any) -> None:
    UNREACHED[:] = [holding(kept.it)]


def read_held(number: int, kept: Any, model: nn.Module) -> None:
    held = UNREACHED[0]()
    kept.read = (held["a"] if isinstance(held, dict) else held).item()


def hold_later(number: int, kept: Any, model: nn.Module) -> None:
    if number == 3:
        hold_it(kept)
    elif number > 3:
        read_held(number, kept, model)


def one_array(kept: Any, model: nn.Module) -> None:
    kept.it = mx.array(0.1)


def one_array_twice(kept: Any, model: nn.Module) -> None:
    one_array(kept, model)
    kept.other = [kept.it]
    kept.now = False


def one_array_held(kept: Any, model: nn.Module) -> None:
    one_array(kept, model)
    hold_it(kept)


def two_places(kept: Any, model: nn.Module) -> None:
    kept.it = [mx.array(0.1)] * 2


def a_dict(kept: Any, model: nn.Module) -> None:
    kept.it = {"a": mx.array(0.1), "b": mx.array(0.2)}


def a_dict_twice(kept: Any, model: nn.Module) -> None:
    a_dict(kept, model)
    kept.other = [kept.it["a"]]


def a_dict_held(kept: Any, model: nn.Module) -> None:
    a_dict(kept, model)
    hold_it(kept)


def turn(number: int, kept: Any, model: nn.Module) -> None:
    kept.now = number in (2, 4)


def the_same(maxlen: int, count: int) -> Callable[[Any, nn.Module], None]:
    def begin(kept: Any, model: nn.Module) -> None:
        kept.it = collections.deque([mx.array(0.5)] * count, maxlen=maxlen)

    return begin


HELD = "while the first is held elsewhere"
CHANGED_AND_TAKEN_OUT = {
    "nobody holds it": Case(one_array, rebind),
    "another place": Case(one_array_twice, rebind_beside),
    "a function that is not reached": Case(one_array_held, rebind, HELD, read_held),
    "a function later on": Case(one_array, rebind, HELD, hold_later),
    "at some calls": Case(one_array_twice, in_turns, between=turn),
    "two places of a list": Case(two_places, add_to_the_other),
    "a dict that nobody holds": Case(a_dict, rebind_in_dict),
    "another place, of a dict's array": Case(a_dict_twice, rebind_in_dict),
    "a function, the dict": Case(a_dict_held, rebind_in_dict, HELD, read_held),
    "a function later on, the dict": Case(a_dict, rebind_in_dict, HELD, hold_later),
    "a full deque": Case(the_same(3, 3), shift),
    "a deque": Case(the_same(4, 1), shift, "it stores a new array in a deque"),
}


@WINDOWS
@pytest.mark.parametrize("name", CHANGED_AND_TAKEN_OUT)
def test_who_holds_an_array_that_is_changed_and_taken_out_of_its_place_sees_the_change(name: str, window: int) -> None:
    check(CHANGED_AND_TAKEN_OUT[name], window)


# what a loss does to a deque of three arrays or of fewer, and what the user does to it between the steps

DEQUES: dict[str, Callable[[Any, mx.array], object]] = {
    "appendleft": lambda it, new: it.appendleft(new),
    "append, rotate": lambda it, new: (it.append(new), it.rotate(1)),
    "again": lambda it, new: it.append(it[0]),
}
SHORTENED: dict[str, Callable[[Any], object]] = {
    "clear": lambda it: (it.clear(), it.append(mx.array(0.3))),
    "popleft": lambda it: it.popleft(),
    "pop": lambda it: it.pop(),
}


def keep_deque(
    place: str, items: list[Any]
) -> tuple[Callable[[Any, nn.Module], None], Callable[[Any, nn.Module], Any]]:
    """Return what begins with a deque at a place, and what gives that deque."""

    def begin(kept: Any, model: nn.Module) -> None:
        it = collections.deque([item() for item in items], maxlen=3)
        if place == "of the model":
            model._it = it
        else:
            kept.it = it if place == "of an object" else [{"it": it}]

    def get(kept: Any, model: nn.Module) -> Any:
        if place == "of the model":
            return model._it
        return kept.it if place == "of an object" else kept.it[0]["it"]

    return begin, get


PLACES = pytest.mark.parametrize("place", ["of an object", "of the model", "in a dict in a list"])


@WINDOWS
@PLACES
@pytest.mark.parametrize("shortened", SHORTENED)
@pytest.mark.parametrize("kind", DEQUES)
@pytest.mark.filterwarnings("ignore:faststep. this step cannot be compiled. it stores a new array in a deque")
def test_a_deque_that_is_shortened_between_the_steps_fills_again(
    kind: str, shortened: str, place: str, window: int
) -> None:
    begin, get = keep_deque(place, [lambda: mx.array(0.1), lambda: mx.array(0.2), lambda: mx.array(0.3)])

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(kept, model)
        loss = loss * (1 + 0.1 * it[-1])
        DEQUES[kind](it, mean)
        return loss

    def between(number: int, kept: Any, model: nn.Module) -> None:
        if number in (3, 8):
            SHORTENED[shortened](get(kept, model))

    check(Case(begin, body, "it stores a new array in a deque", between, None), window, calls=12)


MOVED: dict[str, Callable[[Any, Any], object]] = {
    "appendleft": lambda it, new: it.appendleft(new),
    "append": lambda it, new: it.append(new),
    "rotate": lambda it, new: it.rotate(1),
    "the last one first": lambda it, new: it.appendleft(it.pop()),
}


@WINDOWS
@PLACES
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", MOVED)
@pytest.mark.parametrize("container", [lambda array: [array], lambda array: {0: array}], ids=["list", "dict"])
def test_containers_in_a_deque_that_are_moved(
    container: Callable[[mx.array], Any], kind: str, count: int, place: str, window: int
) -> None:
    items = [lambda at=at: container(mx.array(0.1 * at)) for at in range(1, count + 1)]
    begin, get = keep_deque(place, items)

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(kept, model)
        loss = loss * (1 + it[-1][0])
        MOVED[kind](it, container(mean))
        return loss

    check(Case(begin, body, "it stores a new array in a deque"), window)


# dicts that are made anew in another order, or that are put into one


class Owner:
    """A class with an attribute."""

    it: Any = None


def put(place: str, kept: Any, model: nn.Module, it: Any) -> None:
    """Put a dict at a place."""
    if place == "of an object":
        kept.it = it
    elif place == "of the model":
        model._it = it
    elif place == "in a list":
        kept.it = [it, *getattr(kept, "it", [None])[1:]]
    elif place == "in a slot":
        kept.slotted = getattr(kept, "slotted", None) or Slotted()
        kept.slotted.one = it
    else:
        Owner.it = it


def get(place: str, kept: Any, model: nn.Module) -> Any:
    """Return that dict."""
    places = {
        "of an object": lambda: kept.it,
        "of the model": lambda: model._it,
        "in a list": lambda: kept.it[0],
        "in a slot": lambda: kept.slotted.one,
        "of a class": lambda: Owner.it,
    }
    return places[place]()


def of_two(kind: type) -> Any:
    return kind([("a", mx.array(0.1)), ("b", mx.array(0.9))])


def first(it: Any) -> mx.array:
    item = next(iter(it.values()))
    return first(item) if isinstance(item, dict) else item


DICT_PLACES = ["of an object", "in a list", "in a slot", "of a class"]
MADE_ANEW: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "a dict": (lambda: of_two(dict), lambda it: dict(reversed(it.items()))),
    "an ordered dict": (
        lambda: of_two(collections.OrderedDict),
        lambda it: collections.OrderedDict(reversed(it.items())),
    ),
    "in another": (lambda: {"in": of_two(dict)}, lambda it: {"in": dict(reversed(it["in"].items()))}),
    "beside a number": (lambda: {"a": mx.array(0.1), "n": 0.5}, lambda it: dict(reversed(it.items()))),
}


@WINDOWS
@pytest.mark.parametrize("place", DICT_PLACES)
@pytest.mark.parametrize("kind", MADE_ANEW)
def test_a_dict_that_a_loss_makes_anew_has_its_order(kind: str, place: str, window: int) -> None:
    make, again = MADE_ANEW[kind]

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(place, kept, model)
        loss = loss * (1 + first(it))
        put(place, kept, model, again(it))
        kept.order = list(get(place, kept, model))
        return loss

    check(Case(lambda kept, model: put(place, kept, model, make()), body, "it stores a new array in"), window)


@WINDOWS
@pytest.mark.parametrize("place", ["of an object", "of the model"])
def test_a_dict_that_a_loss_makes_anew_has_its_keys(place: str, window: int) -> None:
    """Equal keys of another class are others."""

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(place, kept, model)
        put(place, kept, model, {(1 if key is True else 1.0): value for key, value in it.items()})
        return loss * (1 + it[1])

    def begin(kept: Any, model: nn.Module) -> None:
        put(place, kept, model, {True: mx.array(0.1)})

    check(Case(begin, body, "it stores a new array"), window)


@pytest.mark.parametrize("place", [*DICT_PLACES, "of the model"])
@pytest.mark.parametrize("renewed", [False, True])
def test_an_ordered_dict_that_is_ordered_anew_between_the_steps(renewed: bool, place: str) -> None:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(place, kept, model)
        loss = loss * (1 + first(it))
        if renewed:
            for key in it:
                it[key] = it[key] * 0.9
        return loss

    def between(number: int, kept: Any, model: nn.Module) -> None:
        if number in (2, 4):
            it = get(place, kept, model)
            it.move_to_end(next(iter(it)))

    def begin(kept: Any, model: nn.Module) -> None:
        put(place, kept, model, of_two(collections.OrderedDict))

    check(Case(begin, body, between=between))


# arrays of the model, in whose places a loss puts something else: called at every step, it does as in the plain loop


def swap(it: Any, one: str, other: str) -> None:
    it[one], it[other] = it[other], it[one] * 0.9


INSTEAD: dict[str, Callable[[Any, str, mx.array], object]] = {
    "a number": lambda it, key, new: it.__setitem__(key, 0.5),
    "none": lambda it, key, new: it.__setitem__(key, None),
    "a text": lambda it, key, new: it.__setitem__(key, "text"),
    "a list": lambda it, key, new: it.__setitem__(key, [new]),
    "a dict": lambda it, key, new: it.__setitem__(key, {"in": new}),
    "a tuple": lambda it, key, new: it.__setitem__(key, (new,)),
    "the number beside it": lambda it, key, new: swap(it, key, f"{key}n"),
    "a number in turns": lambda it, key, new: it.__setitem__(key, 0.5 if isinstance(it[key], mx.array) else new),
}
HOLDERS: dict[str, tuple[Callable[[nn.Module], object], Callable[[nn.Module], Any], str]] = {
    "the model": (lambda model: None, lambda model: model, "_it"),
    "a dict": (lambda model: setattr(model, "_held", {}), lambda model: model._held, "it"),
    "a dict in a list": (lambda model: setattr(model, "_held", [{}]), lambda model: model._held[0], "it"),
    "a module in it": (lambda model: setattr(model, "_held", nn.Module()), lambda model: model._held, "it"),
}


@WINDOWS
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", INSTEAD)
def test_an_array_of_the_model_may_become_something_else(kind: str, holder: str, compiled: bool, window: int) -> None:
    make, holding_it, key = HOLDERS[holder]

    def begin(kept: Any, model: nn.Module) -> None:
        make(model)
        it = holding_it(model)
        it[key], it[f"{key}n"] = mx.array(0.1), 0.7
        model.freeze()
        model.unfreeze(keys=["weight", "bias"], recurse=False)

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = holding_it(model)
        now = it[key]
        INSTEAD[kind](it, key, mean)
        return loss * (1 + now) if isinstance(now, (mx.array, float)) else loss

    check(Case(begin, body, "it removes"), window, compiled)


LISTS: dict[str, Callable[[Any], object]] = {
    "a number": lambda it: it.__setitem__(0, 0.5),
    "in front": lambda it: it.insert(0, 2.0) if len(it) < 5 else None,
    "swapped": lambda it: it.reverse(),
}


@WINDOWS
@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("kind", LISTS)
def test_an_array_in_a_list_of_the_model_may_become_something_else(kind: str, compiled: bool, window: int) -> None:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        loss = loss * (1 + model._it[0])
        LISTS[kind](model._it)
        return loss

    check(Case(lambda kept, model: setattr(model, "_it", [mx.array(0.1), 0.7]), body, "it removes"), window, compiled)


# numbers in a dict or list of the model that a loss makes anew, beside numbers of the model that it changes too

NUMBERED: dict[str, Any] = {
    "a list": lambda: [1.0, mx.array(0.5)],
    "a dict": lambda: {"a": 1.0, "b": mx.array(0.5)},
    "a dict in a list": lambda: [{"a": 1.0, "b": mx.array(0.5)}, mx.array(0.3)],
}


def each(it: Any, change: Callable[[Any], Any]) -> Any:
    """Make a dict or list anew with what a change makes of the items."""
    if isinstance(it, dict):
        return {key: each(item, change) for key, item in it.items()}
    return [each(item, change) for item in it] if isinstance(it, list) else change(it)


@WINDOWS
@pytest.mark.parametrize("changed", ["numbers", "arrays"])
@pytest.mark.parametrize("reads", [True, False])
@pytest.mark.parametrize("kind", NUMBERED)
def test_numbers_in_what_a_loss_makes_anew_on_the_model(kind: str, reads: bool, changed: str, window: int) -> None:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        model._calls += 1
        model._it = each(model._it, lambda it: it * 0.9 if changed == "numbers" or isinstance(it, mx.array) else it)
        number = model._it
        while not isinstance(number, float):
            number = number["a"] if isinstance(number, dict) else number[0]
        return loss * (1 + number) if reads else loss

    def begin(kept: Any, model: nn.Module) -> None:
        model._it, model._calls = NUMBERED[kind](), 0

    check(Case(begin, body, "it puts other numbers into" if changed == "numbers" else None), window)


# containers that a loss changes, and in whose places it then puts others


def changed(it: Any, name: str, *given: Any) -> Any:
    """Call a method that changes a container, which is returned."""
    getattr(it, name)(*given)
    return it


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any, mx.array], Any]]] = {
    "a set": (lambda: {1, 2}, lambda it, new: changed(it, "discard", 1) | {5}),
    "bytes": (
        lambda: bytearray(b"ab"),
        lambda it, new: bytearray(b"x") + changed(it, "append", 99)[:3],
    ),
    "a list": (
        lambda: [mx.array(0.1), 2],
        lambda it, new: [changed(it, "append", 3)[0] * 0.9, 2],
    ),
    "a queue": (
        lambda: collections.deque([mx.array(0.1), 2]),
        lambda it, new: collections.deque([changed(it, "append", 3)[0], 3]),
    ),
    "a queue of another length": (
        lambda: collections.deque([mx.array(0.1), mx.array(0.2)], maxlen=2),
        lambda it, new: collections.deque([it[1], new], maxlen=2 if it.maxlen is None else None),
    ),
    "a dict with a default": (
        lambda: collections.defaultdict(int, a=mx.array(0.1)),
        lambda it, new: collections.defaultdict(list if it.default_factory is int else int, a=new),
    ),
}


def check_changed(kind: str, place: str, held: bool, window: int) -> None:
    make, again = CHANGED[kind]

    def begin(kept: Any, model: nn.Module) -> None:
        it = make()
        put(place, kept, model, it)
        kept.held = holding(it if held else None)

    def between(number: int, kept: Any, model: nn.Module) -> None:
        it = get(place, kept, model)
        kept.ways = [getattr(it, "maxlen", None), str(getattr(it, "default_factory", None))]
        kept.first = str(kept.held())

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        put(place, kept, model, again(get(place, kept, model), mean))
        return loss

    check(Case(begin, body, "it", between, None), window)


@WINDOWS
@pytest.mark.parametrize("held", [False, True])
@pytest.mark.parametrize("kind", ["a set", "bytes", "a list"])
def test_a_container_that_is_changed_and_then_another(kind: str, held: bool, window: int) -> None:
    check_changed(kind, "of an object", held, window)


@WINDOWS
@pytest.mark.parametrize("place", ["of an object", "of the model"])
@pytest.mark.parametrize("kind", ["a queue", "a queue of another length"])
def test_a_queue_that_is_changed_and_then_another(kind: str, place: str, window: int) -> None:
    check_changed(kind, place, False, window)


@WINDOWS
def test_a_dict_with_another_default(window: int) -> None:
    check_changed("a dict with a default", "of an object", False, window)


# an array object that stands at two places, one of which gets something else


def set_at(place: str, kept: Any, at: int, value: Any) -> None:
    """Put something at one of two places."""
    if place == "attributes":
        setattr(kept, "ab"[at], value)
    else:
        kept.it[at] = value


def at_two_places(place: str) -> Callable[[Any, nn.Module], None]:
    def begin(kept: Any, model: nn.Module) -> None:
        kinds: dict[str, Callable[[], Any]] = {"a list": lambda: [0, 0], "a dict": dict}
        kept.it = kinds.get(place, lambda: collections.deque([0, 0]))()
        array = mx.array(0.1)
        for at in range(2):
            set_at(place, kept, at, array)

    return begin


@WINDOWS
@pytest.mark.parametrize("place", ["attributes", "a list", "a dict", "a deque"])
@pytest.mark.parametrize("value", [None, 1.5, "text"])
@pytest.mark.parametrize("in_place", [False, True])
def test_the_second_place_of_an_array_gets_something_else(in_place: bool, value: Any, place: str, window: int) -> None:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        both = [kept.a, kept.b] if place == "attributes" else [kept.it[0], kept.it[1]]
        if in_place:
            both[0] *= 0.5
        set_at(place, kept, 1, value if isinstance(both[1], mx.array) else both[0])
        return loss

    check(Case(at_two_places(place), body, "it", goes_on=None), window)


def test_an_array_of_a_deque_in_the_place_of_a_list() -> None:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        kept.it[1] = [mean] if isinstance(kept.it[1], mx.array) else kept.it[0]
        return loss

    check(Case(at_two_places("a deque"), body, "it removes", goes_on=None))


# numbers by which a loss is called on trial

NUMBER: Any = None


def leave_global(number: Any) -> None:
    globals()["NUMBER"] = number


def leave_in_set(it: set[Any], number: Any) -> None:
    it.discard(number)
    it.add(number)


@pytest.mark.filterwarnings("ignore:faststep. the loss reaches")  # `globals` leads to all of the test process
@pytest.mark.filterwarnings("ignore:faststep.*takes from an open file")  # one of that
@pytest.mark.parametrize("place", ["a slot", "a class", "a global", "a set", "a set of the model"])
def test_a_number_that_is_left_is_one_of_pythons(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a loss makes of a number that it counts equals what is there, at a call that is made on trial."""
    slotted, kept, numbers, model = Slotted(), types.SimpleNamespace(calls=0), {1.0}, nn.Linear(4, 3)
    slotted.one = 1.0
    model._numbers = {1.0}
    monkeypatch.setattr(Owner, "it", 1.0)
    monkeypatch.setitem(globals(), "NUMBER", 1.0)
    leave: dict[str, Callable[[Any], object]] = {
        "a slot": lambda number: setattr(slotted, "one", number),
        "a class": lambda number: setattr(Owner, "it", number),
        "a global": leave_global,
        "a set": lambda number: leave_in_set(numbers, number),
        "a set of the model": lambda number: leave_in_set(model._numbers, number),
    }

    def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
        kept.calls += 1
        if kept.calls == 4:
            leave[place](kept.calls * 0.25)
        return mx.square(model(x)).mean()

    step = Step(model, optim.SGD(0.1), loss_fn)
    for _ in range(6):
        step(mx.ones((2, 4)))
        left = [slotted.one, Owner.it, NUMBER, *numbers, *model._numbers]
        assert {type(number) for number in left} == {float}
    assert kept.calls == 6
