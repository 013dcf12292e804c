"""Compile one source by NVRTC, for `faststep._core`: several at a time in one process wait for each other.

A program, which Python's standard library is enough for::

    python -S _nvrtc.py LIBNVRTC < source > module

Both are lists of strings, each behind its length in 8 bytes: name and text; for headers, kernels and options their
number and as many strings, for headers text and name; whether the code is the device's own. The module: NVRTC's
status and its log, and where that is 0 the kernels' names for the linker and the code.
"""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Iterator


def main() -> None:
    """Read a source, write what it is compiled to."""
    nvrtc = ctypes.CDLL(sys.argv[1])
    given = strings(sys.stdin.buffer.read())
    name, text = next(given), next(given)
    headers = [(next(given), next(given)) for _ in range(int(next(given)))]
    kernels, options = ([next(given) for _ in range(int(next(given)))] for _ in range(2))
    code = "CUBIN" if int(next(given)) else "PTX"
    program = ctypes.c_void_p()
    texts, names = ([header[i] for header in headers] for i in range(2))
    status = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text, name, len(headers), listed(texts), listed(names))
    for kernel in kernels:
        status = status or nvrtc.nvrtcAddNameExpression(program, kernel)
    status = status or nvrtc.nvrtcCompileProgram(program, len(options), listed(options))
    made = [b"%d" % status, contents(nvrtc, program, "ProgramLog").partition(b"\0")[0]]
    for kernel in kernels if status == 0 else ():
        lowered = ctypes.c_char_p()
        if nvrtc.nvrtcGetLoweredName(program, kernel, ctypes.byref(lowered)) or lowered.value is None:
            raise SystemExit(f"NVRTC has no name for {kernel!r}")
        made.append(lowered.value)
    if status == 0:
        made.append(contents(nvrtc, program, code))
    sys.stdout.buffer.write(b"".join(struct.pack("=Q", len(each)) + each for each in made))


def strings(data: bytes) -> Iterator[bytes]:
    """Yield the strings that stand behind their lengths."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("=Q", data, at)
        yield data[at + 8 : at + 8 + length]
        at += 8 + length


def listed(texts: list[bytes]) -> ctypes.Array[ctypes.c_char_p]:
    """Return an array of C strings."""
    return (ctypes.c_char_p * len(texts))(*texts)


def contents(nvrtc: ctypes.CDLL, program: ctypes.c_void_p, what: str) -> bytes:
    """Return what NVRTC has of a program; nothing where it has none."""
    size = ctypes.c_size_t()
    if getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size)):
        return b""
    data = ctypes.create_string_buffer(size.value)
    return data.raw if getattr(nvrtc, f"nvrtcGet{what}")(program, data) == 0 else b""


if __name__ == "__main__":
    main()
