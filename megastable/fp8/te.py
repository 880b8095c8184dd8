"""FP8 by Transformer Engine: its modules replace a block's norms and linear layers, with our own parameters.

Written against the source of version 2.20; this code relies on the following:
- A module built on the meta device neither initialises its parameters nor marks them as tensor-parallel, and
  looks them up by name in every call: our parameters, assigned in their place, keep their marks and placement.
- torch.compile cannot trace most of its modules. It can trace te.Linear of 2.20, but not with delayed scales, and
  recompiles on every switch: all are hidden from it. The code between them is compiled separately: `Block.in_pieces`.
- Every forward, also a recomputing one in autograd's thread, asks one object of the process whether to use FP8, and by
  which recipe; a backward pass uses what its forward has noted. So one autocast wraps a whole step.
- With delayed scales its kernels read a scale and raise the recorded largest magnitude, in place; everything else
  (history, new scales, sums over ranks) it does for modules registered in a global list. Ours never register: scales
  and
  magnitudes are cells of `Meters`, and no scale moves within a step. Hence many micro-batches, 1F1B and torch's own
  recomputation need no special care: a repeated forward reads the same scales and raises nothing.
- Its tensor-parallel messages are those of `mappings`, except that gathered activations are sent in FP8. Under sequence
  parallelism it leaves the gradient of a norm's weight to us.
Features that we do not use: FP8 copies of weights kept over the micro-batches of a step (all its modules would have to
know the first one, and a byte or two per parameter), gradient accumulation in its products, overlapped messages.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megastable.base import products
from megastable.base.installation import install_command
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.fp8.amax_history import SLOTS, Meters
from megastable.fp8.controller import Fp8, Metered, Record, tell
from megastable.fp8.emulated import GRADIENT, INPUT, WEIGHT, Quantizer, formats, metered, quantizers
from megastable.fp8.fitting import misfit
from megastable.fp8.formats import E5M2
from megastable.fp8.scale_factors import AT_ONCE, BLOCK, Quantized, magnitude, scale_of
from megastable.model.gpt import Block
from megastable.model.mlp import MLP, swiglu
from megastable.model.norm import RMSNorm
from megastable.model.sizes import fp8_linears
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.sharding import shape_of
from megastable.parallel.topology import TensorParallel

# The modules' own FP8 tensors are not accessible. Inputs, weights and output gradients are quantized once more by the
# emulation, and counted a few rows at a time, so that such a step takes no more memory.


@dataclass(frozen=True)
class Watched:
    """A module x -> y of one or more linear layers in sequence. layers, weights: of these.

    inputs: x -> the first layer's operand. between: the first layer's output -> the second one's operand. The gradient
    is that of y, of the last layer.
    """

    module: nn.Module
    layers: Sequence[str]
    weights: Sequence[Tensor]
    inputs: Callable[[Tensor], Tensor]
    between: Callable[[Tensor], Tensor]


def _itself(x: Tensor) -> Tensor:
    return x


def watch(
    watched: Watched, quantizers: Sequence[Quantizer], show: Callable[[int, int, Tensor, Quantized], None]
) -> RemovableHandle:
    """Call `show(number of the layer, slot, rows of a matrix, their quantization)` in every training pass until the
    handle is removed.

    The gradient of the first of two layers is not visible. quantizers: of the layers.
    """

    def quantize(number: int, slot: int, matrix: Tensor, of: Callable[[Tensor], Tensor] = _itself) -> None:
        widest = max(matrix.shape[-1], *(n for weight in watched.weights for n in weight.shape))
        rows = max(AT_ONCE // widest // BLOCK, 1) * BLOCK
        parts = matrix.detach().reshape(-1, matrix.shape[-1]).split(rows)
        with torch.no_grad():
            largest = reduce(torch.maximum, (magnitude(of(part)) for part in parts))
            for part in parts:
                x = of(part)
                show(number, slot, x, quantizers[number](x, slot, False, largest)[0])

    def into(number: int) -> Callable[[Tensor], Tensor]:
        """From the module's input to the operand of layer `number`."""
        if not number:
            return watched.inputs
        before, weight = into(number - 1), watched.weights[number - 1]
        return lambda x: watched.between(products.linear(before(x), weight))

    def after(_: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        for number, weight in enumerate(watched.weights):
            quantize(number, INPUT, given[0], into(number))
            quantize(number, WEIGHT, weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: quantize(len(watched.layers) - 1, GRADIENT, gradient))

    # Registered before other hooks: one of ZeRO 3's releases the weights.
    return watched.module.register_forward_hook(after, prepend=True)


# Scales for the first step, and the first one after FP8 was off; for local weights the largest magnitude is computed.
# E5M2 then covers gradients from 1e-11 (normal ones from 6e-11) to 0.05, E4M3 inputs from 0.001 to 448 and weights
# from 4e-6 to 1.75. Underflow is preferred to saturation: trained models have a few essential inputs of hundreds.
FIRST_SCALES = (1.0, 2.0**8, 2.0**20)


# Availability


def why_not(config: RunConfig, device: torch.device) -> str | None:
    """The reason why Transformer Engine cannot compute `config.precision.fp8` on this device; None if it can."""
    if device.type != "cuda":
        return "Transformer Engine computes on GPUs only"
    if reason := misfit(config):
        return reason
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed ({install_command('gpu')})"
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"Transformer Engine cannot be imported: {said}"
    if not hasattr(te, "autocast"):
        return f"this Transformer Engine is too old: 2.9 or newer is needed ({install_command('gpu')})"
    assert config.precision.fp8 is not None
    with torch.cuda.device(device):
        return _unsupported(te, config.precision.fp8)


def _unsupported(te: Any, config: Fp8Config) -> str | None:
    """The reason why the current GPU has no products of this recipe."""
    if config.recipe != "block":
        possible, reason = te.is_fp8_available(return_reason=True)
        return None if possible else f"on this GPU it reports: {reason}"
    possible, reason = te.is_fp8_block_scaling_available(return_reason=True)
    if possible and torch.cuda.get_device_capability() >= (10, 0):
        # From Blackwell on it computes this recipe with blocks of 32, which newer GPUs do not support for all products.
        possible, reason = te.is_mxfp8_available(return_reason=True)
    return None if possible else f"for blocks on this GPU it reports: {reason}"


# Its modules


@dataclass(frozen=True)
class Fitted:
    """One of its modules. layers: the linear layers that it computes, in the order of its products. weights: theirs."""

    module: Any
    layers: tuple[str, ...]
    weights: tuple[nn.Parameter, ...]


def linears_of(block: Block, config: RunConfig) -> set[str]:
    """The layers of `config.LINEARS` that are in FP8 in this block."""
    return set(fp8_linears(config, int(block.name.rpartition(".")[2])))


def fit(block: Block, linears: Collection[str]) -> list[Fitted]:
    """Replace those `linears` (of `config.LINEARS`) of a built block by modules of Transformer Engine.

    A norm before a layer becomes a part of its module, which quantizes the norm's output directly, unless the norm has
    a further factor, which its modules lack. A SwiGLU that is in FP8 as a whole becomes one module, which saves for the
    backward pass what recompute=selective would save.
    """
    found, attention, mlp = [], block.attention, block.mlp
    assert isinstance(mlp, MLP)
    fused_norms = block.residual.norms_input and block.residual.norm == 1.0

    def take(linear: str, owner: nn.Module, norm: str) -> None:
        before = fused_norms and linear in ("attention.qkv", "mlp.gate_up")
        short = linear.rpartition(".")[2]
        module = _linear(getattr(owner, short), getattr(block, norm) if before else None)
        found.append(Fitted(module, (f"{block.name}.{linear}",), (module.weight,)))
        setattr(owner, short, module)
        if before:
            setattr(block, norm, nn.Identity())

    for linear in ("attention.qkv", "attention.out"):
        if linear in linears:
            take(linear, attention, "attention_norm")
    if {"mlp.gate_up", "mlp.down"} <= set(linears) and fused_norms and mlp.activation is swiglu:
        fused = _mlp(mlp, block.mlp_norm)
        layers = f"{block.name}.mlp.gate_up", f"{block.name}.mlp.down"
        found.append(Fitted(fused, layers, (fused.fc1_weight, fused.fc2_weight)))
        block.mlp, block.mlp_norm = fused, nn.Identity()  # type: ignore[assignment]
    else:
        for linear in ("mlp.gate_up", "mlp.down"):
            if linear in linears:
                take(linear, mlp, "mlp_norm")
    for one in found:
        one.module.forward = torch.compiler.disable(one.module.forward)
    if found:
        block.in_pieces()
    return found


def _linear(linear: ColumnParallelLinear | RowParallelLinear, norm: RMSNorm | None) -> Any:
    """[norm,] x [s, b, in] (column: or its sequence shard) -> [s, b, out], like our own layers."""
    import transformer_engine.pytorch as te

    (outputs, inputs), tp = shape_of(linear.weight), linear.tp
    column = isinstance(linear, ColumnParallelLinear)
    told = _told(tp, linear.weight) | {
        "parallel_mode": None if tp.size == 1 else "column" if column else "row"
    }
    # It takes the sizes of the whole and divides them.
    whole = (inputs, outputs * tp.size) if column else (inputs * tp.size, outputs)
    with _quietly():
        if norm is None:
            module = te.Linear(*whole, **told)
        else:
            module = te.LayerNormLinear(*whole, **_told_norm(norm), **told)
            _give_norm(module, norm)
    _give(module, "weight", linear.weight)
    return module


def _mlp(mlp: MLP, norm: RMSNorm) -> Any:
    """norm, then the MLP: x [s, b, hidden] (or its sequence shard) -> the same shape. Its SwiGLU has the gate first."""
    import transformer_engine.pytorch as te

    tp, (hidden, width) = mlp.down.tp, shape_of(mlp.down.weight)
    with _quietly():
        module = te.LayerNormMLP(
            hidden, width * tp.size, activation="swiglu", set_parallel_mode=tp.size > 1, **_told_norm(norm),
            **_told(tp, mlp.down.weight),
        )  # fmt: skip
    _give_norm(module, norm)
    _give(module, "fc1_weight", mlp.gate_up.weight)
    _give(module, "fc2_weight", mlp.down.weight)
    return module


def _told(tp: TensorParallel, weight: Tensor) -> dict[str, Any]:
    return {
        "bias": False,
        "device": "meta",
        "params_dtype": weight.dtype,
        "tp_group": tp.group if tp.size > 1 else None,
        "sequence_parallel": tp.sequence,
    }


def _told_norm(norm: RMSNorm) -> dict[str, Any]:
    return {"eps": norm.eps, "normalization": "RMSNorm", "zero_centered_gamma": norm.centered}


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        # Every tensor-parallel module warns that messages overlap reliably only with CUDA_DEVICE_MAX_CONNECTIONS=1.
        warnings.simplefilter("ignore", UserWarning)
        yield


def _give(module: nn.Module, name: str, parameter: nn.Parameter) -> None:
    its, ours = tuple(getattr(module, name).shape), shape_of(parameter)
    assert its == ours, f"{name}: {its} in place of {ours}"
    setattr(module, name, parameter)


def _give_norm(module: nn.Module, norm: RMSNorm) -> None:
    _give(module, "layer_norm_weight", norm.weight)
    if norm.tp.size > 1:
        # Every rank norms its own part of the tokens. The hook runs before the gradient is accumulated or read.
        norm.weight.register_hook(_Sum(norm.tp))


@dataclass(frozen=True)
class _Sum:
    """Sums a gradient over the tensor group like `mappings.share`: in fp32."""

    tp: TensorParallel

    def __call__(self, gradient: Tensor) -> Tensor:
        wide = gradient.to(torch.float32, copy=True)
        dist.all_reduce(wide, group=self.tp.group)
        return wide.to(gradient.dtype)


# The controller


def apply(module: nn.Module, config: RunConfig, group: Any, device: torch.device) -> Fp8:
    """Convert `module`, a built model or a stage of one, to `config.precision.fp8`; returns its controller.

    group: the ranks that share delayed scales, those of the stage; None: the world. device: where the module will be.
    """
    assert config.precision.fp8 is not None
    blocks = [part for part in module.modules() if isinstance(part, Block)]
    found = [one for block in blocks for one in fit(block, linears_of(block, config))]
    return TransformerEngine(found, config.precision.fp8, group, device)


class TransformerEngine(Metered):
    """Its modules, and the meters that their kernels read and write."""

    def __init__(self, fitted: Sequence[Fitted], config: Fp8Config, group: Any, device: torch.device) -> None:
        layers = [layer for one in fitted for layer in one.layers]
        meters = metered(config, layers, device)
        super().__init__(layers, meters, group)
        self._config, self._fitted, self._recipe = config, fitted, _recipe(config)
        self._hooks: list[RemovableHandle] = []
        self._weights = [weight for one in fitted for weight in one.weights]
        self._weight_format, self._room = formats(config)[WEIGHT], 2.0**config.margin
        self._first: Tensor | None = None  # scales without a history
        if meters is not None:
            self._scales = torch.ones_like(meters.scales)  # read by the kernels: never 0
            with self._autocast(True):
                _connect(fitted, meters, self._scales)

    def watch(self, record: Record | None) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        if record is None or not self.on:
            return
        how = iter(quantizers(self._config, len(self.layers), self._meters))
        for one in self._fitted:
            inputs = partial(_normed, one.module) if hasattr(one.module, "layer_norm_weight") else _as_it_is
            # `fit` makes one module of an MLP only if its activation is this one.
            watched = Watched(one.module, one.layers, one.weights, inputs, swiglu)
            show = partial(_show, record, one.layers)
            self._hooks.append(watch(watched, [next(how) for _ in one.layers], show))

    def computing(self) -> contextlib.AbstractContextManager[Any]:
        return self._autocast(self.on) if self._meters is None else self._metered(self._meters)

    @contextlib.contextmanager
    def _metered(self, meters: Meters) -> Iterator[None]:
        if self.on:
            if self._first is None:
                self._first = self._guess(meters)
            torch.where(meters.scales > 0, meters.scales, self._first, out=self._scales)
        with self._autocast(self.on):
            yield
        if not torch.is_grad_enabled():
            meters.seen.zero_()  # an evaluation also raises them, but is not a step

    def _autocast(self, on: bool) -> contextlib.AbstractContextManager[Any]:
        import transformer_engine.pytorch as te

        # The group is for reductions that never take place; without it they would cover the world, with all stages.
        found: contextlib.AbstractContextManager[Any] = te.autocast(
            enabled=on, recipe=self._recipe, amax_reduction_group=self._group
        )
        return found

    @torch.no_grad()
    def _guess(self, meters: Meters) -> Tensor:
        """Scales [layers, slots] for a step without a history."""
        first = torch.tensor(FIRST_SCALES, device=meters.scales.device).expand_as(meters.scales).clone()
        # Under ZeRO 3 the weights are partitioned.
        here = {row: w.detach() for row, w in enumerate(self._weights) if w.numel()}
        if here:
            largest = torch.stack(torch._foreach_norm(list(here.values()), torch.inf)).float()
            first[list(here), WEIGHT] = scale_of(largest, self._weight_format)
        return first / self._room

    def forget(self) -> None:
        super().forget()
        self._first = None


def _as_it_is(x: Tensor) -> Tensor:
    return x


def _normed(module: Any, x: Tensor) -> Tensor:
    """The operand of a module that includes an RMSNorm."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + module.eps)
    weight = module.layer_norm_weight.float()
    return (wide * (weight + 1.0 if module.zero_centered_gamma else weight)).to(x.dtype)


def _show(
    record: Record, layers: Sequence[str], number: int, slot: int, x: Tensor, became: Quantized
) -> None:
    tell(record, layers[number], slot, x, became)


def _recipe(config: Fp8Config) -> Any:
    """Its recipe object for ours. Delayed scaling is only declared: see `Meters`."""
    from transformer_engine.common import recipe

    to = recipe.Format.HYBRID if formats(config)[2] is E5M2 else recipe.Format.E4M3
    if config.recipe == "delayed":
        return recipe.DelayedScaling(fp8_format=to, amax_history_len=1, amax_compute_algo="most_recent")
    if config.recipe == "block":
        return recipe.Float8BlockScaling(fp8_format=to)
    return recipe.Float8CurrentScaling(fp8_format=to)


def _connect(fitted: Sequence[Fitted], meters: Meters, scales: Tensor) -> None:
    """Make the kernels of delayed scaling read `scales` and raise `meters.seen`, [layers, slots] both; in an autocast.

    A module has three tensors a product in its forward pass (input, weight, output) and two in its backward pass
    (gradient of the output, of the input); outputs and gradients of inputs stay bf16.
    """
    from transformer_engine.pytorch.quantization import FP8GlobalStateManager

    rows = {layer: row for row, layer in enumerate(meters.names)}
    for one in fitted:
        one.module.init_fp8_metadata(num_gemms=len(one.layers))
        # It takes this for its entry in the global list, and does not register itself.
        one.module.fp8_meta[FP8GlobalStateManager.get_buffer_info()] = []
        for number, layer in enumerate(one.layers):
            forward, backward = (one.module.quantizers[key] for key in ("scaling_fwd", "scaling_bwd"))
            cells = forward[3 * number], forward[3 * number + 1], backward[2 * number]
            assert len(cells) == len(SLOTS) and INPUT == 0 and WEIGHT == 1
            for slot, quantizer in enumerate(cells):
                quantizer.scale = scales[rows[layer], slot]
                quantizer.amax = meters.seen[rows[layer], slot].view(1)
