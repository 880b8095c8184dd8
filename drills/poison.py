"""Makes a checkpoint's content wrong and its checksums right: what no hash can find.

    poison(RunDirectory(run).checkpoints, "weight")      # the newest checkpoint of any layout

As memory that flips a bit before the bytes are hashed, a file system that returns other pages, or a hand that mends the
manifest would leave it. Nothing but drills and tests calls this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from megastable.base.errors import CheckpointError
from megastable.checkpoint import markers, store
from megastable.checkpoint.files import hash_file, write_file
from megastable.checkpoint.reader import Reader
from megastable.checkpoint.store import HEALTH, MANIFEST, STATE

Kind = Literal["weight", "second_moments", "block"]
Floats = npt.NDArray[np.float32]

WEIGHT = 1e4  # what one weight becomes; usual ones are 0.02
SCALE = 1.5  # of the weights of a block


def poison(folder: Path, kind: Kind, *, forget: bool = False, step: int | None = None) -> Path:
    """Poison the newest checkpoint of `folder`, or the one of `step`; which one it was.

    kind: "weight": one weight of a block becomes 1e4. "second_moments": all of Adam's become zero. "block": all weights
    of the block in the middle are scaled by 1.5. forget: it remembers nothing of its state any more, as one that an
    older version saved. What it was called (healthy, pinned) it is still called. Raises CheckpointError.
    """
    found = store.newest_first(folder) if step is None else [folder / store.name_of(step)]
    if not found or not found[0].is_dir():
        raise CheckpointError(f"{folder}: there is no such checkpoint")
    checkpoint = found[0]
    contents, health = store.read_contents(checkpoint), markers.healthy(checkpoint)
    changed = set[str]()
    for file, begin, count in _chosen(checkpoint, kind):
        _edit(file, begin, count, _EDITS[kind])
        changed.add(file.name)
    if not changed:
        raise CheckpointError(f"{checkpoint}: holds nothing that could be poisoned so ({kind})")
    files = dict(contents.files)
    if forget:
        state = store.read_state(checkpoint).model_copy(update={"vitals": None})
        files[STATE] = write_file(checkpoint / STATE, state.model_dump_json(indent=1).encode())
    files |= {name: hash_file(checkpoint / name) for name in changed}
    write_file(checkpoint / MANIFEST, contents.model_copy(update={"files": files}).sealed())
    if health is not None:
        (checkpoint / HEALTH).unlink()
        markers.mark_healthy(checkpoint, health.step, health.steps)
    return checkpoint


def _chosen(checkpoint: Path, kind: Kind) -> Iterator[tuple[Path, int, int]]:
    """(file, byte, elements) of the numbers that are to be changed."""
    entries = [
        (name, path, entry.begin, (entry.end - entry.begin) // 4)
        for path in sorted(checkpoint.glob("rank-*.safetensors"))
        for name, entry in Reader(path).entries.items()
    ]
    if kind == "second_moments":
        yield from ((path, at, n) for name, path, at, n in entries if name.startswith("exp_avg_sq/"))
        return
    weights = [entry for entry in entries if entry[0].startswith("weight/blocks.")]
    blocks = sorted({int(name.split(".")[1]) for name, *_ in weights})
    middle = f"weight/blocks.{blocks[len(blocks) // 2]}." if blocks else ""
    inside = [entry for entry in weights if entry[0].startswith(middle)]
    chosen = inside if kind == "block" else sorted(inside, key=lambda entry: -entry[3])[:1]
    yield from ((path, at, n) for _, path, at, n in chosen)


def _one_weight(x: Floats) -> Floats:
    x[x.size // 2] = WEIGHT
    return x


_EDITS: dict[Kind, Callable[[Floats], Floats]] = {
    "weight": _one_weight,
    "second_moments": np.zeros_like,
    "block": lambda x: x * np.float32(SCALE),
}


def _edit(file: Path, begin: int, count: int, edit: Callable[[Floats], Floats]) -> None:
    with file.open("r+b") as opened:
        opened.seek(begin)
        numbers = np.frombuffer(opened.read(4 * count), dtype="<f4").copy()
        opened.seek(begin)
        opened.write(edit(numbers).astype("<f4").tobytes())
