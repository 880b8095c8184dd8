"""`verify`: check every file of checkpoints against their manifests, in parallel, and describe the problems."""

from __future__ import annotations

import difflib
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megastable.base.errors import CheckpointError
from megastable.base.progress_bar import bar
from megastable.base.text import plural, size, visible
from megastable.checkpoint import markers, store
from megastable.config import recipe
from megastable.report.sheet import Column, Sheet

NAME = re.compile(r"(\w+-)?step-\d+")  # names of checkpoints, including those set aside
PARTS = 64  # work units per checkpoint, for the threads

COLUMNS = (
    Column("checkpoint", "checkpoint"),
    Column("outcome", "outcome"),
    Column("files", "files", "count"),
    Column("size", "size", words=True),
    Column("problem", "problem"),
)


@dataclass(frozen=True)
class Verified:
    """A checkpoint, the number of files and bytes in its manifest, and its problems."""

    checkpoint: Path
    files: int
    size: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()  # on its markers, which are not part of it


def checkpoints_of(path: Path) -> list[Path]:
    """The checkpoints that `path` names: one, those of a run (the newest first), or RUN/checkpoints/latest. Unverified.

    Raises CheckpointError if there are none.
    """
    path = recipe.find(path)
    if path.name == store.LATEST and path.is_file():
        try:
            path = path.parent / path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
    folder = path if path.name == "checkpoints" else path / "checkpoints"
    if (path / store.STATE).exists() or (path / store.MANIFEST).exists():
        return [path]
    if NAME.fullmatch(path.name) and not folder.is_dir():
        if not path.is_dir():
            raise CheckpointError(f"{path}: there is no such checkpoint{store.others(path.parent)}")
        return [path]
    if not folder.is_dir():
        what = "neither a checkpoint nor the directory of a run" if path.exists() else "there is no such path"
        raise CheckpointError(f"{path}: {what}{_runs(path)}")
    found = store.newest_first(folder)
    if not found:
        raise CheckpointError(f"{folder}: holds no checkpoint")
    return found


def _runs(missing: Path) -> str:
    """Existing runs near the given path, the likeliest first."""
    try:
        names = sorted(path.name for path in missing.parent.iterdir() if (path / "checkpoints").is_dir())
    except OSError:
        names = []
    near = difflib.get_close_matches(missing.name, names, n=5, cutoff=0.3) or names[:5]
    where = f"; runs in {missing.parent}: {', '.join(near)}" if near else ""
    return where or ": give a run such as runs/mine, or a checkpoint such as runs/mine/checkpoints/step-500"


def verify(paths: Sequence[Path], silent: bool = False) -> list[Verified]:
    """Check all checkpoints that `paths` name. Raises CheckpointError for a path that names none."""
    checkpoints = list(dict.fromkeys(one for path in paths for one in checkpoints_of(path)))
    counts = [_parts(one) for one in checkpoints]
    with bar("verifying", sum(counts), silent, "files") as watch, ThreadPoolExecutor(_threads()) as pool:
        return [_check(one, parts, pool, watch) for one, parts in zip(checkpoints, counts)]


def good(path: Path, silent: bool = False) -> Path:
    """The verified checkpoint that `path` names: for a run its newest good one. Raises CheckpointError."""
    checkpoints = checkpoints_of(path)
    for checkpoint in checkpoints:
        if len(checkpoints) > 1 and (ruling := markers.convicted(checkpoint)) is not None:
            print(f"skipped: {visible(ruling.reason)}", file=sys.stderr)
            last = Verified(checkpoint, 0, 0, (ruling.reason,))
            continue
        [found] = verify([checkpoint], silent)
        if not found.problems:
            return checkpoint
        if len(checkpoints) > 1:
            print(f"skipped: {visible(found.problems[0])}", file=sys.stderr)
        last = found
    more = f" ({plural(len(last.problems) - 1, 'more problem')})" if len(last.problems) > 1 else ""
    raise CheckpointError(
        f"{last.problems[0]}{more}: it is not used. All of its problems: "
        f"megastable checkpoint verify {shlex.quote(str(path))}"
    )


def _threads() -> int:
    return min(16, len(os.sched_getaffinity(0)))


def _parts(checkpoint: Path) -> int:
    try:
        return max(1, min(PARTS, len(store.read_contents(checkpoint).files)))
    except CheckpointError:
        return 1  # `problems` reports the error


def _check(checkpoint: Path, parts: int, pool: ThreadPoolExecutor, watch: Callable[[int], None]) -> Verified:
    def part(number: int) -> bool:
        try:
            store.verify(checkpoint, number, parts)
        except CheckpointError:
            return False
        finally:
            watch(1)
        return True

    good = all(list(pool.map(part, range(parts))))  # hashing releases the GIL
    problems, files, size = [], 0, 0
    try:
        problems = [] if good else store.problems(checkpoint)  # once more, to get all of them
        contents = store.read_contents(checkpoint)
        files, size = len(contents.files), contents.size
    except CheckpointError as error:
        problems = problems or [str(error)]
    notes = markers.problems(checkpoint)
    if (ruling := markers.convicted(checkpoint)) is not None:
        notes.append(f"{checkpoint}: a run convicted it: {ruling.reason}")
    return Verified(checkpoint, files, size, tuple(problems), tuple(notes))


def verified_sheet(found: Sequence[Verified]) -> Sheet:
    """A row for each problem, and for each checkpoint without one."""
    rows = [
        {
            "checkpoint": str(one.checkpoint), "outcome": "damaged" if one.problems else "good", "files": one.files,
            "size": size(one.size), "bytes": one.size, "problem": problem.removeprefix(f"{one.checkpoint}{os.sep}"),
        }
        for one in found
        for problem in one.problems or ("",)
    ]  # fmt: skip
    bad = sum(1 for one in found if one.problems)
    lead = f"{bad} of {plural(len(found), 'checkpoint')} cannot be trusted" if bad else (
        f"{plural(len(found), 'checkpoint')}, all files match their manifests"
    )  # fmt: skip
    return Sheet(
        "verified", lead=[lead], columns=COLUMNS, rows=rows, notes=[n for one in found for n in one.notes],
        data={"checkpoints": len(found), "damaged": bad},
    )  # fmt: skip
