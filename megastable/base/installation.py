"""Tells a checkout from an installed package, which has neither tools/ nor the scripts of launch/."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()


def install_command(extra: str = "") -> str:
    """The command that installs megastable's dependencies here, and those of an extra of pyproject.toml."""
    if IS_CHECKOUT:
        return f"bash launch/install.sh {extra}".rstrip()
    return f"pip install 'megastable[{extra}]'" if extra else "pip install megastable"
