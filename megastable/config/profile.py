"""Settings of a profile: a trace of a few steps while a run trains."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from megastable.config.section import Section


class ProfileConfig(Section):
    """A trace of a few steps by torch.profiler, written to `profiles/` of the run directory (docs/profiling.md)."""

    start: PositiveInt = 200
    """First step that is traced; `from` means the same. [step]"""
    steps: PositiveInt = Field(default=3, le=100)
    """Length of the trace. [steps]"""
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Ranks that write a trace. [ranks]"""

    @model_validator(mode="before")
    @classmethod
    def _from_is_start(cls, given: Any) -> Any:
        # No field of a class can be called so.
        if not isinstance(given, dict) or "from" not in given:
            return given
        if "start" in given:
            raise ValueError("start and from mean the same: give one of them")
        return {"start" if key == "from" else key: value for key, value in given.items()}
