"""Distribute tensors over .safetensors files, with the index of where each one is. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import torch

from megastable.base.errors import ConfigError

Entry = tuple[str, torch.dtype, tuple[int, ...]]

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "KI": 2**10, "MI": 2**20, "GI": 2**30}


def bytes_of(entry: Entry) -> int:
    _, dtype, shape = entry
    return dtype.itemsize * torch.Size(shape).numel()


def read_size(text: str) -> int:
    """Bytes of a text such as 5GB or 500 MiB. Raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?)?B?", text.strip(), re.IGNORECASE)
    size = float(match[1]) * UNITS[(match[2] or "").upper()] if match else 0
    if not 1 <= size < 2**62:
        raise ConfigError(f"--shard-size {text}: write a size such as 5GB or 500MB")
    return int(size)


def plan(entries: Sequence[Entry], limit: int) -> dict[str, list[Entry]]:
    """File names and their tensors, in order. A file exceeds `limit` bytes only if a single tensor does."""
    shards: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if shards[-1] and size + bytes_of(entry) > limit:
            shards.append([])
            size = 0
        shards[-1].append(entry)
        size += bytes_of(entry)
    if len(shards) == 1:
        return {SINGLE: shards[0]}
    return {f"model-{i:05d}-of-{len(shards):05d}.safetensors": held for i, held in enumerate(shards, start=1)}


def index(planned: dict[str, list[Entry]]) -> str:
    """model.safetensors.index.json."""
    entries = [entry for held in planned.values() for entry in held]
    total = {
        "total_parameters": sum(torch.Size(shape).numel() for _, _, shape in entries),
        "total_size": sum(map(bytes_of, entries)),
    }
    where = {name: file for file, held in planned.items() for name, _, _ in held}
    return json.dumps({"metadata": total, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"
