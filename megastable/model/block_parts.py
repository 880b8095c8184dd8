"""RMSNorm, MLP and dropout of a block.

RMSNorm: Zhang & Sennrich, arXiv:1910.07467, computed in fp32 for any parameter dtype. SwiGLU and GeGLU: Shazeer,
arXiv:2002.05202, down(silu(gate x) * up x), gate and up fused into one product.

Dropout (Hinton et al., arXiv:1207.0580) by a mask that is a hash of sample, token, channel and place in the model. No
random state: a layout, a resume, a rewind or a recomputation has no influence on which elements are dropped. A sample's
key comes from its absolute position in the order of samples, so a later epoch drops others. The idea of counting in
place of drawing: Salmon et al., Parallel random numbers: as easy as 1, 2, 3 (SC 2011).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megastable.config.model import ModelConfig
from megastable.model import elementwise
from megastable.model.elementwise import Elementwise
from megastable.parallel.layers import ColumnParallelLinear, RowParallelLinear
from megastable.parallel.mappings import share_weight, share_weights, sum_over_group
from megastable.parallel.sharding import Placement, set_placement
from megastable.parallel.topology import TensorParallel


def norm_rows(x: Tensor, weight: Tensor, eps: float, centered: bool, scale: Tensor | None = None) -> Tensor:
    """As `RMSNorm` says."""
    wide_x = x.float()
    normed_x = wide_x * torch.rsqrt(wide_x.pow(2).mean(-1, keepdim=True) + eps)
    wide_weight = _factor(weight.float(), centered)
    return (normed_x * (wide_weight if scale is None else wide_weight * scale)).to(x.dtype)


class RMSNorm(nn.Module):
    """y = x / rms(x) * weight over the last dimension; output in the dtype of `x`.

    `partial`: each tensor rank sees only a part of the data (sequence shards, or its own heads), so the
    weight's gradient is summed over the tensor group. centered: the factor is 1 + weight. scale: another one.
    """

    def __init__(
        self, width: int, eps: float, tp: TensorParallel, name: str, partial: bool, centered: bool = False,
        scale: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.eps, self.centered = eps, centered
        # A tensor: by a number of its own, every block would be compiled again.
        self.scale = None if scale == 1.0 else torch.tensor(scale, dtype=torch.float32, device="cpu")
        self.tp = tp if partial else TensorParallel()
        self.fast: Callable[..., Tensor] | None = None  # `norm_rows`, compiled, if nothing around it is
        self.plain = False  # whether the compiled version is left aside
        self.shared: Tensor | None = None  # the weight in this micro-batch; see `share_norm_weights`
        self.weight = nn.Parameter(torch.empty(width))
        set_placement(self.weight, Placement(f"{name}.weight"), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        run_norm = norm_rows if self.fast is None or self.plain else self.fast
        return run_norm(x, self.weigh(), self.eps, self.centered, self.scale)

    def compile_alone(self) -> None:
        """Compile it by itself."""
        self.fast = torch.compile(norm_rows, fullgraph=True, dynamic=False)

    def weigh(self) -> Tensor:
        """The weight, whose gradient is summed over the tensor group."""
        if self.shared is not None and torch.is_grad_enabled():
            return self.shared
        return share_weight(self.weight, self.tp)

    def tell_kernel(self) -> tuple[Tensor, float, bool]:
        """weight, eps and centered of the kernels of elementwise.py, which know no scale."""
        if self.scale is None:
            return self.weigh(), self.eps, self.centered
        return _factor(self.weigh().float(), self.centered) * self.scale, self.eps, False


def share_norm_weights(module: nn.Module) -> None:
    """Sum the gradients of the norms of `module`, a model or a chunk of one, over the tensor group in one message per
    micro-batch, at the end of its backward pass, where by themselves they send one each.

    The whole module is called once per micro-batch. Not for ZeRO 3, which gathers a weight only where it is used.
    """
    norm_parts = [part for part in module.modules() if isinstance(part, RMSNorm) and part.tp.size > 1]

    def share_all(*_: Any) -> None:
        if torch.is_grad_enabled():
            # Stay until the next micro-batch: a recomputation, which may come after it, reads the same numbers.
            shared_weights = share_weights([norm.weight for norm in norm_parts], norm_parts[0].tp)
            for norm_part, shared_weight in zip(norm_parts, shared_weights, strict=True):
                norm_part.shared = shared_weight

    if norm_parts:
        module.register_forward_pre_hook(share_all)


def _factor(weight: Tensor, centered: bool) -> Tensor:
    return weight + 1.0 if centered else weight


class SplitRMSNorm(nn.Module):
    """`RMSNorm` over a `width` that is split over the tensor group: x [..., width / tensor] -> the same.

    The mean square is over all ranks' shards; weight and its gradient are split like x.
    """

    def __init__(self, width: int, eps: float, tp: TensorParallel, name: str, centered: bool = False) -> None:
        super().__init__()
        self.width, self.eps, self.tp, self.centered = width, eps, tp, centered
        self.weight = nn.Parameter(torch.empty(width // tp.size))
        set_placement(self.weight, Placement(f"{name}.weight", 0, (width,)), tp.size)

    def forward(self, x: Tensor) -> Tensor:
        wide_x = x.float()
        mean_square = sum_over_group(wide_x.pow(2).sum(-1, keepdim=True), self.tp) / self.width
        wide_weight = _factor(self.weight.float(), self.centered)
        return (wide_x * torch.rsqrt(mean_square + self.eps) * wide_weight).to(x.dtype)


def swiglu(gate_up: Tensor) -> Tensor:
    """[..., 2 f] -> [..., f]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def gated(gate_up: Tensor, gelu: bool, clamp: float | None) -> Tensor:
    """As `swiglu`, with GELU (tanh) in place of SiLU, and with the gate at most `clamp` and up within ± `clamp`."""
    gate, up = gate_up.chunk(2, -1)
    if clamp is not None:
        clamp = min(clamp, torch.finfo(gate_up.dtype).max)  # fp16 ends early
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return (F.gelu(gate, approximate="tanh") if gelu else F.silu(gate)) * up


def activation_of(config: ModelConfig) -> Callable[[Tensor], Tensor]:
    """gate and up [..., 2 f] -> [..., f]."""
    if config.activation == "silu" and config.swiglu_clamp is None:
        return swiglu
    return partial(gated, gelu=config.activation == "gelu", clamp=config.swiglu_clamp)


class MLP(nn.Module):
    """x [s, b, hidden] (or its sequence shard) -> the same shape. width: its inner one; None: the model's."""

    def __init__(
        self, config: ModelConfig, tp: TensorParallel, name: str, recompute_core: bool,
        own: Elementwise = Elementwise(), width: int | None = None,  # noqa: B008
    ) -> None:  # fmt: skip
        super().__init__()
        self.own, ffn_width = own, width or config.ffn_width
        self.recompute_core = recompute_core
        self.activation = activation_of(config)
        # `activate`, compiled; see `Block.compile_in_pieces`.
        self.fast: Callable[[Tensor], Tensor] | None = None
        self.plain = False  # whether the compiled version is left aside
        self.gate_up = ColumnParallelLinear(config.hidden, (ffn_width, ffn_width), tp, f"{name}.gate_up")
        self.down = RowParallelLinear(ffn_width, config.hidden, tp, f"{name}.down")

    def activate(self, gate_up: Tensor) -> Tensor:
        """What lies between both products. Compiled, too, it is what `activation` and `own` say at the time."""
        own_kernel = self.activation is swiglu and self.own.has("swiglu")
        return elementwise.swiglu(gate_up) if own_kernel else self.activation(gate_up)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.run_activation(self.gate_up(x)))

    def run_activation(self, gate_up: Tensor) -> Tensor:
        """`activate`, compiled and recomputed as this block is."""
        run_activation = self.activate if self.fast is None or self.plain else self.fast
        if self.recompute_core and torch.is_grad_enabled():
            # No random numbers in here: there is no state to save and restore.
            y: Tensor = checkpoint(run_activation, gate_up, use_reentrant=False, preserve_rng_state=False)
            return y
        return run_activation(gate_up)


# Odd, with bits everywhere; products of int64 wrap. The last two and the shifts are those of MurmurHash3's finalizer.
OF_SAMPLE, OF_TOKEN, OF_CHANNEL, OF_PLACE = (
    0x5851F42D4C957F2D, 0x14057B7EF767814F, 0x1E3779B97F4A7C15, 0x2545F4914F6CDD1D,
)  # fmt: skip
MIXING = 0x7F51AFD7ED558CCD, 0x44CEB9FE1A85EC53
FINE = 24  # bits of the comparison with the share to drop


def _mixed(x: Tensor) -> Tensor:
    """Every bit depends on every bit of x, int64."""
    for factor in MIXING:
        x = (x ^ ((x >> 33) & 0x7FFFFFFF)) * factor
    return x ^ ((x >> 33) & 0x7FFFFFFF)


def keys_of_samples(positions: Tensor, seed: int) -> Tensor:
    """Keys, int64 [b], of the samples at these absolute positions of a run."""
    return _mixed(positions * OF_SAMPLE + seed)


def keys_at_places(keys: Tensor, *places: int) -> Tensor:
    """Keys, int64 [places, b], of samples at places in the model, numbers from 0 on. Not for compiled code, which would
    be compiled again for every place."""
    return torch.stack([keys + _wrapped(place * OF_PLACE) for place in places])


def _wrapped(number: int) -> int:
    """As a product of int64 would be."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def drop_elements(x: Tensor, keys: Tensor, share: float, tokens: Sequence[range]) -> Tensor:
    """x [s, b, h] without a random `share` of its elements, the others divided by 1 - share. keys: int64 [b], of
    `keys_at_places`; tokens: positions in the sample of the s tokens of x."""
    token_positions = torch.cat([torch.arange(part.start, part.stop, device=x.device) for part in tokens])
    channel_numbers = torch.arange(x.shape[2], device=x.device)
    row_keys = _mixed(keys + token_positions[:, None] * OF_TOKEN)
    hash_bits = _mixed(row_keys[..., None] + channel_numbers * OF_CHANNEL) >> (64 - FINE)
    hash_bits = hash_bits & ((1 << FINE) - 1)
    return x.masked_fill(hash_bits < round(share * (1 << FINE)), 0.0) * (1 / (1 - share))
