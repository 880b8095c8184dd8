"""Limits of the learning rate that a trial has chosen, in a loop whose schedule belongs to somebody else; and what that
loop does with updates that were refused. Needs torch.

A scheduler may compute the next rate from the present one, so a limited rate must not stay in the optimizer: it is put
in right before an update, and the scheduled one is put back right after it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megastable_guard.policy import Policy


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Of a group of parameters; in place where it is a tensor, which a compiled or captured update reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate) if isinstance(rate, torch.Tensor) else group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def read_rate(optimizers: Sequence[Any]) -> float:
    """The largest learning rate of all groups: the one that is judged and limited."""
    rates = {id(group["lr"]): group["lr"] for optimizer in optimizers for group in optimizer.param_groups}
    return max(float(rate) for rate in rates.values())


class RateLimiter:
    """Limits the rates of all groups of some optimizers of torch, each by the same share, during their updates."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.share = 1.0  # of the scheduled rates, in the coming update
        self._scheduled: dict[int, list[Any]] = {}  # by optimizer, while its update is made
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._lower_rates)
            optimizer.register_step_post_hook(self._raise_rates)

    def choose_share(self, policy: Policy, updates: int, scheduled: float) -> float:
        """Of the update after `updates` applied ones, with the schedule at `scheduled`; the limited rate."""
        policy.follow_schedule(scheduled)
        limited_rate = policy.limit_rate(updates, scheduled)
        self.share = limited_rate / scheduled if scheduled > 0 else 1.0
        return limited_rate

    def _lower_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._raise_rates(optimizer)  # if the last update has raised an error
        if self.share == 1.0:
            return
        # Groups may share one tensor.
        scheduled_rates = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
        self._scheduled[id(optimizer)] = scheduled_rates
        for group, rate in zip(optimizer.param_groups, scheduled_rates, strict=True):
            set_rate(group, rate * self.share)

    def _raise_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._scheduled.pop(id(optimizer), ()), strict=False):
            set_rate(group, rate)


class RefusalWatch:
    """Warns once where an optimizer is stepped although its update was refused. Without gradients that changes nothing.

    Args:
        optimizers: of torch.
        is_refused: whether the update that was judged last was refused.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], is_refused: Callable[[], bool]) -> None:
        self.is_refused, self._has_warned = is_refused, False
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self._look_at_step)

    def _look_at_step(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._has_warned or not self.is_refused():
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if any(parameter.grad is not None for parameter in parameters):
            self._has_warned = True
            warnings.warn(
                "megastable guard: an update was refused, but the optimizer was stepped all the same: step it and the "
                "scheduler only if verdict.apply, or call guard.hold_refused(scheduler) once",
                stacklevel=2,
            )
