"""Norm and largest magnitude of a tensor, stored in checkpoints to verify tensors on load."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Size(BaseModel):
    """L2 norm and largest magnitude of a tensor."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    norm: float
    largest: float
