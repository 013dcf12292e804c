"""Search of the objects that a loss reads: entries of a watch list, or the reason why there is none."""

from __future__ import annotations

import abc
import builtins
import enum
import functools
import time
import types
import typing
from collections import deque
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from faststep._reach import _code
from faststep._reach._entries import ABSENT, Entry, Found, Holder, Refused
from faststep._reach._kinds import (
    NAMING,
    TRANSFORMED,
    described,
    inner_functions,
    is_a,
    is_constant,
    is_key,
    is_made,
    is_trusted,
    module_of,
    owner,
)

_MAX_ITEMS = 4096
_MADE_AT_ONCE = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__annotate_func__"})
_RARE = frozenset(
    {"__repr__", "__str__", "__hash__", "__eq__", "__replace__", "__getstate__", "__setstate__"}
)  # a call that runs one is not left out
_SETTERS = ("__setattr__", "__delattr__")
_HOOKS = ("__del__", "__getattr__", "__getattribute__", "__get__", "__set__", "__dict__", *_SETTERS)
_OF_C = (type(str.__len__), type(str.join), type(int.real), types.MemberDescriptorType)  # methods of classes in C
_BASES: tuple[Any, ...] = (object, abc.ABC, typing.Generic, typing.Protocol, tuple, int, str)
_METACLASSES: tuple[type, ...] = (type, abc.ABCMeta, type(enum.Enum), type(typing.Protocol))
_ADVICE = "read it once, or pass it as an argument"


def search(loss_fn: Any, model: Any, arguments: tuple[Any, ...], seconds: float) -> Found:
    """List what a loss reads beside the model and plain arguments.

    Args:
        loss_fn: The loss function of the current call.
        model: The model, whose arrays, numbers and containers are compared elsewhere.
        arguments: Objects among the call's arguments that are no containers, arrays or numbers.
        seconds: Time that the search may take, in seconds, beside that for reading code for the first time.
    """
    return _found(seconds, lambda found: found.take(loss_fn, model, arguments))


def search_update(optimizer: Any, model: Any, transform: Any, seconds: float) -> Found:
    """List what the update of an optimizer reads beside the model, the gradients and its own state.

    Args:
        optimizer: The optimizer, whose arrays, numbers and containers are compared elsewhere.
        model: The model.
        transform: The function that is called with the gradients before it, the same at each step; None: none.
        seconds: Time that the search may take, in seconds.
    """
    return _found(seconds, lambda found: found.take_update(optimizer, model, transform))


def _found(seconds: float, take: Callable[[_Search], None]) -> Found:
    found = _Search(time.perf_counter() + seconds)
    try:
        take(found)
    except Refused as refused:
        return Found([], frozenset(), str(refused))
    except Exception as error:  # of a class whose attributes compute something
        return Found([], frozenset(), f"reads what cannot be looked through ({type(error).__name__}: {error})")
    return Found(found.entries, frozenset(found.codes), None)


class _Search:
    """One search."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.entries = [Entry(mx.array, "length", None, len(vars(mx.array)), "the attributes of mx.array")]
        self.codes: dict[types.CodeType, None] = {}
        self.names = {"_training": "the model", "_value_": "an enumeration"}  # attributes in the code read, and where
        self.seen: dict[int, Any] = {}
        self.classes: set[int] = set()
        self.made: set[int] = set()  # classes that code can reach, and so make objects of
        self.globals: set[tuple[int, str]] = set()
        self.shown: dict[int, str] = {}  # longer texts for messages
        self.holders = [Holder(mx.array, "class", vars(mx.array), "mx.array", set())]
        self.readable = {"faststep"}  # installed packages that are read
        self.compared: tuple[type, ...] = (nn.Module,)  # whose arrays are compared elsewhere
        self.queue: deque[tuple[Any, str, str]] = deque()

    def take(self, loss_fn: Any, model: Any, arguments: tuple[Any, ...]) -> None:
        """Search everything."""
        self.tree(model, "model")
        self.queue += ((each, type(each).__name__.lower(), "an argument") for each in arguments)
        self.root(loss_fn)
        self.search()

    def take_update(self, optimizer: Any, model: Any, transform: Any) -> None:
        """Search what an update reads."""
        if not is_a(optimizer, optim.Optimizer):
            raise Refused("is of no class of `mlx.optimizers.Optimizer`")
        self.names["update"] = "the optimizer"
        self.compared = (nn.Module, optim.Optimizer)
        self.tree(model, "model")
        self.tree(optimizer, "optimizer")
        if transform is not None:
            self.queue.append((transform, "transform", "an option"))
        self.search()

    def search(self) -> None:
        """Search all that is known to be read."""
        while self.queue or self.open():
            while self.queue:
                self.visit(*self.queue.popleft())

    def root(self, loss_fn: Any) -> None:
        """Take the loss function, which may be a new one at each call."""
        if type(loss_fn) is types.FunctionType:
            self.trust(module_of(loss_fn))
            self.function(loss_fn, None, loss_fn.__name__, "the loss")
        elif type(loss_fn) is types.MethodType:
            self.add(None, "part", "__func__", loss_fn.__func__, loss_fn.__func__.__name__, "the loss")
            self.add(None, "part", "__self__", loss_fn.__self__, "self", "the loss")
        else:
            self.add(None, "itself", None, loss_fn, "loss_fn", "the loss")

    def trust(self, module: str) -> None:
        """Read the code of an installed package, which defines the model or the loss."""
        if owner(module) == "installed":
            self.readable.add(module.partition(".")[0])

    def is_read_package(self, module: str) -> bool:
        """True if a module's code is read as the user's own is."""
        return module.partition(".")[0] in self.readable or owner(module) == "user"

    def tree(self, root: Any, name: str) -> None:
        """Walk a model or an optimizer: its classes, and objects in its containers, which are compared elsewhere."""
        todo: list[tuple[Any, Any, str, Any, str]] = [(root, None, "", None, name)]
        while todo:
            value, parent, way, key, path = todo.pop()
            if id(value) in self.seen or is_constant(value) or type(value) is mx.array:
                continue
            if is_a(value, self.compared):
                self.see(value)
                self.trust(type(value).__module__)
                self.read_class(type(value), path, value, path)
                own = object.__getattribute__(value, "__dict__")
                self.holders.append(Holder(value, "attribute", own, path, {"_no_grad", "_faststep"}, in_model=True))
                inside = [(n, each) for n, each in own.items() if is_a(each, (dict, list, tuple, *self.compared[1:]))]
                todo += ((each, value, "attribute", n, f"{path}.{n}") for n, each in inside if n != "_faststep")
                items = dict.items(value) if is_a(value, dict) else ()
                todo += ((each, value, "item", n, f"{path}.{n}") for n, each in items)
            elif type(value) in (dict, list, tuple):
                self.see(value)
                way = "item" if type(value) is dict else "index"
                inside = list(value.items() if type(value) is dict else enumerate(value))
                todo += ((each, value, way, n, f"{path}[{n!r}]") for n, each in inside)
            else:
                self.add(parent, way, key, value, path, "the model")

    def see(self, value: Any) -> None:
        """Note an object, and look at the clock."""
        self.seen[id(value)] = value
        if len(self.seen) % 64 == 0 and time.perf_counter() > self.deadline:
            raise Refused("reads so many objects that looking at them takes longer than a call")

    def add(self, parent: Any, way: str, key: Any, value: Any, name: str, place: str) -> None:
        """Add an entry, and search what stands there."""
        self.entries.append(Entry(parent, way, key, value, name))
        self.queue.append((value, name, place))

    def open(self) -> bool:
        """Add the attributes that code has names for; returns whether there were new ones."""
        before = len(self.entries)
        for holder in self.holders:
            for name in [n for n in holder.names if n not in holder.done and self.is_read(holder, n)]:
                holder.done.add(name)
                self.open_one(holder, name, holder.names[name])
        return len(self.entries) > before or bool(self.queue)

    def is_read(self, holder: Holder, name: str) -> bool:
        """True if code may read an attribute."""
        cls, value = holder.parent, holder.names[name]
        if name in _SETTERS:
            return cls is nn.Module and name == "__setattr__"  # others are dataclasses'
        if name in self.names and (holder.way == "attribute" or name not in _MADE_AT_ONCE):
            return True
        is_dunder = name.startswith("__") and name.endswith("__") and name not in _RARE
        if holder.way == "attribute" or not is_dunder or cls is mx.array:
            return False
        is_code = callable(value) or is_a(value, (property, staticmethod, classmethod))
        is_of_enum = type(value) in _OF_C and is_a(cls, type(enum.Enum))
        return is_code and not is_of_enum and (name not in _MADE_AT_ONCE or id(cls) in self.made)

    def open_one(self, holder: Holder, name: str, value: Any) -> None:
        """Add one attribute."""
        text, place = f"{holder.name}.{name}", self.names.get(name, holder.name)
        if holder.in_model and (is_constant(value) or type(value) in (mx.array, dict, list, tuple)):
            return
        if is_a(holder.parent, type(enum.Enum)) and name in holder.parent._member_map_:
            self.queue.append((holder.parent._member_map_[name], text, place))
        elif type(value) is property:
            self.entries.append(Entry(holder.parent, "class", name, value, text))
            self.queue += ((each, text, place) for each in (value.fget, value.fset) if not is_trusted(value.fget))
        else:
            self.add(holder.parent, holder.way, name, value, text, place)

    def visit(self, value: Any, name: str, place: str) -> None:
        """Search one object, whose own place is watched."""
        if id(value) in self.seen or value is ABSENT or type(value) is mx.array:
            return
        if is_constant(value) or is_trusted(value):
            return
        self.see(value)
        kind = type(value)
        if kind is types.FunctionType:
            self.function(value, value, name, place)
        elif kind is types.MethodType:
            self.queue += ((value.__func__, name, place), (value.__self__, name.rpartition(".")[0] or name, place))
        elif kind in (staticmethod, classmethod):
            self.queue.append((value.__func__, name, place))
        elif kind is functools.partial:
            self.queue += ((each, name, place) for each in (value.func, value.args, value.keywords))
            self.hold(value, name)
        elif kind is TRANSFORMED:
            inner = inner_functions(value)
            if inner is None:
                raise Refused(f"calls `{name}`, which MLX has transformed with arrays of its own ({place})")
            self.queue += ((each, name, place) for each in inner)
        elif kind in (dict, list, tuple):
            self.container(value, name, place)
        elif is_a(value, nn.Module):  # one that is not in the model: a teacher
            self.entries.append(Entry(value, "type", None, kind, f"type({name})"))
            self.items(value, "{}.{}", name, place)
            self.read_class(kind, place, value, name)
            self.hold(value, name)
        elif is_a(value, type):
            self.made.update(map(id, value.__mro__))
            self.read_class(value, place, value, name)
        else:
            self.instance(value, name, place)

    def container(self, value: Any, name: str, place: str) -> None:
        """Watch a dict, a list or a tuple whole."""
        if len(value) > _MAX_ITEMS:
            raise Refused(f"reads `{name}` with {len(value):,} items ({place}): pass it as an argument")
        if type(value) is dict:
            self.items(value, "{}[{!r}]", name, place)
            return
        if type(value) is list:
            self.entries.append(Entry(value, "length", None, len(value), f"len({name})"))
        for at, each in enumerate(value):
            if type(value) is list or not is_constant(each):
                self.add(value, "index", at, each, f"{name}[{at}]", place)

    def items(self, value: dict[Any, Any], form: str, name: str, place: str) -> None:
        """Watch the keys and items of a dict or of a module."""
        if not all(map(is_key, value)):
            raise Refused(f"reads the dict `{name}`, whose keys are objects ({place}): {_ADVICE}")
        self.entries.append(Entry(value, "keys", None, tuple(value), f"the keys of {name}"))
        for key, each in dict.items(value):
            self.add(value, "item", key, each, form.format(name, key), place)

    def instance(self, value: Any, name: str, place: str) -> None:
        """Watch a plain object of a user's class, a member of an enumeration, or a named tuple."""
        cls = type(value)
        is_named = is_a(value, tuple)
        if not self.is_read_package(cls.__module__) or bool(cls.__dictoffset__) == is_named:
            self.refuse(value, name, place)
        self.read_class(cls, place, value, name)
        if is_named:
            self.container(tuple.__getitem__(value, slice(None)), name, place)
        else:
            self.entries.append(Entry(value, "type", None, cls, f"type({name})"))
            self.hold(value, name)

    def hold(self, value: Any, name: str) -> None:
        """Watch an object's attributes, as far as code names them."""
        own = object.__getattribute__(value, "__dict__")
        self.entries.append(Entry(value, "dict", None, own, f"{name}.__dict__"))
        self.entries.append(Entry(own, "keys", None, tuple(own), f"the attributes of {name}"))
        self.holders.append(Holder(value, "attribute", own, name, {"__wrapped__"}))

    def read_class(self, cls: type, place: str, value: Any, name: str) -> None:
        """Watch the functions and attributes of a class and of its bases, as far as code names them."""
        for base in cls.__mro__:
            if id(base) in self.classes or base in _BASES or (base is dict and issubclass(cls, nn.Module)):
                continue
            if base.__module__ == "enum":
                continue
            if owner(base.__module__) != "mlx":  # whose modules have a `__getattr__`, which reads their items
                if not self.is_read_package(base.__module__):
                    self.refuse(value, name, place)
                self.check_class(base, place, self.shown.get(id(value), name))
            elif not issubclass(base, self.compared):
                self.refuse(value, name, place)
            self.classes.add(id(base))
            own = vars(base)
            self.entries.append(Entry(base, "mro", None, base.__mro__, f"the bases of {base.__name__}"))
            self.entries.append(Entry(base, "length", None, len(own), f"the attributes of {base.__name__}"))
            self.holders.append(Holder(base, "class", own, base.__name__, set()))

    def check_class(self, cls: type, place: str, text: str) -> None:
        """Refuse a class whose objects are no plain ones."""
        own, of = vars(cls), f"reads `{text}` of the class {cls.__name__}"
        frozen = getattr(own.get("__dataclass_params__"), "frozen", False)
        for hook in _HOOKS:
            is_plain = type(own.get(hook)) is types.GetSetDescriptorType or (frozen and hook in _SETTERS)
            if hook in own and not is_plain:
                raise Refused(f"{of}, which has a `{hook}` ({place}): {_ADVICE}")
        for name, each in own.items():
            if type(each) in _OF_C and each.__objclass__ is cls and name not in ("__dict__", "__weakref__"):
                raise Refused(f"{of}, which has `__slots__` or C code ({place}): {_ADVICE}")
        if type(cls) not in _METACLASSES:
            raise Refused(f"{of}, which has a metaclass ({place}): {_ADVICE}")

    def function(self, function: Any, parent: Any, name: str, place: str) -> None:
        """Read a function; `parent` is None for the loss function of the current call."""
        module, code = module_of(function), function.__code__
        of_mlx = owner(module) == "mlx"  # whose functions are taken as they are, but for what is replaced in it
        if is_made(function):
            return
        if not (of_mlx or self.is_read_package(module)) or function.__builtins__ is not vars(builtins):
            self.refuse(function, name, place)
        begin = time.perf_counter()
        facts = _code.read(code)
        self.deadline += time.perf_counter() - begin
        if facts.refusal is not None and not of_mlx:
            raise Refused(facts.refusal)
        self.entries.append(Entry(parent, "code", None, code, f"the code of {name}"))
        self.codes.update(dict.fromkeys(facts.codes))
        self.names = {**facts.attributes, **self.names}
        if parent is not None and not of_mlx:
            self.hold(function, name)
        if not of_mlx:
            self.defaults(function, parent, name, place)
        cells = dict(zip(code.co_freevars, map(_contents, function.__closure__ or ()), strict=True))
        for chain in facts.chains:
            self.read_chain(function, parent, chain, cells, of_mlx)
        for at, (variable, value) in enumerate(cells.items()):
            self.entries.append(Entry(parent, "cell", at, value, variable))
            if not is_a(value, types.ModuleType) and variable != "__class__":  # of `super`
                self.queue.append((value, variable, place))

    def defaults(self, function: Any, parent: Any, name: str, place: str) -> None:
        """Watch the defaults of a function's arguments."""
        given, count = function.__defaults__ or (), function.__code__.co_argcount
        for at, value in enumerate(given):
            key = function.__code__.co_varnames[count - len(given) + at]
            self.add(parent, "default", at, value, f"{name}({key})", place)
        for key, value in (function.__kwdefaults__ or {}).items():
            self.add(parent, "kwdefault", key, value, f"{name}({key})", place)

    def read_chain(self, function: Any, parent: Any, chain: _code.Chain, cells: dict[str, Any], of_mlx: bool) -> None:
        """Watch a variable and what is read from it, where it is a module."""
        if chain.is_cell:
            value, name = self.follow(cells[chain.name], chain, of_mlx)
        else:
            known = function.__globals__
            value = known.get(chain.name, getattr(builtins, chain.name, ABSENT))
            self.add_once(None if parent is None else known, Entry(parent, "global", chain.name, value, chain.name))
            if chain.name in ("getattr", "hasattr") and value in NAMING:
                return
            value, name = self.follow(value, chain, of_mlx)
        if not of_mlx or (type(value) in (types.FunctionType, TRANSFORMED) and owner(value.__module__) == "mlx"):
            self.queue.append((value, name, chain.place))

    def add_once(self, names: Any, entry: Entry) -> None:
        """Add an entry for a name in a module or in globals, unless there is one."""
        if (id(names), entry.key) not in self.globals:
            self.globals.add((id(names), entry.key))
            self.entries.append(entry)

    def follow(self, value: Any, chain: _code.Chain, of_mlx: bool) -> tuple[Any, str]:
        """Follow the attributes of modules: `mx.random.normal`; return the first object that is none, and its name."""
        attributes, module, text = list(chain.attributes), None, chain.name
        while is_a(value, types.ModuleType):
            if not attributes:
                raise Refused(f"uses the module `{chain.text}` other than by its names ({chain.place})")
            name, own, module = attributes.pop(0), vars(value), value
            if name not in own or type(value) is not types.ModuleType:
                of = f"which the module `{value.__name__}` finds by code"
                raise Refused(f"reads `{chain.text}`, {of} ({chain.place})")
            value, text = own[name], f"{text}.{name}"
            self.add_once(own, Entry(own, "item", name, value, chain.text))
        self.shown.setdefault(id(value), chain.text)
        if module is not None and not of_mlx and not (is_trusted(value) or is_constant(value)):
            if owner(module.__name__) != "mlx" and not self.is_read_package(module.__name__):
                self.refuse(value, chain.text, chain.place, module.__name__)
        return value, text

    def refuse(self, value: Any, name: str, place: str, module: str = "") -> typing.NoReturn:
        """Refuse an object, and say what can be done."""
        text, cls = self.shown.get(id(value), name), type(value)
        if is_a(value, np.ndarray):
            raise Refused(f"reads the NumPy array `{text}` ({place}): make it an `mx.array`, or pass it as an argument")
        is_function = is_a(value, (types.FunctionType, types.BuiltinFunctionType, type))
        if callable(value) and (is_function or module or cls.__module__ == "nanobind"):
            called = f"{module}.{text.rpartition('.')[2]}" if module else described(value)
            raise Refused(f"calls {called} ({place})")
        root = (module or cls.__module__).partition(".")[0]
        of = root if root not in ("builtins", "__main__") and not self.is_read_package(root) else f"type {cls.__name__}"
        raise Refused(f"reads `{text}` of {of} ({place}): {_ADVICE}")


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT
