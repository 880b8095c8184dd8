"""Keeps samples of a run's machines in files of bounded size, fine ones of late and coarse ones of the whole run.

Three levels, of half a minute, a quarter of an hour and six hours; a line of JSON for each sample. A file that is full
becomes NAME.old.jsonl, in place of the one before: so there are at most two of a level, with at most `LINES` lines or
`BYTES` each, however many steps and hosts there are. Nothing waits for the disk, and nothing depends on them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from megastable.run.machine_state import MachineSample, merged

LEVELS = {"30s": 30.0, "15min": 900.0, "6h": 21_600.0}  # seconds
LINES, BYTES = 4000, 16 << 20  # of a file, at most
TIME = re.compile(rb'\{"time":(\d+(?:\.\d+)?),')
TAIL = 4 << 20  # bytes, in which the last line is


class SamplePlace(NamedTuple):
    """Where a sample is. time: unix seconds; seconds: of its level."""

    time: float
    seconds: float
    path: Path
    offset: int
    length: int


class MachineWriter:
    """Of one run directory: for one process at a time. Raises OSError where a sample cannot be written; later ones may
    be."""

    def __init__(self, folder: Path, lines: int = LINES, size: int = BYTES) -> None:
        self.folder, self.lines, self.size = folder, lines, size
        self._open: dict[str, list[MachineSample]] = {name: [] for name in list(LEVELS)[1:]}
        self._count = dict[str, int]()
        self._newest = 0.0  # time of the sample before

    def add(self, sample: MachineSample) -> None:
        """Write it, and the coarser ones that it completes."""
        if sample.time < self._newest:  # a clock was set back: what waits for it may wait for years
            self.close()
        self._newest = sample.time
        for name, seconds in LEVELS.items():
            if name in self._open:
                waiting = self._open[name]
                waiting.append(sample)
                if sample.time - waiting[0].time + waiting[0].seconds < seconds:
                    return
                sample, self._open[name] = merged(waiting), []
            self._write(name, sample)

    def close(self) -> None:
        """Write what waits for a coarser level."""
        sample: MachineSample | None = None
        for name, waiting in self._open.items():
            waiting += [sample] if sample is not None else []
            if waiting:
                sample = merged(waiting)
                self._write(name, sample)
            self._open[name] = []

    def _write(self, name: str, sample: MachineSample) -> None:
        self.folder.mkdir(exist_ok=True)
        path = self.folder / f"{name}.jsonl"
        line = sample.model_dump_json(exclude_defaults=True).encode() + b"\n"
        if name not in self._count:
            self._count[name] = path.read_bytes().count(b"\n") if path.exists() else 0
        with path.open("a+b") as file:
            end = file.seek(0, os.SEEK_END)
            if end:
                file.seek(end - 1)
                if file.read(1) != b"\n":  # a writer was killed, or the disk was full
                    line = b"\n" + line
            file.write(line)
            end = file.tell()
        self._count[name] += 1
        if self._count[name] >= self.lines or end >= self.size:
            os.replace(path, old_file(path))
            self._count[name] = 0


def old_file(path: Path) -> Path:
    """Where a full file goes."""
    return path.with_suffix(".old.jsonl")


def places(folder: Path) -> dict[str, list[SamplePlace]]:
    """All samples by level, oldest first, without reading more of them than when they are of."""
    return {
        name: sorted(place for path in (old_file(file), file) for place in _places(path, seconds))
        for name, seconds in LEVELS.items() if (file := folder / f"{name}.jsonl")
    }  # fmt: skip


def _places(path: Path, seconds: float) -> Iterator[SamplePlace]:
    offset = 0
    try:
        with path.open("rb") as file:
            for line in file:
                if (found := TIME.match(line)) and line.endswith(b"}\n"):
                    yield SamplePlace(float(found[1]), seconds, path, offset, len(line))
                offset += len(line)
    except OSError:
        return


def read_sample(place: SamplePlace) -> MachineSample | None:
    """None if it is damaged, or its file was replaced meanwhile."""
    try:
        with place.path.open("rb") as file:
            file.seek(place.offset)
            found = MachineSample.model_validate_json(file.read(place.length))
    except (OSError, ValidationError):
        return None
    return found if found.time == place.time else None


def newest(folder: Path) -> MachineSample | None:
    """The last sample, None if there is none."""
    name = next(iter(LEVELS))
    path = folder / f"{name}.jsonl"
    for candidate in (path, old_file(path)):
        try:
            with candidate.open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().split(b"\n")
        except OSError:
            continue
        for line in reversed(lines[-3:]):
            try:
                return MachineSample.model_validate_json(line)
            except ValidationError:
                continue
    return None
