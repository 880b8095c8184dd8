"""Tells where megastable lies: in a checkout, or installed, without the scripts of launch/."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
IS_CHECKOUT = (ROOT / "pyproject.toml").is_file()
PACKAGES = ("megastable", "megastable_guard", "megastable_tools")


def package_folders() -> list[Path]:
    """The folders of our packages, as far as they are there."""
    found = [find_spec(name) for name in PACKAGES]
    return [
        Path(spec.origin).absolute().parent for spec in found if spec is not None and spec.origin is not None
    ]


def install_command(extra: str = "") -> str:
    """The command that installs megastable's dependencies here, and those of an extra of pyproject.toml."""
    if IS_CHECKOUT:
        return f"bash launch/install.sh {extra}".rstrip()
    return f"pip install 'megastable[{extra}]'" if extra else "pip install megastable"
