"""The command line: `faststep train`, `resume`, `eval`, `report` and more. Needs the extra `train`.

Exit codes: 0 done; 1 the training failed in its course (the user's own code, a disk that is full), and has changed what
it had reached; 2 something that was given is wrong (a config, a checkpoint, an option, the run's folder), and nothing
was changed; 3 a check found a difference (`verify-resume`, `checkpoint verify`,
`reproduce`); 4 the supervisor gave up; 130 and 143 stopped by SIGINT and SIGTERM, with a checkpoint.

`_app` has the commands, a file for each group of them; `_status` what they share, `_saved` the config of a run,
`_supervisor` restarts a training.
Uses all rooms.
"""

from faststep._optional import need

need("typer")

from faststep.cli._app import main  # noqa: E402, behind the check of what it needs

__all__ = ["main"]
