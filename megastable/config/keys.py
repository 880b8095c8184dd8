"""Describes every key of the configuration in words, with an example, for messages and the reference."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from megastable.config.tree import RunConfig
from megastable.config.units import InWords
from megastable_guard.section import Section

REQUIRED = "required"
KINDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true or false",
    str: "text",
    Path: "path",
}


@dataclass(frozen=True)
class Key:
    """A key at its place in the tree. List entries are addressed by index: data.corpora.0.path."""

    path: str
    field: FieldInfo

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def section(self) -> type[Section] | None:
        """The section of the keys below it, or below a list's entries."""
        return section_in(self.field.annotation)

    @property
    def expected(self) -> str:
        """Accepted values, e.g. "whole number above 0"."""
        return in_words(self.field.annotation, self.field.metadata)

    @property
    def default(self) -> str:
        """The default as YAML in one line; `REQUIRED` if there is none."""
        value = self.field.get_default(call_default_factory=True, validated_data={})
        return REQUIRED if value is PydanticUndefined else flow(value)

    @property
    def example(self) -> str:
        """A valid override, quoted for a shell: the default if that is instructive."""
        if self.section is not None and self.field.examples is None:
            name, field = next(iter(self.section.model_fields.items()))
            return Key(f"{self.path}.{name}", field).example
        value = flow(self.field.examples[0]) if self.field.examples else self.default
        return f"{self.path}={shlex.quote(value)}"


def flow(value: Any) -> str:
    """`value` as YAML in one line."""
    plain = to_jsonable_python(value)
    written = yaml.safe_dump(plain, default_flow_style=True, sort_keys=False, width=1 << 30)
    return written.strip().removesuffix("...").strip()


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds, alone, as an entry of a list, or beside null."""
    return next((k for k in (annotation, *get_args(annotation)) if _is_section(k)), None)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def section_at(location: Sequence[str]) -> type[Section]:
    """The section at a place of the tree, e.g. CorpusConfig at ["data", "corpora", "0"]."""
    model: type[Section] = RunConfig
    for name in location:
        if name in model.model_fields:
            model = section_in(model.model_fields[name].annotation) or model
    return model


def key_at(location: Sequence[str]) -> Key | None:
    """The key at a place of the tree, or the one that holds it: optimizer.betas at ["optimizer", "betas", "0"]."""
    for depth in range(len(location), 0, -1):
        *parents, name = location[:depth]
        field = section_at(parents).model_fields.get(name)
        if field is not None:
            return Key(".".join(location[:depth]), field)
    return None


def sections(path: str = "", section: type[Section] = RunConfig) -> Iterator[tuple[str, type[Section]]]:
    """Every section with its place, in the order of the tree; the tree itself is at ""."""
    yield path, section
    for key in keys_of(path, section):
        if key.section is not None:
            index = ".0" if get_origin(key.field.annotation) is list else ""
            yield from sections(key.path + index, key.section)


def keys_of(path: str, section: type[Section]) -> list[Key]:
    """The keys of the section at `path`."""
    return [Key(f"{path}.{name}".removeprefix("."), field) for name, field in section.model_fields.items()]


def all_keys() -> list[Key]:
    """Every key of the tree, sections among them."""
    return [key for path, section in sections() for key in keys_of(path, section)]


def in_words(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """A type in words: "whole number above 0", "cosine, linear or wsd", "[number, number]"."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        nested = [
            b for m in annotation.__metadata__ for b in (m.metadata if isinstance(m, FieldInfo) else [m])
        ]
        return in_words(annotation.__origin__, nested)
    if told := [bound.words for bound in bounds if isinstance(bound, InWords)]:
        return told[0]
    kinds = get_args(annotation)
    if get_origin(annotation) is Literal:
        return _either([flow(choice) for choice in kinds])
    if NoneType in kinds:
        (kind,) = (k for k in kinds if k is not NoneType)
        return f"{in_words(kind)} or null"
    if kinds:  # a list or a tuple
        endless = get_origin(annotation) is list or Ellipsis in kinds
        return f"[{', '.join(in_words(k) for k in kinds if k is not Ellipsis)}{', ...' if endless else ''}]"
    return "keys below it" if _is_section(annotation) else f"{KINDS[annotation]} {_within(bounds)}".strip()


def _either(words: Sequence[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _within(bounds: Sequence[Any]) -> str:
    """gt, ge, lt and le of a number, in words."""
    limit = {name: getattr(b, name) for b in bounds for name in ("gt", "ge", "lt", "le") if hasattr(b, name)}
    if limit.keys() == {"ge", "le"}:
        return f"from {_spell(limit['ge'])} to {_spell(limit['le'])}"
    words = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    return " and ".join(f"{words[name]} {_spell(value)}" for name, value in limit.items())


def _spell(limit: float) -> str:
    """A limit with all its digits where they count: 4294967296, not 4.29497e+09."""
    return str(limit) if isinstance(limit, int) and limit % 1000 else f"{limit:g}"
