"""Measure the drawing of initial weights: blocks of a 7B model, in bf16, on a given number of threads.

    python -m benchmarks.initial --threads 1 --threads 2

Beside wall time it reports core time per parameter, which applies to busy machines and to more cores than available
here, as threads do not share resources (a chunk fits in a core's cache).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from megastable.config.model import ModelConfig
from megastable.model.init import ParameterPart, fill, threads_to_draw, whole_weight
from megastable.parallel.sharding import Placement
from megastable.parallel.topology import TensorParallel

MODEL = ModelConfig(layers=32, hidden=4096, heads=32, ffn=11008, vocab_size=32000)
SHAPES = {
    "attention.qkv": (12288, 4096), "attention.out": (4096, 4096),
    "mlp.gate_up": (22016, 4096), "mlp.down": (4096, 11008),
}  # fmt: skip
OF_7B = 6.74e9  # parameters


def main(
    threads: Annotated[
        list[int] | None, typer.Option(help="How many; those of a rank when left out.")
    ] = None,
    blocks: Annotated[int, typer.Option(help="0.2B parameters each.", min=1)] = 2,
) -> None:
    """Draw the weights of some blocks on this many threads, and whole tensor by tensor."""
    parts = [
        ParameterPart(
            Placement(f"blocks.{i}.{name}.weight"), shape, torch.zeros(math.prod(shape), dtype=torch.bfloat16)
        )
        for i in range(blocks)
        for name, shape in SHAPES.items()
    ]
    size = sum(len(part.into) for part in parts)

    def whole() -> None:
        for part in parts:
            part.into.copy_(whole_weight(part.placement, part.shape, MODEL, 1).view(-1))

    table = Table("drawn", "M parameters/s", "ns of a core, each", "7B, s", "7B, s of cores")

    def row(name: str, draw: Callable[[], None]) -> None:
        begun, used = time.perf_counter(), time.process_time()
        draw()
        each, of_core = (time.perf_counter() - begun) / size, (time.process_time() - used) / size
        table.add_row(
            name,
            f"{1e-6 / each:.0f}",
            f"{of_core * 1e9:.2f}",
            f"{OF_7B * each:.1f}",
            f"{OF_7B * of_core:.1f}",
        )

    row("whole tensors", whole)
    for number in threads or [threads_to_draw()]:
        row(f"{number} threads", partial(fill, parts, MODEL, TensorParallel(), 1, number))
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
