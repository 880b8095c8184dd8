"""The guard in Megatron-LM's loop, or in one of your own on Megatron-core.

    guard = MegatronGuard(model, optimizer, opt_param_scheduler)   # the list of model chunks
    ... forward_step_func=guard.watch(forward_step)                # in every call of the schedule

`optimizer.step()` then says of a refused update that it was not successful: Megatron-LM counts a skipped iteration, and
leaves its schedule alone. Needs --no-check-for-nan-in-loss-and-grad, else the run ends before the guard is asked.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from megatron.core.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.nn import Module, ModuleList

from megastable_guard.adapters.judged import JudgedUpdates
from megastable_guard.adapters.megatron_state import GuardedMegatronState
from megastable_guard.loop_guard import Guard


class MegatronGuard(JudgedUpdates):
    """model: the chunks; scheduler: may be None; sampler: a SkippableSampler that your loader follows, if the data can
    go back; options: of `Guard`."""

    def __init__(
        self, model: Sequence[Module], optimizer: MegatronOptimizer, scheduler: Any, sampler: Any = None, **options: Any
    ) -> None:  # fmt: skip
        config: Any = optimizer.config
        not_covered = [config.fp16, config.optimizer_cpu_offload, getattr(model[0].config, "qk_clip", False)]
        if any(not_covered) or math.isfinite(getattr(config, "grad_norm_skip_threshold", math.inf)):
            raise RuntimeError("no guard for fp16, optimizer_cpu_offload, qk_clip, grad_norm_skip_threshold")
        self.optimizer, self.sampler, self.state = optimizer, sampler, GuardedMegatronState(scheduler)
        self.weight: Any = 0.0
        self.guard = Guard(ModuleList(model), optimizer, others={"megatron": self.state}, **options)
        self.record(optimizer, "get_grad_norm", self.keep_norm)
        self.record(optimizer, "clip_grad_norm", self.keep_norm)
        self.wrap(optimizer, "step_with_ready_grads", self._judge)

    def watch(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, whose losses the guard sees: (loss, [number of tokens,] report)."""

        @functools.wraps(forward_step)
        def watched(batches: Any, model: Any, *given: Any, **named: Any) -> Any:
            if self.state.random is None and model.training:
                self.state.random = get_cuda_rng_tracker().get_states()
            model_output, compute_loss = forward_step(batches, model, *given, **named)

            def keep_loss(*given: Any, **named: Any) -> Any:
                loss_answer = compute_loss(*given, **named)
                if model.training:
                    batch_loss, *token_counts, _ = loss_answer
                    self.weight = self.weight + sum(token_counts or [1.0])
                    self.add_loss(batch_loss)  # into a new tensor: the schedule divides this one in place
                return loss_answer

            return model_output, keep_loss

        return watched

    def _judge(self, step_optimizer: Any) -> bool:
        if self.state.random is None:
            raise RuntimeError("the guard has seen no loss: pass forward_step_func=guard.watch(forward_step)")
        mean_loss, token_count = self.loss / self.weight if self.weight else 0.0, float(self.weight)
        full_norm = self.optimizer.get_grad_norm() if self.norm is None else self.norm
        self.judge(loss=mean_loss, grad_norm=full_norm, weight=token_count)
        self.weight, self.state.random = 0.0, None
        return step_optimizer() if self.guard.applies else False
