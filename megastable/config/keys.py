"""Describes every key of the configuration in words, with an example, and other trainers' names for it.

For messages, the reference and Megatron-LM checkpoints; other_names.yaml has the names.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from megastable.config.training import InWords
from megastable.config.tree import RunConfig
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
        default_value = self.field.get_default(call_default_factory=True, validated_data={})
        return REQUIRED if default_value is PydanticUndefined else write_in_one_line(default_value)

    @property
    def example(self) -> str:
        """A valid override, quoted for a shell: the default if that is instructive."""
        if self.section is not None and self.field.examples is None:
            first_name, first_field = next(iter(self.section.model_fields.items()))
            return Key(f"{self.path}.{first_name}", first_field).example
        shown_value = write_in_one_line(self.field.examples[0]) if self.field.examples else self.default
        return f"{self.path}={shlex.quote(shown_value)}"


def write_in_one_line(value: Any) -> str:
    """`value` as YAML in one line."""
    plain_value = to_jsonable_python(value)
    written_value = yaml.safe_dump(plain_value, default_flow_style=True, sort_keys=False, width=1 << 30)
    return written_value.strip().removesuffix("...").strip()


def section_in(annotation: Any) -> type[Section] | None:
    """The section that a key holds, alone, as an entry of a list, or beside null."""
    return next((kind for kind in (annotation, *get_args(annotation)) if _is_section(kind)), None)


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Section)


def section_at(location: Sequence[str]) -> type[Section]:
    """The section at a place of the tree, e.g. CorpusConfig at ["data", "corpora", "0"]."""
    section_class: type[Section] = RunConfig
    for key_name in location:
        if key_name in section_class.model_fields:
            section_class = section_in(section_class.model_fields[key_name].annotation) or section_class
    return section_class


def key_at(location: Sequence[str]) -> Key | None:
    """The key at a place of the tree, or the one that holds it: optimizer.betas at ["optimizer", "betas", "0"]."""
    for path_depth in range(len(location), 0, -1):
        *parent_names, key_name = location[:path_depth]
        found_field = section_at(parent_names).model_fields.get(key_name)
        if found_field is not None:
            return Key(".".join(location[:path_depth]), found_field)
    return None


def walk_sections(path: str = "", section: type[Section] = RunConfig) -> Iterator[tuple[str, type[Section]]]:
    """Every section with its place, in the order of the tree; the tree itself is at ""."""
    yield path, section
    for key in keys_of(path, section):
        if key.section is not None:
            index_suffix = ".0" if get_origin(key.field.annotation) is list else ""
            yield from walk_sections(key.path + index_suffix, key.section)


def keys_of(path: str, section: type[Section]) -> list[Key]:
    """The keys of the section at `path`."""
    return [
        Key(f"{path}.{field_name}".removeprefix("."), field)
        for field_name, field in section.model_fields.items()
    ]


def all_keys() -> list[Key]:
    """Every key of the tree, sections among them."""
    return [key for path, section in walk_sections() for key in keys_of(path, section)]


def in_words(annotation: Any, bounds: Sequence[Any] = ()) -> str:
    """A type in words: "whole number above 0", "cosine, linear or wsd", "[number, number]"."""
    if hasattr(annotation, "__metadata__"):  # Annotated
        nested_bounds = list[Any]()
        for one in annotation.__metadata__:
            nested_bounds += one.metadata if isinstance(one, FieldInfo) else [one]
        return in_words(annotation.__origin__, nested_bounds)
    if bound_words := [any_bound.words for any_bound in bounds if isinstance(any_bound, InWords)]:
        return bound_words[0]
    inner_kinds = get_args(annotation)
    if get_origin(annotation) is Literal:
        return _either([write_in_one_line(inner_kind) for inner_kind in inner_kinds])
    if NoneType in inner_kinds:
        (other_kind,) = (k for k in inner_kinds if k is not NoneType)
        return f"{in_words(other_kind)} or null"
    if inner_kinds:  # a list or a tuple
        is_endless = get_origin(annotation) is list or Ellipsis in inner_kinds
        return f"[{', '.join(in_words(k) for k in inner_kinds if k is not Ellipsis)}{', ...' if is_endless else ''}]"
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


@cache
def read_names() -> dict[str, dict[str, str]]:
    """The tables of other_names.yaml, each from a name to what it says of it: our key, or why there is none."""
    yaml_content = yaml.safe_load(Path(__file__).with_name("other_names.yaml").read_text(encoding="utf-8"))
    return {
        table_name: {
            other_name: own_key for own_key, other_names in table_rows.items()
            for other_name in ([other_names] if isinstance(other_names, str) else other_names)
        }
        for table_name, table_rows in yaml_content.items()
    }  # fmt: skip


@dataclass(frozen=True)
class OtherName:
    """Our counterpart of another trainer's name: KEY or KEY=VALUE, "" for none; and the difference, or the reason."""

    ours: str
    note: str


def known_elsewhere(name: str) -> OtherName | None:
    """Look up a name of another trainer, with - or _, with or without leading dashes."""
    plain_name, name_tables = name.lstrip("-").replace("-", "_").lower(), read_names()
    if ours := (name_tables["megatron"] | name_tables["others"]).get(plain_name):
        own_key, _, note = ours.partition("; ")
        return OtherName(own_key, note)
    without_key = name_tables["megatron_without_key"] | name_tables["others_without_key"]
    return OtherName("", without_key[plain_name]) if plain_name in without_key else None
