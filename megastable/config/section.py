"""Defines the base of every section of the configuration tree: see config/tree.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

LONGEST = 10**9  # seconds, 31 years: timers and timeouts of Python and torch overflow beyond a few billion
Seconds = Annotated[float, Field(ge=0.0, le=LONGEST)]
PositiveSeconds = Annotated[float, Field(gt=0.0, le=LONGEST)]
WholeSeconds = Annotated[int, Field(ge=1, le=LONGEST)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BOOL_FOR_ANOTHER_KIND = "bool_for_another_kind"  # an error type


def _takes_bool(annotation: Any) -> bool:
    return annotation is bool or any(isinstance(choice, bool) for choice in get_args(annotation))


class Section(BaseModel):
    """A section of the tree: frozen, finite, without unknown keys.

    The string below a key is its meaning, with its unit in brackets at the end, for docs/configuration.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # Sections that a single word may stand for, and the key it sets. True: as it is; false: none.
    in_a_word: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _bool_is_no_number(cls, given: Any) -> Any:
        # pydantic would accept yes as 1.
        for name, value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(name)
            if not isinstance(value, bool) or field is None or name in cls.in_a_word:
                continue
            if not _takes_bool(field.annotation):
                raise PydanticCustomError(
                    BOOL_FOR_ANOTHER_KIND,
                    "{name}={given}: expected another kind of value than yes or no",
                    {"name": name, "given": str(value).lower()},
                )
        return given
