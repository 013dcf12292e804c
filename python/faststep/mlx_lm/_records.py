"""Files of records: JSON lines, JSON arrays and Parquet, plain or gzipped, by name, by pattern or in a folder."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from faststep._optional import need

Split = Literal["train", "valid", "test"]

_KINDS = (".jsonl", ".json", ".ndjson", ".parquet")
_SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test",),
}
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")  # of a character beyond U+FFFF, which JSON writes in two
_BOM = b"\xef\xbb\xbf"


class Read(NamedTuple):
    """A record, or what is wrong with it.

    Attributes:
        where: Its place, `file:line`, or `file, row 3`.
        record: The object; None where it is broken.
        problem: What is wrong.
        done: The share of all files that has been read, 0 to 1.
    """

    where: str
    record: dict[str, Any] | None
    problem: str = ""
    done: float = 0.0


def find_files(named: Path | list[Path], split: Split | None) -> list[Path]:
    """Return the files that are named, that match patterns such as `data/*.jsonl`, or are in folders.

    Args:
        named: One or several.
        split: Of a folder, take the files of this name (`train.jsonl`); None: all of them.

    Raises:
        ValueError: There are none, or a folder has several splits and none was chosen.
    """
    found: list[Path] = []
    for path in named if isinstance(named, list) else [named]:
        if path.is_dir():
            found += _in_folder(path, split)
        elif path.is_file():
            found.append(path)
        elif re.search(r"[*?\[]", path.name) and (below := _matching(path)):
            found += below
        else:
            raise ValueError(f"file: expected a file of JSON lines, found none at {path}")
    return found


def _matching(path: Path) -> list[Path]:
    pattern = path.relative_to(path.anchor)
    return [each for each in sorted(Path(path.anchor).glob(str(pattern))) if each.is_file()]


def _in_folder(folder: Path, split: Split | None) -> list[Path]:
    files = [each for each in sorted(folder.rglob("*")) if each.is_file() and _kind(each) in _KINDS]
    by_split = {
        name: [each for each in files if re.split(r"[^a-z]", each.name.lower())[0] in names]
        for name, names in _SPLITS.items()
    }
    there = [name for name, found in by_split.items() if found]
    if split is None and len(there) > 1:
        raise ValueError(f"file: {folder} has files for {', '.join(there)}: choose one by split: {there[0]}")
    found = files if split is None else by_split[split]
    if not found:
        what = f"{split}.jsonl" if split else ", ".join(f"*{each}" for each in _KINDS)
        raise ValueError(f"file: expected {what} in {folder}, found none")
    return found


def _kind(file: Path) -> str:
    return Path(file.name.removesuffix(".gz")).suffix


def read(files: list[Path]) -> Iterator[Read]:
    """Yield the records of files in their order, broken ones too; empty lines are passed over.

    Raises:
        ValueError: A file cannot be read at all.
        ImportError: pyarrow is not installed, for a Parquet file.
    """
    sizes = [max(1, file.stat().st_size) for file in files]
    for number, file in enumerate(files):
        before, share = sum(sizes[:number]) / sum(sizes), sizes[number] / sum(sizes)
        for each, part in _read(file):
            yield each._replace(done=before + share * part)


def _read(file: Path) -> Iterator[tuple[Read, float]]:
    """Yield the records of one file, each with the share of the file that has been read."""
    if _kind(file) == ".parquet":
        yield from _parquet(file)
        return
    size = max(1, file.stat().st_size)
    try:
        with file.open("rb") as raw:
            opened: Any = gzip.open(raw) if file.suffix == ".gz" else raw
            head = opened.read(2048)
            opened.seek(0)
            if head.startswith((b"\xff\xfe", b"\xfe\xff")):
                raise ValueError(f"file: {file}: expected UTF-8, got UTF-16: save it again as UTF-8")
            is_array = head.removeprefix(_BOM).lstrip().startswith(b"[") and _kind(file) == ".json"
            for each in _array(file, opened) if is_array else _lines(file, opened):
                yield each, raw.tell() / size
    except (OSError, EOFError) as error:
        raise ValueError(f"file: {file} cannot be read: {error}") from None


def _lines(file: Path, opened: BinaryIO) -> Iterator[Read]:
    for number, line in enumerate(opened, start=1):
        text = line.removeprefix(_BOM) if number == 1 else line
        if text.strip():
            yield _parsed(f"{file}:{number}", text)


def _array(file: Path, opened: BinaryIO) -> Iterator[Read]:
    try:
        records = json.loads(opened.read().removeprefix(_BOM))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"file: {file}: no JSON array: {error}") from None
    for number, record in enumerate(records, start=1):
        yield _checked(f"{file}, item {number}", record, whole=True)


def _parquet(file: Path) -> Iterator[tuple[Read, float]]:
    library = need("pyarrow.parquet", "parquet")
    try:
        opened = library.ParquetFile(file)
    except Exception as error:  # of as many kinds as there are ways to break a file
        raise ValueError(f"file: {file} cannot be read: {error}") from None
    number, rows = 0, max(1, opened.metadata.num_rows)
    for batch in opened.iter_batches():
        for record in batch.to_pylist():
            number += 1
            yield _checked(f"{file}, row {number}", _without_none(record), whole=True), number / rows


def _without_none(value: Any) -> Any:
    """Leave out keys that are None: a column of structs has each key of any of its rows in all of them."""
    if isinstance(value, dict):
        return {key: _without_none(each) for key, each in value.items() if each is not None}
    return [_without_none(each) for each in value] if isinstance(value, list) else value


def _parsed(where: str, line: bytes) -> Read:
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        return Read(where, None, f"no JSON in this line: {error}")
    return _checked(where, record, whole=_HALF.search(line) is not None)


def _checked(where: str, record: Any, whole: bool) -> Read:
    """Refuse what is no object, or (`whole`) has half a character in a text."""
    if not isinstance(record, dict):
        return Read(where, None, f"expected an object, {{...}}, got {type(record).__name__}")
    if whole:
        try:
            json.dumps(record, ensure_ascii=False, default=str).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("ascii", "backslashreplace").decode()
            return Read(where, None, f"{half} in a text is half of a surrogate pair, which stands for no character")
        except (TypeError, ValueError) as error:
            return Read(where, None, str(error))
    return Read(where, record)
