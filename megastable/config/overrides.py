"""Parses a command-line override, `a.b.c=value`, into the tree of a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from megastable.base.errors import ConfigError
from megastable.config.keys import section_at


def override(tree: dict[str, Any], assignment: str) -> None:
    """Put one `a.b.c=value` into `tree`; the value is read as YAML."""
    key, equals, text = assignment.partition("=")
    if not equals or not all(key.split(".")):
        raise ConfigError(f"{assignment!r}: an override is written key=value, e.g. model.layers=12")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{assignment!r}: the value is not valid YAML: {error}") from None
    *parents, last = key.split(".")
    node: Any = tree
    for depth in range(len(parents)):
        node = _child(node, parents[: depth + 1])
    if isinstance(node, list):
        node[_index(node, last, key)] = value
        return
    word = section_at(parents).in_a_word.get(last)
    if word is not None and isinstance(node.get(last), dict):
        if value is True:
            return
        if isinstance(value, str) and value not in ("off", "none"):
            node[last][word] = value  # the other keys stay
            return
    node[last] = value


def _child(node: Any, path: Sequence[str]) -> Any:
    *parents, name = path
    if isinstance(node, list):
        child = node[_index(node, name, ".".join(path))]
    else:
        child = node.setdefault(name, {})
        word = section_at(parents).in_a_word.get(name)
        if child is None or (word is not None and child in (True, False, "off", "none")):
            child = node[name] = {}
        elif word is not None and isinstance(child, str):
            child = node[name] = {word: child}
    if not isinstance(child, dict | list):
        raise ConfigError(f"{'.'.join(path)} is a value ({child!r}), it has no keys below it")
    return child


def _index(node: list[Any], name: str, path: str) -> int:
    if not name.isdecimal() or int(name) >= len(node):
        raise ConfigError(f"{path}: {name!r} is not an entry of a list of {len(node)}")
    return int(name)
