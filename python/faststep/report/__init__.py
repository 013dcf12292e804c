"""What a run's log says: as arrays, and as pages with plots."""

from faststep.report._compare import compare
from faststep.report._log import Log, LogError, Table, read_log
from faststep.report._report import report

__all__ = ["Log", "LogError", "Table", "compare", "read_log", "report"]
