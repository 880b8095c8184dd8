"""Reads the arguments of a process that the supervisor runs beside a run (supervise/beside_process.py)."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path


def beside_arguments(
    module: str, about: str | None, arguments: Sequence[str] | None = None
) -> argparse.Namespace:
    """parent: the process that it ends with; run, recipe, overrides."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=about)
    parser.add_argument("--parent", type=int, default=os.getppid(), help="process that it ends with")
    parser.add_argument("run", type=Path)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*")
    return parser.parse_intermixed_args(arguments)
