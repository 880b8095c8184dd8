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
  and magnitudes are cells of `Meters`, and no scale moves within a step. Hence many micro-batches, 1F1B and torch's own
  recomputation need no special care: a repeated forward reads the same scales and raises nothing.
- Its tensor-parallel messages are those of `mappings`, except that gathered activations are sent in FP8. Under sequence
  parallelism it leaves the gradient of a norm's weight to us. As in `parallel/overlapped.py` its column-parallel layers
  gather again beside the product of the input's gradient, and sum that beside the weight's; all messages are whole.
- Told by a call whether it is a step's first one, a module casts its weight in that and keeps the cast (a byte per
  element for each layout) for the others; told nothing, it casts in every call and keeps none.
- A module asks its `wgrad_store` whether to delay the products of its weights' gradients, in forward and backward
  pass, and gives them to it with their operands; in a module of two layers that of the second is `fc2_wgrad_gemm`. So
  from version 2.9 to 2.20. Under parallel.schedule=zero_bubble ours takes its place, and gradients come as from our own
  layers. A module gathers what they need in the backward pass, beside a product, and keeps it whole; it waits for the
  sum.
Features that we do not use: gradient accumulation in its products, overlapped messages.
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
from megastable.base.process import install_command
from megastable.config.training import Fp8Config
from megastable.config.tree import RunConfig
from megastable.fp8.controller import Fp8, Record, report_quantization
from megastable.fp8.emulated import (
    GRADIENT,
    INPUT,
    WEIGHT,
    Quantizer,
    choose_formats,
    make_meters,
    make_quantizers,
)
from megastable.fp8.scale_factors import (
    AT_ONCE,
    BLOCK,
    E5M2,
    SLOTS,
    Meters,
    Quantized,
    largest_magnitude,
    scale_of,
)
from megastable.model.block_parts import MLP, RMSNorm, swiglu
from megastable.model.gpt import Block
from megastable.model.sizes import find_misfit, fp8_linears, keeps_weight_casts
from megastable.parallel.deferred_gradients import defer_gradient
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.sharding import shape_of
from megastable.parallel.topology import TensorParallel

# The modules' own FP8 tensors are not accessible. Inputs, weights and output gradients are quantized once more by the
# emulation, and counted a few rows at a time, so that such a step takes no more memory.


@dataclass(frozen=True)
class Fitted:
    """One of its modules. layers: the linear layers that it computes, in the order of its products. weights: theirs."""

    module: Any
    layers: tuple[str, ...]
    weights: tuple[nn.Parameter, ...]


class LateGradients:
    """What a module leaves of a backward pass goes to parallel/deferred_gradients.py, not to `backward_dw`, which would
    write gradients past autograd. weights: in the order of its products."""

    def __init__(self, weights: Sequence[nn.Parameter]) -> None:
        self._weights = weights

    def delay_wgrad_compute(self) -> bool:
        """Always: this schedule has no other backward passes."""
        return True

    def put(self, operands: Sequence[Any], multiply: Callable[..., Any]) -> None:
        """operands: the input and the gradient of the output, as the module has quantized them."""
        given_input, gradient = operands
        # Of a module with two layers. Under another name the gradient would not have the weight's shape.
        weight = self._weights[1 if multiply.__name__ == "fc2_wgrad_gemm" else 0]
        defer_gradient(weight, given_input, lambda x: multiply(x, gradient)[0])


def _itself(x: Tensor) -> Tensor:
    return x


def watch_module(
    fitted: Fitted,
    inputs: Callable[[Tensor], Tensor],
    quantizers: Sequence[Quantizer],
    show: Callable[[int, int, Tensor, Quantized], None],
) -> RemovableHandle:
    """Call `show(number of the layer, slot, rows of a matrix, their quantization)` in every training pass until the
    handle is removed.

    Of two layers, which have a SwiGLU between them (see `fit_block`), the gradient of the first is not visible. inputs:
    the module's input -> the first layer's operand. quantizers: of the layers.
    """

    def quantize(number: int, slot: int, matrix: Tensor, of: Callable[[Tensor], Tensor] = _itself) -> None:
        widest_side = max(matrix.shape[-1], *(n for weight in fitted.weights for n in weight.shape))
        part_rows = max(AT_ONCE // widest_side // BLOCK, 1) * BLOCK
        matrix_parts = matrix.detach().reshape(-1, matrix.shape[-1]).split(part_rows)
        with torch.no_grad():
            matrix_magnitude = reduce(torch.maximum, (largest_magnitude(of(part)) for part in matrix_parts))
            for matrix_part in matrix_parts:
                x = of(matrix_part)
                show(number, slot, x, quantizers[number](x, slot, False, matrix_magnitude)[0])

    def into(number: int) -> Callable[[Tensor], Tensor]:
        """From the module's input to the operand of layer `number`."""
        if not number:
            return inputs
        operand_before, weight_before = into(number - 1), fitted.weights[number - 1]
        return lambda x: swiglu(products.linear(operand_before(x), weight_before))

    def after(_: nn.Module, given: tuple[Any, ...], y: Tensor) -> None:
        if not torch.is_grad_enabled():
            return
        for layer_number, layer_weight in enumerate(fitted.weights):
            quantize(layer_number, INPUT, given[0], into(layer_number))
            quantize(layer_number, WEIGHT, layer_weight)
        if y.requires_grad:
            y.register_hook(lambda gradient: quantize(len(fitted.layers) - 1, GRADIENT, gradient))

    # Registered before other hooks: one of ZeRO 3's releases the weights.
    handle: RemovableHandle = fitted.module.register_forward_hook(after, prepend=True)
    return handle


# Scales for the first step, and the first one after FP8 was off; for local weights the largest magnitude is computed.
# E5M2 then covers gradients from 1e-11 (normal ones from 6e-11) to 0.05, E4M3 inputs from 0.001 to 448 and weights
# from 4e-6 to 1.75. Underflow is preferred to saturation: trained models have a few essential inputs of hundreds.
FIRST_SCALES = (1.0, 2.0**8, 2.0**20)


# Availability


def why_not(config: RunConfig, device: torch.device) -> str | None:
    """The reason why Transformer Engine cannot compute `config.precision.fp8` on this device; None if it can."""
    if device.type != "cuda":
        return "Transformer Engine computes on GPUs only"
    if misfit_reason := find_misfit(config):
        return misfit_reason
    if find_spec("transformer_engine") is None:
        return f"Transformer Engine is not installed ({install_command('gpu')})"
    try:
        import transformer_engine.pytorch as te
    except (ImportError, OSError, RuntimeError, AssertionError) as import_error:
        error_line = (str(import_error).strip() or type(import_error).__name__).splitlines()[0]
        return f"Transformer Engine cannot be imported: {error_line}"
    if not hasattr(te, "autocast"):
        return f"this Transformer Engine is too old: 2.9 or newer is needed ({install_command('gpu')})"
    assert config.precision.fp8 is not None
    with torch.cuda.device(device):
        return _unsupported(te, config.precision.fp8)


def _unsupported(te: Any, config: Fp8Config) -> str | None:
    """The reason why the current GPU has no products of this recipe."""
    if config.recipe != "block":
        is_possible, missing_reason = te.is_fp8_available(return_reason=True)
        return None if is_possible else f"on this GPU it reports: {missing_reason}"
    is_possible, missing_reason = te.is_fp8_block_scaling_available(return_reason=True)
    if is_possible and torch.cuda.get_device_capability() >= (10, 0):
        # From Blackwell on it computes this recipe with blocks of 32, which newer GPUs do not support for all products.
        is_possible, missing_reason = te.is_mxfp8_available(return_reason=True)
    return None if is_possible else f"for blocks on this GPU it reports: {missing_reason}"


# Its modules


def fit_block(block: Block, linears: Collection[str]) -> list[Fitted]:
    """Replace those `linears` (of `config.LINEARS`) of a built block by modules of Transformer Engine.

    A norm before a layer becomes a part of its module, which quantizes the norm's output directly, unless the norm has
    a further factor, which its modules lack. A SwiGLU that is in FP8 as a whole becomes one module, which saves for the
    backward pass what recompute=selective would save.
    """
    fitted_modules, block_attention, block_mlp = [], block.attention, block.mlp
    assert isinstance(block_mlp, MLP)
    fused_norms = block.residual.norms_input and block.residual.norm == 1.0

    def take(linear: str, owner: nn.Module, norm: str) -> None:
        takes_norm = fused_norms and linear in ("attention.qkv", "mlp.gate_up")
        short_name = linear.rpartition(".")[2]
        te_module = _linear(getattr(owner, short_name), getattr(block, norm) if takes_norm else None)
        fitted_modules.append(Fitted(te_module, (f"{block.name}.{linear}",), (te_module.weight,)))
        setattr(owner, short_name, te_module)
        if takes_norm:
            setattr(block, norm, nn.Identity())

    for linear_name in ("attention.qkv", "attention.out"):
        if linear_name in linears:
            take(linear_name, block_attention, "attention_norm")
    if {"mlp.gate_up", "mlp.down"} <= set(linears) and fused_norms and block_mlp.activation is swiglu:
        fused_mlp = _mlp(block_mlp, block.mlp_norm)
        mlp_layers = f"{block.name}.mlp.gate_up", f"{block.name}.mlp.down"
        fitted_modules.append(Fitted(fused_mlp, mlp_layers, (fused_mlp.fc1_weight, fused_mlp.fc2_weight)))
        block.mlp, block.mlp_norm = fused_mlp, nn.Identity()  # type: ignore[assignment]
    else:
        for linear_name in ("mlp.gate_up", "mlp.down"):
            if linear_name in linears:
                take(linear_name, block_mlp, "mlp_norm")
    for fitted_module in fitted_modules:
        fitted_module.module.forward = torch.compiler.disable(fitted_module.module.forward)
    if fitted_modules:
        block.compile_in_pieces()
    return fitted_modules


def _linear(linear: ColumnParallelLinear | RowParallelLinear, norm: RMSNorm | None) -> Any:
    """[norm,] x [s, b, in] (column: or its sequence shard) -> [s, b, out], like our own layers."""
    import transformer_engine.pytorch as te

    (weight_rows, weight_columns), tp = shape_of(linear.weight), linear.tp
    is_column = isinstance(linear, ColumnParallelLinear)
    parallel_mode = None if tp.size == 1 else "column" if is_column else "row"
    module_options = _told(tp, linear.weight) | {"parallel_mode": parallel_mode}
    # It takes the sizes of the whole and divides them.
    whole_sizes = [weight_columns, weight_rows]
    whole_sizes[1 if is_column else 0] *= tp.size
    with _quietly():
        if norm is None:
            te_module = te.Linear(*whole_sizes, **module_options)
        else:
            te_module = te.LayerNormLinear(*whole_sizes, **_told_norm(norm), **module_options)
            _give_norm(te_module, norm)
    _give(te_module, "weight", linear.weight)
    return te_module


def _mlp(mlp: MLP, norm: RMSNorm) -> Any:
    """norm, then the MLP: x [s, b, hidden] (or its sequence shard) -> the same shape. Its SwiGLU has the gate first."""
    import transformer_engine.pytorch as te

    tp, (hidden_width, own_width) = mlp.down.tp, shape_of(mlp.down.weight)
    with _quietly():
        te_module = te.LayerNormMLP(
            hidden_width, own_width * tp.size, activation="swiglu", set_parallel_mode=tp.size > 1, **_told_norm(norm),
            **_told(tp, mlp.down.weight),
        )  # fmt: skip
    _give_norm(te_module, norm)
    _give(te_module, "fc1_weight", mlp.gate_up.weight)
    _give(te_module, "fc2_weight", mlp.down.weight)
    return te_module


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
    te_shape, own_shape = tuple(getattr(module, name).shape), shape_of(parameter)
    assert te_shape == own_shape, f"{name}: {te_shape} in place of {own_shape}"
    setattr(module, name, parameter)


def _give_norm(module: nn.Module, norm: RMSNorm) -> None:
    _give(module, "layer_norm_weight", norm.weight)
    if norm.tp.size > 1:
        # Every rank norms its own part of the tokens. The hook runs before the gradient is accumulated or read.
        norm.weight.register_hook(partial(_sum_gradient, norm.tp))


def _sum_gradient(tp: TensorParallel, gradient: Tensor) -> Tensor:
    """Over the tensor group, like `mappings.share_weight`: in fp32."""
    wide_gradient = gradient.to(torch.float32, copy=True)
    dist.all_reduce(wide_gradient, group=tp.group)
    return wide_gradient.to(gradient.dtype)


# The controller


def apply_transformer_engine(module: nn.Module, config: RunConfig, group: Any, device: torch.device) -> Fp8:
    """Convert `module`, a built model or a stage of one, to `config.precision.fp8`; returns its controller.

    group: the ranks that share delayed scales, those of the stage; None: the world. device: where the module will be.
    """
    assert config.precision.fp8 is not None
    model_blocks = [part for part in module.modules() if isinstance(part, Block)]
    fitted_modules: list[Fitted] = []
    for model_block in model_blocks:
        fitted_modules += fit_block(
            model_block, fp8_linears(config, int(model_block.name.rpartition(".")[2]))
        )
    for fitted in fitted_modules if config.parallel.schedule == "zero_bubble" else ():
        assert hasattr(fitted.module, "wgrad_store"), "it would compute them at once"
        fitted.module.wgrad_store = LateGradients(fitted.weights)
    engine = TransformerEngine(fitted_modules, config.precision.fp8, group, device)
    if keeps_weight_casts(config):
        engine.keep_casts()
    return engine


class TransformerEngine(Fp8):
    """Its modules, and the meters that their kernels read and write."""

    def __init__(self, fitted: Sequence[Fitted], config: Fp8Config, group: Any, device: torch.device) -> None:
        layer_names = [layer for one in fitted for layer in one.layers]
        history_meters = make_meters(config, layer_names, device)
        super().__init__(layer_names, history_meters, group)
        self._config, self._fitted, self._recipe = config, fitted, _recipe(config)
        self._hooks: list[RemovableHandle] = []
        self._weights = [fitted_weight for one in fitted for fitted_weight in one.weights]
        self._weight_format, self._room = choose_formats(config)[WEIGHT], 2.0**config.margin
        self._first: Tensor | None = None  # scales without a history
        self._cast: set[nn.Module] | None = None  # whose weights this step has cast; None: between steps
        if history_meters is not None:
            self._scales = torch.ones_like(history_meters.scales)  # read by the kernels: never 0
            with self._autocast(True):
                _connect(fitted, history_meters, self._scales)

    def watch_quantization(self, record: Record | None) -> None:
        for module_hook in self._hooks:
            module_hook.remove()
        self._hooks.clear()
        if record is None or not self.on:
            return
        layer_quantizers = iter(make_quantizers(self._config, self.layers, self._meters))
        for fitted in self._fitted:
            has_norm = hasattr(fitted.module, "layer_norm_weight")
            module_inputs = partial(_normed, fitted.module) if has_norm else _itself

            def show(number: int, *seen: Any, layers: Sequence[str] = fitted.layers) -> None:
                report_quantization(record, layers[number], *seen)

            quantizers = [next(layer_quantizers) for _ in fitted.layers]
            self._hooks.append(watch_module(fitted, module_inputs, quantizers, show))

    def keep_casts(self) -> None:
        """Cast a weight in the first pass of a step alone."""
        for fitted in self._fitted:
            fitted.module.register_forward_pre_hook(self._tell_first, with_kwargs=True)

    def _tell_first(self, module: nn.Module, args: Any, options: dict[str, Any]) -> Any:
        # What is computed without gradients has no layout for the backward pass, and notes no magnitude.
        if self._cast is None or not torch.is_grad_enabled():
            return None
        is_first = module not in self._cast
        self._cast.add(module)
        return args, options | {"is_first_microbatch": is_first}

    @property
    def reads_weights(self) -> bool:
        return self.on and self._meters is not None and self._first is None

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        self._cast = set()
        try:
            with self._autocast(self.on) if self._meters is None else self._metered(self._meters):
                yield
        finally:
            self._cast = None

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
        te_autocast: contextlib.AbstractContextManager[Any] = te.autocast(
            enabled=on, recipe=self._recipe, amax_reduction_group=self._group
        )
        return te_autocast

    @torch.no_grad()
    def _guess(self, meters: Meters) -> Tensor:
        """Scales [layers, slots] for a step without a history."""
        slot_scales = torch.tensor(FIRST_SCALES, device=meters.scales.device)
        first_scales = slot_scales.expand_as(meters.scales).clone()
        # Under ZeRO 3 the weights are partitioned.
        own_weights = {layer_row: w.detach() for layer_row, w in enumerate(self._weights) if w.numel()}
        if own_weights:
            largest_weights = torch.stack(torch._foreach_norm(list(own_weights.values()), torch.inf)).float()
            first_scales[list(own_weights), WEIGHT] = scale_of(largest_weights, self._weight_format)
        return first_scales / self._room

    def forget_history(self) -> None:
        super().forget_history()
        self._first = None


def _normed(module: Any, x: Tensor) -> Tensor:
    """The operand of a module that includes an RMSNorm."""
    wide_x = x.float()
    wide_x = wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + module.eps)
    wide_weight = module.layer_norm_weight.float()
    return (wide_x * (wide_weight + 1.0 if module.zero_centered_gamma else wide_weight)).to(x.dtype)


def _recipe(config: Fp8Config) -> Any:
    """Its recipe object for ours. Delayed scaling is only declared: see `Meters`."""
    from transformer_engine.common import recipe

    to = recipe.Format.HYBRID if choose_formats(config)[2] is E5M2 else recipe.Format.E4M3
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
