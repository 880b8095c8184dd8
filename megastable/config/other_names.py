"""Looks up other trainers' names for our keys, which other_names.yaml has: for "did you mean", the configuration
reference, and Megatron-LM checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml


@cache
def read_names() -> dict[str, dict[str, str]]:
    """The tables of other_names.yaml, each from a name to what it says of it: our key, or why there is none."""
    content = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {
        table: {name: ours for ours, names in rows.items() for name in ([names] if isinstance(names, str) else names)}
        for table, rows in content.items()
    }  # fmt: skip


@dataclass(frozen=True)
class OtherName:
    """Our counterpart of another trainer's name: KEY or KEY=VALUE, "" for none; and the difference, or the reason."""

    ours: str
    note: str


def known_elsewhere(name: str) -> OtherName | None:
    """Look up a name of another trainer, with - or _, with or without leading dashes."""
    plain, tables = name.lstrip("-").replace("-", "_").lower(), read_names()
    if ours := (tables["megatron"] | tables["others"]).get(plain):
        key, _, note = ours.partition("; ")
        return OtherName(key, note)
    if reason := (tables["megatron_without_key"] | tables["others_without_key"]).get(plain):
        return OtherName("", reason)
    return None
