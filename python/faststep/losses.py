"""Losses that need less memory than their plain form."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import mlx.core as mx
import mlx.nn as nn

Reduction = Literal["none", "mean", "sum"]
FewBits = nn.QuantizedLinear | nn.QuantizedEmbedding

_CHUNK_BYTES = {mx.cpu: 8 << 20, mx.gpu: 256 << 20}  # of logits; a GPU is slow at products with few rows
_MIN_CHUNK = 256
_FEW = 16  # tokens in proportion to the hidden size


def linear_cross_entropy(
    hidden: mx.array,
    weight: mx.array | FewBits,
    targets: mx.array,
    *,
    bias: mx.array | None = None,
    token_weights: mx.array | None = None,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk_size: int | None = None,
) -> mx.array:
    """Compute the cross entropy of a linear layer's output without holding that output.

    It replaces these lines, forward and backward in chunks of the logits that follow one another:

        logits = (hidden @ weight.T + bias).astype(mx.float32)
        losses = nn.losses.cross_entropy(logits, targets) * token_weights * (targets != ignore_index)
        loss = losses.sum() / (token_weights * (targets != ignore_index)).sum()

    A chunk is some rows of `weight`, for all tokens. The forward pass keeps the logarithm of each token's normalizer,
    the backward pass computes the logits of each chunk again, as in "Cut Your Losses in Large-Vocabulary Language
    Models" (Wijmans et al., 2025, https://arxiv.org/abs/2411.09009). Counted in products of the size of
    `hidden @ weight.T` that is one without gradients, three for the gradient of `hidden` alone (a frozen layer) and
    four for all; the lines above take one, two and three. MLX allocates ahead of the work, on a CPU for some ten
    chunks; the gradient of `weight` is there twice for a moment, in chunks and whole.

    Logits, sums and products are float32 (float64 if `hidden` or `weight` is), so half-precision arguments lose nothing
    further; each gradient has the dtype of its argument. Only reverse mode is there: `mx.jvp` and `mx.vmap` raise.

    Example:
        >>> import mlx.core as mx, mlx.nn as nn
        >>> from faststep.losses import linear_cross_entropy
        >>> embedding = nn.Embedding(1000, 16)
        >>> def loss_fn(embedding, tokens, targets):
        ...     hidden = mx.tanh(embedding(tokens))
        ...     return linear_cross_entropy(hidden, embedding.weight, targets)
        >>> tokens, targets = mx.array([[1, 2, 3]]), mx.array([[2, 3, -100]])
        >>> loss, grads = nn.value_and_grad(embedding, loss_fn)(embedding, tokens, targets)
        >>> loss.shape, grads["weight"].shape
        ((), (1000, 16))

    Args:
        hidden: What the linear layer gets, floating point [..., hidden size].
        weight: The layer's weight as `nn.Linear` and `nn.Embedding` have it, floating point [vocabulary, hidden size];
            or a layer in few bits itself, `nn.QuantizedLinear` or `nn.QuantizedEmbedding`, which is made floating point
            a chunk at a time and gets no gradient.
        targets: The right rows of `weight`, integers [...]. One outside of the vocabulary makes the loss NaN.
        bias: The layer's bias, floating point [vocabulary].
        token_weights: What each token counts, [...]. Default: 1.
        ignore_index: The target of tokens that do not count.
        reduction: "mean": the sum of the weighted losses by the sum of the weights of the tokens that count, 0 where
            none counts; "sum": the former; "none": the weighted losses, 0 for tokens that do not count.
        chunk_size: How many rows of `weight` are multiplied at a time. Default: as many as make 8 MiB of logits on a
            CPU and 256 MiB on a GPU, in multiples of 256, the hidden size if that is more; all of them where the tokens
            are at most a sixteenth of the hidden size, so that logits are small beside a gradient of `weight`. A
            smaller chunk takes less memory and, on a GPU, more time.

    Returns:
        The loss in nats, float32 (or float64, see above) [] or, with "none", [...].

    Raises:
        ValueError: A shape, a dtype, `reduction` or `chunk_size` is not one of the above.
    """
    rows = _Rows(weight)
    _check(hidden, rows, targets, bias, token_weights, reduction, chunk_size)
    if targets.size == 0:
        return mx.zeros(targets.shape if reduction == "none" else ())
    labels = targets.reshape(-1).astype(mx.int32)
    ignored = labels == ignore_index
    inside = (labels >= 0) & (labels < rows.shape[0])
    head = _Head(hidden.reshape(-1, hidden.shape[-1]), rows, bias, labels, chunk_size)
    losses = mx.where(ignored, 0, mx.where(inside, head.losses(), mx.nan))
    counts = (~ignored).astype(losses.dtype)
    if token_weights is not None:
        counts = mx.where(ignored, 0, token_weights.reshape(-1).astype(losses.dtype))
        losses = losses * counts
    if reduction == "none":
        return losses.reshape(targets.shape)
    if reduction == "sum":
        return losses.sum()
    total = counts.sum()
    return losses.sum() / mx.where(total == 0, 1, total)


class _Rows:
    """The weight of a linear layer, of which some rows at a time are made floating point.

    Attributes:
        arrays: What it is made of: the weight, and scales and biases of one in few bits.
        shape: Vocabulary and hidden size.
        dtype: Of the rows.
    """

    def __init__(self, weight: mx.array | FewBits) -> None:
        if isinstance(weight, mx.array):
            self.arrays, self.shape, self.dtype, self._how = [weight], weight.shape, weight.dtype, None
            return
        few: Any = weight
        arrays = [few.weight, few.scales, few.get("biases")]
        self.arrays = [each for each in arrays if each is not None]
        self._how = {"group_size": few.group_size, "bits": few.bits, "mode": few.mode}
        self.shape = (few.weight.shape[0], few.weight.shape[1] * 32 // few.bits)
        self.dtype = few.scales.dtype if mx.issubdtype(few.scales.dtype, mx.floating) else mx.float32

    @property
    def trains(self) -> bool:
        """True if its gradient may be computed."""
        return self._how is None

    def between(self, start: int, end: int, dtype: mx.Dtype, after: list[mx.array]) -> mx.array:
        """Return rows in a dtype, not before other arrays are there: floating point [end - start, hidden size]."""
        parts = [each[start:end] for each in self.arrays]
        parts = mx.depends(parts, after) if after else parts
        weight = parts[0] if self._how is None else mx.dequantize(*parts, **self._how)
        return weight.astype(dtype)


class _Head:
    """A linear layer with the cross entropy of its output, in chunks of the vocabulary.

    Each chunk depends on all results of the one before, so that MLX evaluates one after the other whatever the graph
    around them; it would compute the logits of all chunks first otherwise.
    """

    def __init__(
        self, hidden: mx.array, weight: _Rows, bias: mx.array | None, labels: mx.array, chunk_size: int | None
    ) -> None:
        """Cut the vocabulary into chunks.

        Args:
            hidden: Floating point [tokens, hidden size].
            weight: Of shape [vocabulary, hidden size].
            bias: Floating point [vocabulary], or None.
            labels: int32 [tokens]; the loss of one out of the vocabulary means nothing.
            chunk_size: Rows of a chunk; None for the default.
        """
        self.hidden, self.weight, self.bias = hidden, weight, bias
        self.dtype = mx.result_type(hidden, weight.dtype, mx.float32)
        vocabulary = weight.shape[0]
        size = chunk_size or _default_chunk(hidden.shape[0], hidden.shape[1], vocabulary if weight.trains else None)
        self.chunks = [(start, min(start + size, vocabulary)) for start in range(0, vocabulary, size)]
        starts, ends = (mx.array(bounds)[:, None] for bounds in zip(*self.chunks, strict=True))
        # [chunks, tokens]: the label's column, clipped where it is in another chunk, and whether it is in this one. For
        # all chunks at once, since mx.compile would build a kernel for every chunk whose number is in it.
        self.columns = mx.clip(labels - starts, 0, ends - starts - 1)
        self.hits = (labels >= starts) & (labels < ends)

    def losses(self) -> mx.array:
        """Return the loss of every token, [tokens].

        `hidden` and the head have a function each with a gradient of its own, since MLX asks only those whose gradient
        is needed: so a frozen head's is not computed. Where both are needed the head is asked first and computes both;
        `combine`, which every backward pass asks before them, makes sure that none is taken from an earlier pass.
        """
        values, normalizers = self.forward()
        along: list[mx.array] = []
        parameters = [*(self.weight.arrays if self.weight.trains else []), *([] if self.bias is None else [self.bias])]

        def of_hidden(cotangent: mx.array) -> mx.array:
            return along.pop() if along else self.backward(cotangent, normalizers, head=False)[0]

        def of_head(cotangent: mx.array) -> list[mx.array]:
            gradient, *gradients = self.backward(cotangent, normalizers, head=True)
            along.append(gradient)
            return gradients

        def combine(cotangent: mx.array) -> list[mx.array]:
            along.clear()
            return [cotangent, cotangent]

        parts = [_with_gradient(values, of_hidden, [self.hidden])]
        parts.append(
            _with_gradient(mx.zeros_like(values), of_head, parameters) if parameters else mx.zeros_like(values)
        )
        return _with_gradient(values, combine, parts)

    def forward(self) -> tuple[mx.array, mx.array]:
        """Return losses and logarithms of the normalizers, [tokens] each."""
        hidden = self.hidden.astype(self.dtype)
        normalizers: list[mx.array] = []
        targets: list[mx.array] = []
        for i, chunk in enumerate(self.chunks):
            weight, bias = self.rows(chunk, [*normalizers[-1:], *targets[-1:]])
            logits = hidden @ weight.T if bias is None else mx.addmm(bias, hidden, weight.T)
            normalizers.append(mx.logsumexp(logits, axis=-1))
            targets.append(mx.take_along_axis(logits, self.columns[i, :, None], axis=-1).squeeze(-1))
        normalizer = mx.logsumexp(mx.stack(normalizers, axis=-1), axis=-1)
        return normalizer - mx.where(self.hits, mx.stack(targets), 0).sum(axis=0), normalizer

    def backward(self, cotangent: mx.array, normalizer: mx.array, *, head: bool) -> list[mx.array]:
        """Return the gradients of `hidden` and, if asked, of `weight` and `bias`.

        The gradient of the logits is cotangent * (softmax(logits) - one_hot(labels)). The cotangent is multiplied to
        what is smaller than the logits.
        """
        hidden = self.hidden.astype(self.dtype)
        scaled, shift, tokens = cotangent[:, None] * hidden, -normalizer[:, None], mx.arange(hidden.shape[0])
        corrections = -self.hits.astype(self.dtype)
        of_hidden = mx.zeros_like(hidden)
        of_head: list[list[mx.array]] = []
        after = [normalizer, cotangent]
        for i, chunk in enumerate(self.chunks):
            weight, bias = self.rows(chunk, after)
            error = mx.exp(mx.addmm(shift if bias is None else bias + shift, hidden, weight.T))
            error = error.at[tokens, self.columns[i]].add(corrections[i])
            of_hidden = mx.addmm(of_hidden, error, weight)
            if head:
                of_head.append([(error.T @ scaled).astype(self.weight.dtype)] if self.weight.trains else [])
            if head and self.bias is not None:
                of_head[-1].append((cotangent @ error).astype(self.bias.dtype))
            after = [of_hidden, *(of_head[-1] if head else [])]
        gradient = (cotangent[:, None] * of_hidden).astype(self.hidden.dtype)
        return [gradient, *(mx.concatenate(list(parts)) for parts in zip(*of_head, strict=True))]

    def rows(self, chunk: tuple[int, int], after: list[mx.array]) -> tuple[mx.array, mx.array | None]:
        """Return a chunk of weight and bias that is not there before other arrays are."""
        start, end = chunk
        weight = self.weight.between(start, end, self.dtype, after)
        if self.bias is None:
            return weight, None
        (bias,) = mx.depends([self.bias[start:end]], after) if after else [self.bias[start:end]]
        return weight, bias.astype(self.dtype)


def _default_chunk(tokens: int, size: int, vocabulary: int | None) -> int:
    """Return how many rows of the weight make a chunk, for so many tokens and this hidden size.

    A gradient of the weight is there twice, in chunks and whole: of few tokens all logits are far smaller than that.
    """
    if vocabulary is not None and _FEW * tokens <= size:
        return vocabulary
    most = _CHUNK_BYTES[mx.default_device().type] // (4 * tokens)
    return max(most // _MIN_CHUNK * _MIN_CHUNK, size, _MIN_CHUNK)  # products of odd sizes are slow


def _with_gradient(values: mx.array, gradient: Callable[[mx.array], Any], arguments: list[mx.array]) -> mx.array:
    """Return `values`, computed before, as a function of the arguments that has this gradient."""
    function = mx.custom_function(lambda *_: values)
    function.vjp(lambda _primals, cotangent, _values: gradient(cotangent))
    function.jvp(_refuse)
    function.vmap(_refuse)
    result: mx.array = function(*arguments)  # type: ignore[assignment]
    return result


def _refuse(*_: Any) -> None:
    raise ValueError("linear_cross_entropy: only reverse mode (mx.grad, mx.vjp) is there, no mx.jvp or mx.vmap")


def _check(
    hidden: mx.array,
    weight: _Rows,
    targets: mx.array,
    bias: mx.array | None,
    token_weights: mx.array | None,
    reduction: str,
    chunk_size: int | None,
) -> None:
    """Refuse what does not fit.

    Raises:
        ValueError: An argument does not fit; the message names it.
    """
    if len(weight.shape) != 2 or 0 in weight.shape:
        raise ValueError(f"weight: expected [vocabulary, hidden size], got {list(weight.shape)}")
    vocabulary, size = weight.shape
    if hidden.ndim == 0 or hidden.shape[-1] != size:
        raise ValueError(f"hidden: expected [..., {size}], as wide as weight's rows, got {list(hidden.shape)}")
    shapes = {"targets": (targets, hidden.shape[:-1]), "bias": (bias, (vocabulary,))}
    for name, (array, shape) in {**shapes, "token_weights": (token_weights, hidden.shape[:-1])}.items():
        if array is not None and array.shape != shape:
            raise ValueError(f"{name}: expected {list(shape)}, got {list(array.shape)}")
    for name, dtype in {
        "hidden": hidden.dtype,
        "weight": weight.dtype,
        "bias": None if bias is None else bias.dtype,
    }.items():
        if dtype is not None and not mx.issubdtype(dtype, mx.floating):
            raise ValueError(f"{name}: expected a floating-point dtype, got {dtype}; give a layer in few bits itself")
    if not mx.issubdtype(targets.dtype, mx.integer):
        raise ValueError(f"targets: expected an integer dtype, got {targets.dtype}; class probabilities are not taken")
    if reduction not in get_args(Reduction):
        raise ValueError(f"reduction: expected one of {', '.join(get_args(Reduction))}, got {reduction!r}")
    if chunk_size is not None and (type(chunk_size) is not int or chunk_size < 1):
        raise ValueError(f"chunk_size: expected a positive number of rows of weight, or None, got {chunk_size!r}")
