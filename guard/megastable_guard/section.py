"""Defines the base of every section of settings, the guard's and a run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

# Beyond these lie the ends of int64 and fp32, in which training computes; bf16 and fp32 have the same exponents.
LARGEST_WHOLE = 10**15
LARGEST, SMALLEST = 1e30, 1e-30
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
# Types of errors.
BOOL_FOR_ANOTHER_KIND = "bool_for_another_kind"
BEYOND_RANGE = "beyond_range"


def _takes_bool(annotation: Any) -> bool:
    return annotation is bool or any(
        isinstance(literal_choice, bool) for literal_choice in get_args(annotation)
    )


def _numbers_in(value: Any) -> Iterator[int | float]:
    if isinstance(value, tuple | list):
        for inner_value in value:
            yield from _numbers_in(inner_value)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value


class Section(BaseModel):
    """A section of the tree: frozen, without unknown keys, its numbers such that training can compute with them.

    The string below a key is its meaning, with its unit in brackets at the end, for docs/configuration.md.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # Sections that a single word may stand for, and the key it sets. True: as it is; false: none.
    in_a_word: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _bool_is_no_number(cls, given: Any) -> Any:
        # pydantic would accept yes as 1.
        for field_name, field_value in given.items() if isinstance(given, dict) else ():
            field = cls.model_fields.get(field_name)
            if not isinstance(field_value, bool) or field is None or field_name in cls.in_a_word:
                continue
            if not _takes_bool(field.annotation):
                raise PydanticCustomError(
                    BOOL_FOR_ANOTHER_KIND,
                    "{name}={given}: expected another kind of value than yes or no",
                    {"name": field_name, "given": str(field_value).lower()},
                )
        return given

    @field_validator("*")
    @classmethod
    def _is_in_range(cls, value: Any) -> Any:
        for number in _numbers_in(value):
            if isinstance(number, int) and abs(number) > LARGEST_WHOLE:
                limit_text = "a whole number of at most 10^15"
            elif isinstance(number, float) and abs(number) > LARGEST:
                limit_text = f"a number of at most {LARGEST:g}"
            elif isinstance(number, float) and 0 < abs(number) < SMALLEST:
                limit_text = f"a number of at least {SMALLEST:g}"
            else:
                continue
            raise PydanticCustomError(BEYOND_RANGE, "expected {limit} in size", {"limit": limit_text})
        return value
