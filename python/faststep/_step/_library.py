"""Files of installed packages."""

_INSTALLED = ("site-packages", "dist-packages")  # the latter on Debian


def is_installed(file: str) -> bool:
    """Return whether a file is one of an installed package."""
    return any(name in file for name in _INSTALLED)
