"""What a run's log says: as arrays, and as a page with plots."""

from faststep.report._log import Log, LogError, Table, read_log

__all__ = ["Log", "LogError", "Table", "read_log"]
