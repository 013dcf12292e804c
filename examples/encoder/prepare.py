"""Prepare what the configs beside this file train on, from the source of Python's standard library.

It writes into `runs/encoder`: a tokenizer and the sizes of a small ModernBERT (`tiny/tokenizer.json`, `config.json`),
and docstrings labelled with the package that they are from (`train.jsonl`, `held_out.jsonl`); and prints what simple
baselines reach on what is held out: numbers for a training to beat::

    python examples/encoder/prepare.py
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import re
import sys
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

try:
    from faststep.recipes import MaskedText
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
except ModuleNotFoundError as missing:
    sys.exit(f"{missing}. What this example needs: pip install 'mlx-faststep[cpu,train,llm]' (cuda13 for cpu on a GPU)")

LIBRARY = Path(sysconfig.get_path("stdlib"))
LABELS = ["asyncio", "ctypes", "email", "http", "importlib", "logging", "multiprocessing", "unittest", "urllib", "xml"]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
SIZES = {
    "model_type": "modernbert",
    "vocab_size": 2048,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "global_attn_every_n_layers": 3,
    "local_attention": 32,
    "pad_token_id": 0,
    "cls_token_id": 1,
    "sep_token_id": 2,
}
Row = dict[str, str]


def train_tokenizer(folder: Path) -> None:
    """Train byte-level BPE on the text of the top-level modules."""
    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"], special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in sorted(LIBRARY.glob("*.py")))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def docstrings(label: str) -> Iterator[str]:
    """Yield the docstrings of a package without the words that name it."""
    for file in sorted((LIBRARY / label).rglob("*.py")):
        tree = ast.parse(file.read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        for node in (each for each in ast.walk(tree) if isinstance(each, kinds)):
            text = re.sub(rf"\b{label}\w*", "it", ast.get_docstring(node) or "", flags=re.IGNORECASE)
            if len(text.split()) >= 5:
                yield text


def labelled() -> tuple[list[Row], list[Row]]:
    """Collect docstrings, each text once: those to train on, and every 5th of a package, held out."""
    train: list[Row] = []
    held_out: list[Row] = []
    seen: set[str] = set()
    for label in (each for each in LABELS if (LIBRARY / each).is_dir()):
        fresh = [text for text in dict.fromkeys(docstrings(label)) if text not in seen]
        seen.update(fresh)
        for number, text in enumerate(fresh):
            (held_out if number % 5 == 2 else train).append({"text": text, "label": label})
    return train, held_out


def write(rows: Iterable[Row], file: Path) -> None:
    """Write rows as lines of JSON."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def words(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"\w+", text.lower())


def bag_of_words(train: list[Row], held_out: list[Row]) -> float:
    """Return the accuracy of naive Bayes over bags of words, with one added to each count."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in train:
        counts[row["label"]].update(words(row["text"]))
    vocabulary = len(set().union(*counts.values()))
    shares = Counter(row["label"] for row in train)
    totals = {label: sum(each.values()) + vocabulary for label, each in counts.items()}

    def score(label: str, text: str) -> float:
        own = counts[label]
        return math.log(shares[label]) + sum(math.log((own[word] + 1) / totals[label]) for word in words(text))

    right = sum(max(counts, key=lambda label: score(label, row["text"])) == row["label"] for row in held_out)
    return right / len(held_out)


def majority(train: list[Row], held_out: list[Row]) -> float:
    """Return the accuracy of always naming the most frequent label."""
    ((label, _),) = Counter(row["label"] for row in train).most_common(1)
    return sum(row["label"] == label for row in held_out) / len(held_out)


def frequencies(folder: Path) -> tuple[float, float]:
    """Return loss (nats) and accuracy of guessing masked tokens by how frequent tokens are."""
    train, held_out = (MaskedText(folder, length=64, split=split) for split in ("train", "held_out"))
    counts: Counter[int] = Counter()
    for item in train:
        counts.update(item["targets"][item["targets"] >= 0].tolist())
    total = sum(counts.values()) + SIZES["vocab_size"]
    ((usual, _),) = counts.most_common(1)
    targets = [token for item in held_out for token in item["targets"].tolist() if token >= 0]
    losses = [-math.log((counts[token] + 1) / total) for token in targets]
    return sum(losses) / len(losses), targets.count(usual) / len(targets)


def main() -> None:
    """Write the files and print the baselines."""
    parser = argparse.ArgumentParser(description="Prepare tokenizer, sizes and labelled texts in a folder.")
    parser.add_argument("--out", type=Path, default=Path("runs/encoder"), help="the folder (default: %(default)s)")
    out: Path = parser.parse_args().out
    tiny = out / "tiny"
    tiny.mkdir(parents=True, exist_ok=True)
    train_tokenizer(tiny)
    (tiny / "config.json").write_text(json.dumps(SIZES, indent=1), encoding="utf-8")
    train, held_out = labelled()
    write(train, out / "train.jsonl")
    write(held_out, out / "held_out.jsonl")
    print(f"{len(train)} docstrings to train on and {len(held_out)} held out, of {len(LABELS)} packages, in {out}")
    print(f"classes: the most frequent one {majority(train, held_out):.3f} right,", end=" ")
    print(f"naive Bayes over bags of words {bag_of_words(train, held_out):.3f}")
    loss, accuracy = frequencies(tiny)
    print(f"masked tokens: by their frequency, loss {loss:.3f} nats, {accuracy:.3f} right")


if __name__ == "__main__":
    main()
