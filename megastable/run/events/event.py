"""Defines the base of journal events: a line of JSON with typed fields and a sentence for people.

A journal outlives versions and crashes, so reading one never raises: a missing or malformed field is None (or an empty
list of ranges), and an unknown field is kept.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_type_hints

from megastable.base.text import describe_deferral, make_visible

LONGEST = 2000  # characters of an event's sentence
LARGEST = 2**53  # floats are exact up to it


def read_real(value: object) -> float | None:
    """A number of a JSON file: "nan" and "inf" are numbers, true is not."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def read_whole(value: object) -> int | None:
    """An integer of a JSON file, within a sane range."""
    whole_number = read_real(value) if isinstance(value, int | float) else None
    if whole_number is None or not abs(whole_number) < LARGEST or whole_number != int(whole_number):
        return None
    return int(whole_number)


def read_text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def read_flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def read_pairs(value: object) -> list[tuple[int, int]]:
    """Ranges [first, end); empty if it is something else."""
    try:
        return [(int(first_value), int(end_value)) for first_value, end_value in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        return []


def read_items(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def read_tree(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def maybe_tree(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


Whole = Annotated[int | None, read_whole]
Real = Annotated[float | None, read_real]
Text = Annotated[str | None, read_text]
Flag = Annotated[bool | None, read_flag]
Ranges = Annotated[Sequence[tuple[int, int]], read_pairs]
Items = Annotated[Sequence[Any], read_items]
Tree = Annotated[Mapping[str, Any], read_tree]


MaybeTree = Annotated[Mapping[str, Any] | None, maybe_tree]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Field:
    """A field of an event, with its type."""

    def __init__(self, name: str, read: Callable[[object], Any]) -> None:
        self.name, self.read = name, read

    def __get__(self, event: Event | None, owner: type[Event]) -> Any:
        return self if event is None else self.read(event.fields.get(self.name))

    def __set__(self, event: Event, value: object) -> None:
        raise AttributeError(f"{self.name}: an event does not change")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """An event: event[key] are the fields as the journal has them, `event` and `time` included; attributes are those
    that its class declares, of the declared types, None or empty if the journal has something else.

    A new event is journaled with its fields in the order given; fields not given are not journaled. Steps count
    attempted updates, positions are those of the data order, ranges are [first, end).

    NAME: in the journal. TOLD: the sentence, in which {step} is that field, and {because} or {because_problem} the end:
    the reason or the problem, if there is one.
    """

    NAME: ClassVar[str] = ""
    TOLD: ClassVar[str] = ""
    fields: Mapping[str, Any]
    __slots__ = ("fields",)

    def __init__(self, /, **fields: Any) -> None:
        _give(self, {"event": self.NAME, **fields})

    def __init_subclass__(cls) -> None:
        for field_name, type_hint in get_type_hints(cls, include_extras=True).items():
            if field_name in cls.__annotations__ and hasattr(type_hint, "__metadata__"):
                setattr(cls, field_name, _Field(field_name, type_hint.__metadata__[0]))

    @classmethod
    def from_fields(cls, entry: Mapping[str, Any]) -> Self:
        """A JSON object of the journal as an event of this class."""
        event = cls.__new__(cls)
        _give(event, entry)
        return event

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).from_fields, (dict(self.fields),)  # ranks send each other events

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: an event does not change")

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def keys(self) -> KeysView[str]:
        return self.fields.keys()

    def __eq__(self, other: object) -> bool:
        """Compares with an event or a JSON object."""
        return self.fields == (other.fields if isinstance(other, Event) else other)

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: str, default: Any = None) -> Any:
        """A field as in the journal."""
        return self.fields.get(key, default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fields!r})"

    def drop_field(self, key: str) -> Self:
        """The event without a field; itself, if it has none of that name."""
        if key not in self.fields:
            return self
        return self.from_fields({name: value for name, value in self.fields.items() if name != key})

    @property
    def named(self) -> bool:
        """Whether it is a valid event."""
        return isinstance(self.fields.get("event"), str)

    @property
    def event(self) -> str:
        """Its name in the journal; "" if none."""
        return read_text(self.fields.get("event")) or ""

    @property
    def time(self) -> float | None:
        """Unix seconds; None before it is journaled."""
        return read_real(self.get("time"))

    def format_sentence(self) -> str:
        """For people, with control characters visible; "" if there is nothing to say. Never raises."""
        return make_visible(self.describe_event(), LONGEST)

    def format_line(self) -> str:
        """`format_sentence`, prefixed with its step."""
        event_text, step = self.format_sentence(), self.get("step")
        return f"step {step}: {event_text}" if event_text and isinstance(step, int) else event_text

    def describe_event(self) -> str:
        """The raw text of `format_sentence`, from fields that may hold anything: by default `TOLD`."""
        return self.TOLD.format_map(_ShownFields(self))

    def format_reason(self, key: str = "reason") -> str:
        """The end of a sentence: the reason, if there is one."""
        return f": {self[key]}" if self.get(key) else ""


class _ShownFields(dict[str, Any]):
    """The fields of an event for a sentence; those that are missing are None."""

    def __init__(self, event: Event) -> None:
        super().__init__()
        self._event = event

    def __missing__(self, name: str) -> Any:
        name_begin, _, key = name.partition("_")
        is_end = name_begin == "because"
        return self._event.format_reason(key or "reason") if is_end else self._event.get(name)


_give = Event.__dict__["fields"].__set__  # bypasses __setattr__; a journal may have a million events


class OfIncident(Event):
    """May carry an incident's summary, as `IncidentEvent` does; subclasses have their own names."""

    reason: Text = None
    number: Whole = None
    left_out: Tree = NOTHING
    summary: Tree = NOTHING
    policy: Tree = NOTHING


class Other(Event):
    """An event unknown to this version or, without a name, a malformed line."""


def read_later(told: Mapping[str, Any]) -> str:
    """`put_off` of an event or of an incident's summary, as text."""
    lost = told.get("lost")
    return_ranges, lost = read_pairs(told.get("returns")), lost if isinstance(lost, int) else 0
    return describe_deferral(read_pairs(told.get("deferred")), return_ranges, lost)
