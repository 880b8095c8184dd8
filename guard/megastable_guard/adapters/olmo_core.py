"""The guard in OLMo-core's Trainer.

    trainer.add_callback("guard", OLMoGuard(sampler=sampler))  # behind it: trainer.fit()

It stands before the optimizer's step, and takes metrics of undone steps away: OLMo-core ends a run for a loss of nan,
and keeps the first value of a step.
"""

from __future__ import annotations

from typing import Any

from olmo_core.nn.transformer.model import NormalizedTransformer
from olmo_core.optim import SkipStepOptimizer
from olmo_core.train.callbacks import Callback
from olmo_core.train.common import TRAIN_CE_LOSS_METRIC
from olmo_core.train.train_module import TransformerTrainModule

from megastable_guard.adapters.judged import JudgedUpdates
from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class OLMoGuard(JudgedUpdates, Callback):
    """sampler: which the data loader follows, if the data can go back; options: of `Guard`."""

    def __init__(self, sampler: SkippableSampler | None = None, **options: Any) -> None:
        self.sampler, self.options = sampler, options
        self.loaded, self.tokens = dict[str, Any](), TokenCount()

    def pre_load_batch(self) -> None:
        self.tokens.count = self.trainer.global_train_tokens_seen
        if hasattr(self, "guard"):
            return
        module: Any = self.trainer.train_module  # behind the dry run, which draws random numbers
        if type(module) is not TransformerTrainModule or isinstance(module.optim, SkipStepOptimizer):
            raise RuntimeError("OLMoGuard covers TransformerTrainModule, without a SkipStepOptimizer")
        if isinstance(module.model, NormalizedTransformer):
            raise RuntimeError("no guard for nGPT, whose weights change behind a refused step, too")
        self.guard = Guard(module.model, module.optim, others={"tokens": self.tokens}, **self.options)
        if self.loaded:
            self.guard.load_state_dict(self.loaded)
        self.wrap(module.optim, "step", self._judge)

    def _judge(self, step_optimizer: Any) -> None:
        trainer: Any = self.trainer
        tripped_step, full_norm = trainer.global_step, trainer.get_metric("optim/total grad norm")
        self.judge(tripped_step, loss=trainer.get_metric(TRAIN_CE_LOSS_METRIC), grad_norm=full_norm)
        if self.guard.applies:
            return step_optimizer()
        if self.guard.step < tripped_step:
            trainer.global_step, trainer.global_train_tokens_seen = self.guard.step, self.tokens.count
        for metric_step in list(trainer._metrics):
            if metric_step > trainer.global_step or metric_step == tripped_step:
                del trainer._metrics[metric_step]

    def state_dict(self) -> dict[str, Any]:
        return self.guard.state_dict() if hasattr(self, "guard") else self.loaded

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state


class TokenCount:
    """Before this step: it belongs to what is rewound."""

    count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
