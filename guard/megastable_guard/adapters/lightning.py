"""The guard in Lightning's Trainer.

    trainer = lightning.Trainer(callbacks=[LightningGuard(sampler=sampler)], use_distributed_sampler=False)

The module returns its loss from `training_step`, as usual. Lightning clips behind the hook that this uses.
"""

from __future__ import annotations

from typing import Any

from lightning import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from megastable_guard.adapters.judged import TrainerGuard
from megastable_guard.loop_guard import Guard


class LightningGuard(TrainerGuard, Callback):
    """sampler: of the training's loader, if the data can go back; names: tell bad samples from the others of their
    batches, by `training_step` of each alone; options: of `Guard`."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None or len(trainer.optimizers) != 1:
            raise RuntimeError("LightningGuard does not cover fp16 and several optimizers: use bf16")
        schedules = {config.interval: config.scheduler for config in trainer.lr_scheduler_configs}
        guard = Guard(pl_module, trainer.optimizers[0], *[*schedules.values()][:1], **self.options)
        guard.hold_refused(schedules.get("step"))
        self.trainer = trainer
        # What the checkpoint holds of it is read already.
        self._begin(guard, trainer.global_step > 0, self._measure)

    def _measure(self, index: int) -> Tensor:
        """Of one sample, by the model as training calls it; what the module logs is forgotten."""
        trainer: Any = self.trainer
        loader, module = trainer.train_dataloader, trainer.lightning_module
        sample_batch = trainer.precision_plugin.convert_input(loader.collate_fn([loader.dataset[index]]))
        sample_batch = module._on_before_batch_transfer(sample_batch, dataloader_idx=0)
        module.log = lambda *_, **__: None
        try:
            answer = trainer.strategy.training_step(trainer.strategy.batch_to_device(sample_batch), 0)
        finally:
            del module.log
        return answer["loss"] if isinstance(answer, dict) else answer

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.guard.finish_run(self.sampler)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Any) -> None:
        self.add_loss(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        self.judge(loss=self.loss)
