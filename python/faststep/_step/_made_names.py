"""The names that code gives `getattr`: a constant, or a text that it makes of constants and others."""

from __future__ import annotations

import dis
import functools
import itertools
import re
import types
from collections.abc import Sequence

_CALL = next(name for name in ("PRECALL", "CALL", "CALL_FUNCTION") if name in dis.opmap)  # the arguments are complete
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


@functools.lru_cache(maxsize=4096)
def made_names(code: types.CodeType) -> frozenset[str] | None:
    """Return patterns of the names that code makes for `getattr`; None: it may give it any name.

    A constant name needs no pattern. The code of functions that are made by this one is not looked at.
    """
    instructions = list(dis.get_instructions(code))
    patterns = set[str]()
    for at, instruction in enumerate(instructions):
        if instruction.argval == "getattr" and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            pattern = _pattern(instructions[at + 1 :])
            if pattern is None:
                return None
            patterns.add(pattern)
    return frozenset(patterns - {""})


def _pattern(behind: Sequence[dis.Instruction]) -> str | None:
    """Return the pattern of the name in a call whose arguments these instructions begin with; "": a constant."""
    depths = list[int]()
    for instruction in behind:
        depth = depths[-1] if depths else 0
        if instruction.is_jump_target or instruction.opcode in _JUMPS or depth < 0:
            return None
        if instruction.opname == _CALL and instruction.arg == depth and depth in (2, 3):
            break
        argument = instruction.arg if instruction.opcode >= dis.HAVE_ARGUMENT else None
        depths.append(depth + dis.stack_effect(instruction.opcode, argument, jump=False))
    else:
        return None
    arguments = _operands(depths, len(depths), depths[-1])
    return _of_text(behind, depths, *arguments[1])


def _operands(depths: Sequence[int], end: int, count: int) -> list[tuple[int, int]]:
    """Return where the instructions of each of the last values on the stack begin and end: an empty part, not known."""
    base = depths[end - 1] - count
    ends = [max((at for at in range(end) if depths[at] == base), default=-1)]
    for level in range(base + 1, base + count + 1):
        ends.append(max((at for at in range(end) if depths[at] == level), default=ends[-1]))
    return [(first + 1, last + 1) for first, last in itertools.pairwise(ends)]


def _of_text(instructions: Sequence[dis.Instruction], depths: Sequence[int], begin: int, end: int) -> str | None:
    """Return the pattern of a text that instructions make; "": a constant; None: it may be any."""
    if begin >= end:
        return None
    last = instructions[end - 1]
    if last.opname == "LOAD_CONST" and end - begin == 1:
        return "" if isinstance(last.argval, str) else None
    joins = last.opname == "BUILD_STRING" or (last.opname in ("BINARY_OP", "BINARY_ADD") and _adds(last))
    if not joins or end - begin < 2:
        return None
    count = (last.arg or 0) if last.opname == "BUILD_STRING" else 2
    pieces = list[str]()
    for first, behind in _operands(depths, end - 1, count):
        constant = instructions[first].argval if behind - first == 1 else None
        if isinstance(constant, str) and instructions[first].opname == "LOAD_CONST":
            pieces.append(re.escape(constant))
        else:
            pieces.append(_of_text(instructions, depths, first, behind) or ".*")
    return "".join(pieces) if set(pieces) != {".*"} else None


def _adds(instruction: dis.Instruction) -> bool:
    return instruction.opname == "BINARY_ADD" or instruction.argrepr == "+"
