"""Names in Python code: globals, variables of outer functions, attributes, and what its instructions alone refuse."""

from __future__ import annotations

import dis
import functools
import os
import types
from collections.abc import Iterator
from typing import NamedTuple


class Step(NamedTuple):
    """One instruction."""

    op: str
    arg: object
    line: int


class Chain(NamedTuple):
    """One read of a variable with the attributes behind it: `cfg.loss.beta`."""

    is_cell: bool  # a variable of an outer function, no global
    name: str
    attributes: tuple[str, ...]
    place: str

    @property
    def text(self) -> str:
        """The words of the program."""
        return ".".join((self.name, *self.attributes))


class Facts(NamedTuple):
    """Facts about a function's code and the code inside it."""

    chains: tuple[Chain, ...]
    attributes: dict[str, str]  # names that are loaded or stored, and the place of the first of each
    codes: tuple[types.CodeType, ...]
    refusal: str | None


_NOTHING = frozenset({"EXTENDED_ARG", "NOP", "PUSH_NULL", "PRECALL"})
_LOADED = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_NAMED = _LOADED | {"LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "STORE_ATTR"}
_BY_NAME = frozenset({"getattr", "hasattr"})
_REFUSED = {
    "STORE_GLOBAL": "stores `{}`",
    "DELETE_GLOBAL": "deletes `{}`",
    "DELETE_DEREF": "deletes `{}`",
    "DELETE_ATTR": "deletes an attribute `{}`",
    "DELETE_SUBSCR": "deletes an item",
    "LOAD_BUILD_CLASS": "makes a class",
    "MATCH_CLASS": "matches a class",
    "IMPORT_NAME": "imports `{}` inside a function",
    "GET_AWAITABLE": "awaits",
    "GET_AITER": "awaits",
    "BEFORE_ASYNC_WITH": "awaits",
}
_REFUSED_NAMES = frozenset(
    "__dict__ __globals__ __builtins__ __code__ __closure__ __getattribute__ __getattr__ __subclasses__ __weakref__ "
    "__reduce__ __reduce_ex__ __traceback__ __context__ __annotations__ __doc__ __defaults__ __kwdefaults__ "
    "__wrapped__ __self__ tb_frame gi_frame cr_frame f_back f_locals f_globals load_weights save_weights "
    "format format_map".split()  # whose texts may name attributes
)
_SETTERS = frozenset({"__setattr__", "__delattr__"})


@functools.lru_cache(maxsize=4096)
def read(code: types.CodeType) -> Facts:
    """Read the code of a function, with that of the functions inside it."""
    steps = list(_steps(code))
    chains, attributes, codes, refusal = list[Chain](), dict[str, str](), [code], None
    for at, step in enumerate(steps):
        name, where = str(step.arg), place(code, step.line)
        is_cell = step.op == "LOAD_DEREF" and name in code.co_freevars
        if is_cell or step.op == "LOAD_GLOBAL":
            chains.append(Chain(is_cell, name, _behind(steps, at), where))
        if step.op in _NAMED:
            attributes.setdefault(name, where)
        refused = _refusal(code, step, name)
        if step.op == "LOAD_GLOBAL" and name in _BY_NAME:
            literal = _literal(steps, at)
            attributes.setdefault(literal or "", where)
            refused = None if literal else f"calls {name} with a name that is no constant"
        if refused and not refusal:
            refusal = f"{refused} ({where})"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = read(constant)
            chains += (each for each in inner.chains if not (each.is_cell and each.name in code.co_cellvars))
            attributes = {**inner.attributes, **attributes}
            codes += inner.codes
            refusal = refusal or inner.refusal
    return Facts(tuple(dict.fromkeys(chains)), attributes, tuple(codes), refusal)


def place(code: types.CodeType, line: int) -> str:
    """Return a line as `train.py:31`."""
    return f"{os.path.basename(code.co_filename)}:{line}"  # noqa: PTH119, a cell of a notebook has no path


def _steps(code: types.CodeType) -> Iterator[Step]:
    """Yield the instructions that do something."""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        line = getattr(each, "line_number", each.starts_line) or line  # from 3.13 on `starts_line` is a flag
        if each.opname not in _NOTHING:
            yield Step(each.opname, each.argval, line)


def _behind(steps: list[Step], at: int) -> tuple[str, ...]:
    """Return the attributes that are loaded from what an instruction has loaded."""
    found = []
    for step in steps[at + 1 :]:
        if step.op not in _LOADED:
            break
        found.append(str(step.arg))
    return tuple(found)


def _refusal(code: types.CodeType, step: Step, name: str) -> str | None:
    """Return why no function with such an instruction is taken."""
    if step.op in _REFUSED:
        return _REFUSED[step.op].format(name)
    if step.op == "STORE_DEREF" and name in code.co_freevars:
        return f"stores `{name}`"
    if step.op in _NAMED and name in _REFUSED_NAMES:
        return f"reads `{name}` of an object"
    if step.op in _NAMED and name in _SETTERS and code.co_filename != "<string>":  # code of dataclasses
        return f"calls `{name}` of an object"
    return None


def _literal(steps: list[Step], at: int) -> str | None:
    """Return the constant name of a call of `getattr` whose arguments are plain loads; None for any other."""
    values: list[object] = []
    for step in steps[at + 1 :]:
        if step.op in ("CALL", "CALL_FUNCTION") and step.arg == len(values) and len(values) in (2, 3):
            return values[1] if isinstance(values[1], str) and values[1] not in _REFUSED_NAMES else None
        if step.op.startswith("LOAD_") and step.op not in _LOADED:
            values.append(step.arg if step.op == "LOAD_CONST" else None)
        elif step.op not in _LOADED:
            return None
    return None
