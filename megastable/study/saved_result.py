"""Results of a study's runs as JSON files, complete or not there at all."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.run.directory import as_json


@dataclass(frozen=True)
class SavedResult(ABC):
    """A result with its file format: the fields of the dataclass."""

    def save(self, path: Path) -> None:
        """Raises DataError."""
        try:
            durable.write_file(path, (as_json(asdict(self)) + "\n").encode())
        except OSError as error:
            raise DataError(f"{path} could not be written: {error}: make room, start again") from None

    @classmethod
    def load(cls, path: Path) -> Self:
        """Raises DataError for a file that is no result."""
        try:
            return cls.parsed(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise DataError(
                f"{path}: not the result of a run ({error!r}): remove it, and it runs again"
            ) from None

    @classmethod
    @abstractmethod
    def parsed(cls, found: dict[str, Any]) -> Self:
        """The result of what `save` wrote."""
