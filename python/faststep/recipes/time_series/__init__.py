"""Time series in front of a frozen language model: an encoder, a projector, a decoder, and a head that trains.

`_llama` is the decoder, `_model` the whole, `_data` its series. Uses `recipes`.
"""

from faststep.recipes.time_series._data import Series
from faststep.recipes.time_series._loss import series_to_text
from faststep.recipes.time_series._model import SeriesToText, series_model

__all__ = ["Series", "SeriesToText", "series_model", "series_to_text"]
