"""Write docs/config.md, the reference of a config's keys and components, from the package itself.

Usage: config_reference.py
"""

from __future__ import annotations

from pathlib import Path

from faststep.config import reference

PAGE = Path(__file__).parents[1] / "docs" / "config.md"

if __name__ == "__main__":
    PAGE.write_text(reference(), encoding="utf-8")
