"""A time series encoder that trains in front of a language model that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from faststep.recipes._embedding import rows
from faststep.recipes._hugging_face import account, read_config, read_weights
from faststep.recipes.time_series._llama import Llama, LlamaSizes


class SeriesEncoder(nn.Module):
    """A convolution along the series, ReLU, LayerNorm.

    Args:
        channels: Of the series.
        width: Of what it gives.
        kernel: How many places a value of it comes from.
        stride: Places of the series from one value to the next.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.conv = nn.Conv1d(channels, width, kernel, stride, padding=kernel // 2)
        self.norm = nn.LayerNorm(width)

    def __call__(self, series: mx.array) -> mx.array:
        """Map floating point [batch, length, channels] to [batch, length / stride, width]."""
        out: mx.array = self.norm(nn.relu(self.conv(series)))
        return out


class Projector(nn.Module):
    """Linear, GELU, Linear, LayerNorm: from the encoder's vectors to such as the decoder has for tokens.

    Args:
        inputs: The encoder's width.
        hidden: Of the first layer.
        outputs: The decoder's width.
    """

    def __init__(self, inputs: int, hidden: int, outputs: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.up, self.down = nn.Linear(inputs, hidden), nn.Linear(hidden, outputs)
        self.norm = nn.LayerNorm(outputs)

    def __call__(self, x: mx.array) -> mx.array:
        """Map floating point [..., inputs] to [..., outputs]."""
        out: mx.array = self.norm(self.down(nn.gelu(self.up(x))))
        return out


class SeriesToText(nn.Module):
    """Text about a time series: `series_model` makes it.

    Attributes:
        channels: Of the series.
        vocabulary: How many tokens it knows.
    """

    def __init__(self, channels: int, width: int, kernel: int, stride: int, hidden: int, decoder: LlamaSizes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.channels, self.vocabulary = channels, decoder.vocab_size
        self.encoder = SeriesEncoder(channels, width, kernel, stride)
        self.projector = Projector(width, hidden, decoder.hidden_size)
        self.decoder = Llama(decoder)
        self.lm_head = nn.Linear(decoder.hidden_size, decoder.vocab_size, bias=False)
        self.decoder.freeze()

    def __call__(self, series: mx.array, tokens: mx.array) -> mx.array:
        """Map a series and the text about it to the logits of every token of the text.

        Args:
            series: Floating point [batch, length, channels].
            tokens: Integers [batch, seq].

        Returns:
            Floating point [batch, seq, vocabulary]: of a token from the series and the tokens before it.

        Raises:
            ValueError: The series has other channels.
        """
        logits: mx.array = self.lm_head(self.hidden(series, tokens))
        return logits

    def hidden(self, series: mx.array, tokens: mx.array) -> mx.array:
        """Map a series and tokens to what the head gets for each of them, floating point [batch, seq, width]."""
        if series.ndim != 3 or series.shape[-1] != self.channels:
            turned = series.ndim == 3 and series.shape[1] == self.channels
            hint = "; if it is [batch, channels, length], the dataset's `layout: NCL` turns it" if turned else ""
            raise ValueError(f"series: expected [batch, length, {self.channels}], got {list(series.shape)}{hint}")
        front = self.projector(self.encoder(series))
        text = rows(self.decoder.embed_tokens, tokens[:, :-1]).astype(front.dtype)
        states = self.decoder(mx.concatenate([front, text], axis=1))
        return states[:, front.shape[1] - 1 :]

    @property
    def head(self) -> mx.array:
        """The weight of the last layer, [vocabulary, width]."""
        weight: mx.array = self.lm_head.weight
        return weight


def series_model(
    channels: int,
    width: int = 1280,
    kernel: int = 5,
    stride: int = 4,
    hidden: int = 3072,
    path: Path | None = None,
    decoder: dict[str, Any] | Path | None = None,
) -> SeriesToText:
    """Text about a time series: an encoder, a projector, a frozen decoder of Llama's shape, a head that trains.

    Args:
        channels: Of the series.
        width: Of the encoder.
        kernel: Of its convolution.
        stride: Places of the series for each vector in front of the text.
        hidden: Of the projector.
        path: The folder of a Llama, with `config.json` and `model.safetensors` as Hugging Face writes them; its own
            head is the first value of the one that trains. Default: new weights.
        decoder: Keys of `config.json` (`hidden_size`, `num_hidden_layers`, ...), which count before the folder's, or
            such a file. Default: the folder's, or those of Llama-3.2-1B.

    Raises:
        ValueError: A size is out of its range, or a key or a weight is unknown, missing or of another shape.
    """
    sizes = {"channels": channels, "width": width, "kernel": kernel, "stride": stride, "hidden": hidden}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: expected a number from 1 on, got {size}")
    model = SeriesToText(channels, width, kernel, stride, hidden, read_config(path, decoder or {}, LlamaSizes, "llama"))
    if path is not None:
        _load(model, path)
    return model


def _load(model: SeriesToText, path: Path) -> None:
    """Load the decoder and the head from a folder; one whose head is its embedding has no weight for it."""
    weights = {name.replace("model.", "decoder.", 1): each for name, each in read_weights(path).items()}
    weights.setdefault("lm_head.weight", weights.get("decoder.embed_tokens.weight", model.lm_head.weight))
    account(model, path, weights, aside=["decoder.layers.*.self_attn.rotary_emb"], new=["encoder", "projector"])
