"""Describes a run on the console before its first step: model, layout, kernels, precision, batch."""

from __future__ import annotations

from pathlib import Path

from megastable.base.collectives import first
from megastable.base.deterministic import exact
from megastable.base.hardware import peak_tflops
from megastable.base.text import plural
from megastable.config.optimizers import OptimizerConfig
from megastable.config.rules import LINEARS
from megastable.config.tree import RunConfig
from megastable.engine.engine import Engine
from megastable.model.flops import parameters
from megastable.model.kernels import DTYPES
from megastable.model.sizes import in_fp8


def introduction(config: RunConfig, engine: Engine, run: Path, peak: float, peak_source: str) -> str:
    """Several lines. run: the run directory; peak: TFLOP/s of a device, and its source."""
    c, layout = config, engine.topology.layout
    context = f" (context {layout.context})" if layout.context > 1 else ""
    return (
        f"{parameters(c.model) / 1e6:,.1f}M parameters, {plural(layout.world, 'rank')}: tensor {layout.tensor} x "
        f"pipeline {layout.pipeline} x data {layout.data}{context}, ZeRO {c.parallel.zero}, {c.precision.kind} on "
        f"{engine.device.type}\n"
        f"optimizer wrapper {type(engine.optimizer).__name__}, kernels: {engine.kernels}\n"
        f"recomputation {c.parallel.recompute}, peak {peak:.3g} TFLOP/s a device ({peak_source}){_fp8(c, engine)}\n"
        f"{_clipping(c.optimizer)}\n"
        f"{_repeatable(c, engine)}\n"
        f"{plural(c.train.global_batch, 'sample')} of {c.model.sequence_length} tokens a step{_warmups(c)}, "
        f"run directory {run}"
    )


def find_peak(config: RunConfig, engine: Engine) -> tuple[float, str]:
    """The device's peak, TFLOP/s, as rank 0 sees it, so that all ranks report the same MFU; where it is from."""
    if given := config.logging.peak_tflops:
        return given, "given"
    return first(lambda: peak_tflops(engine.device, DTYPES[config.precision.kind]))


def _warmups(config: RunConfig) -> str:
    told, t = "", config.train
    if t.batch_warmup is not None:
        told += f", from {t.batch_warmup.start} samples on over {t.batch_warmup.tokens:,} tokens"
    if t.sequence_warmup is not None:
        told += (
            f", in pieces from {t.sequence_warmup.start} tokens on over {t.sequence_warmup.tokens:,} tokens"
        )
    return told


def _fp8(config: RunConfig, engine: Engine) -> str:
    if config.precision.fp8 is None:
        return ""
    count, of = len(in_fp8(config)), config.model.layers * len(LINEARS)
    emulated = (
        ", emulated: its rounding is real, its speed is not" if engine.kernels.fp8 == "emulated" else ""
    )
    return f"\nFP8 with {config.precision.fp8.recipe} scales in {count} of {of} linear layers{emulated}"


def _clipping(o: OptimizerConfig) -> str:
    """Says what is clipped; the settings of a kind are those of optim/clipping.py."""
    of, norm = o.clipping, f"a norm of {o.clip:g}"
    match of.kind:
        case "value":
            return f"every element of the gradient is clipped to {of.threshold:g}"
        case "adagc" | "zclip" | "agc":
            set_ = {k: v for k, v in of.model_dump(exclude={"kind"}).items() if v is not None}
            settings = f" ({', '.join(f'{k} {v:g}' for k, v in set_.items())})" if set_ else ""
            return f"gradients are clipped by {of.kind}{settings}"
        case "worker":
            return f"each worker's gradient is clipped to {norm}"
    return f"gradients are clipped to {norm}" if o.clip else "gradients are not clipped"


def _repeatable(config: RunConfig, engine: Engine) -> str:
    if exact(config.run.deterministic, engine.device):
        return "a repeated step gives the same bits"
    return "a repeated step may differ in the last bits (run.deterministic=true: the same bits)"
