"""Search of the objects that a loss reads: entries of a watch list, or the reason why there is none."""

from __future__ import annotations

import abc
import builtins
import enum
import functools
import sys
import time
import types
import typing
from collections import deque
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from faststep._reach import _code
from faststep._reach._entries import ABSENT, Entry, Found, Holder, Refused
from faststep._reach._kinds import (
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

_UPDATE = ("update", "apply_gradients", "apply_single", "init_single", "init")  # what MLX calls of an optimizer
_MAX_ITEMS = 4096
_MADE_AT_ONCE = frozenset({"__init__", "__new__", "__post_init__", "__init_subclass__", "__annotate__"})
_HOOKS = ("__del__", "__getattr__", "__getattribute__", "__setattr__", "__delattr__", "__get__", "__set__", "__dict__")
# the last three of enumerations and named tuples
_BASES: tuple[Any, ...] = (object, abc.ABC, typing.Generic, typing.Protocol, tuple, int, str)
_METACLASSES: tuple[type, ...] = (type, abc.ABCMeta, type(enum.Enum), type(typing.Protocol))
_ADVICE = "read it once, or pass it as an argument"


def search(loss_fn: Any, model: Any, optimizer: Any, arguments: tuple[Any, ...], seconds: float) -> Found:
    """List what a loss reads beside the model and plain arguments.

    Args:
        loss_fn: The loss function of the current call.
        model: The model, whose arrays, numbers and containers are compared elsewhere.
        optimizer: An optimizer whose own code belongs to the program, or None.
        arguments: Objects among the call's arguments that are no containers, arrays or numbers.
        seconds: Time that the search may take, in seconds.
    """
    found = _Search(time.perf_counter() + seconds)
    try:
        found.take(loss_fn, model, optimizer, arguments)
    except Refused as refused:
        return Found([], frozenset(), str(refused))
    except Exception as error:  # of a class whose attributes compute something
        return Found([], frozenset(), f"reads what cannot be looked through ({type(error).__name__}: {error})")
    return Found(found.entries, frozenset(found.codes), None)


class _Search:
    """One search."""

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.entries: list[Entry] = []
        self.codes: dict[types.CodeType, None] = {}
        self.names = {"_training": "the model"}  # attributes in the code read, and where
        self.seen: dict[int, Any] = {}
        self.classes: set[int] = set()
        self.of_modules: set[int] = set()  # classes of modules, and those mixed in
        self.made: set[int] = set()  # classes that code can reach, and so make objects of
        self.globals: set[tuple[int, str]] = set()
        self.shown: dict[int, str] = {}  # longer texts for messages
        self.holders: list[Holder] = []
        self.readable = {"faststep"}  # installed packages that are read
        self.queue: deque[tuple[Any, str, str]] = deque()
        self.ticks = 0

    def take(self, loss_fn: Any, model: Any, optimizer: Any, arguments: tuple[Any, ...]) -> None:
        """Search everything."""
        self.tree(model, "model")
        if optimizer is not None:
            self.names.update(dict.fromkeys(_UPDATE, "the optimizer"))
            self.tree(optimizer, "optimizer")
        for each in arguments:
            self.queue.append((each, type(each).__name__.lower(), "an argument"))
        self.root(loss_fn)
        while self.queue or self.open():
            while self.queue:
                self.visit(*self.queue.popleft())

    def root(self, loss_fn: Any) -> None:
        """Take the loss function, which may be a new one at each call."""
        target = loss_fn
        while type(target) in (types.MethodType, functools.partial):
            target = target.__func__ if type(target) is types.MethodType else target.func
        if type(target) is types.FunctionType:
            self.trust(module_of(target))
        if type(loss_fn) is types.FunctionType:
            self.function(loss_fn, None, loss_fn.__name__, "the loss")
        elif type(loss_fn) is types.MethodType:
            self.add(None, "part", "__func__", loss_fn.__func__, loss_fn.__func__.__name__, "the loss")
            self.add(None, "part", "__self__", loss_fn.__self__, "self", "the loss")
        else:
            self.add(None, "itself", None, loss_fn, "loss_fn", "the loss")

    def trust(self, module: str) -> None:
        """Read the code of an installed package, which defines the model, the optimizer or the loss."""
        if owner(module) == "installed":
            self.readable.add(module.partition(".")[0])

    def tree(self, root: Any, name: str) -> None:
        """Walk a model or an optimizer: its classes and other objects; its containers are compared elsewhere."""
        todo: list[tuple[Any, Any, str, Any, str]] = [(root, None, "", None, name)]
        while todo:
            value, parent, way, key, path = todo.pop()
            if id(value) in self.seen or is_constant(value) or type(value) is mx.array:
                continue
            if is_a(value, nn.Module) or value is root:
                self.see(value)
                self.trust(type(value).__module__)
                own = object.__getattribute__(value, "__dict__")
                is_open = self.class_of_module(value, path, path)
                self.holders.append(Holder(value, "attribute", own, path, set(), is_open, in_model=True))
                inside = [each for each in own.items() if value is root or type(each[1]) in (dict, list, tuple)]
                todo += ((each, value, "attribute", n, f"{path}.{n}") for n, each in inside if n != "_no_grad")
            if is_a(value, dict) and (type(value) is dict or is_a(value, nn.Module)):
                self.see(value)
                form = "{}.{}" if is_a(value, nn.Module) else "{}[{!r}]"
                todo += ((each, value, "item", n, form.format(path, n)) for n, each in dict.items(value))
            elif type(value) in (list, tuple):
                self.see(value)
                todo += ((each, value, "index", n, f"{path}[{n}]") for n, each in enumerate(value))
            elif id(value) not in self.seen and way != "attribute":
                self.add(parent, way, key, value, path, "the model")

    def see(self, value: Any) -> None:
        """Note an object, and look at the clock."""
        self.seen[id(value)] = value
        self.ticks += 1
        if self.ticks % 64 == 0 and time.perf_counter() > self.deadline:
            raise Refused("reads so many objects that looking at them takes longer than a call")

    def add(self, parent: Any, way: str, key: Any, value: Any, name: str, place: str) -> None:
        """Add an entry, and search what stands there."""
        self.entries.append(Entry(parent, way, key, value, name))
        if not is_constant(value) and value is not ABSENT and type(value) is not mx.array:
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
        if holder.way == "attribute" or name in self.names:
            return name in self.names or holder.is_open
        value = holder.names[name]
        is_code = callable(value) or is_a(value, (property, staticmethod, classmethod))
        dunder = is_code and name.startswith("__") and name.endswith("__")
        return dunder and (name not in _MADE_AT_ONCE or id(holder.parent) in self.made)

    def open_one(self, holder: Holder, name: str, value: Any) -> None:
        """Add one attribute."""
        text, place = f"{holder.name}.{name}", self.names.get(name, holder.name)
        if holder.in_model and (is_constant(value) or is_a(value, (mx.array, dict, list, tuple)) or name == "_no_grad"):
            return
        if holder.way == "class":
            if is_a(holder.parent, type(enum.Enum)) and name in holder.parent._member_map_:
                self.queue.append((holder.parent._member_map_[name], text, place))
                return
            if is_made(value, name, holder.parent):
                self.entries.append(Entry(holder.parent, "class", name, value, text))
                return
            if type(value) is property:
                self.property(holder.parent, name, value, place)
                return
        self.add(holder.parent, holder.way, name, value, text, place)

    def property(self, cls: type, name: str, value: property, place: str) -> None:
        """Take a property of a module's class or of a dataclass."""
        text = f"{cls.__name__}.{name}"
        if not (id(cls) in self.of_modules or "__dataclass_fields__" in vars(cls) or self.is_optimizer(cls)):
            raise Refused(f"reads the property `{text}` ({place}): {_ADVICE}")
        self.entries.append(Entry(cls, "class", name, value, text))
        self.queue += ((each, text, place) for each in (value.fget, value.fset) if each is not None)

    @staticmethod
    def is_optimizer(cls: type) -> bool:
        return any(base.__module__ == "mlx.optimizers.optimizers" for base in cls.__mro__)

    def visit(self, value: Any, name: str, place: str) -> None:
        """Search one object, whose own place is watched."""
        if id(value) in self.seen or is_constant(value) or value is ABSENT or type(value) is mx.array:
            return
        if is_trusted(value):
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
            self.queue += ((value.func, name, place), (value.args, name, place), (value.keywords, name, place))
        elif kind is TRANSFORMED or kind is mx.custom_function:
            self.transformed(value, name, place)
        elif kind in (dict, list, tuple):
            self.container(value, name, place)
        elif is_a(value, nn.Module):
            self.module(value, name, place)
        elif is_a(value, type):
            self.made.add(id(value))
            self.read_class(value, place, value, name)
        elif is_a(value, enum.Enum):
            self.read_class(kind, place, value, name)
            self.holders.append(self.instance_dict(value, name))
            self.add(value, "attribute", "_value_", value._value_, f"{name}.value", place)
        else:
            self.instance(value, name, place)

    def transformed(self, value: Any, name: str, place: str) -> None:
        """Take the Python functions inside what `mx.compile` or `mx.grad` returns."""
        inner = inner_functions(value)
        if inner is None:
            raise Refused(f"calls `{name}`, which MLX has transformed with arrays of its own ({place})")
        self.queue += ((each, name, place) for each in inner)

    def container(self, value: Any, name: str, place: str) -> None:
        """Watch a dict, a list or a tuple whole."""
        if len(value) > _MAX_ITEMS:
            raise Refused(f"reads `{name}` with {len(value):,} items ({place}): pass it as an argument")
        if type(value) is tuple:
            for at, each in enumerate(value):
                if not is_constant(each):
                    self.add(value, "index", at, each, f"{name}[{at}]", place)
        elif type(value) is list:
            self.entries.append(Entry(value, "length", None, len(value), f"len({name})"))
            for at, each in enumerate(value):
                self.add(value, "index", at, each, f"{name}[{at}]", place)
        else:
            self.items(value, "{}[{!r}]", name, place)

    def items(self, value: dict[Any, Any], form: str, name: str, place: str) -> None:
        """Watch the keys and items of a dict or of a module."""
        if not all(map(is_key, value)):
            raise Refused(f"reads the dict `{name}`, whose keys are objects ({place}): {_ADVICE}")
        self.entries.append(Entry(value, "keys", None, tuple(value), f"the keys of {name}"))
        for key, each in dict.items(value):
            self.add(value, "item", key, each, form.format(name, key), place)

    def module(self, value: Any, name: str, place: str) -> None:
        """Watch a module that is not in the model: a teacher."""
        self.entries.append(Entry(value, "type", None, type(value), f"type({name})"))
        self.items(value, "{}.{}", name, place)
        is_open = self.class_of_module(value, name, place)
        holder = self.instance_dict(value, name)
        self.holders.append(holder._replace(done={"_no_grad"}, is_open=is_open))

    def class_of_module(self, value: Any, name: str, place: str) -> bool:
        """Read the class of a module; returns whether MLX's code reads all its attributes."""
        cls = type(value)
        self.read_class(cls, place, value, name)
        return any(owner(base.__module__) == "mlx" and base is not nn.Module for base in cls.__mro__)

    def instance(self, value: Any, name: str, place: str) -> None:
        """Watch a plain object of a user's class."""
        cls = type(value)
        foreign = is_a(value, BaseException) or any(owner(base.__module__) == "mlx" for base in cls.__mro__)
        if foreign or not self.is_read_package(cls.__module__):
            self.refuse(value, name, place)
        self.read_class(cls, place, value, name)
        if is_a(value, tuple):
            for at, each in enumerate(tuple.__iter__(value)):
                self.add(value, "index", at, each, f"{name}[{at}]", place)
            return
        if cls.__dictoffset__ == 0:
            self.refuse(value, name, place)
        self.entries.append(Entry(value, "type", None, cls, f"type({name})"))
        self.holders.append(self.instance_dict(value, name))

    def instance_dict(self, value: Any, name: str) -> Holder:
        own = object.__getattribute__(value, "__dict__")
        self.entries.append(Entry(value, "dict", None, own, f"{name}.__dict__"))
        self.entries.append(Entry(own, "keys", None, tuple(own), f"the attributes of {name}"))
        return Holder(value, "attribute", own, name, {"__wrapped__"}, is_open=False, in_model=False)

    def is_read_package(self, module: str) -> bool:
        root = module.partition(".")[0]
        return root in self.readable or owner(module) == "user"

    def read_class(self, cls: type, place: str, value: Any, name: str) -> None:
        """Watch the functions and attributes of a class and of its bases, as far as code names them."""
        if issubclass(cls, nn.Module):
            self.of_modules.update(map(id, cls.__mro__))
        for base in cls.__mro__:
            if id(base) in self.classes or base in _BASES or (base is dict and issubclass(cls, nn.Module)):
                continue
            if base.__module__ == "enum" or (base.__module__ == "builtins" and issubclass(base, BaseException)):
                continue
            if owner(base.__module__) != "mlx":  # whose modules have a `__getattr__`, which reads their items
                if not self.is_read_package(base.__module__):
                    self.refuse(value, name, place)
                self.check_class(base, place, self.shown.get(id(value), name))
            self.classes.add(id(base))
            own = vars(base)
            self.entries.append(Entry(base, "mro", None, base.__mro__, f"the bases of {base.__name__}"))
            self.entries.append(Entry(base, "length", None, len(own), f"the attributes of {base.__name__}"))
            self.holders.append(Holder(base, "class", own, base.__name__, set(), is_open=False, in_model=False))

    def check_class(self, cls: type, place: str, text: str) -> None:
        """Refuse a class whose objects are no plain ones."""
        own, of = vars(cls), f"reads `{text}` of the class {cls.__name__}"
        frozen = getattr(own.get("__dataclass_params__"), "frozen", False)
        for hook in _HOOKS:
            is_descriptor = type(own.get(hook)) is types.GetSetDescriptorType
            if hook in own and not is_descriptor and not (frozen and hook in ("__setattr__", "__delattr__")):
                raise Refused(f"{of}, which has a `{hook}` ({place}): {_ADVICE}")
        if own.get("__slots__") and not issubclass(cls, tuple):
            raise Refused(f"{of}, which has `__slots__` ({place}): {_ADVICE}")
        if type(cls) not in _METACLASSES:
            raise Refused(f"{of}, which has a metaclass ({place}): {_ADVICE}")

    def function(self, function: Any, parent: Any, name: str, place: str) -> None:
        """Read a function; `parent` is None for the loss function of the current call."""
        module = module_of(function)
        if owner(module) == "mlx" or module.startswith("faststep._"):  # which replaces a property of MLX's optimizers
            self.cells(function, parent, name, place)
            return
        if is_trusted(function):
            return
        if not self.is_read_package(module) or getattr(function, "__builtins__", None) is not vars(builtins):
            self.refuse(function, name, place)
        facts = _code.read(function.__code__)
        if facts.refusal is not None:
            raise Refused(facts.refusal)
        for variable, where in facts.cells:
            raise Refused(f"stores `{variable}` ({where})")
        self.entries.append(Entry(parent, "code", None, function.__code__, f"the code of {name}"))
        self.codes.update(dict.fromkeys(facts.codes))
        for attribute, where in facts.attributes.items():
            self.names.setdefault(attribute, where)
        if parent is not None:
            self.holders.append(self.instance_dict(function, name))
        self.defaults(function, parent, name, place)
        for chain in facts.chains:
            if chain.kind == "cell":
                cell = function.__closure__[function.__code__.co_freevars.index(chain.name)]
                self.follow(_contents(cell), chain)
        self.cells(function, parent, name, place)
        for chain in facts.chains:
            if chain.kind != "cell":
                self.read_chain(function, parent, chain)

    def cells(self, function: Any, parent: Any, name: str, place: str) -> None:
        """Watch the variables of outer functions."""
        for at, cell in enumerate(function.__closure__ or ()):
            value, variable = _contents(cell), function.__code__.co_freevars[at]
            if is_a(value, types.ModuleType):
                self.entries.append(Entry(parent, "cell", at, value, variable))
            else:
                self.add(parent, "cell", at, value, variable, place)

    def defaults(self, function: Any, parent: Any, name: str, place: str) -> None:
        """Watch the defaults of a function's arguments."""
        count = len(function.__defaults__ or ())
        positional = function.__code__.co_varnames[: function.__code__.co_argcount]
        for at, value in enumerate(function.__defaults__ or ()):
            self.add(parent, "default", at, value, f"{name}({positional[at - count]})", place)
        for key, value in (function.__kwdefaults__ or {}).items():
            self.add(parent, "kwdefault", key, value, f"{name}({key})", place)

    def read_chain(self, function: Any, parent: Any, chain: _code.Chain) -> None:
        """Watch a global, or take what is imported inside a function."""
        if chain.kind == "import":
            if chain.name not in sys.modules:
                raise Refused(f"imports `{chain.name}` inside a function ({chain.place})")
            module = sys.modules[chain.name]
            self.add_once(sys.modules, Entry(sys.modules, "item", chain.name, module, chain.name))
            self.follow(module, chain)
            return
        known = function.__globals__
        value = known.get(chain.name, getattr(builtins, chain.name, ABSENT))
        entry = Entry(parent, "global", chain.name, value, chain.name)
        self.add_once(None if parent is None else known, entry)
        value = self.follow(value, chain)
        if not is_constant(value) and value is not ABSENT and type(value) is not mx.array:
            self.queue.append((value, chain.name if value is known.get(chain.name) else chain.text, chain.place))

    def add_once(self, names: dict[str, Any] | None, entry: Entry) -> bool:
        """Add an entry for a name in a module or in globals, unless there is one."""
        at = (id(names), entry.key)
        is_new = at not in self.globals
        if is_new:
            self.globals.add(at)
            self.entries.append(entry)
        return is_new

    def follow(self, value: Any, chain: _code.Chain) -> Any:
        """Follow the attributes of modules: `mx.random.normal`; returns the first object that is no module."""
        attributes = list(chain.attributes)
        while is_a(value, types.ModuleType):
            if not attributes:
                raise Refused(f"uses the module `{chain.text}` other than by its names ({chain.place})")
            name, own = attributes.pop(0), vars(value)
            if name not in own or type(value) is not types.ModuleType:
                raise Refused(
                    f"reads `{chain.text}`, which the module `{value.__name__}` finds by code ({chain.place})"
                )
            module, value = value, own[name]
            if name == "__name__":
                return value
            if not is_a(value, types.ModuleType):
                self.check_module(module, value, chain)
            if not is_a(value, types.ModuleType) and chain.kind != "global":
                self.queue.append((value, chain.text, chain.place))
            self.add_once(own, Entry(own, "item", name, value, chain.text))
        self.shown.setdefault(id(value), chain.text)
        return value

    def check_module(self, module: Any, value: Any, chain: _code.Chain) -> None:
        """Refuse what is read from a module of Python's or an installed package's."""
        known = owner(module.__name__) == "mlx" or self.is_read_package(module.__name__)
        if not (known or is_trusted(value) or is_constant(value)):
            self.refuse(value, chain.text, chain.place, module.__name__)

    def refuse(self, value: Any, name: str, place: str, module: str = "") -> typing.NoReturn:
        """Refuse an object, and say what can be done."""
        text = self.shown.get(id(value), name)
        if is_a(value, np.ndarray):
            raise Refused(f"reads the NumPy array `{text}` ({place}): make it an `mx.array`, or pass it as an argument")
        if is_a(value, types.ModuleType):
            raise Refused(f"keeps the module `{value.__name__}` in `{text}` ({place})")
        is_function = is_a(value, (types.FunctionType, types.BuiltinFunctionType, type))
        if callable(value) and (is_function or module or type(value).__module__ == "nanobind"):
            called = f"{module}.{text.rpartition('.')[2]}" if module else described(value)
            raise Refused(f"calls {called} ({place})")
        cls = type(value)
        root = (module or cls.__module__).partition(".")[0]
        of = root if root not in ("builtins", "__main__") and not self.is_read_package(root) else f"type {cls.__name__}"
        raise Refused(f"reads `{text}` of {of} ({place}): {_ADVICE}")


def _contents(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return ABSENT
