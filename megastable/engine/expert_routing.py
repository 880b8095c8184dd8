"""What all routers chose in a step, and the bias that follows from it: state outside of the optimizer, which moves once
per applied update, from the gate's sum over all ranks, and is the same on every rank.

Source: arXiv:2408.15664, algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from megastable.config.model import ModelConfig
from megastable.model.experts import ExpertMLP, count_columns
from megastable.model.gpt import Block
from megastable.parallel.topology import Topology

PREFIX = "experts/"  # of its state among the shared state
BIAS = f"{PREFIX}bias"


class ExpertRouting:
    """The routers of all layers, of which `module` has those of this rank's stage.

    bias: fp32 [layers, experts], added to scores for the choice. shares: fp32 [layers, experts], of all choices in the
    last applied update's batch, for the balance loss over steps; even in the beginning. Dense layers have both, unused.
    """

    def __init__(
        self, module: nn.Module, config: ModelConfig, topology: Topology, device: torch.device
    ) -> None:
        assert config.experts is not None
        self._experts, self._topology = config.experts, topology
        table_size = config.layers, config.experts.count
        self.bias = torch.zeros(table_size, dtype=torch.float32, device=device)
        self.shares = torch.full(table_size, 1 / config.experts.count, dtype=torch.float32, device=device)
        self.newest: Tensor | None = None  # sums of the last applied update's batch, also in a branch
        self._mlps: dict[int, ExpertMLP] = {}
        for part in module.modules():
            if isinstance(part, Block) and isinstance(part.mlp, ExpertMLP):
                layer = int(part.name.rpartition(".")[2])
                self._mlps[layer] = part.mlp
                part.mlp.bias = self.bias[layer]
                part.mlp.shares = self.shares[layer]

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

    @property
    def shared(self) -> dict[str, Tensor]:
        """Its state by name; the originals."""
        return {BIAS: self.bias, f"{PREFIX}shares": self.shares}

    def restore_state(self, saved: Mapping[str, Tensor]) -> None:
        """Continue with what `shared` had; from a state without experts, from the beginning."""
        self.bias.zero_()
        self.shares.fill_(1 / self._experts.count)
        for name, held in self.shared.items():
            if name in saved:
                held.copy_(saved[name])
