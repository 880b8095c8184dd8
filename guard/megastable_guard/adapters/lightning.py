"""The guard in Lightning's Trainer.

    trainer = lightning.Trainer(callbacks=[LightningGuard(sampler=sampler)], use_distributed_sampler=False)

The module returns its loss from `training_step`, as usual. Lightning clips behind the hook that this uses.
"""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch.optim import Optimizer

from megastable_guard.loop_guard import Guard
from megastable_guard.sampler import SkippableSampler


class LightningGuard(Callback):
    """sampler: of the training's loader, if the data can go back; options: of `Guard`."""

    def __init__(self, sampler: SkippableSampler | None = None, **options: Any) -> None:
        self.sampler, self.options = sampler, options
        self.loss, self.stale = 0.0, 0

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if trainer.global_step or scaler is not None or len(trainer.optimizers) != 1:
            raise RuntimeError(
                "LightningGuard does not cover fp16, several optimizers or a resumed training: use bf16"
            )
        schedules = {config.interval: config.scheduler for config in trainer.lr_scheduler_configs}
        self.guard = Guard(pl_module, trainer.optimizers[0], *[*schedules.values()][:1], **self.options)
        self.guard.hold_refused(schedules.get("step"))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.guard.finish_run(self.sampler)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self.loss = self.loss + loss.detach()  # of a micro-batch, divided by their number already

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        loss, self.loss = self.loss, 0.0
        if self.stale:
            self.stale -= 1
            return self.guard.drop_update()
        verdict = self.guard.check(loss=loss)
        if verdict.rewind:
            self.guard.rewind()
            if self.sampler is not None:
                self.stale = self.sampler.seek(self.guard.step, verdict.step, defer=self.guard.deferred)
