"""Reads heat maps of the layers over time from layers/*.parquet: as many looks as can be drawn, evenly chosen."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable.base.folder_stamp import folder_stamp
from megastable.run.record_files import RecordFile, list_files, read_file
from megastable.run.records import LAYER_SCHEMA

# Kinds of heat map: title, unit, the columns of which the largest value in a layer counts.
KINDS = {
    "activation": ("Largest activation", "", ("activation_max",)),
    "gradient": ("Gradient, root mean square", "", ("gradient_rms",)),
    "logit": ("Largest attention logit", "", ("attention_logit",)),
    "entropy": ("Attention entropy", "nats", ("attention_entropy",)),
    "update": ("Update / weight", "", ("update_ratio",)),
    "saturation": ("FP8 saturation", "share", ("input_saturation", "weight_saturation", "gradient_saturation")),
}  # fmt: skip
MEASURED = dict.fromkeys(column for *_, columns in KINDS.values() for column in columns)
COLUMNS = pa.schema([LAYER_SCHEMA.field(column) for column in ("name", *MEASURED)])
BLOCK = re.compile(r"blocks\.(\d{1,6})(?:\.|$)")
KEPT = 2048  # looks in memory
MOST = 240  # looks in a map

Look = dict[str, npt.NDArray[np.float32]]  # by layer: [kinds]


class LayerFile(NamedTuple):
    """time: unix seconds, of the name."""

    time: float
    step: int
    file: RecordFile


class LayerMap:
    """Of one run. damaged: names of files that cannot be read, with the reason."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damaged: dict[str, str] = {}
        self.files: list[LayerFile] = []
        self._changed: int | None = None
        self._looks: OrderedDict[str, Look] = OrderedDict()

    def look(self) -> bool:
        """Look for new files, without reading them."""
        try:
            changed = folder_stamp(self.folder)
            if changed is not None and changed == self._changed:
                return False
            found = list_files(self.folder)
        except OSError:
            return False
        self._changed, before = changed, self.files
        self.files = [LayerFile(file.stamp / 1000, file.high, file) for file in found if file.stamp]
        return self.files != before

    def chosen(self, begin: float, end: float, axis: str) -> list[LayerFile]:
        """At most MOST files of the looks between two steps or times, in order. By step those that were done again are
        left out."""
        files = self.files
        if axis != "time":
            newest = {file.step: file for file in files}
            files = [newest[step] for step in sorted(newest)]
        key = [file.time if axis == "time" else file.step for file in files]
        first, last = np.searchsorted(key, [begin, end], side="left")
        files = files[max(0, first - 1) : last + 1]
        if len(files) > MOST:
            files = [files[n] for n in np.unique(np.linspace(0, len(files) - 1, MOST).astype(int))]
        return files

    def read(self, files: list[LayerFile]) -> dict[str, Any]:
        """kinds: by kind that anything was measured of, the values [layers, looks]; layers: their names, from the first
        to the last."""
        looks = [self._look(one.file) for one in files]
        names = sorted({name for look in looks for name in look}, key=depth)
        cube = np.full((len(KINDS), len(names), len(files)), np.nan, dtype=np.float32)
        for n, look in enumerate(looks):
            for m, name in enumerate(names):
                if name in look:
                    cube[:, m, n] = look[name]
        some = {kind: cube[k] for k, kind in enumerate(KINDS) if not np.isnan(cube[k]).all()}
        return {"layers": names, "kinds": some}

    def _look(self, file: RecordFile) -> Look:
        name = file.name
        if name in self._looks:
            self._looks.move_to_end(name)
            return self._looks[name]
        try:
            _, table, problem, _ = read_file(self.folder, file, COLUMNS)
        except FileNotFoundError:
            return {}
        if table is None:
            self.damaged[name] = problem
            return {}
        found = by_layer(table)
        self._looks[name] = found
        while len(self._looks) > KEPT:
            self._looks.popitem(last=False)
        return found


def by_layer(table: pa.Table) -> Look:
    """The largest value of every kind, in each block and in each parameter outside of blocks."""
    names = [layer_of(name) for name in table.column("name").to_pylist()]
    order = {name: n for n, name in enumerate(dict.fromkeys(names))}
    at = np.array([order[name] for name in names], dtype=np.intp)
    found = np.full((len(order), len(KINDS)), np.nan, dtype=np.float32)
    for k, (_, _, columns) in enumerate(KINDS.values()):
        for column in columns:
            np.fmax.at(found[:, k], at, table.column(column).to_numpy())
    return {name: found[n] for name, n in order.items()}


def layer_of(name: str) -> str:
    """The block of a parameter, or the parameter itself outside of blocks."""
    block = BLOCK.match(name)
    return f"block {int(block[1])}" if block else name.removesuffix(".weight")


def depth(layer: str) -> tuple[int, int, str]:
    """The place of a layer: the embedding, the blocks, the rest."""
    if layer.startswith("block "):
        return (1, int(layer.removeprefix("block ")), "")
    return (0 if "embedding" in layer else 2, 0, layer)
