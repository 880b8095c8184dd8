"""The guard in torchtitan's Trainer.

    trainer = config.build()
    guard = TitanGuard(trainer, sampler=sampler)  # behind it: trainer.train()

torchtitan clips before the guard is asked, and ends a run whose loss is not finite, but for refused steps.
"""

from __future__ import annotations

import json
from typing import Any

from torch.nn import ModuleList
from torchtitan.distributed import utils
from torchtitan.trainer import Trainer

from megastable_guard.adapters.judged import JudgedUpdates
from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class TitanGuard(JudgedUpdates):
    """sampler: which the trainer's loader follows, if the data can go back; options: of `Guard`."""

    def __init__(self, trainer: Trainer, sampler: SkippableSampler | None = None, **options: Any) -> None:
        if not trainer.config.training.disable_cuda_graphs:
            raise RuntimeError("TitanGuard does not cover CUDA graphs: set training.disable_cuda_graphs")
        self.trainer, self.sampler, model_parts = trainer, sampler, trainer.model_parts
        whole_model = model_parts[0] if len(model_parts) == 1 else ModuleList(model_parts)
        self.guard = Guard(whole_model, list(trainer.optimizers), trainer.lr_schedulers, **options)
        loss_mesh = trainer.parallel_dims.get_optional_mesh("loss")
        self.parts = loss_mesh.size() if loss_mesh else 1  # whose losses are summed up, not averaged
        trainer.checkpointer.states["guard"] = self
        self.record(trainer, "forward_backward_step", self.add_loss)
        self.wrap(trainer.optimizers, "step", self._judge)
        self.wrap(trainer.lr_schedulers, "step", lambda step: self.guard.applies and step())
        self.wrap(trainer, "train_step", self._train)

    def _judge(self, step_optimizers: Any) -> None:
        step_loss, trainer = self.loss * self.parts, self.trainer
        has_loss = not trainer.parallel_dims.pp_enabled or trainer.pp_has_last_stage
        self.judge(trainer.step, loss=step_loss, grad_norm=self.norm, weight=float(has_loss))
        trainer.step = self.guard.step  # which a rewind takes back
        if self.guard.applies:
            step_optimizers()

    def _train(self, train_step: Any, batches: Any) -> None:
        clip_gradients = utils.clip_grad_norm_  # of all trainers: watched during this one's step alone
        self.record(utils, "clip_grad_norm_", self.keep_norm)
        try:
            train_step(batches)
        except RuntimeError as error:
            if self.guard.applies or "Loss is not finite" not in str(error):
                raise
        finally:
            utils.clip_grad_norm_ = clip_gradients

    def state_dict(self) -> dict[str, Any]:
        return {"state": json.dumps(self.guard.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.guard.load_state_dict(json.loads(state["state"]))
