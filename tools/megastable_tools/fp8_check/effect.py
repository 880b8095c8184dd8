"""Measure the effect of FP8 on a model: tensor by tensor, layer by layer, and on its loss and gradient as a whole.

    found = check(model, micro_batches, before, configs)     # megastable fp8-check

Three passes. Over the micro-batches `before`, in the model's precision: the largest magnitudes for delayed scales. Over
`micro_batches`, in the model's precision: in every layer's backward pass, where its input, weight and gradient are
together, the quantization by each recipe and its products. Then the whole model by each recipe, with all layers
in FP8 and without those of `advice.advise`. Memory: weights and gradients once, and the tensors of one layer.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megastable.base.errors import DataError
from megastable.checkpoint.plain import PlainModel
from megastable.config.training import Fp8Config
from megastable.fp8.apply import emulate_fp8, find_linears
from megastable.fp8.controller import History, count_losses
from megastable.fp8.emulated import (
    GRADIENT,
    INPUT,
    WEIGHT,
    Blocks,
    Current,
    Delayed,
    Quantizer,
    choose_formats,
    multiply_quantized,
)
from megastable.fp8.scale_factors import SLOTS, Meters, Quantized, largest_magnitude
from megastable.model.loss import LossFunction
from megastable.parallel.layers import ColumnParallelLinear, VocabParallelEmbedding
from megastable.parallel.topology import TensorParallel
from megastable_tools.fp8_check.advice import (
    LayerLoss,
    ModelLoss,
    RecipeOutcome,
    TensorLoss,
    choose_kept_layers,
    find_instabilities,
)

PRODUCTS = ("y", "dx", "dw")
LOGITS = 1 << 26  # bytes of fp32 logits at a time
Look = Callable[[Tensor, Tensor, Tensor], None]  # x [n, in], w [out, in], g [n, out]


@dataclass(frozen=True)
class EvaluationBatch:
    """tokens int64 [b, s + 1]: inputs and, shifted by one, labels. segments: if attention stays inside documents."""

    tokens: Tensor
    segments: Tensor | None = None


@dataclass(frozen=True)
class EffectReport:
    """loss: in the model's precision, nats per token. outcomes: of every recipe."""

    loss: float
    outcomes: Sequence[RecipeOutcome]


def count_passes_of(batches: int, before: int, configs: Mapping[str, Fp8Config]) -> int:
    """Number of passes over a micro-batch that `check_effect` needs, without those that verify its advice."""
    return (before if "delayed" in configs else 0) + batches * (2 + len(configs))


def check_effect(
    model: PlainModel, batches: Sequence[EvaluationBatch], before: Sequence[EvaluationBatch],
    configs: Mapping[str, Fp8Config], advance: Callable[[], None] = lambda: None,
    more: Callable[[int], None] = lambda _: None,
) -> EffectReport:  # fmt: skip
    """The effect of each of `configs`, by recipe, on the model on `batches`. before: other micro-batches, the newest
    last.

    advance: called after every pass over a micro-batch; more: called with passes that `count_passes_of` did not
    count. The model's weights stay; its gradients do not. Raises DataError if it is broken without FP8.
    """
    linear_layers = find_linears(model.gpt)
    amax_history = _history(model, linear_layers, before, advance) if "delayed" in configs else {}
    measured = _layers(model, linear_layers, batches, configs, amax_history, advance)
    keeps_by_recipe = {recipe: choose_kept_layers(layer_losses) for recipe, layer_losses in measured.items()}
    variants = [(recipe, frozenset[str]()) for recipe in configs]
    variants += [(recipe, frozenset(keep)) for recipe, keep in keeps_by_recipe.items() if keep]
    more(len(batches) * (len(variants) - len(configs)))
    plain_loss, model_losses = _models(model, batches, configs, amax_history, variants, advance)
    outcomes = []
    for recipe, keep in keeps_by_recipe.items():
        full_loss = model_losses[recipe, frozenset()]
        kept_loss = model_losses[recipe, frozenset(keep)] if keep else None
        problems_found = find_instabilities(plain_loss, kept_loss or full_loss, len(keep), len(linear_layers))
        outcomes.append(RecipeOutcome(recipe, measured[recipe], keep, full_loss, kept_loss, problems_found))
    return EffectReport(plain_loss, outcomes)


# Forward and backward


def _pass(model: PlainModel, batch: EvaluationBatch) -> tuple[float, Tensor]:
    """Forward and backward of the training objective; hooks collect the gradients. The cross-entropy, nats per token,
    and the head's input, [s, b, hidden]."""
    hidden = model.compute_hidden(batch.tokens[:, :-1], batch.segments)
    head = model.gpt[0] if model.gpt.tied else model.gpt[-1]
    model_config = model.config
    loss_function = LossFunction(
        model.vocabulary, model_config.z_loss, TensorParallel(), cap=model_config.logit_softcap
    )
    assert isinstance(head, ColumnParallelLinear | VocabParallelEmbedding)
    loss_function(model.gpt.readout.make_features(head, hidden), batch.tokens[:, 1:]).backward()
    return float(loss_function.samples[0][0].mean()), hidden.detach()


@contextlib.contextmanager
def _gradients(model: nn.Module, take: Callable[[nn.Parameter, Tensor], None]) -> Iterator[None]:
    """Hand over every parameter's gradient as soon as it exists, and free it."""

    def given(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        take(parameter, parameter.grad)
        parameter.grad = None

    gradient_hooks = [
        model_parameter.register_post_accumulate_grad_hook(given) for model_parameter in model.parameters()
    ]
    try:
        yield
    finally:
        for gradient_hook in gradient_hooks:
            gradient_hook.remove()


@contextlib.contextmanager
def _plainly(layers: Mapping[str, Any]) -> Iterator[None]:
    """Restore the layers' plain products afterwards."""
    try:
        yield
    finally:
        for linear in layers.values():
            linear.product = F.linear


@contextlib.contextmanager
def _watched(layers: Mapping[str, Any], look: Callable[[int], Look]) -> Iterator[None]:
    """In its backward pass, show every layer's operands to the callback that `look` returns for its number."""
    with _plainly(layers):
        for number, linear in enumerate(layers.values()):
            linear.product = partial(_Shown.apply, look(number))
        yield


class _Shown(torch.autograd.Function):
    """x w^T, unchanged; its backward pass shows x, w and the gradient."""

    @staticmethod
    def forward(ctx: Any, look: Look, x: Tensor, w: Tensor) -> Tensor:
        ctx.look = look
        ctx.save_for_backward(x, w)
        return F.linear(x, w)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, Tensor]:
        x, w = ctx.saved_tensors
        g, flat = gradient.reshape(-1, gradient.shape[-1]), x.reshape(-1, x.shape[-1])
        ctx.look(flat, w, g)
        return None, (g @ w).view(x.shape), g.t() @ flat


# Magnitudes for delayed scales


def _history(
    model: PlainModel,
    layers: Mapping[str, Any],
    before: Sequence[EvaluationBatch],
    advance: Callable[[], None],
) -> History:
    """The largest magnitudes of every micro-batch, the newest first, in the form of `Meters.write_history`."""
    magnitudes_found: list[list[list[float]]] = [[[] for _ in SLOTS] for _ in layers]

    def look(number: int) -> Look:
        def see(*tensors: Tensor) -> None:
            for slot, tensor in enumerate(tensors):
                magnitudes_found[number][slot].insert(0, float(largest_magnitude(tensor)))

        return see

    with _watched(layers, look), _gradients(model, lambda parameter, gradient: None):
        for earlier_batch in before:
            _pass(model, earlier_batch)
            advance()
    return dict(zip(layers, magnitudes_found, strict=True))


# Layer by layer


class _Sums:
    """Sums for one tensor or product: squares of the error and of the true values, counts, the largest magnitude."""

    def __init__(self) -> None:
        self.error = self.right = self.cut = self.lost = self.numbers = self.largest = 0.0
        self.format = ""

    def add(self, found: Tensor, right: Tensor) -> None:
        self.error += _square(found.float().sub_(right))
        self.right += _square(right)

    def add_tensor(self, x: Tensor, became: Quantized) -> None:
        self.add(became.dequantized(torch.float32), x)
        cut_count, lost_count = count_losses(x, became)
        self.cut += float(cut_count)
        self.lost += float(lost_count)
        self.numbers += x.numel()
        self.largest, self.format = max(self.largest, float(largest_magnitude(x))), became.format.name

    @property
    def relative(self) -> float:
        if self.error == 0:
            return 0.0
        return math.sqrt(self.error / self.right) if self.right else math.inf

    @property
    def tensor(self) -> TensorLoss:
        return TensorLoss(
            self.relative, self.cut / max(self.numbers, 1), self.lost / max(self.numbers, 1), self.largest, self.format
        )  # fmt: skip


def _square(x: Tensor) -> float:
    # The norm in fp32, squared in Python: squares of fp32 numbers may overflow or underflow.
    return float(torch.linalg.vector_norm(x, dtype=torch.float32)) ** 2


def _layers(
    model: PlainModel, layers: Mapping[str, Any], batches: Sequence[EvaluationBatch], configs: Mapping[str, Fp8Config],
    history: History, advance: Callable[[], None],
) -> dict[str, list[LayerLoss]]:  # fmt: skip
    recipe_quantizers = {
        recipe: _quantizers(recipe_config, list(layers), history, model.device)
        for recipe, recipe_config in configs.items()
    }
    sum_names = (*SLOTS, *PRODUCTS)
    sums_by_recipe = {
        recipe: [{sum_name: _Sums() for sum_name in sum_names} for _ in layers] for recipe in configs
    }

    def look(number: int) -> Look:
        def compare(x: Tensor, w: Tensor, g: Tensor) -> None:
            for recipe in configs:
                _compare(recipe_quantizers[recipe](number), sums_by_recipe[recipe][number], x, w, g)

        return compare

    with _watched(layers, look), _gradients(model, lambda parameter, gradient: None):
        for batch in batches:
            _pass(model, batch)
            advance()
    return {
        recipe: [
            LayerLoss(name, {slot: of[slot].tensor for slot in SLOTS}, {p: of[p].relative for p in PRODUCTS})
            for name, of in zip(layers, recipe_sums, strict=True)
        ]
        for recipe, recipe_sums in sums_by_recipe.items()
    }


def _quantizers(
    config: Fp8Config, names: Sequence[str], history: History, device: torch.device
) -> Callable[[int], Quantizer]:
    """The quantizers that `apply.emulate` gives to the layers, by their number."""
    format_pair = choose_formats(config)
    if config.recipe != "delayed":
        same_quantizer = Blocks(format_pair) if config.recipe == "block" else Current(format_pair)
        return lambda number: same_quantizer
    amax_meters = Meters(names, format_pair, config.history, config.margin, device)
    amax_meters.read_history(history)
    return lambda number: Delayed(format_pair, amax_meters, number)


def _compare(quantize: Quantizer, sums: Mapping[str, _Sums], x: Tensor, w: Tensor, g: Tensor) -> None:
    """One layer, one recipe: its tensors, and their products as in `emulated.Product`."""
    slot_tensors = {INPUT: x, WEIGHT: w, GRADIENT: g}
    quantized_slots = {slot: quantize(tensor, slot, False) for slot, tensor in slot_tensors.items()}
    for slot, tensor in slot_tensors.items():
        sums[SLOTS[slot]].add_tensor(tensor, quantized_slots[slot][0])
    (xr, xc), (wr, wc), (gr, gc) = quantized_slots.values()
    sums["y"].add(multiply_quantized(xr, wr, x.dtype, transpose_b=True), F.linear(x, w))
    sums["dx"].add(multiply_quantized(gr, wc, x.dtype), g @ w)
    sums["dw"].add(multiply_quantized(gc, xc, x.dtype, transpose_a=True), g.t() @ x)


# The whole model


class _Against:
    """A recipe's gradients and predictions compared with the model's own precision, micro-batch by micro-batch."""

    def __init__(self) -> None:
        self.loss = self.kl = self.dot = self.own = self.right = self.apart = 0.0

    def gradient(self, right: Mapping[nn.Parameter, Tensor], parameter: nn.Parameter, own: Tensor) -> None:
        a, b = own.float(), right[parameter].float()
        self.own, self.right = self.own + _square(a), self.right + _square(b)
        self.dot += float((a * b).sum(dtype=torch.float64))
        self.apart += _square(a.sub_(b))

    def found(self, batches: int) -> ModelLoss:
        norm_product = math.sqrt(self.own) * math.sqrt(self.right)
        cosine = self.dot / norm_product if norm_product else 1.0 if self.own == self.right else 0.0
        gradient_error = math.sqrt(self.apart / self.right) if self.right else 0.0
        return ModelLoss(self.loss / batches, self.kl / batches, cosine, gradient_error)


def _models(
    model: PlainModel, batches: Sequence[EvaluationBatch], configs: Mapping[str, Fp8Config], history: History,
    variants: Collection[tuple[str, frozenset[str]]], advance: Callable[[], None],
) -> tuple[float, dict[tuple[str, frozenset[str]], ModelLoss]]:  # fmt: skip
    """(loss without FP8, results of every variant), a variant being a recipe and the layers kept out of it."""
    linear_layers, total = find_linears(model.gpt), 0.0
    sums = {variant: _Against() for variant in variants}
    for batch in batches:
        right: dict[nn.Parameter, Tensor] = {}
        with _gradients(model, right.__setitem__):
            plain_loss, plain_hidden = _pass(model, batch)
        if not math.isfinite(plain_loss) or not all(bool(g.isfinite().all()) for g in right.values()):
            raise DataError(
                f"{model.checkpoint}: loss or gradient is not finite without FP8, too: take another checkpoint, or "
                "another --text"
            )
        total += plain_loss
        advance()
        for (recipe, kept_layers), against in sums.items():
            with _plainly(linear_layers), _gradients(model, partial(against.gradient, right)):
                emulate_fp8(model.gpt, configs[recipe], frozenset(linear_layers) - kept_layers).read_history(
                    history
                )
                fp8_loss, fp8_hidden = _pass(model, batch)
            against.loss += fp8_loss
            against.kl += _divergence(model, plain_hidden, fp8_hidden)
            advance()
    return total / len(batches), {variant: against.found(len(batches)) for variant, against in sums.items()}


@torch.no_grad()
def _divergence(model: PlainModel, right: Tensor, other: Tensor) -> float:
    """KL(right || other) of the next token, nats, the mean over tokens; from the head's inputs, [s, b, hidden]."""
    chunk_size, total_divergence = max(1, LOGITS // (4 * model.config.padded_vocab)), 0.0
    right, other = right.flatten(0, 1), other.flatten(0, 1)
    for right_part, b in zip(right.split(chunk_size), other.split(chunk_size), strict=True):
        p, q = (
            model.compute_logits(x)[..., : model.vocabulary].float().log_softmax(-1) for x in (right_part, b)
        )
        total_divergence += float(F.kl_div(q, p, reduction="sum", log_target=True))
    return total_divergence / len(right)
