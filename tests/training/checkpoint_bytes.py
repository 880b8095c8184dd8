from __future__ import annotations

from pathlib import Path


def bytes_of(run: Path, step: int) -> dict[str, bytes]:
    """Masters, moments and weights of a run's checkpoint, which must be there, by file."""
    found = {p.name: p.read_bytes() for p in sorted((run / f"checkpoints/step-{step}").glob("*.safetensors"))}
    assert found, f"{run} has no checkpoint of step {step}"
    return found
