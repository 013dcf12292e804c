"""The config that is saved with a run: written while the run's folder is held, and never over a file of the user's."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from faststep import _files
from faststep.cli._status import Exit

if TYPE_CHECKING:
    from faststep.config import Config

NAME = "config.yaml"
_HEAD = "# The config of a run, as faststep wrote it. SHA-256 of the rest: "


def config_of(run: Path, overrides: list[str] | None = None) -> Config:
    """Load the config that was saved with a run.

    Raises:
        Exit: There is none.
    """
    from faststep.config import load

    file = run / NAME
    if not file.is_file():
        raise Exit(f"{run}: expected the folder of a run, found no {NAME} in it")
    return load(file, [*(overrides or []), f"run={run}"])


def refuse(config: Config, given: Path) -> None:
    """Refuse a run's folder in which saving the config would write over a file of the user's.

    Args:
        config: The config.
        given: The file that it is from.

    Raises:
        Exit: Such a file is there.
    """
    run, file = Path(config.run), Path(config.run, NAME)
    if file.exists() and (not _is_ours(file) or (file.samefile(given) and not is_saved(config))):
        raise Exit(
            f"{file}: expected no {NAME} in the folder of the run but that of a run, found a file of yours, which "
            "would be written over: choose another folder by `run: FOLDER` or `--set run=FOLDER`, for example "
            f"{run / 'run'}"
        )


def save(config: Config) -> Path:
    """Save a config with its run, whose folder is held; one that was edited by hand is kept beside it.

    Returns:
        The run's folder.
    """
    run = Path(config.run)
    if is_saved(config):
        return run
    file = run / NAME
    if file.exists() and not _is_ours(file):
        file.rename(next(each for each in _beside(file) if not each.exists()))
    text = config.text()
    run.mkdir(parents=True, exist_ok=True)
    _files.write_text(file, f"{_HEAD}{_sha256(text)}\n{text}")
    return run


def is_saved(config: Config) -> bool:
    """Return whether this config is the one that is saved with its run."""
    from faststep.config import ConfigError

    run = Path(config.run)
    try:
        return (run / NAME).is_file() and config_of(run).text() == config.text()
    except (ConfigError, OSError):
        return False


def _is_ours(file: Path) -> bool:
    """Return whether it is a config that was saved with a run, and not edited since."""
    head, _, rest = file.read_text(encoding="utf-8", errors="replace").partition("\n")
    return head == _HEAD + _sha256(rest)


def _beside(file: Path) -> list[Path]:
    return [file.with_name(f"{file.stem}.edited-{number}{file.suffix}") for number in range(1, 1000)]


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
