"""Corrupt a checkpoint's content and fix its checksums: damage that no hash can detect.

    poison(RunDirectory(run).checkpoints, "weight")      # the newest checkpoint of any layout

It simulates memory that flips a bit before the bytes are hashed, a file system that returns other pages, or an edit of
the manifest. Only drills and tests call this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import Reader, hash_file, write_file
from megastable.checkpoint.store import HEALTH, MANIFEST, STATE

Kind = Literal["weight", "second_moments", "block"]
Floats = npt.NDArray[np.float32]

WEIGHT = 1e4  # the new value of one weight; usual ones are 0.02
SCALE = 1.5  # factor on the weights of a block


def poison_checkpoint(folder: Path, kind: Kind, *, forget: bool = False, step: int | None = None) -> Path:
    """Poison the newest checkpoint of `folder`, or the one of `step`; returns its path.

    kind: "weight": one weight of a block becomes 1e4. "second_moments": all of Adam's become zero. "block": all weights
    of the middle block are scaled by 1.5. forget: remove its vitals, as in a checkpoint of an older version. Its
    markers (healthy, pinned) stay valid. Raises CheckpointError.
    """
    found_checkpoints = store.newest_first(folder) if step is None else [folder / store.name_of(step)]
    if not found_checkpoints or not found_checkpoints[0].is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    checkpoint = found_checkpoints[0]
    contents, health_marker = store.read_contents(checkpoint), markers.read_health(checkpoint)
    changed_names = set[str]()
    for shard_file, first_byte, number_count in _chosen(checkpoint, kind):
        _edit(shard_file, first_byte, number_count, _EDITS[kind])
        changed_names.add(shard_file.name)
    if not changed_names:
        raise CheckpointError(f"{checkpoint}: holds nothing that could be poisoned so ({kind})")
    file_hashes = dict(contents.files)
    if forget:
        run_state = store.read_state(checkpoint).model_copy(update={"vitals": None})
        file_hashes[STATE] = write_file(checkpoint / STATE, run_state.model_dump_json(indent=1).encode())
    file_hashes |= {name: hash_file(checkpoint / name) for name in changed_names}
    write_file(checkpoint / MANIFEST, contents.model_copy(update={"files": file_hashes}).to_sealed_bytes())
    if health_marker is not None:
        (checkpoint / HEALTH).unlink()
        markers.mark_healthy(checkpoint, health_marker.step, health_marker.steps)
    return checkpoint


def _chosen(checkpoint: Path, kind: Kind) -> Iterator[tuple[Path, int, int]]:
    """(file, byte, elements) of the numbers to change."""
    all_entries = [
        (name, path, entry.begin, (entry.end - entry.begin) // 4)
        for path in sorted(checkpoint.glob("rank-*.safetensors"))
        for name, entry in Reader(path).entries.items()
    ]
    if kind == "second_moments":
        yield from ((path, at, n) for name, path, at, n in all_entries if name.startswith("exp_avg_sq/"))
        return
    weight_entries = [entry for entry in all_entries if entry[0].startswith("weight/blocks.")]
    block_numbers = sorted({int(name.split(".")[1]) for name, *_ in weight_entries})
    middle_prefix = f"weight/blocks.{block_numbers[len(block_numbers) // 2]}." if block_numbers else ""
    inside = [entry for entry in weight_entries if entry[0].startswith(middle_prefix)]
    chosen_entries = inside if kind == "block" else sorted(inside, key=lambda entry: -entry[3])[:1]
    yield from ((path, at, n) for _, path, at, n in chosen_entries)


def _one_weight(x: Floats) -> Floats:
    x[x.size // 2] = WEIGHT
    return x


_EDITS: dict[Kind, Callable[[Floats], Floats]] = {
    "weight": _one_weight,
    "second_moments": np.zeros_like,
    "block": lambda x: x * np.float32(SCALE),
}


def _edit(file: Path, begin: int, count: int, edit: Callable[[Floats], Floats]) -> None:
    with file.open("r+b") as opened_file:
        opened_file.seek(begin)
        edited_numbers = np.frombuffer(opened_file.read(4 * count), dtype="<f4").copy()
        opened_file.seek(begin)
        opened_file.write(edit(edited_numbers).astype("<f4").tobytes())
