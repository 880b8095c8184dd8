"""What all routers chose in a step, and the bias that follows from it; the norms that their weights are held at. State
outside of the optimizer, which moves once per applied update, from sums over all ranks, and is the same on every rank.

Source of the bias: arXiv:2408.15664, algorithm 1.
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
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import Topology

PREFIX = "experts/"  # of its state among the shared state
BIAS, CAPS = f"{PREFIX}bias", f"{PREFIX}caps"


class ExpertRouting:
    """The routers of all layers, of which `module` has those of this rank's stage.

    bias: fp32 [layers, experts], added to scores for the choice. shares: fp32 [layers, experts], of all choices in the
    last applied update's batch, for the balance loss over steps; even in the beginning. Dense layers have both, unused.
    caps: fp64 [layers], the norms beyond which no router's weight grows; None: they may.
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
        for layer, weight_piece, counted in self._view_weights(buffers):
            if counted:
                layer_squares[layer] += torch.linalg.vector_norm(weight_piece, dtype=torch.float64).square()
        return sum_over_world(layer_squares).sqrt_()

    def _view_weights(self, buffers: set[int]) -> list[tuple[int, Tensor, bool]]:
        """Of this rank's pieces of routers' weights in these buffers: the layer, a view, and whether it counts here."""
        own_pieces = [(layer, f, self._flat.masters[f.group]) for layer, f in self._weights]
        return [
            (layer, master.data.narrow(0, f.offset, f.numel), f.counted)
            for layer, f, master in own_pieces
            if id(master) in buffers
        ]

    # State

    @property
    def shared(self) -> dict[str, Tensor]:
        """Its state by name; the originals."""
        held_caps = {} if self.caps is None else {CAPS: self.caps}
        return {BIAS: self.bias, f"{PREFIX}shares": self.shares} | held_caps

    def restore_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with what `shared` had; from a state without experts, from the beginning."""
        self.bias.zero_()
        self.shares.fill_(1 / self._experts.count)
        self.caps = torch.empty_like(saved[CAPS], device=self.bias.device) if CAPS in saved else None
        for name, held in self.shared.items():
            if name in saved:
                held.copy_(saved[name])
