"""A tokenizer that is trained on the spot, for tests."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from support.places import ROOT

SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]"]
TEXTS = sorted((ROOT / "docs").glob("*.md"))


def write_tokenizer(folder: Path, vocabulary: int = 400) -> Path:
    """Train WordPiece on the project's documentation, and write it as Hugging Face does."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train([str(file) for file in TEXTS], trainer)
    tokenizer.enable_truncation(16)  # as sentence encoders' files have it: it is of no effect
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
