"""Reads heat maps of the layers over time from layers/*.parquet: as many looks as can be drawn, evenly chosen."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from megastable.base.durable import folder_stamp
from megastable.run.record_files import RecordFile, list_files, read_file
from megastable.run.records import EXPERT, LAYER_SCHEMA

# Kinds of heat map: title, unit, the columns of which the largest value in a layer counts.
KINDS = {
    "activation": ("Largest activation", "", ("activation_max",)),
    "gradient": ("Gradient, root mean square", "", ("gradient_rms",)),
    "logit": ("Largest attention logit", "", ("attention_logit",)),
    "entropy": ("Attention entropy", "nats", ("attention_entropy",)),
    "load": ("Largest load of an expert", "times the mean", ("expert_load",)),
    "router": ("Router: entropy of a token's scores", "nats", ("router_entropy",)),
    "update": ("Update / weight", "", ("update_ratio",)),
    "saturation": ("FP8 saturation", "share", ("input_saturation", "weight_saturation", "gradient_saturation")),
}  # fmt: skip
MEASURED = dict.fromkeys(column for *_, columns in KINDS.values() for column in columns)
COLUMNS = pa.schema([LAYER_SCHEMA.field(column) for column in ("name", *MEASURED)])
BLOCK = re.compile(r"blocks\.(\d{1,6})(?:\.|$)")
KEPT = 2048  # looks in memory
MOST = 240  # looks in a map
MOST_LOADS = 1 << 20  # loads of experts in all looks of a map
NO_LOAD = 0xFFFF  # of an expert that is not recorded

Loads = npt.NDArray[np.uint16]  # in hundredths of the mean; 0 only without a token


class Look(NamedTuple):
    """largest: by layer, [kinds]. loads: of blocks with routed experts, [experts]."""

    largest: dict[str, npt.NDArray[np.float32]]
    loads: dict[int, Loads]


class ExpertLoads(NamedTuple):
    """files: of the looks; blocks: with routed experts, in order; loads: [looks, blocks, experts]."""

    files: list[LayerFile]
    blocks: list[int]
    loads: Loads


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

    def look_again(self) -> bool:
        """Look for new files, without reading them."""
        try:
            folder_change = folder_stamp(self.folder)
            if folder_change is not None and folder_change == self._changed:
                return False
            record_files = list_files(self.folder)
        except OSError:
            return False
        self._changed, files_before = folder_change, self.files
        self.files = [LayerFile(file.stamp / 1000, file.high, file) for file in record_files if file.stamp]
        return self.files != files_before

    def choose_files(self, begin: float, end: float, axis: str) -> list[LayerFile]:
        """At most MOST files of the looks between two steps or times, in order. By step those that were done again are
        left out."""
        files = self.files
        if axis != "time":
            newest_by_step = {layer_file.step: layer_file for layer_file in files}
            files = [newest_by_step[step] for step in sorted(newest_by_step)]
        axis_keys = [layer_file.time if axis == "time" else layer_file.step for layer_file in files]
        first_index, last_index = np.searchsorted(axis_keys, [begin, end], side="left")
        files = files[max(0, first_index - 1) : last_index + 1]
        if len(files) > MOST:
            files = [files[n] for n in np.unique(np.linspace(0, len(files) - 1, MOST).astype(int))]
        return files

    def read_maps(self, files: list[LayerFile]) -> dict[str, Any]:
        """kinds: by kind that anything was measured of, the values [layers, looks]; layers: their names, from the first
        to the last."""
        layer_looks = [self._look(layer_file.file).largest for layer_file in files]
        names = sorted({name for look in layer_looks for name in look}, key=sort_key)
        cube = np.full((len(KINDS), len(names), len(files)), np.nan, dtype=np.float32)
        for n, look in enumerate(layer_looks):
            for m, name in enumerate(names):
                if name in look:
                    cube[:, m, n] = look[name]
        measured = {
            kind: values for kind, values in zip(KINDS, cube, strict=True) if not np.isnan(values).all()
        }
        return {"layers": names, "kinds": measured}

    def read_loads(self, files: list[LayerFile]) -> ExpertLoads | None:
        """The load of every expert at looks that are evenly chosen of these, the last one among them; None if no expert
        was recorded."""
        load_looks = [
            (layer_file, loads) for layer_file in files if (loads := self._look(layer_file.file).loads)
        ]
        if not load_looks:
            return None
        block_numbers = sorted({block for _, loads in load_looks for block in loads})
        expert_count = max(len(block_loads) for _, loads in load_looks for block_loads in loads.values())
        look_count = min(len(load_looks), max(1, MOST_LOADS // (len(block_numbers) * expert_count)))
        chosen_looks = [
            load_looks[n] for n in np.linspace(len(load_looks) - 1, 0, look_count).astype(int)[::-1]
        ]
        load_cube = np.full((look_count, len(block_numbers), expert_count), NO_LOAD, dtype=np.uint16)
        for n, (_, loads) in enumerate(chosen_looks):
            for m, block_number in enumerate(block_numbers):
                if block_number in loads:
                    load_cube[n, m, : len(loads[block_number])] = loads[block_number]
        return ExpertLoads([layer_file for layer_file, _ in chosen_looks], block_numbers, load_cube)

    def _look(self, file: RecordFile) -> Look:
        file_name = file.name
        if file_name in self._looks:
            self._looks.move_to_end(file_name)
            return self._looks[file_name]
        try:
            _, record_table, file_problem, _ = read_file(self.folder, file, COLUMNS)
        except FileNotFoundError:
            return Look({}, {})
        if record_table is None:
            self.damaged[file_name] = file_problem
            return Look({}, {})
        layer_look = Look(by_layer(record_table), read_expert_loads(record_table))
        self._looks[file_name] = layer_look
        while len(self._looks) > KEPT:
            self._looks.popitem(last=False)
        return layer_look


def by_layer(table: pa.Table) -> dict[str, npt.NDArray[np.float32]]:
    """The largest value of every kind, in each block and in each parameter outside of blocks."""
    layer_names = [layer_of(layer_name) for layer_name in table.column("name").to_pylist()]
    layer_order = {layer_name: n for n, layer_name in enumerate(dict.fromkeys(layer_names))}
    layer_indexes = np.array([layer_order[layer_name] for layer_name in layer_names], dtype=np.intp)
    largest_values = np.full((len(layer_order), len(KINDS)), np.nan, dtype=np.float32)
    for k, (_, _, kind_columns) in enumerate(KINDS.values()):
        for column_name in kind_columns:
            np.fmax.at(largest_values[:, k], layer_indexes, table.column(column_name).to_numpy())
    return {layer_name: largest_values[n] for layer_name, n in layer_order.items()}


def read_expert_loads(table: pa.Table) -> dict[int, Loads]:
    """The loads in the records of one look, by block."""
    recorded_loads = table.column("expert_load").to_numpy()
    load_rows = np.flatnonzero(np.isfinite(recorded_loads))
    found_loads: dict[int, dict[int, float]] = {}
    row_names = table.column("name").take(load_rows).to_pylist()
    for row_name, row_load in zip(row_names, recorded_loads[load_rows], strict=True):
        if expert_match := EXPERT.fullmatch(row_name):
            found_loads.setdefault(int(expert_match[1]), {})[int(expert_match[2])] = float(row_load)
    block_loads = dict[int, Loads]()
    for block_number, load_by_expert in found_loads.items():
        block_loads[block_number] = np.full(max(load_by_expert) + 1, NO_LOAD, dtype=np.uint16)
        for expert_number, expert_load in load_by_expert.items():
            hundredths = max(int(expert_load > 0), round(100 * expert_load))
            block_loads[block_number][expert_number] = min(NO_LOAD - 1, hundredths)
    return block_loads


def layer_of(name: str) -> str:
    """The block of a parameter, or the parameter itself outside of blocks."""
    block_match = BLOCK.match(name)
    return f"block {int(block_match[1])}" if block_match else name.removesuffix(".weight")


def sort_key(layer: str) -> tuple[int, int, str]:
    """The place of a layer: the embedding, the blocks, the rest."""
    if layer.startswith("block "):
        return (1, int(layer.removeprefix("block ")), "")
    return (0 if "embedding" in layer else 2, 0, layer)
