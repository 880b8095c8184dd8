"""Defines the hints of the recipe lint: what a rule says about a dangerous setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from megastable.config.tree import RunConfig


@dataclass(frozen=True)
class Hint:
    """setting: key=value. effect: what it does, with numbers. source: paper and section, or measurement. remedy: what
    to set."""

    setting: str
    effect: str
    source: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.setting}: {self.effect} ({self.source}). Set {self.remedy}"


Rule = Callable[[RunConfig], Hint | None]
