"""Folders that are checkpoints by all that can be seen from outside: manifest, state and files, without weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megastable.checkpoint.files import write_file
from megastable.checkpoint.store import LATEST, MANIFEST, STATE, Contents, LayoutState, RunState

LAYOUT = LayoutState(tensor=1, pipeline=1, data=2, zero=1, precision="bf16")


def checkpoint(folder: Path, step: int, name: str = "", finite: bool = True, **state: Any) -> Path:
    """`folder`/step-N (or `name`), whole."""
    path = folder / (name or f"step-{step}")
    path.mkdir(parents=True)
    told = RunState(order_fingerprint="abc", layout=LAYOUT, step=step, **state)
    files = {
        "rank-00000.safetensors": write_file(path / "rank-00000.safetensors", bytes(100 + step % 7)),
        STATE: write_file(path / STATE, told.model_dump_json().encode()),
    }
    (path / MANIFEST).write_bytes(Contents(step=step, files=files, finite=finite).to_sealed_bytes())
    return path


def run_with(root: Path, *steps: int) -> Path:
    """RUN/checkpoints with whole checkpoints of these steps, the last of which is the latest."""
    folder = root / "checkpoints"
    folder.mkdir(parents=True)
    for step in steps:
        checkpoint(folder, step)
    if steps:
        (folder / LATEST).write_text(f"step-{steps[-1]}")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
