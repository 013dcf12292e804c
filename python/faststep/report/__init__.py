"""Reports of a run's log: as arrays, and as pages with plots.

`_log` and `_series` read, `_plot` and `_charts` draw, `_page` writes HTML, `_report` is the page of one run, `_compare`
that of several. Uses `_records`, `_files` and `_optional`.
"""

from faststep.report._compare import compare, ends
from faststep.report._log import Log, LogError, Table, read_log
from faststep.report._page import Html, cards, figures, framed, page, said, section, table, write
from faststep.report._plot import COLOURS, plot, tick
from faststep.report._report import report

__all__ = [
    "COLOURS",
    "Html",
    "Log",
    "LogError",
    "Table",
    "cards",
    "compare",
    "ends",
    "figures",
    "framed",
    "page",
    "plot",
    "read_log",
    "report",
    "said",
    "section",
    "table",
    "tick",
    "write",
]
