"""Make what qlora_base.yaml and qlora.yaml train on: a small model of Llama's shape, and JSON lines of real text.

The text is Python's standard library: functions and classes for the model, which it is trained on in full, and chats
for its adapters, a function's head being the question and the first sentence of its docstring the answer::

    python examples/qlora.py                      # runs/qlora/llama, with random weights, and text and chats beside it
    faststep train examples/qlora_base.yaml       # all of the model, on text
    faststep checkpoint export runs/qlora/text --best --fuse runs/qlora/base
    faststep train examples/qlora.yaml            # adapters over 4 bits, on chats

docs/qlora.md says more. A model that you have takes the place of the first three.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path

try:
    from faststep.mlx_lm import new_llama
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train,llm]' (cuda13 for cpu on a GPU)")

Definition = ast.FunctionDef | ast.ClassDef
EVERY = 20  # one of so many files is held out
LONGEST = 800  # characters of a text


def definitions() -> Iterator[tuple[bool, str, Definition]]:
    """Yield the functions and classes of the standard library with their source, and whether their file is held out."""
    for number, file in enumerate(sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))):
        source = file.read_text(encoding="utf-8", errors="replace")
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
        lines = source.splitlines(keepends=True)
        for node in ast.walk(tree):
            if isinstance(node, Definition):
                text = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno]))
                yield number % EVERY == EVERY // 2, text, node


def chat_of(node: Definition) -> dict[str, object] | None:
    """Return a chat about a function: its head, and what its docstring says first."""
    first = (ast.get_docstring(node) or "").partition("\n")[0].strip()
    if not isinstance(node, ast.FunctionDef) or not 10 <= len(first) <= 100 or not first.isascii():
        return None
    head = f"def {node.name}({ast.unparse(node.args)})"
    question, answer = {"role": "user", "content": head}, {"role": "assistant", "content": first}
    return {"messages": [question, answer]} if len(head) <= 200 else None


def write(file: Path, records: list[dict[str, object]]) -> None:
    """Write JSON lines."""
    file.write_text("".join(json.dumps(each) + "\n" for each in records), encoding="utf-8")
    print(f"{file}: {len(records)} lines")


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description="Make a small model of Llama's shape, and text and chats to train it on."
    )
    parser.add_argument("--out", type=Path, default=Path("runs/qlora"), help="folder for all of it (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens of the tokenizer (%(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks of the model (%(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of its residual stream (%(default)s)")
    parser.add_argument("--heads", type=int, default=4, help="of each attention (%(default)s)")
    parser.add_argument("--context", type=int, default=192, help="its longest sequence, in tokens (%(default)s)")
    return parser.parse_args()


def main() -> None:
    """Write text, chats and model."""
    args = parse_arguments()
    if (args.out / "llama").exists():
        sys.exit(f"{args.out / 'llama'}: there is such a model already: remove it, or give another --out")
    args.out.mkdir(parents=True, exist_ok=True)
    found = list(definitions())
    for name, held in (("train", False), ("valid", True)):
        here = [(text, node) for held_out, text, node in found if held_out == held]
        write(args.out / f"text-{name}.jsonl", [{"text": text[:LONGEST]} for text, _ in here])
        write(args.out / f"chat-{name}.jsonl", [chat for _, node in here if (chat := chat_of(node)) is not None])
    sizes = {name: getattr(args, name) for name in ("vocabulary", "layers", "width", "heads", "context")}
    print(new_llama(args.out / "llama", (text for held_out, text, _ in found if not held_out), **sizes))


if __name__ == "__main__":
    main()
