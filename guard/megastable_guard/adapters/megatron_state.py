"""What of Megatron's state is neither in the model nor in the optimizer: its random states, and its schedule."""

from __future__ import annotations

from typing import Any

from megatron.core.tensor_parallel import get_cuda_rng_tracker


class GuardedMegatronState:
    """scheduler: an OptimizerParamScheduler, or None."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.random: dict[str, Any] | None = None  # of the tracker, before this step

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random, "schedule": self.scheduler.state_dict() if self.scheduler else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        get_cuda_rng_tracker().set_states(state["random"])
        if self.scheduler:
            self.scheduler.num_steps = 0  # it adds the steps of a loaded state to those that it has
            self.scheduler.load_state_dict(state["schedule"])
