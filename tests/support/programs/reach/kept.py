"""What a loss keeps on an object or on its model: arrays that others hold, and containers with their order."""

from __future__ import annotations

import collections
import itertools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

from support.programs.reach.registry import (
    Made,
    Make,
    Place,
    add,
    program,
)

Body = Callable[[Any, nn.Module, mx.array, mx.array], mx.array]


Between = Callable[[int, Any, nn.Module], object]


def nothing(number: int, kept: Any, model: nn.Module) -> None:
    """Change nothing between the steps."""


@dataclass
class Case:
    """A loss with what it keeps, on an object or on the model.

    Args:
        begin: Makes what is kept: it is given an empty object, and the model.
        body: Is given these, the loss and the mean of the output; it returns the loss.
        between: Is called before each call with its number, the object and the model.
    """

    begin: Callable[[Any, nn.Module], object]
    body: Body
    between: Between = nothing

    def __call__(self) -> Made:
        """Make the program."""
        kept, model = types.SimpleNamespace(), nn.Linear(4, 3)
        body = self.body  # alone: a loss reaches all that its case has
        self.begin(kept, model)

        def loss_fn(model: nn.Module, x: mx.array) -> mx.array:
            out = model(x)
            return body(kept, model, mx.square(out).mean(), mx.stop_gradient(out.mean()))

        return Made(
            loss_fn,
            lambda: [kept, {**model, **vars(model)}],
            lambda number: self.between(number, kept, model),
            model,
            optim.SGD(0.1),
            calls=10,
        )


class Slotted:
    """An object without an instance dict."""

    __slots__ = ("one", "two")


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


CHANGED_AND_TAKEN_OUT = {
    "nobody holds it": Case(one_array, rebind),
    "another place": Case(one_array_twice, rebind_beside),
    "a function that is not reached": Case(one_array_held, rebind, read_held),
    "a function later on": Case(one_array, rebind, hold_later),
    "at some calls": Case(one_array_twice, in_turns, turn),
    "two places of a list": Case(two_places, add_to_the_other),
    "a dict that nobody holds": Case(a_dict, rebind_in_dict),
    "another place, of a dict's array": Case(a_dict_twice, rebind_in_dict),
    "a function, the dict": Case(a_dict_held, rebind_in_dict, read_held),
    "a function later on, the dict": Case(a_dict, rebind_in_dict, hold_later),
    "a full deque": Case(the_same(3, 3), shift),
    "a deque": Case(the_same(4, 1), shift),
}


for name, case in CHANGED_AND_TAKEN_OUT.items():
    add("object", f"an array that is changed and taken out of its place: {name}", case)


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


def place_of(place: str) -> Place:
    return "model" if place == "of the model" else "object"


def shortened(kind: str, how: str, place: str) -> Make:
    """A deque that is shortened between the calls, and fills again."""

    def make() -> Made:
        begin, get = keep_deque(place, [lambda: mx.array(0.1), lambda: mx.array(0.2), lambda: mx.array(0.3)])

        def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
            it = get(kept, model)
            loss = loss * (1 + 0.1 * it[-1])
            DEQUES[kind](it, mean)
            return loss

        def between(number: int, kept: Any, model: nn.Module) -> None:
            if number in (3, 8):
                SHORTENED[how](get(kept, model))

        return Case(begin, body, between)()

    return make


DEQUE_PLACES = ("of an object", "of the model", "in a dict in a list")
for kind, how, place in itertools.product(DEQUES, SHORTENED, DEQUE_PLACES):
    add(place_of(place), f"a deque {place}: {kind}, shortened by {how}", shortened(kind, how, place))


MOVED: dict[str, Callable[[Any, Any], object]] = {
    "appendleft": lambda it, new: it.appendleft(new),
    "append": lambda it, new: it.append(new),
    "rotate": lambda it, new: it.rotate(1),
    "the last one first": lambda it, new: it.appendleft(it.pop()),
}


def moved(kind: str, container: Callable[[mx.array], Any], count: int, place: str) -> Make:
    """Containers in a deque that are moved."""

    def make() -> Made:
        items = [lambda at=at: container(mx.array(0.1 * at)) for at in range(1, count + 1)]
        begin, get = keep_deque(place, items)

        def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
            it = get(kept, model)
            loss = loss * (1 + it[-1][0])
            MOVED[kind](it, container(mean))
            return loss

        return Case(begin, body)()

    return make


CONTAINERS: dict[str, Callable[[mx.array], Any]] = {"lists": lambda array: [array], "dicts": lambda array: {0: array}}
for kind, (name, container), count, place in itertools.product(MOVED, CONTAINERS.items(), (2, 3), DEQUE_PLACES):
    add(place_of(place), f"{count} {name} in a deque {place}: {kind}", moved(kind, container, count, place))


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


def made_anew(kind: str, place: str) -> Make:
    """A dict that a loss makes anew has its order."""
    begin, again = MADE_ANEW[kind]

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(place, kept, model)
        loss = loss * (1 + first(it))
        put(place, kept, model, again(it))
        kept.order = list(get(place, kept, model))
        return loss

    return Case(lambda kept, model: put(place, kept, model, begin()), body)


for kind, place in itertools.product(MADE_ANEW, DICT_PLACES):
    add("object", f"{kind} {place} that the loss makes anew", made_anew(kind, place))


def of_equal_keys(place: str) -> Make:
    """Equal keys of another class are others."""

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        it = get(place, kept, model)
        put(place, kept, model, {(1 if key is True else 1.0): value for key, value in it.items()})
        return loss * (1 + it[1])

    return Case(lambda kept, model: put(place, kept, model, {True: mx.array(0.1)}), body)


for place in ("of an object", "of the model"):
    add(place_of(place), f"a dict {place} that the loss makes anew with equal keys", of_equal_keys(place))


def ordered_anew(renewed: bool, place: str) -> Make:
    """An ordered dict that the user orders anew between the calls."""

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

    return Case(begin, body, between)


for renewed, place in itertools.product((False, True), (*DICT_PLACES, "of the model")):
    name = f"an ordered dict {place} that is ordered anew{', of new arrays' if renewed else ''}"
    add(place_of(place), name, ordered_anew(renewed, place))


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


def something_else(kind: str, holder: str) -> Make:
    """An array of the model may become something else."""
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

    return Case(begin, body)


for kind, holder in itertools.product(INSTEAD, HOLDERS):
    add("model", f"an array of {holder} that becomes {kind}", something_else(kind, holder))


LISTS: dict[str, Callable[[Any], object]] = {
    "a number": lambda it: it.__setitem__(0, 0.5),
    "in front": lambda it: it.insert(0, 2.0) if len(it) < 5 else None,
    "swapped": lambda it: it.reverse(),
}


def in_a_list(kind: str) -> Make:
    """An array in a list of the model may become something else."""

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        loss = loss * (1 + model._it[0])
        LISTS[kind](model._it)
        return loss

    return Case(lambda kept, model: setattr(model, "_it", [mx.array(0.1), 0.7]), body)


for kind in LISTS:
    add("model", f"an array in a list of the model: {kind}", in_a_list(kind))


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


def numbered(kind: str, reads: bool, what: str) -> Make:
    """Numbers in what a loss makes anew on the model."""

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        model._calls += 1
        model._it = each(model._it, lambda it: it * 0.9 if what == "numbers" or isinstance(it, mx.array) else it)
        number = model._it
        while not isinstance(number, float):
            number = number["a"] if isinstance(number, dict) else number[0]
        return loss * (1 + number) if reads else loss

    def begin(kept: Any, model: nn.Module) -> None:
        model._it, model._calls = NUMBERED[kind](), 0

    return Case(begin, body)


for kind, reads, what in itertools.product(NUMBERED, (False, True), ("numbers", "arrays")):
    name = f"{kind} on the model with other {what} at each call{', which the loss reads' if reads else ''}"
    add("model", name, numbered(kind, reads, what))


def after(it: Any, name: str, *given: Any) -> Any:
    """Call a method that changes a container, which is returned."""
    getattr(it, name)(*given)
    return it


CHANGED: dict[str, tuple[Callable[[], Any], Callable[[Any, mx.array], Any]]] = {
    "a set": (lambda: {1, 2}, lambda it, new: after(it, "discard", 1) | {5}),
    "bytes": (
        lambda: bytearray(b"ab"),
        lambda it, new: bytearray(b"x") + after(it, "append", 99)[:3],
    ),
    "a list": (
        lambda: [mx.array(0.1), 2],
        lambda it, new: [after(it, "append", 3)[0] * 0.9, 2],
    ),
    "a queue": (
        lambda: collections.deque([mx.array(0.1), 2]),
        lambda it, new: collections.deque([after(it, "append", 3)[0], 3]),
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


def changed_and_another(kind: str, place: str, held: bool) -> Make:
    """A container that is changed, in whose place the loss then puts another one."""
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

    return Case(begin, body, between)


for kind, place, held in [
    *itertools.product(("a set", "bytes", "a list"), ("of an object",), (False, True)),
    *itertools.product(("a queue", "a queue of another length"), ("of an object", "of the model"), (False,)),
    ("a dict with a default", "of an object", False),
]:
    name = f"{kind} {place} that is changed and then another{', held elsewhere' if held else ''}"
    add(place_of(place), name, changed_and_another(kind, place, held))


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


def second_place(in_place: bool, value: Any, place: str) -> Make:
    """The second place of an array gets something else."""

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        both = [kept.a, kept.b] if place == "attributes" else [kept.it[0], kept.it[1]]
        if in_place:
            both[0] *= 0.5
        set_at(place, kept, 1, value if isinstance(both[1], mx.array) else both[0])
        return loss

    return Case(at_two_places(place), body)


for in_place, value, place in itertools.product(
    (False, True), (None, 1.5, "text"), ("attributes", "a list", "a dict", "a deque")
):
    name = f"one array twice in {place}, the second becomes {value}{', and the first changes' if in_place else ''}"
    add("object", name, second_place(in_place, value, place))


@program("object")
def an_array_of_a_deque_in_the_place_of_a_list() -> Made:
    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        kept.it[1] = [mean] if isinstance(kept.it[1], mx.array) else kept.it[0]
        return loss

    return Case(at_two_places("a deque"), body)()


NUMBER: Any = None


def leave_global(number: Any) -> None:
    global NUMBER
    NUMBER = number


def left_number(place: str) -> Make:
    """A number that a loss makes of one that it counts."""

    def begin(kept: Any, model: nn.Module) -> None:
        kept.slotted, kept.calls, kept.numbers = Slotted(), 0, {1.0}
        kept.slotted.one = 1.0
        model._numbers = {1.0}
        Owner.it = 1.0
        leave_global(1.0)

    def body(kept: Any, model: nn.Module, loss: mx.array, mean: mx.array) -> mx.array:
        kept.calls += 1
        if kept.calls == 4:
            leave: dict[str, Callable[[Any], object]] = {
                "a slot": lambda number: setattr(kept.slotted, "one", number),
                "a class": lambda number: setattr(Owner, "it", number),
                "a global": leave_global,
                "a set": lambda number: kept.numbers.add(number),
                "a set of the model": lambda number: model._numbers.add(number),
            }
            leave[place](kept.calls * 0.25)
        return loss

    def between(number: int, kept: Any, model: nn.Module) -> None:
        kept.left = [Owner.it, NUMBER]

    return Case(begin, body, between)


for place in ("a slot", "a class", "a global", "a set", "a set of the model"):
    add("model" if "model" in place else "object", f"a number that is left in {place}", left_number(place))
