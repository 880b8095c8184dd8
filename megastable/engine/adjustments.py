"""Changes how a run trains from the next update on, by name, and back again; QK-clip, one of them. All ranks alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megastable.config.model import ModelConfig
from megastable.config.tree import RunConfig
from megastable.engine.expert_routing import ExpertRouting
from megastable.engine.flatstate import FlatState
from megastable.model.block_parts import MLP, gated, swiglu
from megastable.model.experts import ExpertMLP
from megastable.model.gpt import Block
from megastable.model.loss import LossFunction
from megastable.optim.clipping import clip_factors, find_heads_over, row_factors, scale_rows
from megastable.parallel.topology import Topology


class LogitClipping:
    """Measures the largest attention logit of every head in a step, and applies QK-clip after the update.

    Each rank watches the heads that it computes: tensor and context parallelism share them out (in a ring it has all
    heads, and watches its own queries), pipeline stages have their blocks. One MAX all-reduce of [layers, heads] per
    update. Recomputed blocks are measured twice, which changes nothing. threshold: of the logits, q k / sqrt(d); None:
    none, and no measurement.
    """

    def __init__(
        self,
        module: nn.Module,
        model: ModelConfig,
        topology: Topology,
        threshold: float | None,
        device: torch.device,
        ring: bool = False,
    ) -> None:
        self.model, self.topology = model, topology
        sharing_ranks, share = topology.layout.tensor, topology.tensor_rank
        if not ring:
            context_ranks = topology.layout.context
            sharing_ranks, share = (
                sharing_ranks * context_ranks,
                share * context_ranks + topology.context_rank,
            )
        own_heads = model.heads // sharing_ranks
        first_head = share * own_heads
        self._mine = slice(first_head, first_head + own_heads)
        # By layer. Tensors of their own: compiled blocks share one graph, which takes them as inputs.
        self._attentions = {
            int(block.name.rpartition(".")[2]): block.attention
            for block in module.modules()
            if isinstance(block, Block)
        }
        self._highest = {layer: torch.empty(own_heads, device=device) for layer in self._attentions}
        self._table = torch.empty(model.layers, model.heads, device=device)
        self.threshold: float | None = None
        self.switch_threshold(threshold)

    def switch_threshold(self, threshold: float | None) -> None:
        """Clip at another threshold from the next step on."""
        if threshold == self.threshold:  # as before nearly every step
            return
        self.threshold = threshold
        self.begin_step()
        for layer_index, attention in self._attentions.items():
            attention.highest = None if threshold is None else self._highest[layer_index]

    def begin_step(self) -> None:
        if self.threshold is None:
            return
        for layer_highest in self._highest.values():
            layer_highest.fill_(-math.inf)

    def gather_highest_logits(self) -> Tensor:
        """The largest logits of the step, fp32 [layers, heads] on the CPU. Collective over the world."""
        self._table.fill_(-math.inf)
        for layer_index, layer_highest in self._highest.items():
            self._table[layer_index, self._mine] = layer_highest
        # Libraries differ in the maximum of a NaN and a number.
        self._table.nan_to_num_(math.inf, math.inf, -math.inf)
        dist.all_reduce(self._table, op=dist.ReduceOp.MAX)
        return self._table.to("cpu", copy=True)

    def after_update(
        self, highest: Tensor, inner: torch.optim.Optimizer, flat: FlatState
    ) -> Callable[..., Any]:
        """The optimizer's `step`, and then QK-clip of the buffers that it updates. highest: from
        `gather_highest_logits`."""
        step, threshold = inner.step, self.threshold
        if threshold is None or not find_heads_over(highest, threshold).any():
            return step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            # DeepSpeed's ZeRO 3 hands the optimizer one buffer at a time.
            buffers = {id(p) for param_group in inner.param_groups for p in param_group["params"]}
            self._clip(threshold, highest, flat, buffers)
            return result

        return stepped

    def _clip(self, threshold: float, highest: Tensor, flat: FlatState, buffers: set[int]) -> None:
        """Scale the master weights in these buffers (by `id`)."""
        place = self.topology.layout.tensor, self.topology.tensor_rank
        width = self.model.head_width
        query_factors, key_factors = clip_factors(highest, self.model.key_value_heads, threshold)
        for f in flat.fragments:
            block_name, _, parameter_kind = f.name.partition(".attention.qkv.")
            if parameter_kind and id(flat.masters[f.group]) in buffers:
                layer = int(block_name.rpartition(".")[2])
                own_factors = row_factors(query_factors[layer], key_factors[layer], width, *place)
                weight_piece = flat.view_piece(f, "weight")
                assert weight_piece is not None
                scale_rows(weight_piece, f, own_factors)


CLIP = 0.25  # of `optimizer.clip`
Z_LOSS, LEAST_Z_LOSS = 10.0, 1e-4  # times `model.z_loss`, and at least so much (PaLM's, arXiv:2204.02311)
# The second moment forgets twice as fast, and no slower than 0.95 does: arXiv:2304.13013, section 3, has lower ones
# follow gradients that change.
BETA2 = 0.95
# Of the logits, as Kimi K2 was trained with from the start to 15.5T tokens (arXiv:2507.20534, section 2.1). Not
# relative to the good state: what bf16 and softmax bear does not depend on it, and a name in a checkpoint is enough.
QK_CLIP = 100.0
# DeepSeek-V4's (`swiglu_limit`), taken up against spikes. gpt-oss has 7 (arXiv:2508.10925), but from the start: the
# wider one takes less from weights that were trained without.
SWIGLU_CLAMP = 10.0
# Times the weights of a router's losses, and at least ST-MoE's (arXiv:2202.08906) and Switch's (arXiv:2101.03961); and
# times its rate.
ROUTER_LOSS, LEAST_ROUTER_Z_LOSS, LEAST_BALANCE_LOSS, ROUTER_RATE = 10.0, 1e-3, 1e-2, 0.3
CLAMPED = partial(gated, gelu=False, clamp=SWIGLU_CLAMP)


def lower_beta2(beta2: float) -> float:
    return min(BETA2, 1 - 2 * (1 - beta2))


class Adjustments:
    """wrapper: DeepSpeed's, around the optimizer. fp8: by what layers compute in it, see `Kernels`.

    clip: the norm that gradients are clipped to, 0: never.
    """

    def __init__(
        self, config: RunConfig, wrapper: Any, loss: LossFunction, qk_clip: LogitClipping, module: nn.Module,
        fp8: str, routing: ExpertRouting | None,
    ) -> None:  # fmt: skip
        self._wrapper, self._loss, self._z_loss = wrapper, loss, loss.z_loss
        self._groups = [group for group in wrapper.optimizer.param_groups if "betas" in group]
        self._betas = [group["betas"] for group in self._groups]
        self._qk_clip, o, m = qk_clip, config.optimizer, config.model
        # Of the recipe's: muP has more for some groups.
        decaying_groups = [group for group in wrapper.optimizer.param_groups if group["weight_decay"]]
        self._decays = [(group, group["weight_decay"] / o.weight_decay) for group in decaying_groups]
        self._mlps = [mlp_part for mlp_part in module.modules() if isinstance(mlp_part, MLP)]
        self._routing = routing
        self._expert_mlps = [part for part in module.modules() if isinstance(part, ExpertMLP)]
        self._router_groups = [group for group in wrapper.optimizer.param_groups if group.get("router")]
        self.clip = self._clip = o.clip
        self._clips = o.clipping.kind == "norm"
        possible_names = {
            "clip": self._clips and o.clip > 0,
            "beta2": any(beta2 > 0.5 for _, beta2 in self._betas),
            "z_loss": True,
            # Norms undo what is done to the weights, and a cap bounds the logits already.
            "qk_clip": o.qk_clip is None and not m.qk_norm and m.attention_softcap is None,
            # Transformer Engine may have fused the MLP.
            "swiglu_clamp": m.activation == "silu" and m.swiglu_clamp is None and fp8 != "te",
            "reset_moments": True,
            "no_balance_loss": m.experts is not None and m.experts.balance_loss > 0,
            "reset_bias": m.experts is not None and m.experts.bias_rate > 0,
            **dict.fromkeys(
                ("past_routing", "hold_router", "router_z_loss", "balance_loss", "router_rate"),
                m.experts is not None,
            ),
        }
        self.possible = frozenset(
            possible_name for possible_name, is_possible in possible_names.items() if is_possible
        )
        self.now: tuple[str, ...] = ()

    def follow_config(self, config: RunConfig) -> None:
        """Take the recipe's values from `config` from the next update on; what was switched applies to these."""
        o = config.optimizer
        self._z_loss, self._clip = config.model.z_loss, o.clip
        self._betas = [o.betas for _ in self._groups]
        for group, decay_share in self._decays:
            group["weight_decay"] = decay_share * o.weight_decay
        self.switch_to(self.now)

    def switch_to(self, names: Collection[str]) -> None:
        """Train with these changes and no others from the next update on, as far as they are possible."""
        names_before, self.now = self.now, tuple(names)
        self._loss.z_loss = max(LEAST_Z_LOSS, Z_LOSS * self._z_loss) if "z_loss" in names else self._z_loss
        for group, (beta1, beta2) in zip(self._groups, self._betas, strict=True):
            group["betas"] = (beta1, lower_beta2(beta2) if "beta2" in names else beta2)
        if self._clips:
            self.clip = self._clip * (CLIP if "clip" in names else 1.0)
            self._wrapper.clip_grad = self.clip
        if "qk_clip" in self.possible:
            self._qk_clip.switch_threshold(QK_CLIP if "qk_clip" in names else None)
        for expert_mlp in self._expert_mlps:
            experts = expert_mlp.config
            expert_mlp.z_weight, expert_mlp.balance_weight = experts.router_z_loss, experts.balance_loss
            if "router_z_loss" in names:
                expert_mlp.z_weight = max(LEAST_ROUTER_Z_LOSS, ROUTER_LOSS * experts.router_z_loss)
            if "balance_loss" in names:
                expert_mlp.balance_weight = max(LEAST_BALANCE_LOSS, ROUTER_LOSS * experts.balance_loss)
            if "no_balance_loss" in names:
                expert_mlp.balance_weight = 0.0
        if self._routing is not None:
            self._routing.hold_norms("hold_router" in names)
        for group in self._router_groups:
            group["lr_scale"] = ROUTER_RATE if "router_rate" in names else 1.0
        wants_clamp = "swiglu_clamp" in names
        if "swiglu_clamp" in self.possible and wants_clamp != ("swiglu_clamp" in names_before):
            for mlp in self._mlps:
                mlp.activation = CLAMPED if wants_clamp else swiglu
