"""The command line: `faststep train`, `resume`, `eval`, `report` and more. Needs the extra `train`.

Exit codes: 0 done; 1 the training failed in its course (the user's own code, a disk that is full), and has changed what
it had reached; 2 something that was given is wrong (a config, a checkpoint, an option, the run's folder), and nothing
was changed; 3 a check found a difference (`verify-resume`, `checkpoint verify`, `reproduce`); 4 the supervisor gave up;
5 the training made no progress (`train.on_hang: exit`); 6 the other ranks are gone; 130 and 143 stopped by SIGINT
and SIGTERM, with a checkpoint.

`_app` has the commands, a file for each group of them; `_status` what they share, `_saved` the config of a run,
`_supervisor` restarts a training, `_launch` starts the ranks of one by `_mlx_launch`.
Uses `config`, `training`, `checkpoints`, `loggers`, `report`, `doctor`, `mlx_lm`, `_tune`, `_profile`, `_step`,
`_native`, `_files`, `_records`, `_optional` and `_command`.
"""

import sys

from faststep._command import asks_for_environment
from faststep._optional import need

if asks_for_environment():  # nothing may be imported that needs MLX or an extra: that these work is the question

    def main() -> None:
        """Print the lines about the environment."""
        from faststep.doctor import environment

        raise SystemExit(environment(as_json="--json" in sys.argv))

else:
    need("typer")

    from faststep.cli._app import main  # behind the check of what it needs

__all__ = ["main"]
