"""Log records: their values, numbers as people read them, and lines of text about them.

What loggers write, the report reads and the trainer counts. Uses no other room.
"""

from faststep._records._format import clock, count, figure, printable, quantity, share, size, span
from faststep._records._text import (
    REASONS,
    data_lines,
    describe_event,
    describe_validation,
    headline,
    monitored,
    parameter_table,
)
from faststep._records._values import Record, dumps, flat, number, plain

__all__ = [
    "REASONS",
    "Record",
    "clock",
    "count",
    "data_lines",
    "describe_event",
    "describe_validation",
    "dumps",
    "figure",
    "flat",
    "headline",
    "monitored",
    "number",
    "parameter_table",
    "plain",
    "printable",
    "quantity",
    "share",
    "size",
    "span",
]
