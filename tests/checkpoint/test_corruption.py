"""Corruption as disks, file systems and people cause it: found every time, named, passed over when training resumes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
import torch

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.files import write_file
from megastable.checkpoint.parts import write_manifest
from megastable.checkpoint.store import MANIFEST, RECIPE, STATE
from megastable.run.directory import RunDirectory
from megastable.run.events.training_events import CheckpointRejected, Resumed
from tests.checkpoint.states import LAYOUTS, make_run, recipe_of
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.training.test_failures import train

TOTAL = 1000
PAGE = 4096
Files = dict[str, bytes]
Damage = Callable[[Files, Files, Random], Files]


# The kinds of damage. Each gets the files of a checkpoint, those of an older one of the run, and dice.


def flipped(files: Files, older: Files, dice: Random) -> Files:
    """One bit of any file, the short ones as often as the long ones."""
    name = dice.choice(sorted(files))
    content, bit = bytearray(files[name]), dice.randrange(8 * len(files[name]))
    content[bit // 8] ^= 1 << bit % 8
    return files | {name: bytes(content)}


def truncated(files: Files, older: Files, dice: Random) -> Files:
    name = dice.choice(sorted(files))
    length = len(files[name])
    return files | {name: files[name][: dice.choice([0, length - 1, dice.randrange(length)])]}


def extended(files: Files, older: Files, dice: Random) -> Files:
    name = dice.choice(sorted(files))
    more = dice.choice([bytes(PAGE), b"\0", b"\n", dice.randbytes(dice.randint(1, 100)) + b"\0", files[name]])
    return files | {name: files[name] + more}


def swapped(files: Files, older: Files, dice: Random) -> Files:
    one, other = dice.sample(sorted(files), 2)
    return files | {one: files[other], other: files[one]}


def swapped_alike(files: Files, older: Files, dice: Random) -> Files:
    """Two files of one size: nothing but the checksums tells."""
    alike = [
        (a, b)
        for a in files
        for b in files
        if a < b and len(files[a]) == len(files[b]) and files[a] != files[b]
    ]
    one, other = dice.choice(alike) if alike else dice.sample(sorted(files), 2)
    return files | {one: files[other], other: files[one]}


def deleted(files: Files, older: Files, dice: Random) -> Files:
    gone = dice.choice(sorted(files))
    return {name: content for name, content in files.items() if name != gone}


def older_file(files: Files, older: Files, dice: Random) -> Files:
    name = dice.choice(sorted(older))
    return files | {name: older[name]}


def older_manifest(files: Files, older: Files, dice: Random) -> Files:
    return files | {MANIFEST: older[MANIFEST]}


def older_state(files: Files, older: Files, dice: Random) -> Files:
    return files | {STATE: older[STATE]}


def older_but_one(files: Files, older: Files, dice: Random) -> Files:
    kept = dice.choice(sorted(files))
    return older | {kept: files[kept]}


def unlisted(files: Files, older: Files, dice: Random) -> Files:
    """What a larger layout left."""
    name = dice.choice(["rank-{:05d}.safetensors", "rank-{:05d}.json", "rng-{:05d}.pt"])
    return files | {name.format(dice.randint(4, 2000)): dice.choice(list(files.values()))}


def zeroed(files: Files, older: Files, dice: Random) -> Files:
    """A page that never reached the disk: the file has its size, and zeros there."""
    name = dice.choice(sorted(files))
    start = PAGE * dice.randrange(-(-len(files[name]) // PAGE))
    lost = files[name][start : start + PAGE]
    return files | {name: files[name][:start] + bytes(len(lost)) + files[name][start + PAGE :]}


def garbled(files: Files, older: Files, dice: Random) -> Files:
    """A page of something else."""
    name = dice.choice(sorted(files))
    start = PAGE * dice.randrange(-(-len(files[name]) // PAGE))
    lost = files[name][start : start + PAGE]
    return files | {name: files[name][:start] + dice.randbytes(len(lost)) + files[name][start + PAGE :]}


KINDS: tuple[Damage, ...] = (
    flipped, truncated, extended, swapped, swapped_alike, deleted, older_file, older_manifest, older_state,
    older_but_one, unlisted, zeroed, garbled,
)  # fmt: skip
RENAMED = "renamed"  # the folder: to another step's name
EVERY: tuple[Damage | str, ...] = (*KINDS, RENAMED)


@dataclass
class Specimen:
    """A checkpoint to be damaged, and what an older one of its run holds."""

    folder: Path
    files: Files
    older: Files

    def damage(self, kind: Damage | str, dice: Random) -> tuple[Path, set[str]]:
        """Do it; where the checkpoint is now, and the names of which one must be named."""
        if isinstance(kind, str):
            other = dice.choice([n for n in range(100) if n != store.step_of(self.folder)])
            return self.folder.rename(self.folder.with_name(store.name_of(other))), {MANIFEST}
        made = self.files
        while made == self.files:  # two files that are the same may have been swapped
            made = kind(self.files, self.older, dice)
        names = {name for name in made.keys() | self.files.keys() if made.get(name) != self.files.get(name)}
        self._put(made, names)
        return self.folder, names

    def mend(self, folder: Path, names: set[str]) -> None:
        if folder != self.folder:
            folder.rename(self.folder)
        self._put(self.files, names)

    def _put(self, files: Files, names: set[str]) -> None:
        for name in names:
            # Not over the old one: file systems bring a file that was emptied to the disk at once, which takes long.
            (self.folder / name).unlink(missing_ok=True)
            if name in files:
                (self.folder / name).write_bytes(files[name])


def read(folder: Path) -> Files:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def specimen(out: Path, layout: str) -> Specimen:
    """Two checkpoints of a run, of the same names, with random states as a training run writes them."""
    recipe, found = b"", []
    for step in (7, 12):
        folder = make_run(out / str(step), LAYOUTS[layout], seed=step, step=step)
        files = dict(store.read_contents(folder).files)
        recipe = recipe or (folder / RECIPE).read_bytes()
        files[RECIPE] = write_file(folder / RECIPE, recipe)
        for rank in range(store.read_state(folder).layout.world):
            name = f"rng-{rank:05d}.pt"
            files[name] = write_file(folder / name, {"torch": torch.randint(99, (50,)), "cuda": []})
        write_manifest(folder, store.read_state(folder), recipe_of(LAYOUTS[layout]).model, files)
        found.append(folder)
    older, newer = found
    assert read(older).keys() == read(newer).keys()
    return Specimen(newer, read(newer), read(older))


def told(folder: Path) -> list[str]:
    """What the check of all files says; the ranks, who share the files out, must come to the same."""
    found = store.list_problems(folder)
    refused = 0
    for rank in range(3):
        try:
            store.verify_checkpoint(folder, rank, 3)
        except CheckpointError:
            refused += 1
    assert bool(found) == bool(refused), found
    return found


@pytest.mark.slow
def test_of_a_thousand_corruptions_a_thousand_are_found_and_named(tmp_path: Path) -> None:
    dice = Random(20261121)
    specimens = [specimen(tmp_path / name, name) for name in ("one", "tp2-pp2", "dp2-zero2", "tp2-dp2")]
    found, missed = 0, []
    for number in range(TOTAL):
        at, kind = specimens[number % len(specimens)], EVERY[number // len(specimens) % len(EVERY)]
        folder, names = at.damage(kind, dice)
        problems = told(folder)
        if any(f"{folder / name}: " in problem for name in names for problem in problems):
            found += 1
        else:
            missed.append((number, kind, names, problems))
        at.mend(folder, names)
        if not number % 100:
            assert all(not told(each.folder) for each in specimens)
    assert missed == [] and found == TOTAL
    assert all(not told(each.folder) and read(each.folder) == each.files for each in specimens)


@pytest.mark.slow
def test_training_goes_on_from_before_all_the_damage(corpus: Path, tmp_path: Path) -> None:
    """Every checkpoint but the oldest is damaged, each in another way."""
    run, steps = tmp_path / "run", len(EVERY) + 1
    batch = {"steps": steps, "eval_samples": 0}

    def config(interval: int) -> object:
        return tiny(
            corpus, run, train=batch, checkpoint={"interval": interval, "keep": steps}, model={"hidden": 16}
        )

    assert run_ranks(1, train, config(1)) == [(0, "")]
    folder, dice = run / "checkpoints", Random(3)
    intact = read(folder / store.name_of(steps))
    damaged = {}
    for step, kind in zip(range(steps, 1, -1), EVERY, strict=True):
        path, older = folder / store.name_of(step), folder / store.name_of(step - 1)
        files = read(path)
        at = Specimen(path, files, {name: c for name, c in read(older).items() if name in files})
        if kind == RENAMED:
            path, names = path.rename(folder / "step-99"), {MANIFEST}
        else:
            path, names = at.damage(kind, dice)
        damaged[path.name] = names
    assert run_ranks(1, train, config(100)) == [(0, "")]
    rejected = {e["name"]: e["problem"] for e in RunDirectory(run).iterate_events(CheckpointRejected)}
    assert rejected.keys() == damaged.keys()
    for name, problem in rejected.items():
        assert any(f"{folder / name / file}: " in problem for file in damaged[name]), (problem, damaged[name])
        assert (folder / f"rejected-{name}").is_dir()
    assert [e["step"] for e in RunDirectory(run).iterate_events(Resumed)] == [1]
    # And it came to where it had been.
    again = read(folder / store.name_of(steps))
    assert [name for name in intact if name.endswith(".safetensors") and again[name] != intact[name]] == []
