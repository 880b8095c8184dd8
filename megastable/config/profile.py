"""Settings of a profile: a trace of a few steps while a run trains."""

from __future__ import annotations

from pydantic import AliasChoices, Field, NonNegativeInt, PositiveInt

from megastable.config.section import Section


class ProfileConfig(Section):
    """A trace of a few steps by torch.profiler, written to `profiles/` of the run directory (docs/profiling.md)."""

    # Strict: by its second name, a section would not see that true is no number.
    start: PositiveInt = Field(default=200, strict=True, validation_alias=AliasChoices("start", "from"))
    """First step that is traced; `from` means the same. [step]"""
    steps: PositiveInt = Field(default=3, le=100)
    """Length of the trace. [steps]"""
    ranks: tuple[NonNegativeInt, ...] = Field(default=(0,), min_length=1)
    """Ranks that write a trace. [ranks]"""
