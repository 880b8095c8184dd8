"""The guard in Hugging Face's Trainer, and in what is made of it, such as TRL's SFTTrainer; alone, with DDP, or with
DeepSpeed.

    trainer = Trainer(model=model, args=args, train_dataset=dataset)
    trainer.add_callback(GuardCallback(trainer, sampler=sampler))
    trainer.train(resume_from_checkpoint=...)
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from megastable_guard.adapters.trainer_guard import TrainerGuard
from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class GuardCallback(TrainerGuard, TrainerCallback, ExportableState):
    """sampler: what the trainer's `_get_train_sampler` returns, if the data can go back; options: of `Guard`."""

    def __init__(self, trainer: Trainer, sampler: SkippableSampler | None = None, **options: Any) -> None:
        super().__init__(sampler, **options)
        self.trainer, self.norm = trainer, None
        self._record("training_step", trainer, self._add_loss)
        self._record("clip_grad_norm_", trainer.accelerator, self._keep_norm)

    def _record(self, name: str, owner: Any, keep: Any) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: keep(call(*given, **named)))

    def _keep_norm(self, norm: Any) -> Any:
        self.norm = norm  # before clipping; the hook below comes after it
        return norm

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        trainer, schedule = self.trainer, given["lr_scheduler"]
        if trainer.accelerator.scaler is not None or trainer.is_fsdp_enabled:
            raise RuntimeError("GuardCallback does not cover fp16 and FSDP: use bf16, and DDP or DeepSpeed")
        if state.global_step:
            passed_updates = 0 if args.ignore_data_skip else state.global_step
            saved_state = state.stateful_callbacks.get(type(self).__name__, {"attributes": {}})
            self.load_state_dict(saved_state["attributes"], passed_updates)
        if trainer.is_deepspeed_enabled:
            from megastable_guard.adapters.deepspeed_engine import EngineGuard

            engine_guard = EngineGuard(trainer.model_wrapped, others={"schedule": schedule}, **self.options)
            engine_guard.hold_scheduler(schedule)
            self._begin(engine_guard, state.global_step > 0)
        else:
            self._begin(
                Guard(given["model"], given["optimizer"], schedule, **self.options), state.global_step > 0
            )
            self.guard.hold_refused(schedule)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self.guard.finish_run(self.sampler)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self._judge_update(self.norm)
        state.global_step = self.guard.step - 1  # the trainer adds one

    def state(self) -> dict[str, Any]:
        """What the trainer writes to trainer_state.json of its checkpoints."""
        return {"args": {}, "attributes": self.state_dict()}
