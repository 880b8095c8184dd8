"""Apply FP8 to a built model: choose the linear layers that compute in it, and switch it on and off during training.

    fp8 = apply(module, config, "emulated", group, device)  # before deepspeed.initialize; None without precision.fp8
    with fp8.computing(): ...                              # around forward and backward of a step, or an evaluation
    fp8.settle(applied)                                    # after it
    fp8.on = False                                         # from the next step on in the model's own precision

Parameters and their names do not change: checkpoints are the same with either backend and without FP8.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.fp8.controller import Emulated, Fp8
from megastable.fp8.emulated import Product, make_meters, make_quantizers
from megastable.model.gpt import Block
from megastable.model.sizes import in_fp8, keeps_weight_casts
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.sharding import placement_of

Linear = ColumnParallelLinear | RowParallelLinear


def apply_fp8(
    module: nn.Module, config: RunConfig, backend: str, group: Any, device: torch.device
) -> Fp8 | None:
    """Make `module`, a built model or a stage of one, compute as `precision.fp8` says; None without that section.

    backend: "emulated" or "te", see `numerics.choose`. group: the ranks that share delayed scales: all with parts
    of the same blocks; None: the world. device: where the module will be.
    """
    if config.precision.fp8 is None:
        return None
    if backend == "te":
        from megastable.fp8 import te  # only here: most machines lack its dependencies

        return te.apply_transformer_engine(module, config, group, device)
    return emulate_fp8(
        module, config.precision.fp8, in_fp8(config), group, device, keeps_weight_casts(config)
    )


def find_linears(module: nn.Module) -> dict[str, Linear]:
    """The linear layers of a model's blocks by name, such as blocks.3.mlp.down."""
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    found = [part for block in blocks for part in block.modules() if isinstance(part, Linear)]
    return {placement_of(linear.weight).name.removesuffix(".weight"): linear for linear in found}


def emulate_fp8(
    module: nn.Module,
    config: Fp8Config,
    names: frozenset[str],
    group: Any = None,
    device: torch.device | None = None,
    keeps_casts: bool = True,
) -> Emulated:
    """Emulate FP8 in the layers `names` that are on this rank. device: None = the module's."""
    here = {name: linear for name, linear in find_linears(module).items() if name in names}
    # Other ranks of the group may have other experts of these blocks. All remember all of them, in one order, so that
    # the largest magnitudes are one message, and any rank can write the history down.
    block_prefixes = tuple(f"{part.name}." for part in module.modules() if isinstance(part, Block))
    shared_names = sorted(name for name in names if name.startswith(block_prefixes))
    meters = make_meters(config, shared_names, device or next(module.parameters()).device)
    found = Emulated(list(here), meters, group, keeps_casts)
    quantizers = make_quantizers(config, list(here), meters)
    for (name, linear), quantize in zip(here.items(), quantizers, strict=True):
        before = linear.product
        plain = before.plain if isinstance(before, Product) else before  # tools apply the emulation again
        is_entered = isinstance(linear, ColumnParallelLinear) and linear.tp.size > 1
        entered_group = linear.tp if is_entered else None
        linear.product = Product(name, quantize, lambda: found.on, plain, entered_group)
        found.products.append(linear.product)
    return found
