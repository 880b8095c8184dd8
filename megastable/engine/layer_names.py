"""Names this rank's modules as people know them, in the whole model and alike in every layout: for hooks that report.

The list of layers is that of gpt.py: embedding, blocks, final_norm, head; the loss comes after the last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from megastable.model.gpt import Block
from megastable.parallel.sharding import placement_of

# Operations between two modules belong to neither: the input of the left module is the output of the right one, ...
GIVEN_BY = {".attention.out": ".attention.core", ".mlp.down": ".mlp.swiglu", "loss": "head"}
# ... and a gradient that reaches the left's output has passed through the right one.
TAKEN_BY = {
    ".attention.qkv": ".attention.core",
    ".attention.q_norm": ".attention.core",
    ".attention.k_norm": ".attention.core",
    ".mlp.gate_up": ".mlp.swiglu",
}


def named_modules(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Blocks, and modules with a weight: "blocks.7", "blocks.7.mlp.down", "final_norm"."""
    for part in module.modules():
        if isinstance(part, Block):
            yield part.name, part
        elif isinstance(weight := getattr(part, "weight", None), nn.Parameter):
            yield placement_of(weight).name.removesuffix(".weight"), part


def is_layer_of_list(name: str) -> bool:
    """Whether the model calls it, not a block."""
    return name.count(".") == (1 if name.startswith("blocks.") else 0)


def depth_of(name: str, blocks: int) -> int:
    """Index in the list of layers of the one that `name` is, or is in; blocks: of the model."""
    kind, *rest = name.split(".")
    if kind == "blocks":
        return 1 + int(rest[0])
    return {"embedding": 0, "final_norm": blocks + 1, "head": blocks + 2, "loss": blocks + 3}[kind]


def renamed(name: str, table: Mapping[str, str]) -> str | None:
    """`name` with the ending that `table` gives for its own; None if it has none of these."""
    for ending, other in table.items():
        if name.endswith(ending):
            return name.removesuffix(ending) + other
    return None


def split_stream(stream: Any) -> tuple[Tensor, tuple[Any, ...]]:
    """x, and what travels with it."""
    return (stream[0], stream[1:]) if isinstance(stream, tuple) else (stream, ())
