"""Limits of the learning rate that a trial has chosen, in a loop whose schedule belongs to somebody else. Needs torch.

A scheduler may compute the next rate from the present one, so a limited rate must not stay in the optimizer: it is put
in right before an update, and the scheduled one is put back right after it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from megastable_guard.policy import Policy


def set_rate(group: dict[str, Any], rate: Any) -> None:
    """Of a group of parameters; in place where it is a tensor, which a compiled or captured update reads."""
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].copy_(rate) if isinstance(rate, torch.Tensor) else group["lr"].fill_(rate)
    else:
        group["lr"] = rate


class RateLimiter:
    """Limits the rates of all groups of some optimizers, each by the same share, during their updates.

    optimizers: of torch; those of other kinds are left alone, and no limit must be imposed there.
    """

    def __init__(self, optimizers: Sequence[Any]) -> None:
        self.share = 1.0  # of the scheduled rates, in the coming update
        self.can_limit = all(isinstance(optimizer, torch.optim.Optimizer) for optimizer in optimizers)
        self._scheduled: dict[int, list[Any]] = {}  # by optimizer, while its update is made
        for optimizer in optimizers if self.can_limit else ():
            optimizer.register_step_pre_hook(self._lower_rates)
            optimizer.register_step_post_hook(self._raise_rates)

    def choose_share(self, policy: Policy, updates: int, scheduled: float) -> float:
        """Of the update after `updates` applied ones, with the schedule at `scheduled`; the limited rate."""
        policy.follow_schedule(scheduled)
        limited_rate = policy.limit_rate(updates, scheduled)
        self.share = limited_rate / scheduled if scheduled > 0 else 1.0
        return limited_rate

    def _lower_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self.share == 1.0:
            return
        self._scheduled[id(optimizer)] = copy.deepcopy([group["lr"] for group in optimizer.param_groups])
        for group in optimizer.param_groups:
            set_rate(group, group["lr"] * self.share)

    def _raise_rates(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for group, rate in zip(optimizer.param_groups, self._scheduled.pop(id(optimizer), ()), strict=False):
            set_rate(group, rate)
