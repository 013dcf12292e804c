"""Reports of hangs: where a training stands, and what to do about it.

Uses nothing of the other rooms. `_step` reports calls that do not return (`Step(hang_timeout=...)`), `training` any
stage of a run.
"""

from faststep._watch._memory import memory
from faststep._watch._report import hang_report
from faststep._watch._watchdog import Watchdog

__all__ = ["Watchdog", "hang_report", "memory"]
