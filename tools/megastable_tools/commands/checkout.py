"""Finds the parts of a checkout beside the installed package: benchmarks/ and drills/."""

from __future__ import annotations

import sys

from megastable.base.errors import ConfigError
from megastable.base.installation import ROOT


def find_beside(folder: str) -> None:
    """Make a folder beside the package importable. Raises ConfigError if it is missing."""
    if not (ROOT / folder / "__init__.py").is_file():
        raise ConfigError(
            f"{folder}/ is not installed with megastable: this command needs a checkout of its repository; there, "
            "bash launch/install.sh, then the same command with .venv/bin/megastable"
        )
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
