"""How large a tensor is in numbers: what a checkpoint keeps of its tensors to know them again."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Size(BaseModel):
    """Of a tensor: L2 norm and largest magnitude."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="constants")

    norm: float
    largest: float
