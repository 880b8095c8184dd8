"""Explains why a configuration is refused: what was expected, with an example, or which key was meant."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic_core import ErrorDetails

from megastable.config.keys import Key, all_keys, key_at, section_at
from megastable.config.other_names import known_elsewhere
from megastable.config.section import BEYOND_RANGE, BOOL_FOR_ANOTHER_KIND


def explain(detail: ErrorDetails) -> list[str]:
    """The message lines for one of pydantic's errors; more than one if a whole section is unknown."""
    location, kind, message = [str(part) for part in detail["loc"]], detail["type"], detail["msg"]
    given = repr(detail["input"])
    if kind in ("extra_forbidden", "invalid_key"):  # the second: a number
        return list(_unknown(location, detail["input"]))
    if kind == BOOL_FOR_ANOTHER_KIND:
        location, given = [*location, detail["ctx"]["name"]], detail["ctx"]["given"]
    path, key = ".".join(location), key_at(location)
    if kind == "value_error":  # raised by a rule of the tree
        message = message.removeprefix("Value error, ")
        return [f"{path}: {message}" if path else message]
    if key is None:
        return [f"{path}={given}: {message}"]
    if kind == "missing":
        return [f"{path}: missing, e.g. {key.example}"]
    if kind == BEYOND_RANGE:
        return [f"{path}={given}: {message}, e.g. {key.example}"]
    words = key.expected
    if kind == "finite_number":
        words = words.replace("number", "finite number", 1)
    if words.startswith(("whole number", "number", "finite number", "path")):
        words = f"a {words}"
    of = "" if key.path == path else f" {key.path} to be"
    return [f"{path}={given}: expected{of} {words}, e.g. {key.example}"]


CHOICES = ("kind", "type")  # as other trainers choose an optimizer by


def _unknown(location: Sequence[str], given: Any) -> Iterator[str]:
    """The key that an unknown key may have meant."""
    path, name = ".".join(location), location[-1]
    inside = given if isinstance(given, dict) else {}
    known = [str(child) for child in inside if known_elsewhere(str(child))]
    below = (line for child in known for line in _unknown([*location, child], inside[child]))
    if there := known_elsewhere("optim" if location[0] == "optimizer" and name in CHOICES else name):
        if not there.ours:
            yield f"{path}: no such key: {there.note}"
            return
        key, _, value = there.ours.partition("=")
        found = key_at(key.split("."))
        example = "" if value or found is None else f" e.g. {found.example}"
        note = f" ({there.note})" if there.note else ""
        if value and (given is False or inside.get("enabled") is False):
            yield f"{path}: unknown key; when true it stands for {there.ours}: leave it out"
            return
        yield f"{path}: unknown key; did you mean {there.ours}?{note}{example}"
        yield from below
        return
    # A section of another trainer, whose keys may be known.
    yield from below
    if known and len(known) == len(inside):
        return
    siblings = keys_beside(location)
    near = difflib.get_close_matches(name, siblings, n=1)
    keys = [siblings[n] for n in near] or _elsewhere(name)
    if not keys:
        yield f"{path}: unknown key; known here: {', '.join(siblings)}"
        return
    example = f" e.g. {keys[0].example}" if len(keys) == 1 else ""
    yield f"{path}: unknown key; did you mean {' or '.join(key.path for key in keys)}?{example}"


def keys_beside(location: Sequence[str]) -> dict[str, Key]:
    """The existing keys beside an unknown one, by name."""
    *parents, _ = location
    return {
        name: Key(".".join((*parents, name)), field)
        for name, field in section_at(parents).model_fields.items()
    }


def _elsewhere(name: str) -> list[Key]:
    """Keys of other sections with this name, or a similar one."""
    keys = all_keys()
    best = difflib.get_close_matches(name, [key.name for key in keys], n=1, cutoff=0.8)
    return [key for key in keys if key.name in best]
