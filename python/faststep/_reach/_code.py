"""Names in Python code: attributes, globals, cells, imports, and what is refused by its instructions alone."""

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

    kind: str  # "global", "cell", or "import": then `name` is a module's full name
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
    cells: tuple[tuple[str, str], ...]  # variables of outer functions that are stored, and the place
    codes: tuple[types.CodeType, ...]
    refusal: str | None


_NOTHING = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PUSH_NULL", "PRECALL", "COPY_FREE_VARS", "MAKE_CELL"})
_GLOBAL = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})
_CELL = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_ATTRIBUTE = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_SUPER = frozenset({"LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD"})
_CALL = frozenset({"CALL", "CALL_FUNCTION"})
_REFUSED = {
    "STORE_GLOBAL": "stores `{}`",
    "DELETE_GLOBAL": "deletes `{}`",
    "DELETE_DEREF": "deletes `{}`",
    "DELETE_ATTR": "deletes an attribute `{}`",
    "DELETE_SUBSCR": "deletes an item",
    "LOAD_BUILD_CLASS": "makes a class",
    "MATCH_CLASS": "matches a class",
    "IMPORT_STAR": "imports `*`",
    "GET_AWAITABLE": "awaits",
    "GET_AITER": "awaits",
    "BEFORE_ASYNC_WITH": "awaits",
}
_REFUSED_NAMES = frozenset(
    {
        *("__dict__", "__globals__", "__builtins__", "__code__", "__closure__", "__getattribute__", "__getattr__"),
        *("__subclasses__", "__weakref__", "__reduce__", "__reduce_ex__", "__traceback__", "__context__"),
        *("tb_frame", "gi_frame", "cr_frame", "f_back", "f_locals", "f_globals"),
        *(
            "__annotations__",
            "__doc__",
            "__defaults__",
            "__kwdefaults__",
            "__wrapped__",
            "load_weights",
            "save_weights",
        ),
        *("format", "format_map"),  # whose texts may name attributes
    }
)


@functools.lru_cache(maxsize=4096)
def read(code: types.CodeType) -> Facts:
    """Read the code of a function, with that of the functions inside it."""
    steps = list(_steps(code))
    imported = dict(_imports(code, steps))
    chains = list(_chains(code, steps, imported))
    attributes, cells = dict[str, str](), list[tuple[str, str]]()
    refusal = _refusal(code, steps)
    for step in steps:
        if step.op in _ATTRIBUTE or step.op in _SUPER or step.op == "STORE_ATTR":
            attributes.setdefault(str(step.arg), place(code, step.line))
        if step.op == "STORE_DEREF" and step.arg in code.co_freevars:
            cells.append((str(step.arg), place(code, step.line)))
    for name, where in _literals(code, steps):
        attributes.setdefault(name, where)
    codes = [code]
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = read(constant)
            own = code.co_cellvars
            chains += (each for each in inner.chains if each.kind != "cell" or each.name not in own)
            cells += (each for each in inner.cells if each[0] not in own)
            attributes = {**inner.attributes, **attributes}
            codes += inner.codes
            refusal = refusal or inner.refusal
    return Facts(tuple(dict.fromkeys(chains)), attributes, tuple(cells), tuple(codes), refusal)


def place(code: types.CodeType, line: int) -> str:
    """Return a line as `train.py:31`."""
    return f"{os.path.basename(code.co_filename)}:{line}"  # noqa: PTH119, a cell of a notebook has no path


def _steps(code: types.CodeType) -> Iterator[Step]:
    """Yield the instructions that do something; those that Python 3.13 has joined are taken apart."""
    line = code.co_firstlineno
    for each in dis.get_instructions(code):
        starts = getattr(each, "line_number", each.starts_line)  # from Python 3.13 on `starts_line` is a flag
        line = starts or line
        joined = each.opname.split("_FAST")
        if each.opname in _NOTHING:
            continue
        if isinstance(each.argval, tuple) and len(joined) == 3 and each.opname != "LOAD_CONST":
            for op, name in zip(joined, each.argval, strict=False):
                yield Step(f"{op.strip('_')}_FAST", name, line)
        else:
            yield Step(each.opname, each.argval, line)


def _behind(steps: list[Step], at: int) -> tuple[str, ...]:
    """Return the attributes that are loaded from what an instruction has loaded."""
    found = []
    for step in steps[at + 1 :]:
        if step.op not in _ATTRIBUTE:
            break
        found.append(str(step.arg))
    return tuple(found)


def _chains(code: types.CodeType, steps: list[Step], imported: dict[str, tuple[str, ...]]) -> Iterator[Chain]:
    """Yield the reads of globals, of outer variables and of what is imported inside the function."""
    for at, step in enumerate(steps):
        name, where = str(step.arg), place(code, step.line)
        if step.op in _GLOBAL:
            yield Chain("global", name, _behind(steps, at), where)
        elif step.op in _CELL and name in code.co_freevars:
            yield Chain("cell", name, _behind(steps, at), where)
        elif step.op.startswith("LOAD_FAST") and name in imported:
            module, *attributes = imported[name]
            yield Chain("import", module, (*attributes, *_behind(steps, at)), where)
        elif step.op == "IMPORT_NAME":
            yield Chain("import", name, ("__name__",), where)


def _imports(code: types.CodeType, steps: list[Step]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the local variables of imports: each with the module's full name, and an attribute for `from` imports."""
    module, given, attribute = "", False, ""
    for at, step in enumerate(steps):
        if step.op == "IMPORT_NAME":
            module, given, attribute = str(step.arg), steps[at - 1].arg is not None, ""
        elif step.op == "IMPORT_FROM":
            attribute = str(step.arg)
        elif step.op == "STORE_FAST" and module and steps[at - 1].op.startswith(("IMPORT", "POP", "SWAP", "ROT")):
            if steps[at - 1].op == "IMPORT_NAME":
                yield str(step.arg), (module.split(".")[0],)
            elif given:
                yield str(step.arg), (module, attribute)
            else:
                yield str(step.arg), (module,)


def _refusal(code: types.CodeType, steps: list[Step]) -> str | None:
    """Return why no function with such code is taken."""
    for at, step in enumerate(steps):
        where = place(code, step.line)
        if step.op in _REFUSED:
            return f"{_REFUSED[step.op].format(step.arg)} ({where})"
        if step.op in _ATTRIBUTE and step.arg in _REFUSED_NAMES:
            return f"reads `{step.arg}` of an object ({where})"
        if step.op in _ATTRIBUTE and step.arg in ("__setattr__", "__delattr__") and code.co_filename != "<string>":
            return f"calls `{step.arg}` of an object ({where})"  # Python's own code for frozen dataclasses may
        if step.op == "IMPORT_NAME" and (steps[at - 2].arg != 0 or _is_kept(steps, at)):
            return f"imports `{step.arg or '.'}` inside a function ({where})"
        if step.op in _GLOBAL and step.arg in ("getattr", "hasattr") and _literal(steps, at) is None:
            return f"calls {step.arg} with a name that is no constant ({where})"
    return None


def _is_kept(steps: list[Step], at: int) -> bool:
    """True if an import is stored elsewhere than in local variables."""
    for step in steps[at + 1 :]:
        if step.op.startswith("STORE"):
            return step.op != "STORE_FAST"
    return False


def _literals(code: types.CodeType, steps: list[Step]) -> Iterator[tuple[str, str]]:
    """Yield the names in `getattr(x, "name")` and `hasattr(x, "name")`."""
    for at, step in enumerate(steps):
        if step.op in _GLOBAL and step.arg in ("getattr", "hasattr"):
            name = _literal(steps, at)
            if name is not None:
                yield name, place(code, step.line)


def _literal(steps: list[Step], at: int) -> str | None:
    """Return the constant name of a call of `getattr` whose arguments are plain loads; None for any other."""
    values: list[object] = []
    for step in steps[at + 1 :]:
        if step.op in _CALL and step.arg == len(values) and len(values) in (2, 3):
            return values[1] if isinstance(values[1], str) and values[1] not in _REFUSED_NAMES else None
        if step.op.startswith(("LOAD_CONST", "LOAD_SMALL_INT")):
            values.append(step.arg)
        elif step.op.startswith("LOAD_FAST") or step.op in _CELL or step.op in _GLOBAL:
            values.append(None)
        elif step.op not in _ATTRIBUTE:
            return None
    return None
