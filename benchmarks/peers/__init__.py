"""Registry of trainers of the same model: ours, the same model without DeepSpeed, and other frameworks.

`PEERS` lists them; each is built from a `Task` by a function, imported only on request, which returns a
`Contestant`. One that cannot run here raises `Unavailable` with the reason.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from megastable.base.errors import ConfigError
from megastable.config.model import ModelConfig
from megastable.config.optimizers import OptimizerConfig
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.model import gpt
from megastable.model.kernels import DTYPES
from megastable.parallel.sharding import placement_of
from megastable.parallel.topology import TensorParallel

OURS = "megastable"
RATE = 1e-6  # so that the weights hardly change, even in bf16


# Keys of the model that every peer has, or that do not change its work: sizes, and how weights begin, which are given.
COMMON = frozenset(
    """layers hidden heads kv_heads head_dim ffn sequence_length vocab_size vocab_multiple max_positions rope_theta
    norm_eps tied init init_std residual_init z_loss""".split()
)


class Unavailable(Exception):
    """The reason why a contestant cannot run here, for its table row."""


def refuse_others(config: ModelConfig, has: Mapping[str, Collection[Any]]) -> None:
    """Raise Unavailable for keys of the model that a peer lacks. has: the values that it knows of some keys; it has the
    defaults of the others, except `COMMON`."""
    lacking_keys = [
        f"model.{key}={getattr(config, key)}"
        for key, field in ModelConfig.model_fields.items()
        if key not in COMMON and getattr(config, key) not in has.get(key, [field.default])
    ]
    if lacking_keys:
        raise Unavailable(f"it is built here without {', '.join(lacking_keys)}")


@dataclass
class Task:
    """The work of every contestant: one step on these micro-batches of this model. The config is complete."""

    config: RunConfig
    device: torch.device
    batches: list[MicroBatch]
    ours: Any = None  # the Engine of OURS, while it exists

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.config.precision.kind]

    @cached_property
    def weights(self) -> dict[str, Tensor]:
        """The common initial weights by name, on the CPU."""
        run_config = self.config
        module = gpt.GPT(run_config.model, TensorParallel(), "none", run_config.run.seed)
        return {placement_of(p).name: p.data.to(self.dtype) for p in module.parameters()}

    def send_inputs(self) -> list[tuple[Tensor, Tensor]]:
        """(tokens, labels), each [b, s], sent to the device in every step, as a loader does."""
        return [
            (b.tokens.to(self.device, non_blocking=True), b.labels.to(self.device, non_blocking=True))
            for b in self.batches
        ]


@dataclass
class Contestant:
    """step(): forward, backward, clipping and update of one global batch; returns the mean loss (a tensor may still be
    computing on the device). backends: in words. same_weights: it starts from `Task.weights`. prepare: before a row of
    steps, not measured."""

    step: Callable[[], Tensor | float]
    backends: str
    same_weights: bool = True
    close: Callable[[], None] = field(default=lambda: None)
    prepare: Callable[[], None] = field(default=lambda: None)


@dataclass(frozen=True)
class Peer:
    """module:function builds it. default: measured by default, on the named devices."""

    builder: str
    meaning: str
    default: tuple[str, ...] = ()
    holds: int = 16  # approximate bytes per parameter between steps; to estimate what fits together

    @property
    def given(self) -> bool:
        """Whether it gets `Task.weights`: our own modules draw the same weights themselves."""
        return not self.builder.startswith("own:")

    def build_contestant(self, task: Task) -> Contestant:
        module, _, function = self.builder.partition(":")
        built: Contestant = getattr(importlib.import_module(f"{__name__}.{module}"), function)(task)
        return built


BOTH = ("cpu", "cuda")
PEERS = {
    "megastable": Peer("own:ours", "Engine under DeepSpeed, gate, watch over hardware, as a run trains", BOTH, 18),
    "megastable-unwatched": Peer("own:ours_unwatched", "the same engine without the watch over hardware", (), 0),
    "megastable-bf16": Peer("own:ours_bf16", "the same without FP8, where the recipe asks for it", (), 18),
    "megastable-fp8-off": Peer("own:ours_fp8_off", "ours with its FP8 switched off; nothing is built", (), 0),
    "bare": Peer("own:bare", "the same modules without DeepSpeed; AdamW on the 16-bit weights", BOTH, 6),
    "bare-masters": Peer("own:bare_masters", "bare, with fp32 masters and gradients as DeepSpeed keeps", (), 18),
    "plain": Peer("plain_torch:build", "the model in plain torch, compiled whole", BOTH, 6),
    "transformers": Peer("huggingface:compiled", "transformers' model, compiled", BOTH, 6),
    "transformers-eager": Peer("huggingface:eager", "transformers' model, eager", (), 6),
    "megatron-core": Peer("megatron_core:build", "GPTModel of megatron.core on one rank", ("cuda",), 6),
}  # fmt: skip


def default_peers(device: str) -> list[str]:
    """The peers measured by default."""
    return [name for name, one_peer in PEERS.items() if device in one_peer.default]


def chosen_peers(names: Sequence[str], device: str) -> list[str]:
    """Ours first, then those named, each once. Raises ConfigError for an unknown name."""
    for name in names:
        if name not in PEERS:
            raise ConfigError(f"--peers {name}: choose among {', '.join(n for n in PEERS if n != OURS)}")
    return list(dict.fromkeys([OURS, *(names or default_peers(device))]))


def make_adamw(module: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """torch's fused AdamW over the parameters in their dtype; matrices decay, norms do not."""
    return adamw_of(list(module.parameters()), config)


def adamw_of(parameters: list[Any], config: OptimizerConfig) -> torch.optim.AdamW:
    parameter_groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [g for g in parameter_groups if g["params"]], lr=RATE, betas=config.betas, eps=config.eps, fused=True
    )


def make_training_step(
    task: Task, module: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], Tensor]:
    """The step of a plain training loop: gradients accumulate in the dtype of the weights, one clip, one update."""
    c, n = task.config, len(task.batches)
    optimizer = make_adamw(module, c.optimizer)
    parameters = list(module.parameters())

    def step() -> Tensor:
        total_loss: Any = 0.0
        for tokens, labels in task.send_inputs():
            loss = loss_of(tokens, labels) / n
            loss.backward()
            total_loss += loss.detach()
        if c.optimizer.clip:
            nn.utils.clip_grad_norm_(parameters, c.optimizer.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert isinstance(total_loss, Tensor)
        return total_loss

    return step
