"""Numbers as people read them."""

from __future__ import annotations

import math
from typing import Any

from faststep._records._values import number


def figure(value: Any, digits: int = 4) -> str:
    """Return a loss or a norm: `1.4321`, `2.1e-05`, `-` when it is unknown, `nan`."""
    if value is None:
        return "-"
    value = number(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.{max(0, digits - max(0, math.floor(math.log10(abs(value)))))}f}"
    return f"{value:.{digits - 2}e}"


def count(value: Any) -> str:
    """Return a whole number: `1,240`."""
    return "-" if value is None else f"{int(value):,}"


def quantity(value: Any) -> str:
    """Return an amount: `985`, `152.7k`, `1.3M`."""
    if value is None or not math.isfinite(value := number(value)):
        return "-"
    for unit, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.1f}".removesuffix(".0") + unit
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def size(value: Any) -> str:
    """Return bytes: `1.21 GB`, in powers of ten."""
    if value is None or not math.isfinite(value := number(value)):
        return "-"
    for unit, scale in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}" if value < 999.5 * scale else f"{value / scale:.0f} {unit}"
    return f"{value:.0f} B"


def clock(value: Any) -> str:
    """Return seconds as a clock: `0:02:13`, `1d 02:03:04`."""
    if value is None or not math.isfinite(value := number(value)):
        return "-"
    minutes, seconds = divmod(max(0, round(value)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d {hours:02}:{minutes:02}:{seconds:02}" if days else f"{hours}:{minutes:02}:{seconds:02}"


def span(value: Any) -> str:
    """Return a short time: `11.2 ms`, `3.4 s`, a clock from two minutes on."""
    if value is None or not math.isfinite(value := number(value)):
        return "-"
    if value >= 120:
        return clock(value)
    return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"


def share(value: Any) -> str:
    """Return a share of one: `38 %`."""
    return "-" if value is None or not math.isfinite(value := number(value)) else f"{100 * value:.0f} %"


def printable(text: str) -> str:
    """Return the text in one line that moves no cursor: control codes are shown as Python writes them."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
