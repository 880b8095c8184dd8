"""The base of journal events: a line of JSON with typed fields and a sentence for people.

A journal outlives versions and crashes, so reading one never raises: a field that is missing, or of a wrong kind, is
None (no ranges, where it has ranges), and a field that nobody knows is kept.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Self, dataclass_transform, get_type_hints

from megastable.base.text import put_off, visible

LONGEST = 2000  # characters of an event in words
LARGEST = 2**53  # up to it a float is exact


def real(value: object) -> float | None:
    """A number of a JSON file: "nan" and "inf" are numbers there, true is none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


def whole(value: object) -> int | None:
    """A whole number of a JSON file, of a size that a program gave it."""
    number = real(value) if isinstance(value, int | float) else None
    if number is None or not abs(number) < LARGEST or number != int(number):
        return None
    return int(number)


def text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def flag(value: object) -> bool | None:
    return value if isinstance(value, bool) else None


def pairs(value: object) -> list[tuple[int, int]]:
    """Ranges [first, end); none where it is something else."""
    try:
        return [(int(a), int(b)) for a, b in value]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):
        return []


def items(value: object) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def tree(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def maybe_tree(value: object) -> dict[str, Any] | None:
    return value if isinstance(value, dict) else None


Whole = Annotated[int | None, whole]
Real = Annotated[float | None, real]
Text = Annotated[str | None, text]
Flag = Annotated[bool | None, flag]
Ranges = Annotated[Sequence[tuple[int, int]], pairs]
Items = Annotated[Sequence[Any], items]
Tree = Annotated[Mapping[str, Any], tree]


MaybeTree = Annotated[Mapping[str, Any] | None, maybe_tree]
NOTHING: Mapping[str, Any] = MappingProxyType({})


class _Field:
    """A field of an event, as its kind reads it."""

    def __init__(self, name: str, read: Callable[[object], Any]) -> None:
        self.name, self.read = name, read

    def __get__(self, event: Event | None, owner: type[Event]) -> Any:
        return self if event is None else self.read(event.fields.get(self.name))

    def __set__(self, event: Event, value: object) -> None:
        raise AttributeError(f"{self.name}: an event does not change")


@dataclass_transform(kw_only_default=True, frozen_default=True)
class Event:
    """An event: event[key] are the fields as the journal has them, `event` and `time` among them; attributes are those
    that its kind declares, of the declared types, None or empty where the journal has something else.

    A new one is journaled with its fields in the order in which they are given; what is not given is not journaled.
    Steps count updates that were tried, positions are those of the order of the data, ranges are [first, end).

    NAME: in the journal.
    """

    NAME: ClassVar[str] = ""
    fields: Mapping[str, Any]
    __slots__ = ("fields",)

    def __init__(self, /, **fields: Any) -> None:
        _give(self, {"event": self.NAME, **fields})

    def __init_subclass__(cls) -> None:
        for name, hint in get_type_hints(cls, include_extras=True).items():
            if name in cls.__annotations__ and hasattr(hint, "__metadata__"):
                setattr(cls, name, _Field(name, hint.__metadata__[0]))

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """An object of the journal as an event of this kind."""
        event = cls.__new__(cls)
        _give(event, entry)
        return event

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__}.{name}: an event does not change")

    def __getitem__(self, key: str) -> Any:
        return self.fields[key]

    def __contains__(self, key: str) -> bool:
        return key in self.fields

    def keys(self) -> KeysView[str]:
        return self.fields.keys()

    def __eq__(self, other: object) -> bool:
        """With an event, or an object of a journal."""
        return self.fields == (other.fields if isinstance(other, Event) else other)

    __hash__ = None  # type: ignore[assignment]

    def get(self, key: str, default: Any = None) -> Any:
        """A field as the journal has it."""
        return self.fields.get(key, default)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.fields!r})"

    def without(self, key: str) -> Self:
        """The same event without a field."""
        return self if key not in self.fields else self.of({k: v for k, v in self.fields.items() if k != key})

    @property
    def named(self) -> bool:
        """Whether it is an event at all."""
        return isinstance(self.fields.get("event"), str)

    @property
    def event(self) -> str:
        """Its name in the journal; "" where it has none."""
        name = self.fields.get("event")
        return name if isinstance(name, str) else ""

    @property
    def time(self) -> float | None:
        """Unix seconds; None before it is journaled."""
        return real(self.get("time"))

    def sentence(self) -> str:
        """For people, made visible; "" for one that tells a person nothing new. Never raises."""
        return visible(self.words(), LONGEST)

    def line(self) -> str:
        """As `sentence`, with its step before it."""
        told, step = self.sentence(), self.get("step")
        return f"step {step}: {told}" if told and isinstance(step, int) else told

    def words(self) -> str:
        """What `sentence` makes visible: of the fields as they are in the journal, whatever they are."""
        raise NotImplementedError

    def because(self, key: str = "reason") -> str:
        """The end of a sentence: a reason, where there is one."""
        return f": {self[key]}" if self.get(key) else ""


_give = Event.__dict__["fields"].__set__  # past __setattr__; a journal may have a million events


class OfIncident(Event):
    """What may carry an incident as it stands, as `IncidentEvent` does; its kinds have names of their own."""

    reason: Text = None
    number: Whole = None
    left_out: Tree = NOTHING
    summary: Tree = NOTHING
    policy: Tree = NOTHING


class Other(Event):
    """An event that this version does not know, or, without a name, a line that is no event at all."""

    def words(self) -> str:
        return ""


def read_later(told: Mapping[str, Any]) -> str:
    """As `put_off`, of an event or of the summary of an incident."""
    lost = told.get("lost")
    returns, lost = pairs(told.get("returns")), lost if isinstance(lost, int) else 0
    return put_off(pairs(told.get("deferred")), returns, lost)
