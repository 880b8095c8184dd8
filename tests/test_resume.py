"""Stop and go on: the same bytes as without the stop, and the same global order under another layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable import records
from megastable.config import RunConfig
from tests.conftest import tiny
from tests.distributed import run_ranks


def train(config: RunConfig) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


def tensors(folder: Path) -> dict[str, Any]:
    """Everything in the files of a checkpoint, by file and path inside it."""
    found: dict[str, Any] = {}

    def walk(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for key, below in value.items():
                walk(below, f"{path}/{key}")
        elif isinstance(value, list | tuple):
            for index, below in enumerate(value):
                walk(below, f"{path}/{index}")
        elif isinstance(value, torch.Tensor | int | float | bool | str) or value is None:
            found[path] = value

    for file in sorted(folder.glob("*.pt")):
        walk(torch.load(file, weights_only=False), file.name)
    return found


def identical(a: Path, b: Path) -> int:
    """Assert that two checkpoints hold the same; the number of tensors compared."""
    one, other = tensors(a), tensors(b)
    assert one.keys() == other.keys()
    count = 0
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == other[name].dtype
            assert torch.equal(value.view(torch.uint8) if value.dim() else value, other[name].view(torch.uint8) if value.dim() else other[name]), name
            count += 1
        else:
            assert value == other[name], name
    return count


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "pp2": (2, {"parallel": {"pipeline": 2}}),
    "tp2-sequence": (2, {"parallel": {"tensor": 2, "sequence": True}}),
    "zero1-dp2": (2, {}),
    "zero2-dp2": (2, {"parallel": {"zero": 2}}),
    "zero3-dp2": (2, {"parallel": {"zero": 3}}),
    "fp16-dp2": (2, {"precision": {"kind": "fp16", "initial_scale_power": 8}, "parallel": {"zero": 2}}),
    "fp32-pp2-tied": (2, {"precision": {"kind": "fp32"}, "parallel": {"pipeline": 2}, "tied": True}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_resume_is_bit_for_bit(name: str, corpus: Path, tmp_path: Path) -> None:
    world, parts = LAYOUTS[name]
    tied = {"tied": True} if "tied" in parts else {}
    parts = {k: v for k, v in parts.items() if k != "tied"}
    model = dict(tiny(corpus, tmp_path).model) | tied

    def at(run: str, steps: int) -> RunConfig:
        return tiny(corpus, tmp_path / run, **parts, model=model, train={"steps": steps, "global_batch": 8, "micro_batch": 2, "eval_samples": 8, "eval_interval": 0})  # fmt: skip

    run_ranks(world, train, at("straight", 20))
    run_ranks(world, train, at("stopped", 10))
    run_ranks(world, train, at("stopped", 20))
    straight, stopped = (tmp_path / r / "checkpoints/step-20" for r in ("straight", "stopped"))
    assert identical(straight, stopped) > 20
    one, other = (json.loads((p / "state.json").read_text()) for p in (straight, stopped))
    assert one["cursor"] == other["cursor"] == 160 and one["updates"] == other["updates"]
    table, again = (records.read(tmp_path / r / "steps") for r in ("straight", "stopped"))
    assert table.num_rows == 20
    for column in ("step", "first_position", "next_position", "loss", "grad_norm", "lr", "z_loss", "worst_position"):
        assert table.column(column).equals(again.column(column)), column
    events = [json.loads(line) for line in (tmp_path / "stopped/journal.jsonl").read_text().splitlines()]
    assert [e["step"] for e in events if e["event"] == "resumed"] == [10]
