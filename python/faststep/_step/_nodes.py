"""Nodes of a search: objects that a loss reaches, where each is found, and what is compared there."""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable, Container, Iterable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.optimizers import Optimizer

from faststep._step._inside import names_of
from faststep._step._library import is_library_module
from faststep._step._switches import switches
from faststep._step._things import (
    BUFFERS,
    GETTERS,
    MAX_ITEMS,
    PLAIN,
    STREAMS,
    VIEWS,
    attributes,
    has_attributes,
    holds_values,
    is_a,
    is_fixed,
    is_large_deque,
    is_member,
    is_numbers,
    is_of_numbers,
    parts,
    size,
)

# Ways from a parent's object to a node's; reach/node.rs has the same numbers.
ROOT, ITEM, INDEX, ATTRIBUTE, INSTANCE, CELL, GLOBAL, TYPE, BASE, CLASS, REFERENT, MODULES, CONTEXT, WEAK = range(14)
HELD, LENGTH, MISSES, READ, NAMES = range(14, 19)
# Comparisons that it has to pass.
ARRAY, VALUE, CONTENTS, CONTAINER, OBJECT, FUNCTION, SAME, IDENTITY, ANYTHING, MODULE = range(10)

Node = tuple[int, int, Any, int, Any]  # parent, how it is found, its key, what is compared, what is expected


def containers(root: Any, apart: Container[str] = ()) -> set[int]:
    """Return the addresses of a model's modules, dicts and lists, but those in attributes of some names."""
    found: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if is_a(value, (dict, list)) and id(value) not in found:
            found.add(id(value))
            if is_a(value, nn.Module):
                todo += [item[2] for item in items_of(value) if not is_apart(apart, *item)]
            else:
                todo.extend(dict.values(value) if is_a(value, dict) else value)
        elif is_a(value, tuple):
            todo.extend(value)
    return found


def items_of(module: nn.Module) -> list[tuple[int, Any, Any]]:
    """Return how each item and attribute of a module is found, its name, and what it is."""
    return [(ITEM, *item) for item in dict.items(module)] + [(INSTANCE, *item) for item in attributes(module).items()]


def is_apart(names: Container[str], how: int, name: Any, value: Any) -> bool:
    """Return whether an item or attribute of a module is no part of the model's tree, as tree/apart.rs does."""
    if name not in names:
        return False
    if how == INSTANCE:
        return not is_a(value, (dict, mx.array))
    return name.startswith("_") and is_a(value, (dict, list, tuple)) and not is_a(value, nn.Module)


def optimizers_in(root: Any) -> dict[int, Any]:
    """Return the optimizers of MLX's kind that an object is or has in its attributes, in lists and dicts too."""
    found: dict[int, Any] = {}
    seen: set[int] = set()
    todo = [root]
    while todo:
        value = todo.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_a(value, Optimizer):
            found[id(value)] = value
            # not its state, which is of arrays, and of many
            todo.extend(each for name, each in attributes(value).items() if name != "_state")
        elif is_a(value, (dict, list, tuple)) and not is_a(value, nn.Module):
            todo.extend(dict.values(value) if is_a(value, dict) else value)
        elif has_attributes(value) and not is_a(value, (type, types.ModuleType, types.FunctionType, nn.Module)):
            todo.extend(attributes(value).values())
    return found


class Nodes:
    """What a search has found so far, and what it has to follow."""

    def __init__(self, model: nn.Module, owned: Any, apart: Iterable[str] = ()) -> None:
        self.nodes: list[Node] = []
        self.objects: list[Any] = []  # of each node
        self.index: dict[tuple[Any, ...], int] = {}
        self.apart = frozenset(apart)  # names of attributes of the model that nobody watches
        self.read: list[str] = []  # those of them that code may read
        self.owned = owned
        self.walked = containers(model, self.apart)  # dicts, lists and modules whose arrays are known as slots
        self.numbers: dict[str, Any] | None = None  # of the model, where they change again and again
        self.calls: tuple[str, ...] = ()  # methods of optimizers that a step calls, whether code names them or not
        self.of_update = False  # then the arrays and numbers of optimizers are known
        self.updating: dict[int, Any] = optimizers_in(owned)  # by the step, which knows their state
        self.scheduled: set[int] = set()  # the addresses of those whose schedules it calls
        self.growing: set[int] = set()  # addresses of lists and dicts: one of numbers is compared as a whole
        self.seen: dict[int, int] = {}  # the node of each object by its address
        self.todo: collections.deque[int] = collections.deque()
        self.filtered: list[int] = []  # nodes of objects of which only attributes that the code names are followed
        self.spaces: dict[int, int] = {}  # the first function with these globals, or builtins
        self.openers: set[int] = set()  # nodes that are there for what is found from them
        self.attributes: set[str] = set()
        self.of_modules: set[str] = set()  # attributes that code asks modules of libraries for, and nothing else
        self.of_others: set[str] = (
            set()
        )  # of these, what it asks other modules for than MLX's core, whose random numbers a trace draws
        self.names: set[str] = set()  # of globals
        self.texts: set[str] = set()  # strings met, of which each may name an attribute
        self.constants: set[str] = set()  # strings in code that asks for something by its name
        self.switches = switches()
        self.slots: dict[type, frozenset[str]] = {}
        self.of_library: dict[type, int] = {}  # the first object of each class of a library's
        self.data: dict[type, set[str]] = {}  # what classes of libraries have that is no method
        self.plain: set[type] = set()  # classes of which objects hold nothing that is to be read
        self.naming: set[str] = set()  # those that name what a library's module has
        self.any_attribute = self.any_global = self.any_module = False  # that the code may ask for
        self.made: set[str] = set()  # patterns of names that code makes for `getattr`
        self.asking: set[str] = set()  # texts in code of the user's
        self.parts: set[str] = set()  # of which a name may be made
        self.counted = (0, 0)  # out of so many in `asking` and in `texts`
        self.own_spaces: dict[int, dict[str, Any]] = {}  # globals of functions that are not installed
        self.left: list[tuple[Any, str, tuple[int, int, Any, Any] | None]] = []  # nodes of what no code has named yet
        self.classes: dict[int, type] = {}
        self.makers: set[type] = set()  # classes that are met as such, of which code may make objects
        self.codes: set[types.CodeType] = set()  # of MLX's functions
        self.own_codes: dict[types.CodeType, None] = {}  # of functions that are no library's
        self.hidden: str | None = None
        self.large: dict[str, None] = {}  # containers in whose items nothing is watched

    def add(self, parent: int, how: int, key: Any, value: Any) -> int:
        """Add an object as a node, to be followed."""
        place = (parent, how, key)
        if how not in (TYPE, BASE) and is_a(value, type):
            self.makers.add(value)
        if place not in self.index:
            at = self.index[place] = len(self.nodes)
            try:
                kind, expected = self.compared(value)
            except Exception as error:  # by the user's class
                self.hide(value, error)
                kind, expected = ANYTHING, None
            self.nodes.append((*place, kind, expected))
            self.objects.append(value)
            if kind == VALUE:
                if type(value) is str:
                    self.texts.add(value)
                elif not is_fixed(value):
                    self.open(parent, how, key, value)
            elif kind != SAME and id(value) not in self.seen:
                self.seen[id(value)] = at
                self.todo.append(at)
            self.add_switch(at)
        return self.index[place]

    def add_place(self, parent: int, how: int, key: Any, value: Any = None) -> int:
        """Add a place that is not followed; None: there is nothing, and something may be put there later."""
        return self._put((parent, how, key), ANYTHING, None, value)

    def add_fixed(self, parent: int, how: int, key: Any, value: Any) -> int:
        """Add an object of a library that is not followed: only that it is that one is seen."""
        at = self._put((parent, how, key), IDENTITY, value, value)
        self.add_switch(at)
        return at

    def add_switch(self, at: int) -> None:
        """Add what a function of a library tells of the process, if it is such a function."""
        if known := self.switches.get(id(self.objects[at])):
            self.add_read(at, known[1])

    def add_read(self, parent: int, read: Callable[[Any], Any] | None) -> None:
        """Add what a function reads of an object; None: what that returns when it is called."""
        value = self.objects[parent]
        if read is names_of:
            self._put((parent, NAMES, None), VALUE, names_of(value), None)
            return
        self._put((parent, READ, read), VALUE, value() if read is None else read(value), None)

    def open(self, parent: int, how: int, key: Any, value: Any) -> None:
        """Add a second node at the place of a number or a string of a class that may have attributes."""
        at = self._put((parent, how, key, OBJECT), ANYTHING, None, value)
        if at not in self.openers:
            self.openers.add(at)
            self.todo.append(at)

    def _put(self, place: tuple[Any, ...], kind: int, expected: Any, value: Any) -> int:
        if place not in self.index:
            self.index[place] = len(self.nodes)
            self.nodes.append((place[0], place[1], place[2], kind, expected))
            self.objects.append(value)
        return self.index[place]

    def hide(self, value: Any, error: Exception) -> None:
        """Note that an object cannot be looked at."""
        what = f"{type(error).__name__}: {error}"
        self.hidden = (
            self.hidden or f"it reaches an object of {type(value).__qualname__}, which cannot be looked at ({what})"
        )

    def note_large(self, value: Any) -> None:
        """Note a container of which only the items are compared, where they may change themselves."""
        if not holds_values(value):
            self.large[f"a {type(value).__name__} of {size(value):,} objects"] = None

    def compared(self, value: Any) -> tuple[int, Any]:
        """Return what is compared in an object, and what is expected."""
        if is_a(value, weakref.ref) or type(value) in (*weakref.ProxyTypes, *VIEWS, *GETTERS):
            return ANYTHING, None
        if is_a(value, PLAIN):
            return VALUE, value
        if is_a(value, mx.array):
            return ARRAY, None  # at a second place too: another one may be put there
        if id(value) in self.seen and not is_a(value, types.ModuleType):
            return SAME, self.seen[id(value)]
        if is_a(value, (np.ndarray, set, frozenset, *BUFFERS, *STREAMS)) or is_numbers(value):
            return CONTENTS, type(value)
        if is_a(value, types.FunctionType):
            return FUNCTION, value.__code__
        if is_a(value, nn.Module):
            if id(value) in self.walked:
                return IDENTITY, weakref.ref(value)
            own = containers(value)
            if own & self.walked:  # the model is a part of it, say: the rest is looked at by itself
                return CONTAINER, None
            self.walked |= own
            return MODULE, None
        if is_a(value, (dict, list, tuple)):
            if id(value) in self.walked:
                return ANYTHING, None
            if id(value) in self.growing and is_of_numbers(value):
                return CONTENTS, type(value)
            if size(value) <= MAX_ITEMS:
                return CONTAINER, None
            self.note_large(value)
            return CONTENTS, type(value)
        if is_a(value, collections.deque) and not is_large_deque(value):
            return CONTAINER, None
        if parts(value):
            return ANYTHING, None
        if self.is_optimizer(value):
            self.walked |= containers(attributes(value))
        elif value is not self.owned and has_attributes(value) and not is_a(value, type):
            return OBJECT, None
        elif is_a(value, types.ModuleType):
            return (IDENTITY, value) if is_library_module(value) else (OBJECT, None)
        try:
            return IDENTITY, weakref.ref(value)
        except TypeError:
            return IDENTITY, value

    def is_optimizer(self, value: Any) -> bool:
        """Return whether it is an optimizer, or leads to one that updates: arrays and numbers of those are known."""
        return self.of_update and (is_a(value, Optimizer) or id(value) in self.updating)

    def kept(self) -> list[Node]:
        """Return the nodes that can change, and those that lead to them, renumbered."""
        for at, (parent, how, key, kind, value) in enumerate(self.nodes):
            if kind == VALUE and how != READ and type(value) is str and value in self.naming:  # another function's name
                self.nodes[at] = (parent, how, key, IDENTITY, value)
        keep = [self.can_change(at) for at in range(len(self.nodes))]
        others = {type(each) for node, each in zip(self.nodes, self.objects, strict=True) if node[1] != HELD}
        for at, (_, how, *_) in enumerate(self.nodes):
            keep[at] |= (
                how == HELD and type(self.objects[at]) in others
            )  # one of those may become it, or cease to be it
        for at in reversed(range(len(self.nodes))):
            parent, _, _, kind, expected = self.nodes[at]
            if keep[at]:
                for needed in (parent, expected if kind == SAME else -1):
                    if needed >= 0:
                        keep[needed] = True
        numbers, nodes = {-1: -1}, list[Node]()
        for at, (parent, how, key, kind, expected) in enumerate(self.nodes):
            if keep[at]:
                numbers[at] = len(nodes)
                nodes.append((numbers[parent], how, key, kind, numbers[expected] if kind == SAME else expected))
        return nodes

    def can_change(self, at: int) -> bool:
        """Return whether a user may put another object there, or change it."""
        parent, how, _, kind, _ = self.nodes[at]
        if at in self.openers:
            return False
        if how == ROOT or kind in (ARRAY, CONTENTS, MODULE):
            return True
        if how == MODULES and is_a(self.objects[at], types.ModuleType):
            return False
        if how in (TYPE, BASE, REFERENT, HELD) or (how == CLASS and kind in (FUNCTION, ANYTHING)):
            return False
        if how == CLASS and kind == SAME:
            return not is_a(self.objects[at], types.FunctionType)  # methods are looked at with their class
        if kind == SAME and is_member(self.objects[at]):
            return True  # the object of the other node may become another one
        return not (kind in (IDENTITY, ANYTHING, SAME) and id(self.objects[parent]) in self.walked)
