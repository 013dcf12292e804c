"""Encoders of text by the names and weights of Hugging Face, with their heads and losses.

A file for each architecture; `_parts` is what they share. Uses `recipes`.
"""

from faststep.recipes.encoders._bert import Bert, bert
from faststep.recipes.encoders._losses import masked_lm, text_classification
from faststep.recipes.encoders._modernbert import ModernBert, modernbert

__all__ = ["Bert", "ModernBert", "bert", "masked_lm", "modernbert", "text_classification"]
