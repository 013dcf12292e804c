"""The safetensors format: written from any thread, and read with nothing of the file trusted.

The format is that of <https://github.com/huggingface/safetensors#format>: eight bytes with the length of a JSON
header, the header, the bytes of the tensors. MLX's own reader and writer are not used: its writer computes
(`contiguous`), which another thread must not do with arrays of this one, and an error of its reader comes in a thread
of MLX's, where it ends the process.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeGuard

import mlx.core as mx
import numpy as np

from faststep.checkpoints._errors import CheckpointError, Damaged

Write = Callable[[memoryview], object]

CHUNK = 16 << 20  # bytes that are written and hashed at a time
LONGEST_HEADER = 100_000_000  # bytes, the limit of the reference implementation and of MLX
LARGEST_DIMENSION = 2**31 - 1  # a dimension of MLX's is an int32
MOST_DIMENSIONS = 32

# name in the file, MLX's dtype, numpy's dtype of the same size through which the bytes come in
_DTYPES: list[tuple[str, mx.Dtype, type[Any]]] = [
    ("BOOL", mx.bool_, np.bool_),
    ("U8", mx.uint8, np.uint8),
    ("I8", mx.int8, np.int8),
    ("U16", mx.uint16, np.uint16),
    ("I16", mx.int16, np.int16),
    ("F16", mx.float16, np.float16),
    ("BF16", mx.bfloat16, np.uint16),
    ("U32", mx.uint32, np.uint32),
    ("I32", mx.int32, np.int32),
    ("F32", mx.float32, np.float32),
    ("U64", mx.uint64, np.uint64),
    ("I64", mx.int64, np.int64),
    ("C64", mx.complex64, np.complex64),
]
_NAMES = {dtype: name for name, dtype, _ in _DTYPES}
_READ = {name: (dtype, np.dtype(carrier)) for name, dtype, carrier in _DTYPES}


class Readable(Protocol):
    """A file."""

    def read(self, count: int = -1, /) -> bytes:
        """Read so many bytes, or what there is."""

    def readinto(self, buffer: memoryview, /) -> int:
        """Fill the buffer; return how many bytes there were."""


class Tensor(NamedTuple):
    """The place of a tensor in its file, behind the header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def check(arrays: Mapping[str, mx.array]) -> None:
    """Refuse what no safetensors file can hold.

    Raises:
        CheckpointError: An array has such a dtype.
    """
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            known = ", ".join(str(dtype).removeprefix("mlx.core.") for _, dtype, _ in _DTYPES)
            raise CheckpointError(
                f"{name}: expected a dtype that MLX reads from safetensors ({known}), got {array.dtype}"
            )


def write(write: Write, arrays: dict[str, mx.array], metadata: Mapping[str, str]) -> None:
    """Write arrays that are evaluated, in any thread; each is released as soon as it is written.

    The largest items come first, so that each tensor is aligned to its own.

    Args:
        write: What takes the bytes.
        arrays: The arrays by name; empty afterwards.
        metadata: What stands in the header beside them.
    """
    names = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    offset = 0
    for name in names:
        array, begin = arrays[name], offset
        offset += array.nbytes
        header[name] = {"dtype": _NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [begin, offset]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    write(memoryview(len(text).to_bytes(8, "little") + text))
    for name in names:
        contents = _bytes_of(arrays.pop(name))
        for begin in range(0, len(contents), CHUNK):
            write(contents[begin : begin + CHUNK])


def _bytes_of(array: mx.array) -> memoryview:
    buffer: Any = array  # which MLX's stubs say of it from Python 3.12 on
    view = memoryview(buffer)
    if not array.nbytes:
        return memoryview(b"")
    return view.cast("B") if view.c_contiguous else memoryview(view.tobytes())


def read_header(file: Readable, size: int) -> tuple[list[Tensor], dict[str, str]]:
    """Read and check the header of a file of so many bytes.

    Returns:
        The tensors in the order in which they lie in the file, which they fill without a gap, and the metadata.

    Raises:
        Damaged: It is none.
    """
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise Damaged(f"expected a safetensors header within {size} bytes, found one of {length} bytes")
    header = parse_json(file.read(length))
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Damaged("expected texts in the metadata of the safetensors header, found something else")
    tensors = sorted((_tensor(name, entry) for name, entry in header.items()), key=lambda tensor: tensor[3:])
    offset = 0
    for tensor in tensors:
        if tensor.begin != offset:
            raise Damaged(f"{tensor.name!r}: expected its bytes to begin at {offset}, found {tensor.begin}")
        offset = tensor.end
    if offset != size - 8 - length:
        raise Damaged(f"expected {offset} bytes of tensors, as its header says, found {size - 8 - length}")
    return tensors, metadata


def parse_json(text: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        Damaged: It is none.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as error:  # not UTF-8 is a ValueError too
        raise Damaged(f"expected JSON, found {text[:40]!r} ({error})") from error
    if not isinstance(parsed, dict):
        raise Damaged(f"expected a JSON object, found {type(parsed).__name__}")
    return parsed


def _tensor(name: str, entry: Any) -> Tensor:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _READ:
        raise Damaged(f"{name!r}: expected a dtype of {', '.join(_READ)}, found {dtype!r}")
    if not _are_counts(shape, LARGEST_DIMENSION) or len(shape) > MOST_DIMENSIONS:
        raise Damaged(f"{name!r}: expected a shape, found {shape!r}")
    if not _are_counts(offsets, 2**63) or len(offsets) != 2:
        raise Damaged(f"{name!r}: expected two offsets, found {offsets!r}")
    begin, end = offsets
    if end - begin != math.prod(shape) * _READ[dtype][1].itemsize:
        raise Damaged(f"{name!r}: expected the bytes of {dtype} {shape}, found those from {begin} to {end}")
    return Tensor(name, dtype, tuple(shape), begin, end)


def _are_counts(values: Any, largest: int) -> TypeGuard[list[int]]:
    return isinstance(values, list) and all(type(value) is int and 0 <= value <= largest for value in values)


def read_arrays(file: Readable, tensors: list[Tensor]) -> dict[str, mx.array]:
    """Read the tensors of a header that has just been read; they are evaluated.

    Raises:
        Damaged: The file ends before they do.
    """
    arrays = {}
    for tensor in tensors:
        dtype, carrier = _READ[tensor.dtype]
        try:
            contents = np.empty(tensor.shape, carrier)
        except ValueError as error:
            raise Damaged(f"{tensor.name!r}: expected a shape, found {tensor.shape} ({error})") from error
        if contents.nbytes and file.readinto(contents.reshape(-1).view(np.uint8).data) != contents.nbytes:
            raise Damaged(f"{tensor.name!r}: expected {contents.nbytes} bytes, found the end of the file")
        array = mx.array(contents)
        array = array if array.dtype == dtype else array.view(dtype)
        arrays[tensor.name] = copied(array) if moves_when_read() else array
    mx.eval(arrays)
    return arrays


def moves_when_read() -> bool:
    """Return whether an array is either in the device's memory or in the host's, as on CUDA.

    Reading one on the host moves it there, under whatever uses it; and what the host has made stays there.
    """
    return mx.cuda.is_available() and mx.default_device() == mx.gpu


def copied(array: mx.array) -> mx.array:
    """Copy an array on the device, to rows that lie one behind the other."""
    return mx.contiguous(mx.where(True, array, array))
