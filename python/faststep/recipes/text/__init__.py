"""Datasets of text by a Hugging Face tokenizer: texts to mask, and texts with labels.

`_tokenizer` reads the tokenizer of a model's folder. Uses `recipes`.
"""

from faststep.recipes.text._labelled import LabelledText
from faststep.recipes.text._masked import MaskedText
from faststep.recipes.text._tokenizer import Tokenizer

__all__ = ["LabelledText", "MaskedText", "Tokenizer"]
