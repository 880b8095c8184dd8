"""What the process above the training is told: when it loses patience, whom it tells. Part of the tree of config.py."""

from __future__ import annotations

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat

from megastable.part import Part


class SuperviseConfig(Part):
    """Budgets of restarts are in stability.policy, like all others.

    Hangs: a step may take hang_factor times the median of the last ones, never less than hang_floor; all else (the
    start, a checkpoint, a rewind) hang_unknown, or hang_factor times the longest of its kind where that is more. Ten
    times is far beyond a slow file system and far below a night. grace_seconds: from a rank's death to the end of the
    others, for their last words. stop_seconds: for the checkpoint after SIGTERM. backoff_seconds: at most, between
    restarts that lead nowhere.
    """

    hang_factor: PositiveFloat = 10.0
    hang_floor: PositiveFloat = 30.0
    hang_unknown: PositiveFloat = 1800.0
    grace_seconds: NonNegativeFloat = 2.0
    stop_seconds: PositiveFloat = 900.0
    backoff_seconds: NonNegativeFloat = 60.0
    command: str | None = None  # started on every incident: JSON on its standard input
    webhook: str | None = None  # gets the same JSON by POST; may hold $VARIABLES of the environment
    notify_seconds: NonNegativeFloat = (
        60.0  # at least, between two notifications; what comes in between is folded
    )
    hook_timeout: PositiveFloat = 10.0
    metrics_port: NonNegativeInt = Field(default=0, le=65535)  # Prometheus on 127.0.0.1; 0 = none
    gpu_hour_price: PositiveFloat | None = None  # for the costs in post-mortems
    currency: str = "USD"
