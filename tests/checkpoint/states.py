"""Checkpoints of a tiny model with random numbers in it, made without training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megastable.checkpoint.new_run import ADAM, write_run
from megastable.checkpoint.store import LayoutState, RunState
from megastable.checkpoint.whole import describe_parameters
from megastable.config.tree import RunConfig

# tensor, pipeline, ZeRO, data
LAYOUTS: dict[str, tuple[int, int, int, int]] = {
    "one": (1, 1, 1, 1),
    "tp2": (2, 1, 1, 1),
    "pp2": (1, 2, 1, 1),
    "tp2-pp2": (2, 2, 1, 1),
    "dp2-zero1": (1, 1, 1, 2),
    "dp2-zero2": (1, 1, 2, 2),
    "dp2-zero3": (1, 1, 3, 2),
    "tp2-dp2": (2, 1, 1, 2),
}


def recipe_of(layout: tuple[int, int, int, int] = (1, 1, 1, 1), **model: Any) -> RunConfig:
    tensor, pipeline, zero, _ = layout
    shape = {
        "layers": 2, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "sequence_length": 16, "vocab_size": 50,
        "vocab_multiple": 8,
    }  # fmt: skip
    return RunConfig.model_validate(
        {
            "model": shape | model,
            "data": {"corpora": [{"path": "data/none"}]},
            "train": {"global_batch": 8, "micro_batch": 2},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "zero": zero},
            "precision": {"kind": "bf16"},
        }
    )


def state_of(layout: tuple[int, int, int, int] = (1, 1, 1, 1), step: int = 7, **fields: Any) -> RunState:
    tensor, pipeline, zero, data = layout
    saved = LayoutState(tensor=tensor, pipeline=pipeline, data=data, zero=zero, precision="bf16")
    given: dict[str, Any] = {
        "step": step, "updates": step - 1, "cursor": 8 * step, "tokens": 128 * step, "adam_step": step - 1.0,
        "seconds": 12.5, "recent_losses": [3.5, 3.25], "order_fingerprint": "0" * 32, "layout": saved,
        "stability": {"detector": {"level": 1.5}}, "mix": {"none": 1.0},
    }  # fmt: skip
    return RunState(**given | fields)


def numbers(run: RunConfig, seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """By name and kind; second moments are not negative."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, of in describe_parameters(run.model).items():
        for kind in ("weight", "exp_avg", "exp_avg_sq"):
            tensor = torch.randn(of.shape, generator=generator)
            found[name, kind] = tensor.square() if kind == "exp_avg_sq" else tensor
    return found


def make_run(
    out: Path, layout: tuple[int, int, int, int] = (1, 1, 1, 1), seed: int = 0, step: int = 7,
    optimizer: bool = True, change: dict[tuple[str, str], Tensor] | None = None, model: dict[str, Any] | None = None,
    **fields: Any,
) -> Path:  # fmt: skip
    """A run with one checkpoint, whose folder is returned. change: tensors other than the random ones."""
    run = recipe_of(layout, **model or {})
    held = numbers(run, seed) | (change or {})
    return write_run(
        out, run, state_of(layout, step, **fields), lambda name, kind: held[name, kind],
        optimizer=ADAM if optimizer else None, origin={"how": "test"},
    )  # fmt: skip
