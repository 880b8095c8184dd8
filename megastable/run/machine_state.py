"""What is recorded of a run's machines: readings of hosts and GPUs, own work of ranks; and the files that hold it.

The files are of bounded size. There are three levels, of half a minute, a quarter of an hour and six hours; a line of
JSON for each sample. A file that is full becomes NAME.old.jsonl, in place of the one before: so there are at most two
of a level, with at most `LINES` lines or `BYTES` each, however many steps and hosts there are. Nothing waits for the
disk, and nothing depends on them.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

Floats = npt.NDArray[np.float64]
GIB = float(1 << 30)
# Numbers read of every GPU: unit, and what stands for several readings.
GAUGES: dict[str, tuple[str, Callable[..., Any]]] = {
    "utilization": ("share", np.nanmean),
    "memory_used": ("GiB", np.nanmax),
    "memory": ("GiB", np.nanmax),
    "temperature": ("°C", np.nanmax),
    "power": ("W", np.nanmean),
    "clock": ("MHz", np.nanmean),
    "ecc_uncorrected": ("errors", np.nanmax),
}


# What only tells of trouble: field of a reading, and its name in `cluster.gpu_health`.
SIGNS = {"throttled": "clocks_throttled", "xid": "xid"}


class HostReading(BaseModel):
    """A host. memory: of the machine or, if that has less, the control group; memory_free: that a process may still
    allocate [GiB]; load: average of a minute; gauges: by key of GAUGES, the value of each GPU, None where it does not
    tell; throttled: why clocks are held back, xid: errors of the last day, both by GPU and only where there is one;
    unread: which of these two no GPU tells, such as xid where the kernel's log is not for this user; unknown: why GPUs
    cannot be read; ranks: that run there."""

    model_config = ConfigDict(extra="ignore")

    memory: float
    memory_free: float
    load: float
    gauges: dict[str, list[float | None]] = {}
    throttled: dict[int, list[str]] = {}
    xid: dict[int, list[int]] = {}
    unread: list[str] = []
    unknown: str = ""
    ranks: list[int] = []

    @property
    def gpus(self) -> int:
        return max(map(len, self.gauges.values()), default=0)


class MachineSample(BaseModel):
    """All machines of a run over `seconds`, up to `time` (unix). own: by rank, seconds of a step that are its own work
    (`rank_ipc.WorkBlock`), None if it has not told; whole: seconds of a step, the median of all ranks; step: done."""

    model_config = ConfigDict(extra="ignore")

    time: float
    seconds: float
    step: int | None = None
    whole: float | None = None
    own: list[float | None] = []
    hosts: dict[str, HostReading] = {}


def host_reading(
    memory: int, free: int, load: float, gpus: Sequence[Mapping[str, Any]], why: str
) -> HostReading:
    """From bytes, and what `cluster.gpu_health` tells of each GPU; why: there is nothing of GPUs."""
    scale = {"memory": 1 / GIB, "memory_used": 1 / GIB, "utilization": 0.01}
    told = {gauge_name: [gpu.get(gauge_name) for gpu in gpus] for gauge_name in GAUGES}
    gauges = {
        name: [_short(value, scale.get(name, 1.0)) for value in values]
        for name, values in told.items() if any(value is not None for value in values)
    }  # fmt: skip
    return HostReading(
        memory=round(memory / GIB, 2), memory_free=round(free / GIB, 2), load=round(load, 2), gauges=gauges,
        throttled={n: held for n, gpu in enumerate(gpus) if (held := gpu.get("clocks_throttled"))},
        xid={n: codes for n, gpu in enumerate(gpus) if (codes := gpu.get("xid"))},
        unread=[name for name, key in SIGNS.items() if all(gpu.get(key) is None for gpu in gpus)] if gpus else [],
        unknown=why,
    )  # fmt: skip


def merge_samples(samples: Sequence[MachineSample]) -> MachineSample:
    """One sample for several, oldest first: means of times, utilization, power and clocks; the worst of all else."""
    last = samples[-1]
    host_names = dict.fromkeys(host_name for sample in samples for host_name in sample.hosts)
    whole = _over([[sample.whole] for sample in samples], np.nanmean)
    return MachineSample(
        time=last.time, seconds=round(last.time - samples[0].time + samples[0].seconds, 1), step=last.step,
        whole=whole[0], own=_over([sample.own for sample in samples], np.nanmean),
        hosts={name: _of_host([s.hosts[name] for s in samples if name in s.hosts]) for name in host_names},
    )  # fmt: skip


def _of_host(readings: Sequence[HostReading]) -> HostReading:
    last_reading, reasons_by_gpu, codes_by_gpu = readings[-1], dict[int, set[str]](), dict[int, set[int]]()
    for one_reading in readings:
        for gpu, why in one_reading.throttled.items():
            reasons_by_gpu.setdefault(gpu, set()).update(why)
        for gpu, xid_codes in one_reading.xid.items():
            codes_by_gpu.setdefault(gpu, set()).update(xid_codes)
    gauge_names = dict.fromkeys(name for r in readings for name in r.gauges if name in GAUGES)
    return last_reading.model_copy(update={
        "memory_free": min(r.memory_free for r in readings), "load": max(r.load for r in readings),
        "gauges": {name: _over([r.gauges.get(name, []) for r in readings], GAUGES[name][1]) for name in gauge_names},
        "throttled": {gpu: sorted(why) for gpu, why in reasons_by_gpu.items()},
        "xid": {gpu: sorted(xid_codes) for gpu, xid_codes in codes_by_gpu.items()},
    })  # fmt: skip


def _over(rows: Sequence[Sequence[float | None]], how: Callable[..., Any]) -> list[float | None]:
    """Values [times, n] over the times; rows may be shorter than others."""
    value_rows = as_floats(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value is nan
        combined_values = how(value_rows, axis=0) if value_rows.size else np.empty(0)
    return [_short(combined_value) for combined_value in combined_values.tolist()]


def as_floats(rows: Sequence[Sequence[float | None]]) -> Floats:
    """[rows, longest]; nan where there is none."""
    filled_rows = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for n, row in enumerate(rows):
        filled_rows[n, : len(row)] = np.array(row, dtype=np.float64)
    return filled_rows


def _short(value: float | None, scale: float = 1.0) -> float | None:
    """Four digits: there may be thousands in a line."""
    return None if value is None or value != value else float(f"{value * scale:.4g}")


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
        self._open: dict[str, list[MachineSample]] = {level_name: [] for level_name in list(LEVELS)[1:]}
        self._count = dict[str, int]()
        self._newest = 0.0  # time of the sample before

    def add_sample(self, sample: MachineSample) -> None:
        """Write it, and the coarser ones that it completes."""
        if sample.time < self._newest:  # a clock was set back: what waits for it may wait for years
            self.close()
        self._newest = sample.time
        for level_name, level_seconds in LEVELS.items():
            if level_name in self._open:
                waiting_samples = self._open[level_name]
                waiting_samples.append(sample)
                if sample.time - waiting_samples[0].time + waiting_samples[0].seconds < level_seconds:
                    return
                sample, self._open[level_name] = merge_samples(waiting_samples), []
            self._write(level_name, sample)

    def close(self) -> None:
        """Write what waits for a coarser level."""
        merged_sample: MachineSample | None = None
        for level_name, waiting_samples in self._open.items():
            waiting_samples += [merged_sample] if merged_sample is not None else []
            if waiting_samples:
                merged_sample = merge_samples(waiting_samples)
                self._write(level_name, merged_sample)
            self._open[level_name] = []

    def _write(self, name: str, sample: MachineSample) -> None:
        self.folder.mkdir(exist_ok=True)
        level_path = self.folder / f"{name}.jsonl"
        sample_line = sample.model_dump_json(exclude_defaults=True).encode() + b"\n"
        if name not in self._count:
            self._count[name] = level_path.read_bytes().count(b"\n") if level_path.exists() else 0
        with level_path.open("a+b") as level_file:
            file_end = level_file.seek(0, os.SEEK_END)
            if file_end:
                level_file.seek(file_end - 1)
                if level_file.read(1) != b"\n":  # a writer was killed, or the disk was full
                    sample_line = b"\n" + sample_line
            level_file.write(sample_line)
            file_end = level_file.tell()
        self._count[name] += 1
        if self._count[name] >= self.lines or file_end >= self.size:
            os.replace(level_path, old_file(level_path))
            self._count[name] = 0


def old_file(path: Path) -> Path:
    """Where a full file goes."""
    return path.with_suffix(".old.jsonl")


def list_places(folder: Path) -> dict[str, list[SamplePlace]]:
    """All samples by level, oldest first, without reading more of them than when they are of."""
    return {
        name: sorted(sample_place for path in (old_file(file), file) for sample_place in _places(path, level_seconds))
        for name, level_seconds in LEVELS.items() if (file := folder / f"{name}.jsonl")
    }  # fmt: skip


def _places(path: Path, seconds: float) -> Iterator[SamplePlace]:
    line_offset = 0
    try:
        with path.open("rb") as sample_file:
            for sample_line in sample_file:
                if (time_match := TIME.match(sample_line)) and sample_line.endswith(b"}\n"):
                    yield SamplePlace(float(time_match[1]), seconds, path, line_offset, len(sample_line))
                line_offset += len(sample_line)
    except OSError:
        return


def read_sample(place: SamplePlace) -> MachineSample | None:
    """None if it is damaged, or its file was replaced meanwhile."""
    try:
        with place.path.open("rb") as sample_file:
            sample_file.seek(place.offset)
            stored_sample = MachineSample.model_validate_json(sample_file.read(place.length))
    except (OSError, ValidationError):
        return None
    return stored_sample if stored_sample.time == place.time else None


def read_newest(folder: Path) -> MachineSample | None:
    """The last sample, None if there is none."""
    level_name = next(iter(LEVELS))
    level_path = folder / f"{level_name}.jsonl"
    for candidate_path in (level_path, old_file(level_path)):
        try:
            with candidate_path.open("rb") as sample_file:
                sample_file.seek(max(0, sample_file.seek(0, os.SEEK_END) - TAIL))
                sample_lines = sample_file.read().split(b"\n")
        except OSError:
            continue
        for sample_line in reversed(sample_lines[-3:]):
            try:
                return MachineSample.model_validate_json(sample_line)
            except ValidationError:
                continue
    return None
