"""Defines what is recorded of a run's machines: readings of hosts and GPUs, and own work of ranks. Pure."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

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
    told = {name: [gpu.get(name) for gpu in gpus] for name in GAUGES}
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


def merged(samples: Sequence[MachineSample]) -> MachineSample:
    """One sample for several, oldest first: means of times, utilization, power and clocks; the worst of all else."""
    last = samples[-1]
    names = dict.fromkeys(name for sample in samples for name in sample.hosts)
    whole = _over([[sample.whole] for sample in samples], np.nanmean)
    return MachineSample(
        time=last.time, seconds=round(last.time - samples[0].time + samples[0].seconds, 1), step=last.step,
        whole=whole[0], own=_over([sample.own for sample in samples], np.nanmean),
        hosts={name: _of_host([s.hosts[name] for s in samples if name in s.hosts]) for name in names},
    )  # fmt: skip


def _of_host(readings: Sequence[HostReading]) -> HostReading:
    last, reasons, codes = readings[-1], dict[int, set[str]](), dict[int, set[int]]()
    for reading in readings:
        for gpu, why in reading.throttled.items():
            reasons.setdefault(gpu, set()).update(why)
        for gpu, found in reading.xid.items():
            codes.setdefault(gpu, set()).update(found)
    gauges = dict.fromkeys(name for r in readings for name in r.gauges if name in GAUGES)
    return last.model_copy(update={
        "memory_free": min(r.memory_free for r in readings), "load": max(r.load for r in readings),
        "gauges": {name: _over([r.gauges.get(name, []) for r in readings], GAUGES[name][1]) for name in gauges},
        "throttled": {gpu: sorted(why) for gpu, why in reasons.items()},
        "xid": {gpu: sorted(found) for gpu, found in codes.items()},
    })  # fmt: skip


def _over(rows: Sequence[Sequence[float | None]], how: Callable[..., Any]) -> list[float | None]:
    """Values [times, n] over the times; rows may be shorter than others."""
    found = as_floats(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a column without any value is nan
        values = how(found, axis=0) if found.size else np.empty(0)
    return [_short(value) for value in values.tolist()]


def as_floats(rows: Sequence[Sequence[float | None]]) -> Floats:
    """[rows, longest]; nan where there is none."""
    found = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for n, row in enumerate(rows):
        found[n, : len(row)] = np.array(row, dtype=np.float64)
    return found


def _short(value: float | None, scale: float = 1.0) -> float | None:
    """Four digits: there may be thousands in a line."""
    return None if value is None or value != value else float(f"{value * scale:.4g}")
