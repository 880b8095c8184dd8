"""What all routers chose in a step, and the bias that follows from it; the norms that their weights are held at; older
weights that choose. State outside of the optimizer, which moves once per applied update, from sums over all ranks, and
is the same on every rank.

Source of the bias: arXiv:2408.15664, algorithm 1. Choices by older weights: DeepSeek-V4's anticipatory routing
(arXiv:2606.19348, section 4.2.3), of which the older weights are those of the whole model; here of the routers alone,
which need no second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megastable.base.collectives import send_answers
from megastable.config.model import ModelConfig
from megastable.engine.flatstate import FlatState
from megastable.model.experts import ExpertMLP, count_columns
from megastable.model.gpt import Block
from megastable.optim.clipping import compute_factors
from megastable.optim.pieces import sum_over_world
from megastable.parallel.sharding import Fragment, placement_of
from megastable.parallel.topology import Topology

PREFIX = "experts/"  # of its state among the shared state
BIAS, CAPS = f"{PREFIX}bias", f"{PREFIX}caps"
PAST, PAST_UPDATES = f"{PREFIX}past", f"{PREFIX}past_updates"
# For how many updates older weights choose, and how many updates they are old at least, and at most twice as many.
PAST_LENGTH, PAST_AGE = 64, 8


class ExpertRouting:
    """The routers of all layers, of which `module` has those of this rank's stage.

    bias: fp32 [layers, experts], added to scores for the choice. shares: fp32 [layers, experts], of all choices in the
    last applied update's batch, for the balance loss over steps; even in the beginning. Dense layers have both, unused.
    caps: fp64 [layers], the norms beyond which no router's weight grows; None: they may. past: fp32 [2, layers,
    experts, hidden], weights that choose, and those that will next, for `past_updates` more, fp64 [1]; None: the
    present ones do.
    """

    def __init__(
        self,
        module: nn.Module,
        config: ModelConfig,
        topology: Topology,
        flat: FlatState,
        device: torch.device,
    ) -> None:
        assert config.experts is not None
        self._experts, self._topology = config.experts, topology
        table_size = config.layers, config.experts.count
        self.bias = torch.zeros(table_size, dtype=torch.float32, device=device)
        self.shares = torch.full(table_size, 1 / config.experts.count, dtype=torch.float32, device=device)
        self.caps: Tensor | None = None
        self.past: Tensor | None = None
        self.past_updates = torch.zeros(1, dtype=torch.float64, device=device)
        self._weight_size, self._weight_dtype = (
            (*table_size, config.hidden), next(module.parameters()).dtype
        )  # fmt: skip
        self.newest: Tensor | None = None  # sums of the last applied update's batch, also in a branch
        self._mlps: dict[int, ExpertMLP] = {}
        for part in module.modules():
            if isinstance(part, Block) and isinstance(part.mlp, ExpertMLP):
                layer = int(part.name.rpartition(".")[2])
                self._mlps[layer] = part.mlp
                part.mlp.bias = self.bias[layer]
                part.mlp.shares = self.shares[layer]
        layer_by_name = {placement_of(mlp.router.weight).name: layer for layer, mlp in self._mlps.items()}
        held_fragments = [f for f in flat.fragments if f.name in layer_by_name]
        # The weights that this rank updates: their layer, and where they lie.
        self._flat, self._weights = flat, [(layer_by_name[f.name], f) for f in held_fragments]

    def begin_step(self, loss_scale: float) -> None:
        """loss_scale: what the gradients of a micro-batch's loss are multiplied by."""
        for mlp in self._mlps.values():
            mlp.measured, mlp.loss_scale = [], loss_scale

    def measure_step(self) -> Tensor:
        """Of this rank's tokens and layers, fp64 [layers x columns]; the sums over all ranks are those of the batch.
        Columns: `count_columns`. Zero where another rank counts the same tokens."""
        columns = count_columns(self._experts.count)
        choice_table = torch.zeros(len(self.bias), columns, dtype=torch.float64, device=self.bias.device)
        if self._topology.tensor_rank == 0 or self._counts_own_tokens():
            for layer, mlp in self._mlps.items():
                assert mlp.measured is not None
                if mlp.measured:
                    choice_table[layer] = torch.stack(mlp.measured).double().sum(0)
        return choice_table.flatten()

    def _counts_own_tokens(self) -> bool:
        """Whether the ranks of a tensor group route different tokens."""
        return any(mlp.tp.sequence for mlp in self._mlps.values())

    def unfold_sums(self, sums: Tensor) -> Tensor:
        """The sums over all ranks, fp64 [layers, columns]."""
        return sums.view(len(self.bias), -1)

    def follow_update(self, sums: Tensor) -> None:
        """An update was applied to the batch of these sums, as from `unfold_sums`."""
        self.newest = sums
        choice_counts = sums[:, : self._experts.count].to(self.bias.device)
        mean_count = choice_counts.mean(1, keepdim=True)
        self.bias.add_(torch.sign(mean_count - choice_counts).float(), alpha=self._experts.bias_rate)
        has_choices = mean_count > 0
        self.shares.copy_(
            torch.where(
                has_choices, choice_counts / choice_counts.sum(1, keepdim=True).clamp_min(1), self.shares
            )
        )
        if self.past is not None:
            self._age_past(self.past)

    # Held norms

    def hold_norms(self, holds: bool) -> None:
        """Hold the weight of every router at the norm that it has now, unless it is held already; or no longer.
        Collective over the world when it begins."""
        if not holds:
            self.caps = None
        elif self.caps is None:
            send_answers()  # a start may begin with it
            self.caps = self._measure_norms({id(master) for master in self._flat.masters})

    def hold_after(self, inner: torch.optim.Optimizer) -> Callable[..., Any]:
        """The optimizer's `step`, which then scales the weights down whose norm is above its cap: master weights, so
        that the copies in compute precision follow. A norm counts whatever made it: the update, or what was done to
        the weight since the last one."""
        step = inner.step

        def stepped(*args: Any, **kwargs: Any) -> Any:
            result = step(*args, **kwargs)
            # DeepSpeed's ZeRO 3 hands the optimizer one buffer at a time.
            buffers = {id(p) for param_group in inner.param_groups for p in param_group["params"]}
            assert self.caps is not None
            layer_factors = compute_factors(self._measure_norms(buffers), self.caps)
            for layer, weight_piece, _ in self._view_weights(buffers):
                weight_piece.mul_(layer_factors[layer].float())
            return result

        return stepped

    def _measure_norms(self, buffers: set[int]) -> Tensor:
        """Norms of all routers' weights, of which the parts in these master buffers (by `id`) count: fp64 [layers].
        Collective over the world; all ranks get the same bits."""
        layer_squares = torch.zeros(len(self.bias), dtype=torch.float64, device=self.bias.device)
        for layer, weight_piece, fragment in self._view_weights(buffers):
            if fragment.counted:
                layer_squares[layer] += torch.linalg.vector_norm(weight_piece, dtype=torch.float64).square()
        return sum_over_world(layer_squares).sqrt_()

    def _view_weights(self, buffers: set[int]) -> list[tuple[int, Tensor, Fragment]]:
        """This rank's pieces of routers' weights in these buffers: the layer, a view, and where it lies."""
        own_pieces = [(layer, f, self._flat.masters[f.group]) for layer, f in self._weights]
        return [
            (layer, master.data.narrow(0, f.offset, f.numel), f)
            for layer, f, master in own_pieces
            if id(master) in buffers
        ]

    # Choices by older weights

    def choose_by_past(self) -> None:
        """Have the weights of now choose in the next updates, and then those of some updates before each, as
        `PAST_LENGTH` and `PAST_AGE` say. Collective over the world."""
        self._set_past(self._gather_weights().repeat(2, 1, 1, 1))
        self.past_updates.fill_(PAST_LENGTH)

    def _age_past(self, past: Tensor) -> None:
        """After an update. Collective over the world when the weights that choose change."""
        self.past_updates -= 1
        updates_left = int(self.past_updates)
        if not updates_left:
            self._set_past(None)
        elif updates_left % PAST_AGE == 0:
            past[0] = past[1]
            past[1] = self._gather_weights()

    def _set_past(self, past: Tensor | None) -> None:
        self.past = past
        for layer, mlp in self._mlps.items():
            mlp.router.past = None if past is None else past[0, layer]

    def _gather_weights(self) -> Tensor:
        """The weights of all routers, as they compute with them, fp32 [layers, experts, hidden]. Collective over the
        world."""
        weight_table = torch.zeros(self._weight_size, dtype=torch.float32, device=self.bias.device).flatten(1)
        for layer, weight_piece, f in self._view_weights({id(master) for master in self._flat.masters}):
            if f.counted:
                weight_table[layer, f.start : f.start + f.numel] = weight_piece
        return sum_over_world(weight_table).to(self._weight_dtype).float().view(self._weight_size)

    # State

    @property
    def shared(self) -> dict[str, Tensor]:
        """Its state by name; the originals."""
        held_caps = {} if self.caps is None else {CAPS: self.caps}
        held_past = {} if self.past is None else {PAST: self.past, PAST_UPDATES: self.past_updates}
        return {BIAS: self.bias, f"{PREFIX}shares": self.shares} | held_caps | held_past

    def restore_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with what `shared` had; from a state without experts, from the beginning."""
        self.bias.zero_()
        self.shares.fill_(1 / self._experts.count)
        self.caps = torch.empty_like(saved[CAPS], device=self.bias.device) if CAPS in saved else None
        self._set_past(torch.empty_like(saved[PAST], device=self.bias.device) if PAST in saved else None)
        for name, held in self.shared.items():
            if name in saved:
                held.copy_(saved[name])
