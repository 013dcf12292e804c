"""The search for faster environment variables: `tune`, its child processes and its table.

`_search` starts `_child` in processes of their own; `_report` has the rule and the table. Uses `_step`.
"""

from faststep._tune._report import Tuning
from faststep._tune._tune import main, tune

__all__ = ["Tuning", "main", "tune"]
