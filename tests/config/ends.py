"""Every key of the configuration at its ends: the smallest and the largest value that the schema takes for valid."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from megastable.config.tree import RunConfig
from megastable_guard.section import LARGEST, LARGEST_WHOLE, SMALLEST, Section

HUGE = {int: LARGEST_WHOLE, float: LARGEST}  # where a key has no bound of its own


def cases(section: type[Section] = RunConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with a value at an end of each. A section that may be null counts, too."""
    for name, field in section.model_fields.items():
        below = next((kind for kind in _kinds(field.annotation) if _is_section(kind)), None)
        if below is not None:
            yield from cases(below, f"{prefix}{name}.")
        else:
            yield from ((f"{prefix}{name}", value) for value in _ends(field.annotation, field.metadata))


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def _kinds(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a type, None left out."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(kind for kind in get_args(annotation) if kind is not type(None))
    return (annotation,)


def _ends(annotation: Any, metadata: list[Any]) -> Iterator[Any]:
    for kind in _kinds(annotation):
        if get_origin(kind) is Annotated:
            plain, *more = get_args(kind)
            yield from _ends(plain, [*metadata, *(m for one in more for m in _constraints(one))])
        elif kind in (int, float):
            low = [
                m.ge if isinstance(m, Ge) else _above(kind, m.gt) for m in metadata if isinstance(m, Ge | Gt)
            ]
            high = [
                m.le if isinstance(m, Le) else _below(kind, m.lt) for m in metadata if isinstance(m, Le | Lt)
            ]
            yield max(low, default=-HUGE[kind])
            yield min(high, default=HUGE[kind])
        elif kind is bool:
            yield from (True, False)
        elif get_origin(kind) is Literal:
            yield from get_args(kind)
        elif get_origin(kind) is tuple and ... not in get_args(kind):
            parts = [list(_ends(part, [])) for part in get_args(kind)]
            yield from (list(ends) for ends in zip(*parts, strict=True))


def _constraints(one: Any) -> list[Any]:
    return one.metadata if isinstance(one, FieldInfo) else [one]


def _above(kind: type, bound: float) -> Any:
    return bound + 1 if kind is int else max(SMALLEST, bound * (1 + 1e-15))


def _below(kind: type, bound: float) -> Any:
    return bound - 1 if kind is int else bound * (1 - 1e-15)
