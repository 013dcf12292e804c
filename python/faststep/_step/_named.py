"""Names that code has for what it reads: globals, attributes and modules, in constants too."""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import string
import types
import warnings
from collections.abc import Iterable

from faststep._step._made_names import made_names

_NAMES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL", "DELETE_GLOBAL")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "LOAD_SUPER_METHOD", "IMPORT_FROM")
_CHANGES = ("STORE_ATTR", "DELETE_ATTR")
_OF_DATACLASSES = ("__eq__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__", "__setattr__", "__delattr__")
_OF_NEW = ("__init__", "__post_init__")  # what they store is in an object that was not there before
MAKERS = (*_OF_NEW, "__new__")
# what makes a key that is no name, and is known
_KEYS = ("LOAD_CONST", "LOAD_SMALL_INT", "BUILD_SLICE", "BUILD_TUPLE", "UNARY_NEGATIVE")
# what makes the second part of a `|` or `%` that takes nothing of a dict: a mask, a number
_TAKES_NOTHING = ("COMPARE_OP", "LOAD_CONST", "LOAD_SMALL_INT")
_WHOLE = ("DICT_MERGE", "DICT_UPDATE", "MATCH_MAPPING", "BUILD_MAP_UNPACK")  # of mappings
# functions that may read any attribute
DYNAMIC = frozenset(
    {"getattr", "vars", "__dict__", "__getattribute__", "eval", "exec", "attrgetter", "methodcaller", "getmembers"}
    | {"getattr_static", "__reduce__", "__reduce_ex__", "__getstate__", "format_map", "dumps"}
)
# those that find a global or a module by a name that they are given
_OF_GLOBALS = frozenset({"eval", "exec", "globals"})
_OF_MODULES = frozenset({"import_module", "__import__"})
# methods that Python calls for one of these names alone
_OF_TEXT = frozenset({"repr", "str", "format", "print", "ascii"})
CALLED_BY = {
    "__len__": frozenset({"len", "bool", "list", "tuple", "sorted", "enumerate", "reversed"}),
    **dict.fromkeys(("__repr__", "__str__", "__format__"), _OF_TEXT),
}
# by which code makes an object of the class of another one
COPIES = frozenset({"type", "__class__", "copy", "deepcopy", "replace", "__reduce__", "__reduce_ex__", "loads"})
# what puts a constant, or a class that is built in, before a question whether two objects are one
_KNOWN = ("LOAD_CONST", "LOAD_SMALL_INT", "LOAD_COMMON_CONSTANT")
_BUILTINS = frozenset(vars(builtins))
_OF_SHAPES = frozenset({"shape", "ndim", "dtype", "size", "itemsize", "nbytes"})  # of arrays, in messages
_IS = frozenset({"is_", "is_not"})  # the same question as a function
LOOKUPS = _OF_GLOBALS | _OF_MODULES | {"f_globals"}


@functools.lru_cache(maxsize=4096)
def named(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str], bool]:
    """Return the globals, the attributes and the modules that code names, and whether it may read any attribute."""
    names, attributes, modules = set(), set(), set()
    made = _made(code)
    before = list[dis.Instruction]()
    for instruction in dis.get_instructions(code):
        before = [*before[-3:], instruction]
        if instruction.opname in _NAMES:
            names.add(instruction.argval)
        elif instruction.offset in made:
            continue
        elif instruction.opname in _ATTRIBUTES:
            attributes.add(instruction.argval)
        elif instruction.opname in _CHANGES and code.co_name not in _OF_NEW:
            attributes.add(instruction.argval)
        elif instruction.opname.startswith("FORMAT_"):
            if not _is_of_shape(before):
                names.add("format")
        elif instruction.opname == "IMPORT_NAME":
            modules |= {instruction.argval, instruction.argval.split(".")[0]}
    dynamic = bool(DYNAMIC & ((names - {"getattr"}) | attributes)) or made_names(code) is None
    constants = list(texts(code.co_consts))
    if LOOKUPS & (names | attributes) or ("modules" in attributes and "sys" in names | modules):
        names |= {name for text in constants for name in _names_in(text)}
        modules |= set(constants)
    attributes |= {name for text in constants for name in attributes_in(text)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_attributes, inner_modules, inner_dynamic = named(constant)
            names |= inner_names
            attributes |= inner_attributes
            modules |= inner_modules
            dynamic |= inner_dynamic
    if code.co_name in _OF_DATACLASSES and _is_of_dataclass(code):  # which ask for the class to compare it
        names.discard("type")
        attributes.discard("__class__")
    return frozenset(names), frozenset(attributes), frozenset(modules), dynamic


def _is_of_dataclass(code: types.CodeType) -> bool:
    """Return whether `dataclasses` has made the code; Python 3.10 does not tell by what function it was made."""
    made_by = getattr(code, "co_qualname", "__create_fn__")
    return code.co_filename == "<string>" and made_by.startswith("__create_fn__")


def _is_of_shape(last: list[dis.Instruction]) -> bool:
    """Return whether what the last instruction makes a text is a shape, a size of it or the like."""
    *before, end = last
    if len(before) > 2 and _is_subscript(before[-1]) and before[-2].opname in _KEYS:
        *before, key, subscript = before
        if key.is_jump_target or subscript.is_jump_target:
            return False  # of one of several
    known = bool(before) and before[-1].opname == "LOAD_ATTR" and before[-1].argval in _OF_SHAPES
    return known and not end.is_jump_target


def _is_subscript(instruction: dis.Instruction) -> bool:
    name = instruction.opname
    return name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]")


@functools.lru_cache(maxsize=4096)
def on_globals(code: types.CodeType) -> tuple[frozenset[tuple[str, ...]], frozenset[str]]:
    """Return the globals of code with the names read behind each (`nn.losses.mse_loss`), and other attributes."""
    chains, others, chain = set[tuple[str, ...]](), set[str](), tuple[str, ...]()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _NAMES:
            chain = (instruction.argval,)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and chain:
            chain = (*chain, instruction.argval)
            chains.add(chain)
        else:
            chain = ()
            if instruction.opname in (*_ATTRIBUTES, *_CHANGES):
                others.add(instruction.argval)
    others |= {name for text in texts(code.co_consts) for name in attributes_in(text)}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_chains, inner_others = on_globals(constant)
            chains |= inner_chains
            others |= inner_others
    return frozenset(chains), frozenset(others)


def _made(code: types.CodeType) -> set[int]:
    """Return where a maker reads private attributes that it gives the new object: by offset."""
    if code.co_name not in _OF_NEW or not code.co_argcount:
        return set()
    given, owner = set(), False
    read = dict[int, str]()
    for instruction in dis.get_instructions(code):
        name = instruction.argval
        if owner and instruction.opname == "STORE_ATTR" and name.startswith("_"):
            given.add(name)
        elif owner and instruction.opname == "LOAD_ATTR":
            read[instruction.offset] = name
        last = name[-1:] == code.co_varnames[:1] if isinstance(name, tuple) else name == code.co_varnames[0]
        owner = instruction.opname.startswith("LOAD_FAST") and last  # of two, from Python 3.13 on
    return {offset for offset, name in read.items() if name in given}


def asked(names: frozenset[str], attributes: frozenset[str], modules: frozenset[str]) -> tuple[bool, bool]:
    """Return whether code with these names may ask for any global, and for any module."""
    of_modules = bool(_OF_MODULES & (names | attributes)) or ("modules" in attributes and "sys" in names | modules)
    return bool(_OF_GLOBALS & names) or "f_globals" in attributes, of_modules


@functools.lru_cache(maxsize=4096)
def names_of_others(code: types.CodeType, name: str) -> bool:
    """Return whether code names an attribute otherwise than as `self.name`."""
    if name in texts(code.co_consts):
        return True
    of_self = False
    for instruction in dis.get_instructions(code):
        if instruction.argval == name and not (of_self and instruction.opname in ("LOAD_ATTR", "STORE_ATTR")):
            return True
        of_self = instruction.opname in ("LOAD_FAST", "LOAD_FAST_BORROW") and instruction.argval == "self"
    return any(names_of_others(each, name) for each in code.co_consts if isinstance(each, types.CodeType))


def _named_arguments(code: types.CodeType) -> str:
    """Return the name of a function's `**arguments`; an empty text where it has none, or gives that another value."""
    if not code.co_flags & inspect.CO_VARKEYWORDS:
        return ""
    name = code.co_varnames[code.co_argcount + code.co_kwonlyargcount + bool(code.co_flags & inspect.CO_VARARGS)]
    stores = (each for each in dis.get_instructions(code) if each.opname.startswith("STORE_FAST"))
    return "" if any(name in str(each.argval) for each in stores) else name


@functools.lru_cache(maxsize=4096)
def asks_for_items(code: types.CodeType) -> bool:
    """Return whether code may read an item of a dict under a key that it does not name, or all of them."""
    last, loaded = "", None
    for instruction in dis.get_instructions(code):
        name = instruction.opname
        if instruction.is_jump_target:
            last = ""  # one of several
        if name == "DICT_MERGE" and last == "LOAD_FAST" and loaded == _named_arguments(code):
            continue  # they are no model's items, unless another call has made them so
        if (_is_subscript(instruction) and last not in _KEYS) or name in _WHOLE:
            return True
        binary = name in ("BINARY_OP", "BINARY_OR", "BINARY_MODULO")
        joins = binary and instruction.argrepr.rstrip("=") in ("|", "%", "")
        if joins and last not in _TAKES_NOTHING:
            return True
        last, loaded = name, instruction.argval
    return any(asks_for_items(each) for each in code.co_consts if isinstance(each, types.CodeType))


@functools.lru_cache(maxsize=4096)
def tells_apart(code: types.CodeType) -> bool:
    """Return whether code may ask whether two objects are one of which it knows neither."""
    last, loaded = "", None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "IS_OP" and last not in _KNOWN and not (last == "LOAD_GLOBAL" and loaded in _BUILTINS):
            return True
        last, loaded = instruction.opname, instruction.argval
    names, attributes, *_ = named(code)
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return not _IS.isdisjoint(names | attributes) or any(map(tells_apart, inner))


def codes_of(code: types.CodeType) -> Iterable[types.CodeType]:
    """Return code and that of the functions that it makes."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from codes_of(constant)


def texts(constants: Iterable[object]) -> Iterable[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):  # the names in a pattern of `match`, say
            yield from texts(constant)


def attributes_in(text: str) -> Iterable[str]:
    """Return the attributes that a constant may name: "weight", "layer.weight" or "{0.weight}"."""
    if all(part.isidentifier() for part in text.split(".")):
        return text.split(".")
    try:
        fields = [field for _, field, _, _ in string.Formatter().parse(text) if field] if "{" in text else []
    except ValueError:
        return []
    return [part for field in fields for part in field.replace("[", ".").split(".") if part.isidentifier()]


def _names_in(text: str) -> Iterable[str]:
    """Return the globals that a constant may name, which may be Python code."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return named(compile(text.strip(), "<constant>", "exec"))[0]
    except (SyntaxError, ValueError):
        return []
