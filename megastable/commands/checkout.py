"""What is no part of the installed package, but lies beside it in a checkout: benchmarks/ and drills/."""

from __future__ import annotations

import sys
from pathlib import Path

import megastable
from megastable.base.errors import ConfigError


def find_beside(folder: str) -> None:
    """Make a folder beside the package importable. Raises ConfigError where there is none."""
    root = Path(megastable.__file__).resolve().parents[1]
    if not (root / folder / "__init__.py").is_file():
        raise ConfigError(
            f"{folder}/ is not installed with megastable: this command needs a checkout of its repository; there, "
            "bash launch/install.sh, then the same command with .venv/bin/megastable"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
