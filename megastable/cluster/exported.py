"""The variables that ranks on other hosts get, as from the deepspeed launcher: those of communication and of Python,
and what the file .deepspeed_env names. Pure, but for the file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from megastable.base.errors import ConfigError

PREFIXES = ("MLFLOW", "NCCL", "PYTHON", "MV2", "UCX", "DS_ACCELERATOR", "GLOO", "TORCH", "OMP_")
NAME = ".deepspeed_env"


def exported(environment: Mapping[str, str] | None = None, folder: Path | None = None) -> dict[str, str]:
    """Raises ConfigError for a line of the file that is not NAME=VALUE."""
    environment = os.environ if environment is None else environment
    folder = Path.cwd() if folder is None else folder
    found = {name: value for name, value in environment.items() if name.startswith(PREFIXES)}
    found["PYTHONPATH"] = ":".join(filter(None, [str(folder), environment.get("PYTHONPATH", "")]))
    named = environment.get("DS_ENV_FILE")
    for path in [Path(named)] if named else [Path.home() / NAME, folder / NAME]:
        if path.is_file():
            found |= _read(path)
    return found


def _read(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        if line.strip() and not line.lstrip().startswith("#"):
            name, equals, value = line.partition("=")
            if not equals or not name.strip():
                raise ConfigError(f"{path}: line {number} is not NAME=VALUE: {line}")
            found[name.strip()] = value
    return found
