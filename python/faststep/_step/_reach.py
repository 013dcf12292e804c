"""Objects that a loss function refers to beside its arguments: the arrays, numbers and objects that its code names.

A loss function reads closure cells, defaults, globals, the object that it is a method of, and whatever their attributes
lead to. `discover` follows its code, and the code of the functions that this leads to, and returns a list of nodes that
the native step compares before each call. Code of MLX, NumPy and the standard library is not followed; that a function
of theirs is another one is seen where the code names it, and for MLX's own also where MLX's code names it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import enum
import functools
import gc
import os
import sys
import types
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer

from faststep._native import core
from faststep._step._asked import BASES, Asking, owner_of
from faststep._step._inside import names_of, read_by_names, read_of, slots_of, what_slot_gives
from faststep._step._library import is_library_class, is_library_function, is_library_module, is_mlx, is_own
from faststep._step._named import (
    CALLED_BY,
    COPIES,
    MAKERS,
    attributes_in,
    named,
    on_globals,
    tells_apart,
    texts,
)
from faststep._step._nodes import (
    ATTRIBUTE,
    BASE,
    CELL,
    CLASS,
    CONTAINER,
    CONTEXT,
    GLOBAL,
    HELD,
    IDENTITY,
    INDEX,
    INSTANCE,
    ITEM,
    LENGTH,
    MISSES,
    MODULES,
    READ,
    REFERENT,
    ROOT,
    SAME,
    TYPE,
    VALUE,
    WEAK,
    Node,
    is_apart,
    items_of,
)
from faststep._step._of_library import MADE_BY_PYTHON
from faststep._step._own import HUNG, OwnOptimizer
from faststep._step._positions import may_draw
from faststep._step._switches import by_names
from faststep._step._things import (
    CACHE,
    GETTERS,
    MAX_ITEMS,
    PLAIN,
    VIEWS,
    WEAK_SETS,
    Kept,
    attributes,
    chosen,
    has_attributes,
    held,
    holder,
    is_a,
    is_buffer,
    is_fixed,
    is_large_deque,
    is_member,
    is_numbers,
    is_record,
    kept_in,
    members,
    parts,
    size,
    slots,
    values_kept,
)

Found = tuple[
    list[Node], list[tuple[type, bool]], list[types.CodeType], str | None, bool, bool, list[str], tuple[bool, bool]
]
_UPDATE = ("update", "apply_gradients", "apply_single", "init_single", "init")  # what a step calls of an optimizer
_USES = {"state", "_state", *_UPDATE}  # of an optimizer's state, moments and all
_OF_OPTIMIZERS = ("_state", "_schedulers", HUNG)  # which a step knows of one that updates
_PLAIN_BASES = frozenset(BASES) - {functools.partial}  # whose own objects have none
_OF_ADDRESSES = frozenset({"id", "hash"})  # functions that give what another object of the same kind does not
_MAX_NODES = 50_000
_MAX_MISSES = 256  # numbers of which Python has one object each


def discover(
    roots: tuple[Any, ...],
    owned: Any,
    growing: Iterable[int] = (),
    numbers: dict[str, Any] | None = None,
    apart: Iterable[str] = (),
) -> Found:
    """Return what a loss function reaches.

    Args:
        roots: The loss function, the model, then modules and other objects that are passed to the loss function. The
            model's own arrays and numbers are left out: they are watched elsewhere.
        owned: The optimizer, which belongs to the step.
        growing: The addresses of lists and dicts whose length changes again and again.
        numbers: The root that holds numbers of the model which change again and again.
        apart: The names of attributes of the model that are looked at nowhere.

    Returns:
        The nodes, each behind its parent, roots numbered as in `roots`; classes whose methods the loss may call, and
        whether these may be given other code; the code of functions that are no library's; why what the loss reaches
        cannot be looked at, if it cannot; whether the optimizer, or one in it, is among it; whether the loss may take
        from a generator or an iterator; the names in `apart` that its code may read; whether its code asks for the
        addresses of objects, and whether it asks whether two are one.
    """
    search = _Search(roots[1], owned, apart)
    search.growing.update(growing)
    search.numbers = numbers
    search.attributes |= _called_on(roots[1])
    search.walked.update(
        id(root) for root in roots[2:] if is_a(root, (dict, list, tuple)) and not is_a(root, nn.Module)
    )
    search.walked.discard(id(numbers))
    return _found(search, roots)


def discover_update(roots: tuple[Any, ...], numbers: dict[str, Any] | None = None, apart: Iterable[str] = ()) -> Found:
    """Return what the code of an optimizer reaches beside its own arrays and numbers, as `discover` does.

    Args:
        roots: The optimizer, the model, and `numbers` where there are such.
        numbers: As in `discover`.
        apart: As in `discover`.
    """
    optimizer, model = roots[:2]
    search = _Search(model, None, apart)
    within = core.optimizers_within(optimizer)
    within += [each.own for each in within if is_a(each, OwnOptimizer)]  # of no class of MLX's
    search.of_update, search.updating = True, {id(each): each for each in within}
    search.scheduled = {id(each) for each in core.optimizers_of(optimizer)}
    search.numbers, called = numbers, _called_on(model)
    search.attributes |= called
    search.walked.discard(id(numbers))
    if not all(is_library_class(type(each)) for each in search.updating.values()):
        search.calls = _UPDATE
        search.attributes |= _read_by_mlx(within)
    elif not called:  # a rule of the step's own takes the place of the code
        roots = (optimizer,)
    return _found(search, roots)


def _read_by_mlx(optimizers: Iterable[Any]) -> set[str]:
    """Return the attributes that MLX's code reads of optimizers: a property of a user's class may stand there."""
    bases = {base for each in optimizers for base in type(each).__mro__ if is_mlx(base.__module__)}
    functions = [each for base in bases for each in vars(base).values() if is_a(each, types.FunctionType)]
    return {name for each in functions for name in named(each.__code__)[1]} - _USES


def _called_on(model: Any) -> set[str]:
    """Return the methods of a model's own that MLX calls in each step, twice: for the loss and for the optimizer."""
    own = is_a(model, nn.Module) and getattr(model.update, "__func__", model.update) is not nn.Module.update
    return {"update"} if own else set()


def _found(search: _Search, roots: tuple[Any, ...]) -> Found:
    for at, root in enumerate(roots):
        search.add(-1, ROOT, at, root)
    search.run()
    who = "the optimizer" if search.of_update else "the loss"
    if search.todo:
        warnings.warn(
            f"faststep: {who} reaches more than {_MAX_NODES:,} objects: those beyond are not watched, and numbers "
            "in them keep the values that they have now. Keep large tables in an mx.array or a NumPy array",
            RuntimeWarning,
            stacklevel=4,  # between the user and this is Step.__call__ or fast_step
        )
    if search.large and not search.hidden:
        warnings.warn(
            f"faststep: {who} reaches {' and '.join(search.large)}: what changes in them is not watched, and keeps "
            "the value that it has now. Keep it in an mx.array or a NumPy array, or pass to the loss what it reads",
            RuntimeWarning,
            stacklevel=4,
        )
    classes = [(cls, not is_library_class(cls)) for cls in search.classes.values()]
    meets_optimizer = not search.updating.keys().isdisjoint(search.seen)
    draws = may_draw(search.names | search.of_others | search.attributes, search.objects)
    codes = list(search.own_codes)
    asks_addresses = not _OF_ADDRESSES.isdisjoint(search.names)
    identity = asks_addresses, any(map(tells_apart, codes))
    return search.kept(), classes, codes, search.hidden, meets_optimizer, draws, search.read, identity


class _Search(Asking):
    """A walk from the roots to all that the code found on the way names."""

    def run(self) -> None:
        """Follow objects until nothing new is met: attributes may be named by code that is met later."""
        self.add_class(mx.array)
        again = True
        while (self.todo or again) and len(self.nodes) < _MAX_NODES:
            while self.todo and len(self.nodes) < _MAX_NODES:
                self.attempt(self.follow, self.todo.popleft())
            known = len(self.attributes)
            for at in self.filtered:
                self.attempt(self.follow_named, at)
            again = len(self.attributes) != known
            for cls, at in self.of_library.items():
                self.follow_class_data(at, cls)
            self.follow_asked()
            self.follow_left()
        names = self.attributes | self.of_modules | self.names
        for at in range(len(self.objects)):
            self.attempt(functools.partial(self.read_inside, names), at)
        for read in by_names(names, self.texts | self.constants, {type(value) for value in self.objects}):
            self.add_read(0, read)

    def attempt(self, follow: Any, at: int) -> None:
        """Follow an object, which may be of a class that allows no look at it."""
        try:
            follow(at, self.objects[at])
        except Exception as error:  # by the user's class
            self.hide(self.objects[at], error)

    def follow(self, at: int, value: Any) -> None:
        """Add what an object leads to."""
        self.add_class(type(value))
        self.name_function(at, value)
        if is_a(value, BASES) and type(value) not in _PLAIN_BASES and not is_a(value, nn.Module):
            self.filtered.append(at)
            self.follow_class(at, value)
            self.follow_named(at, value)
            if id(value) in self.walked and type(value).__dictoffset__:  # its items are looked at with the model's
                self.add_read(at, names_of)
            if is_a(value, collections.defaultdict):
                self.add(at, ATTRIBUTE, "default_factory", value.default_factory)
        if is_library_class(type(value)) and type(value).__flags__ & MADE_BY_PYTHON:
            self.of_library.setdefault(type(value), at)
        if at in self.openers:
            self.filtered.append(at)
            self.follow_class(at, value)
            self.follow_named(at, value)
        elif is_a(value, weakref.ref):
            self.add(at, WEAK, None, value())
        elif type(value) in weakref.ProxyTypes:
            self.follow_proxy(at, value)
        elif is_a(value, types.FunctionType):
            self.follow_function(at, value)
        elif named_parts := parts(value):
            for name in named_parts:
                self.add(at, ATTRIBUTE, name, getattr(value, name))
            if is_a(value, CACHE):
                self.follow_results(at, value)
        elif type(value) in VIEWS:
            self.follow_referents(at, value, dict)
        elif type(value) in GETTERS:
            self.attributes |= {part for text in texts(value.__reduce__()[1]) for part in attributes_in(text)}
            self.follow_referents(at, value, types.FunctionType)
        elif is_a(value, WEAK_SETS):
            self.add(at, INSTANCE, "data", attributes(value)["data"])
            if is_a(value, weakref.WeakSet):
                self.follow_members(at, value)
        elif is_a(value, (dict, list, tuple)):
            in_argument = self.nodes[at][1] == ROOT and not is_a(value, nn.Module)  # looked at with the argument
            in_argument = in_argument and value is not self.numbers
            if size(value) <= MAX_ITEMS and not in_argument:
                self.follow_container(at, value)
        elif is_a(value, (set, frozenset)):
            self.follow_set(at, value)
        elif is_a(value, np.ndarray) and value.dtype.hasobject:
            self.follow_objects(at, value)
        elif (
            is_a(value, (type, types.ModuleType))
            or self.is_optimizer(value)
            or (value is not self.owned and has_attributes(value))
        ):
            self.filtered.append(at)
            self.follow_class(at, value)
            self.follow_named(at, value)
            self.follow_deque(at, value)
        elif is_a(value, collections.deque):
            self.follow_deque(at, value)
        elif is_a(value, contextvars.ContextVar):
            self.follow_context(at, value)
        elif is_a(value, type(os.environ)):
            self.add(at, INSTANCE, "_data", attributes(value)["_data"])
        elif callable(value) and not is_a(value, type):
            getattr(value, "__dict__", None)  # which Python may make only now, as one more referent
            # of mx.compile, mx.checkpoint and their kind
            self.follow_referents(at, value, types.FunctionType, types.MethodType, functools.partial)
            self.filtered.append(at)
        else:
            self.filtered.append(at)

    def read_inside(self, names: set[str], at: int, value: Any) -> None:
        """Add what an object holds that is neither an attribute nor an item."""
        cls = type(value)
        if cls in self.plain or self.nodes[at][3] in (VALUE, SAME):
            return
        if (read := read_of(value) or read_by_names(value, names)) is not None:
            self.add_read(at, read)
        elif is_a(value, (types.FunctionType, type, mx.array)):
            self.plain.add(cls)

    def follow_proxy(self, at: int, proxy: Any) -> None:
        """Add what a weak proxy stands for: the object of a bound method of it."""
        for name in ("__init__", "mro"):
            with contextlib.suppress(ReferenceError, AttributeError):
                self.add(at, WEAK, None, getattr(proxy, name).__self__)
                return

    def follow_referents(self, at: int, value: Any, *kinds: type) -> None:
        """Add those objects of some kinds that an object refers to."""
        for number, referent in enumerate(gc.get_referents(value)):
            if issubclass(type(referent), kinds):
                self.add(at, REFERENT, number, referent)

    def follow_results(self, at: int, cache: Any) -> None:
        """Add how many results a function with a cache has made, and the objects, containers and functions in it."""
        _, misses, _, count = cache.cache_info()
        wrapped = cache.__wrapped__
        of_library = is_a(wrapped, types.FunctionType) and is_library_function(wrapped)
        found = [] if of_library else kept_in(cache)
        if misses <= _MAX_MISSES and not of_library and (found or not count):
            self._put((at, MISSES, None), IDENTITY, misses, misses)  # another one may be the first to be looked at
        else:
            self.add(at, MISSES, None, misses)
        for each in found:
            self.add(at, READ, Kept(each), each)
        if not of_library and values_kept(cache):  # it may be cleared, and filled with others
            self.add_read(at, values_kept)

    def follow_function(self, at: int, function: types.FunctionType) -> None:
        """Add a function's closure and defaults, and the globals that its code names."""
        for number, cell in enumerate(function.__closure__ or ()):
            try:
                self.add(at, CELL, number, cell.cell_contents)
            except ValueError:  # the cell is empty
                continue
        for name in ("__defaults__", "__kwdefaults__", "__wrapped__"):
            if (value := getattr(function, name, None)) is not None:
                self.add(at, ATTRIBUTE, name, value)
        if is_library_function(function) and function not in (os.getenv, getattr(os, "getenvb", None)):
            self.follow_library(function)
            return
        if vars(function):
            self.filtered.append(at)
        self.own_codes[function.__code__] = None
        names, attributes, modules, _ = named(function.__code__)
        of_modules, of_others = _of_library_modules(function)
        self.of_modules |= of_modules
        self.of_others |= of_others
        self.attributes |= attributes - of_modules
        self.names |= names
        if "getLogger" in attributes | names:
            self.constants.update(texts(function.__code__.co_consts))
        space = self.spaces.setdefault(id(function.__globals__), at)
        self.ask_in(space, function)
        for name in sorted(names):
            if name in function.__globals__ and not name.startswith("@"):
                self.add(space, GLOBAL, name, function.__globals__[name])
        for name in sorted(names - function.__globals__.keys()):
            self.add_place(space, GLOBAL, name)
        self.follow_builtins(space, function, names - function.__globals__.keys())
        for name in sorted(modules & sys.modules.keys()):
            self.add(at, MODULES, name, sys.modules[name])
        for name in sorted(modules - sys.modules.keys()):  # the code may be the first to import them
            self.add_place(at, MODULES, name)

    def follow_container(self, at: int, value: Any) -> None:
        """Add what is in a dict, list, tuple or module; of a module, what is no slot of it."""
        pairs = [(ITEM, *item) for item in dict.items(value)] if is_a(value, dict) else []
        if not is_a(value, dict):
            pairs = [(INDEX, *item) for item in enumerate(value)]
        if is_a(value, nn.Module):
            pairs = items_of(value)
            self.follow_class(at, value)
        of_module = id(value) in self.walked
        pairs.sort(key=lambda pair: not is_a(pair[2], PLAIN))  # numbers in one row are compared fastest
        if value is self.numbers:
            for _, path, number in pairs:
                self.leave(owner_of(self.objects[1], path), path.rpartition(".")[2], (at, ITEM, path, number))
            return
        for how, key, item in pairs:
            if of_module and is_a(value, nn.Module) and is_apart(self.apart, how, key, item):
                self.leave(value, key, None)
                continue
            if how == INSTANCE and of_module and is_a(item, collections.deque):
                self.leave(value, key, (at, how, key, item))
                continue
            known = is_a(item, (mx.array, *PLAIN)) or type(item) is set or id(item) in self.seen
            if not of_module or not known or is_member(item):
                self.add(at, how, key, item)
            elif type(item) is set:
                self.follow_members(at, item)
        if is_a(value, dict):
            self.follow_members(at, value)

    def follow_set(self, at: int, value: Any) -> None:
        """Add the objects in a set; their number is compared too, since a new one is to be followed."""
        if len(value) <= MAX_ITEMS and held(value):
            parent, how, key, *_ = self.nodes[at]
            self._put((parent, how, key, CONTAINER), CONTAINER, None, value)
            self.follow_members(at, value)

    def follow_members(self, at: int, value: Iterable[Any]) -> None:
        """Add the objects in a set, and those that are keys of a dict or stand in one."""
        for member in held(value):
            self.add(at, HELD, holder(member), member)

    def follow_objects(self, at: int, value: np.ndarray[Any, Any]) -> None:
        """Add what is in an array of objects, where that can be watched: in one that is passed, others may be."""
        items = value.ravel().tolist()
        if value.size <= MAX_ITEMS and len(members(items)) == len(items) and self.nodes[at][1] != ROOT:
            self.follow_members(at, items)
        elif value.size:
            self.hidden = self.hidden or (
                "it reaches a NumPy array of objects or texts, whose changes cannot be seen: make it a list"
            )

    def follow_deque(self, at: int, value: Any) -> None:
        """Add what is in a short deque, and how long another is."""
        if not is_a(value, collections.deque) or is_numbers(value):
            return
        if is_large_deque(value):
            self.add(at, LENGTH, None, len(value))
            return
        for number, item in enumerate(value):
            self.add(at, INDEX, number, item)

    def follow_context(self, at: int, variable: contextvars.ContextVar[Any]) -> None:
        """Add the value of a context variable, or that it has none."""
        try:
            self.add(at, CONTEXT, None, variable.get())
        except LookupError:
            self.add_place(at, CONTEXT, None)

    def follow_class(self, at: int, value: Any) -> None:
        """Add the class of an object, whose methods the code may call."""
        cls = type(value)
        self.add_class(cls)
        if cls is not type and not is_library_class(cls) and id(cls) not in self.seen:
            self.add(at, TYPE, None, cls)

    def follow_named(self, at: int, value: Any) -> None:
        """Add the attributes of an object, class or Python module that the code names."""
        if is_a(value, type):
            self.add_class(value)
            for number, base in enumerate(value.__mro__):
                self.ask_made(vars(base))
                if is_library_class(base):
                    self.follow_library_class(at, number, base)
                else:
                    self.follow_base(at, number, base)
            return
        self.ask_made(attributes(value))
        if is_a(value, types.ModuleType) and is_library_module(value):
            self.follow_module(at, value, self.attributes | self.of_modules)
            if self.any_attribute:
                named_so = self.texts & vars(value).keys()
                self.naming |= named_so
                self.follow_module(at, value, named_so)
            return
        values = attributes(value)
        if self.is_optimizer(value):
            if id(value) not in self.updating:
                self.hidden = self.hidden or (
                    f"the optimizer's code reaches another one ({type(value).__name__}) that is none of its "
                    "attributes: make it one, so that its state is seen"
                )
            apart = [n for n in _OF_OPTIMIZERS if n != "_schedulers" or id(value) in self.scheduled]
            names = [n for n in values if n not in apart and not is_a(values[n], (mx.array, *PLAIN))]
            self.follow_slots(at, value, everything=False)
            if is_a(value, OwnOptimizer):
                self.add(at, ATTRIBUTE, "own", value.own)
        elif is_a(value, types.ModuleType):
            everything = self.any_attribute and is_own(values.get("__name__"))
            names = [name for name in values if self.is_named(name, values[name], everything) or name == "__getattr__"]
        else:
            everything = is_record(value) or (self.any_attribute and not is_a(value, enum.Enum))
            updates = id(value) in self.updating and is_a(value, Optimizer)
            everything |= is_a(value, Optimizer) and not updates  # it may update within the loss
            known = chosen(value)
            names = [n for n in values if n in self.attributes or (everything and not is_buffer(values[n]))]
            names = names if known is None else known
            if updates:  # the step knows its state
                names = [name for name in names if name not in _OF_OPTIMIZERS]
                if self.owned is not None and self.may_read_state(value):  # of which nobody is told
                    self.hidden = self.hidden or "it may read the `_state` of the optimizer that updates it"
            elif is_a(value, Optimizer) and type(value).state is Optimizer.state:  # another step's, perhaps
                names = [name for name in names if name != "_state"]
                self.follow_state(at, value)
            if is_a(value, enum.Enum) and "value" in self.attributes and not is_a(value._value_, PLAIN):
                names.append("_value_")
            names = [name for name in names if name in values]
            names.sort(key=lambda name: not is_a(values[name], PLAIN))
            self.follow_slots(at, value, everything)
            self.follow_written_in_c(at, value)
        for name in names:
            self.add(at, INSTANCE, name, values[name])

    def follow_state(self, at: int, optimizer: Optimizer) -> None:
        """Add what the code may read of the state of an optimizer, whose moments may lie in another step."""
        used = self.attributes | (self.texts if self.any_attribute else set())
        if used & _USES:
            self.add(at, ATTRIBUTE, "state", optimizer.state)  # which makes it current
            return
        state = vars(optimizer)["_state"]
        place = self.add_place(at, INSTANCE, "_state", state)
        for name in sorted(used & {"step", "learning_rate"} & state.keys()):
            self.add(place, ITEM, name, state[name])

    def follow_slots(self, at: int, value: Any, everything: bool) -> None:
        for name, slot in slots(type(value)):
            if everything or name in self.attributes:
                try:
                    self.add(at, ATTRIBUTE, name, slot.__get__(value))
                except AttributeError:
                    self.add_place(at, ATTRIBUTE, name)

    def follow_written_in_c(self, at: int, value: Any) -> None:
        cls = type(value)
        if cls not in self.slots:
            self.slots[cls] = slots_of(cls)
        self.ask_made(self.slots[cls])
        for name in sorted(self.slots[cls] & self.attributes):
            if (inner := what_slot_gives(value, name)) is not None:
                self.add(at, ATTRIBUTE, name, inner)

    def may_call(self, cls: type, name: str) -> bool:
        """Return whether the code may call a method of a class that Python calls by itself."""
        if name not in MAKERS and name not in CALLED_BY:
            return True
        names = self.names | self.of_modules | self.attributes
        if name in CALLED_BY:
            return not names.isdisjoint(CALLED_BY[name])
        made = any(base in self.makers or base.__name__ in names for base in cls.__mro__)
        return made or not names.isdisjoint(COPIES)

    def follow_base(self, at: int, number: int, base: type) -> None:
        """Add what the code names of one class of an inheritance, and what Python calls by itself."""
        own = vars(base)
        everything = self.any_attribute and is_own(base.__module__)
        self.attributes.update(texts(own.get("__match_args__", ())))
        for name, value in own.items():
            called = name.startswith("__") and is_a(value, (types.FunctionType, staticmethod, classmethod))
            called = called and self.may_call(self.objects[at], name)
            is_data = not name.startswith("__") or is_a(value, (dict, *PLAIN))  # `__annotations__`, say
            called |= name in self.calls and any(issubclass(type(each), base) for each in self.updating.values())
            if called or (self.is_named(name, value, everything) and is_data):
                if issubclass(base, enum.Enum) and is_a(value, enum.Enum):
                    continue  # a member cannot be replaced, but has attributes
                self.add(self.add_place(at, BASE, number, base), CLASS, name, value)
        if issubclass(base, enum.Enum):
            for name, value in base.__members__.items():
                if name in self.attributes and not is_fixed(value):
                    place = self.add_place(self.add_place(at, BASE, number, base), CLASS, "_member_map_")
                    self.open(place, ITEM, name, value)


def _of_library_modules(function: types.FunctionType) -> tuple[set[str], set[str]]:
    """Return the names for which a function's code asks modules of libraries alone: those of no other object.

    And of these the ones for which it asks other modules than MLX's core.
    """
    chains, others = on_globals(function.__code__)
    found, of_others, elsewhere = set[str](), set[str](), set(others)
    for first, *names in chains:
        value: Any = function.__globals__.get(first)
        for number, name in enumerate(names):
            if not is_a(value, types.ModuleType) or not is_library_module(value):
                elsewhere.update(names[number:])
                break
            found.add(name)
            if value is not mx:
                of_others.add(name)
            value = vars(value).get(name)
    return found - elsewhere, of_others - elsewhere
