"""Reads maps of a run's machines over time, as many samples as can be drawn: own work of ranks, readings of GPUs."""

from __future__ import annotations

import math
import os
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megastable.base.text import make_visible
from megastable.run.machine_state import (
    MachineSample,
    SamplePlace,
    as_floats,
    list_places,
    read_newest,
    read_sample,
)

Floats = npt.NDArray[np.float64]
MOST = 240  # samples in a map
ROWS = 256  # of a map; several ranks or GPUs share one where there are more
KEPT = 1000  # samples in memory, ...
VALUES = 2_000_000  # ... with so many numbers together
GAP = 3.0  # times the time of a sample, without one, after which nothing is drawn
SLOW = 1.3  # times the median, which is drawn as the slowest at least


class Gauge(NamedTuple):
    """A map of GPUs. worst: of those that share a row."""

    title: str
    unit: str
    worst: Any


GAUGES = {
    "utilization": Gauge("GPU utilization", "share", np.nanmin),
    "memory_used": Gauge("GPU memory", "GiB", np.nanmax),
    "temperature": Gauge("GPU temperature", "°C", np.nanmax),
    "power": Gauge("GPU power", "W", np.nanmax),
    "clock": Gauge("GPU clock", "MHz", np.nanmin),
}


UNREAD = {"throttled": "why clocks are held back", "xid": "Xid errors"}  # that no GPU of a host tells


class MachineMap:
    """Of one run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.levels = dict[str, list[SamplePlace]]()
        self.newest: MachineSample | None = None
        self._stamp: list[Any] = []
        self._samples: OrderedDict[float, MachineSample] = OrderedDict()

    def look_again(self) -> bool:
        """Look for new samples."""
        try:
            folder_stamp = sorted((entry.name, entry.stat().st_size) for entry in os.scandir(self.folder))
        except OSError:
            return False
        if folder_stamp == self._stamp:
            return False
        self._stamp = folder_stamp
        self.levels, self.newest = list_places(self.folder), read_newest(self.folder)
        return True

    def read_between(self, begin: float, end: float) -> list[MachineSample]:
        """Those between two times that are to be drawn, oldest first. [unix seconds]"""
        read_samples = [self._sample(sample_place) for sample_place in choose_places(self.levels, begin, end)]
        return [machine_sample for machine_sample in read_samples if machine_sample is not None]

    def _sample(self, place: SamplePlace) -> MachineSample | None:
        # By time: a file that is full gets another name.
        key = place.time + place.seconds / 1e9
        if key not in self._samples and (found := read_sample(place)) is not None:
            self._samples[key] = found
            number_count = max(1, len(found.own) + sum(8 * host.gpus for host in found.hosts.values()))
            while len(self._samples) > min(KEPT, max(2, VALUES // number_count)):
                self._samples.popitem(last=False)
            return found
        return self._samples.get(key)


def choose_places(levels: dict[str, list[SamplePlace]], begin: float, end: float) -> list[SamplePlace]:
    """At most MOST samples between two times, oldest first: of the finest level that needs no more of them, completed
    by coarser ones before it and finer ones after it."""
    inside = [[place for place in level if begin <= place.time <= end] for level in levels.values()]
    if not any(inside):
        return []
    first_time = min(level[0].time for level in inside if level)
    window_width = max(level[-1].time for level in inside if level) - first_time
    level_seconds = [next(iter(level)).seconds if level else 0.0 for level in levels.values()]
    fine = (n for n, level in enumerate(inside) if level and window_width <= MOST * level_seconds[n])
    best_level = next(fine, len(inside) - 1)
    found = list(inside[best_level])
    for coarser_level in inside[best_level + 1 :]:
        found = [place for place in coarser_level if not found or place.time < found[0].time] + found
    for finer_level in reversed(inside[:best_level]):
        found += [place for place in finer_level if not found or place.time > found[-1].time]
    if len(found) > MOST:
        found = [found[n] for n in np.unique(np.linspace(0, len(found) - 1, MOST).astype(int))]
    return found


def keep_forward(samples: Sequence[MachineSample]) -> list[MachineSample]:
    """Those after whose step the run never went back: an axis of steps has a place for them."""
    forward_samples, lowest_step = list[MachineSample](), math.inf
    for machine_sample in reversed(samples):
        step = lowest_step if machine_sample.step is None else machine_sample.step
        if step <= lowest_step:
            forward_samples.append(machine_sample)
            lowest_step = step
    return forward_samples[::-1]


def with_gaps(samples: Sequence[MachineSample]) -> list[MachineSample]:
    """The same, with empty samples where nothing was recorded."""
    found = list[MachineSample]()
    # Of very many samples only some are drawn, which are farther apart.
    usual_gap = float(np.median(np.diff([sample.time for sample in samples]))) if len(samples) > 1 else 0.0
    for sample in samples:
        least_gap = GAP * max(sample.seconds, found[-1].seconds, usual_gap) if found else 0.0
        if found and sample.time - sample.seconds - found[-1].time > least_gap:
            found.append(MachineSample(time=found[-1].time + 1.0, seconds=1.0, step=found[-1].step))
            found.append(MachineSample(time=sample.time - sample.seconds, seconds=1.0, step=sample.step))
        found.append(sample)
    return found


def build_maps(samples: Sequence[MachineSample], stages: int) -> list[dict[str, Any]]:
    """kind, title, unit, rows (names), values [rows, samples], and where colours begin and end, None: by the values.
    stages: of the pipeline."""
    own = as_floats([sample.own for sample in samples])
    drawn_maps = [own_work(own, stages)] if own.size and not np.isnan(own).all() else []
    host_names = dict.fromkeys(name for sample in samples for name in sample.hosts)
    gpu_counts = {name: max(s.hosts[name].gpus for s in samples if name in s.hosts) for name in host_names}
    row_names = [f"{name} GPU {n}" for name in host_names for n in range(gpu_counts[name])]
    for gauge_kind, gpu_gauge in GAUGES.items():
        values = np.full((len(row_names), len(samples)), np.nan)
        for sample_index, sample in enumerate(samples):
            row_begin = 0
            for name in host_names:
                gpu_values = sample.hosts[name].gauges.get(gauge_kind) if name in sample.hosts else None
                if gpu_values:
                    rows = slice(row_begin, row_begin + len(gpu_values))
                    values[rows, sample_index] = np.array(gpu_values, dtype=np.float64)
                row_begin += gpu_counts[name]
        if values.size and not np.isnan(values).all():
            shown_values, labels = share_rows(values, row_names, gpu_gauge.worst)
            colour_scale = (0.0, 1.0) if gauge_kind == "utilization" else None
            drawn_maps.append(
                _map(gauge_kind, gpu_gauge.title, gpu_gauge.unit, labels, shown_values, colour_scale)
            )
    return drawn_maps


def own_work(own: Floats, stages: int) -> dict[str, Any]:
    """The map of all ranks; own: seconds [samples, ranks]. Ranks of a pipeline stage do the same work: each is compared
    with their median."""
    ranks = own.shape[1]
    rank_names = [f"rank {n}" for n in range(ranks)]
    if ranks == 1:
        return _map("own", "Own work of the rank", "seconds of a step", rank_names, own.T, None)
    stage_size = max(1, ranks // max(1, stages))
    stage_ratios = np.full_like(own, np.nan)
    with np.errstate(all="ignore"):
        for begin in range(0, ranks, stage_size):
            stage = own[:, begin : begin + stage_size]
            some = ~np.isnan(stage).all(axis=1)
            stage_medians = np.nanmedian(stage[some], axis=1, keepdims=True)
            stage_ratios[some, begin : begin + stage_size] = stage[some] / stage_medians
    shown_ratios, row_labels = share_rows(stage_ratios.T, rank_names, np.nanmax)
    scale = (0.9, max(SLOW, min(3.0, float(np.nanmax(shown_ratios)))))
    whose = "every rank" if len(row_labels) == ranks else "ranks, the slowest of each row"
    title, unit = f"Own work of {whose}", "times the median of its stage"
    return _map("own", title, unit, row_labels, shown_ratios, scale)


def share_rows(values: Floats, names: Sequence[str], worst: Any) -> tuple[Floats, list[str]]:
    """At most ROWS rows: the worst of neighbours, named by the first and the last of them. values: [rows, samples]"""
    if len(names) <= ROWS:
        return values, list(names)
    each = -(-len(names) // ROWS)
    parts = [slice(begin, min(begin + each, len(names))) for begin in range(0, len(names), each)]
    found = np.full((len(parts), values.shape[1]), np.nan)
    for n, part in enumerate(parts):
        some = ~np.isnan(values[part]).all(axis=0)
        found[n, some] = worst(values[part][:, some], axis=0)
    return found, [_from_to(names[part.start], names[part.stop - 1]) for part in parts]


def _from_to(first: str, last: str) -> str:
    """Names of rows; of the last one only the number, if the rest is that of the first."""
    name_before, _, last_number = last.rpartition(" ")
    return f"{first} to {last_number if first.startswith(name_before + ' ') else last}"


def _map(
    kind: str, title: str, unit: str, rows: list[str], values: Floats, scale: tuple[float, float] | None
) -> dict[str, Any]:
    return {
        "kind": f"machine-{kind}", "title": title, "unit": unit,
        "rows": [make_visible(row_name, 100) for row_name in rows],
        "values": values.astype(np.float32), "scale": scale,
    }  # fmt: skip


def list_hosts(sample: MachineSample | None) -> list[dict[str, Any]]:
    """The last reading of each host, for a table; those with something to look at first."""
    host_rows = []
    for host_name, host in (sample.hosts if sample is not None else {}).items():
        known_gauges = {
            gauge_key: [v for v in values if v is not None] for gauge_key, values in host.gauges.items()
        }
        trouble = [f"GPU {n}: {', '.join(reasons)}" for n, reasons in host.throttled.items()]
        trouble += [f"GPU {n}: Xid {', '.join(map(str, xid_codes))}" for n, xid_codes in host.xid.items()]
        trouble += [
            f"GPU {n}: {ecc_errors:.0f} uncorrected ECC errors"
            for n, ecc_errors in enumerate(host.gauges.get("ecc_uncorrected", [])) if ecc_errors
        ]  # fmt: skip
        trouble += [host.unknown] if host.unknown else []
        host_rows.append({
            "name": make_visible(host_name, 80), "memory": host.memory, "memory_free": host.memory_free,
            "load": host.load,
            "ranks": host.ranks[:64], "gpus": host.gpus,
            "trouble": [make_visible(trouble_text, 300) for trouble_text in trouble[:20]],
            "unread": [unread_text for key, unread_text in UNREAD.items() if key in host.unread],
            "range": {gauge_key: [min(values), max(values)] for gauge_key, values in known_gauges.items() if values},
        })  # fmt: skip
    return sorted(host_rows, key=lambda host: not host["trouble"])
