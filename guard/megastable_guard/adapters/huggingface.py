"""The guard in Hugging Face's Trainer, and in what is made of it, such as TRL's SFTTrainer.

trainer = Trainer(model=model, args=args, train_dataset=dataset)
trainer.add_callback(GuardCallback(trainer, sampler=sampler))
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class GuardCallback(TrainerCallback):
    """sampler: what the trainer's `_get_train_sampler` returns, if the data can go back; options: of `Guard`."""

    def __init__(self, trainer: Trainer, sampler: SkippableSampler | None = None, **options: Any) -> None:
        self.trainer, self.sampler, self.options = trainer, sampler, options
        self.loss, self.norm, self.stale = 0.0, None, 0
        self._record("training_step", trainer, self._add_loss)
        self._record("clip_grad_norm_", trainer.accelerator, self._keep_norm)

    def _record(self, name: str, owner: Any, keep: Any) -> None:
        call = getattr(owner, name)
        setattr(owner, name, lambda *given, **named: keep(call(*given, **named)))

    def _add_loss(self, loss: Any) -> Any:
        self.loss = self.loss + loss.detach()  # of a micro-batch, divided by their number already
        return loss

    def _keep_norm(self, norm: Any) -> Any:
        self.norm = norm  # before clipping; the hook below comes after it
        return norm

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        trainer = self.trainer
        is_sharded = (
            trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        )  # whose update is out of reach, or untried
        if state.global_step or trainer.accelerator.scaler is not None or is_sharded:
            raise RuntimeError(
                "GuardCallback does not cover fp16, DeepSpeed, FSDP or a resumed training: use bf16 and DDP"
            )
        self.guard = Guard(given["model"], given["optimizer"], given["lr_scheduler"], **self.options)
        self.guard.hold_refused(given["lr_scheduler"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        self.guard.finish_run(self.sampler)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        loss, self.loss = self.loss, 0.0
        if self.stale:  # a batch that was fetched before the rewind
            self.stale, state.global_step = self.stale - 1, state.global_step - 1
            return self.guard.drop_update()
        verdict = self.guard.check(loss=loss, grad_norm=self.norm)
        if verdict.rewind:
            state.global_step = self.guard.rewind() - 1  # the trainer adds one
            if self.sampler is not None:
                self.stale = self.sampler.seek(self.guard.step, verdict.step, defer=self.guard.deferred)
