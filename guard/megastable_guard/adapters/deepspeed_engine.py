"""The guard around a DeepSpeed engine (ZeRO 0 to 3, fp32 and bf16), whose update is inside of `engine.step()`.

    guard = EngineGuard(engine, run_dir="runs/mine")
    while guard.step < steps:
        loss = engine(next(batches))
        engine.backward(loss)
        engine.step()  # asks the guard; refuses the update, or rewinds
        if guard.verdict and guard.verdict.rewind:
            sampler.seek(guard.step, trained=guard.verdict.step, defer=guard.deferred)
            batches = iter(loader)

All of DeepSpeed's step is done but the optimizer's own: the norm is the one that DeepSpeed has computed, and it clears
the gradients and holds the scheduler that `deepspeed.initialize` was given as after an overflow. Tried with deepspeed
0.19.8.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from megastable_guard.loop_guard import Guard, StepVerdict

COUNTERS = ("global_steps", "global_samples", "skipped_steps")


class EngineGuard(Guard):
    """verdict: on the update of the last `engine.step()`; None before the next one. drops: the next update is left out
    unjudged. options: of `Guard`. Raises ValueError where DeepSpeed's update is out of reach."""

    def __init__(self, engine: Any, **options: Any) -> None:
        if "_take_model_step" in vars(engine):
            raise ValueError("this engine has a guard already")
        inner, wrapper = engine.basic_optimizer, engine.optimizer
        has_muon = any(group.get("use_muon") for group in inner.param_groups)
        is_split = engine.pipeline_parallelism or engine.mpu is not None
        zero_config = engine._config.zero_config
        is_far = engine.fp16_enabled() or zero_config.offload_optimizer or zero_config.offload_param
        if has_muon or is_split or is_far or not getattr(wrapper, "compute_grad_norm", True):
            raise ValueError(
                "EngineGuard does not cover fp16, offloading, pipelines, tensor parallelism, Muon and "
                "compute_grad_norm=false: use bf16 and ZeRO alone"
            )
        counters = SimpleNamespace(
            state_dict=lambda: {name: vars(engine)[name] for name in COUNTERS},
            load_state_dict=vars(engine).update,
        )
        others = {"engine": counters, **(options.pop("others", None) or {})}
        super().__init__(engine.module, inner, engine.lr_scheduler, others=others, **options)
        self.engine, self.drops = engine, False
        self.verdict: StepVerdict | None = None
        self._loss: Any = None  # until it is judged
        self._take, self._backward = engine._take_model_step, engine.backward
        engine._take_model_step, engine.backward = self._take_step, self._add_loss
        # ZeRO calls the optimizer once a group, and hides the other groups from it.
        holder, name = (
            (wrapper, "_optimizer_step") if hasattr(wrapper, "_optimizer_step") else (inner, "step")
        )
        self._update = getattr(holder, name)
        setattr(holder, name, self._update_if_good)

    def _add_loss(self, loss: Any, *given: Any, **named: Any) -> Any:
        parts = self.engine.gradient_accumulation_steps() if named.get("scale_wrt_gas", True) else 1
        part_loss = loss.detach() / parts
        self._loss, self.verdict = part_loss if self._loss is None else self._loss + part_loss, None
        return self._backward(loss, *given, **named)

    def _take_step(self, *given: Any) -> None:
        wrapper: Any = self.engine.optimizer
        if self._loss is None:
            raise RuntimeError(
                "EngineGuard has seen no loss: call engine.backward(loss) before engine.step()"
            )
        self._norm = (
            None if hasattr(wrapper, "_global_grad_norm") else self._measure_norm()
        )  # before clipping
        self._take(*given)
        self._judge_once(math.inf)  # if DeepSpeed has met a number that is not finite
        if self.verdict and self.verdict.rewind:
            with self._show_masters():
                self.rewind()
            wrapper._hp_optimizer_states_linked = False  # moments may be new tensors
            if hasattr(wrapper, "_partition_all_parameters"):  # ZeRO 3 has gathered some of those before
                wrapper._partition_all_parameters()

    def _update_if_good(self, *given: Any) -> None:
        self._judge_once(self.engine.optimizer._global_grad_norm if self._norm is None else self._norm)
        if self.applies:
            self._update(*given)
        self.engine.optimizer.overflow = not self.applies  # which holds the scheduler

    def _judge_once(self, norm: Any) -> None:
        loss, self._loss = self._loss, None
        if loss is not None and self.drops:
            super().drop_update()
        elif loss is not None:
            with self._show_masters():
                self.verdict = self.check(loss=loss, grad_norm=norm)

    @contextlib.contextmanager
    def _show_masters(self) -> Iterator[None]:
        """ZeRO 3 takes the fp32 weights away from the optimizer between its updates."""
        wrapper: Any = self.engine.optimizer
        is_hidden = hasattr(wrapper, "_set_fp32_optimizer_param_groups")
        if is_hidden:
            wrapper._set_fp32_optimizer_param_groups()
        try:
            yield
        finally:
            if is_hidden:
                wrapper._clear_fp32_optimizer_param_groups()

    def drop_update(self) -> None:
        """That of the last `engine.step()`, which was made with `drops`, is left out already."""
