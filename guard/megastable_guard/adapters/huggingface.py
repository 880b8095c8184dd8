"""The guard in Hugging Face's Trainer, and in what is made of it, such as TRL's SFTTrainer; alone, with DDP, or with
DeepSpeed.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.add_callback(GuardCallback(trainer, sampler=sampler, names=True))
    trainer.train(resume_from_checkpoint=...)
"""

from __future__ import annotations

import copy
from typing import Any

from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from megastable_guard.adapters.judged import TrainerGuard
from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class GuardCallback(TrainerGuard, TrainerCallback, ExportableState):
    """sampler: what the trainer's `_get_train_sampler` returns, if the data can go back; names: tell bad samples from
    the others of their batches (not with DeepSpeed), by the trainer's `compute_loss` of each alone; options: of
    `Guard`."""

    def __init__(self, trainer: Trainer, sampler: SkippableSampler | None = None, **options: Any) -> None:
        super().__init__(sampler, **options)
        self.trainer = trainer
        self.record(trainer, "training_step", self.add_loss)
        self.record(trainer.accelerator, "clip_grad_norm_", self.keep_norm)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        trainer, schedule, self.loader = self.trainer, given["lr_scheduler"], given["train_dataloader"]
        if trainer.accelerator.scaler is not None or trainer.is_fsdp_enabled:
            raise RuntimeError("GuardCallback does not cover fp16 and FSDP: use bf16, and DDP or DeepSpeed")
        if state.global_step:
            passed_updates = 0 if args.ignore_data_skip else state.global_step
            saved_state = state.stateful_callbacks.get(type(self).__name__, {"attributes": {}})
            self.load_state_dict(saved_state["attributes"], passed_updates)
        if trainer.is_deepspeed_enabled:
            from megastable_guard.adapters.deepspeed_engine import EngineGuard

            guard: Guard = EngineGuard(trainer.model_wrapped, others={"schedule": schedule}, **self.options)
            guard.hold_scheduler(schedule)
        else:
            guard = Guard(given["model"], given["optimizer"], schedule, **self.options)
            guard.hold_refused(schedule)
        self._begin(guard, state.global_step > 0, self._measure)

    def _measure(self, index: int) -> Tensor:
        """Of one sample, by the model as training calls it. What else is noted, such as TRL's metrics, is forgotten."""
        trainer, recorder = self.trainer, copy.copy(self.trainer)
        recorder._metrics, recorder.log = copy.deepcopy(vars(trainer).get("_metrics")), lambda *_: None
        sample_inputs = trainer._prepare_inputs(self.loader.collate_fn([self.loader.dataset[index]]))
        with trainer.compute_loss_context_manager():
            return recorder.compute_loss(trainer.model_wrapped, sample_inputs).mean()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self.guard.finish_run(self.sampler)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self.judge(loss=self.loss, grad_norm=self.norm)
        state.global_step = self.guard.step - 1  # the trainer adds one

    def state(self) -> dict[str, Any]:
        """What the trainer writes to trainer_state.json of its checkpoints."""
        return {"args": {}, "attributes": self.state_dict()}
