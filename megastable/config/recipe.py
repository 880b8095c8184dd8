"""Loads recipes: YAML files and dotted overrides into a `RunConfig`, with actionable error messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from megastable.base.errors import ConfigError
from megastable.base.installation import IS_CHECKOUT, ROOT
from megastable.config.keys import Key, all_keys, key_at, section_at
from megastable.config.other_names import known_elsewhere
from megastable.config.tree import RunConfig
from megastable_guard.section import BEYOND_RANGE, BOOL_FOR_ANOTHER_KIND

# What comes along in every installation, below the paths that it has in a checkout, where links lead here.
SHIPPED = Path(__file__).resolve().parents[1] / "shipped"


def find(path: str | Path) -> Path:
    """`path` from the working directory, or else from the checkout, or of what comes along: recipes work from anywhere,
    also without a checkout."""
    given = Path(path)
    # Beside an installed package lie those of others.
    bases = [ROOT, SHIPPED] if IS_CHECKOUT else [SHIPPED]
    found = (base / given for base in bases if (base / given).exists())
    return given if given.exists() or given.is_absolute() else next(found, given)


def shipped(folder: str) -> str:
    """The names of the files that come along in a folder, for messages."""
    return ", ".join(f"{folder}/{path.name}" for path in sorted((SHIPPED / folder).iterdir()))


class _Loader(yaml.SafeLoader):
    """YAML with unique keys: the plain loader silently keeps the last duplicate."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands here twice", key_node.start_mark
                )
            seen.add(str(key_node.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `ConfigError` with line and column if it is not one."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such recipe; these come along: {shipped('launch/recipes')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{path}: expected keys such as 'model:' at the top, found a {type(content).__name__}"
        )
    return content


def load(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply overrides in order, validate. Raises ConfigError."""
    path = find(recipe)
    tree = read_yaml(path)
    if not (tree or overrides):
        raise ConfigError(
            f"{recipe} is empty: it names no model and no corpus; these come along: {shipped('launch/recipes')}"
        )
    if "manifests" in tree and isinstance(tree.get("config"), dict):
        tree = tree["config"]  # the frozen recipe of a run directory
        if (path.parent / "checkpoints").is_dir():
            # The run directory is where its recipe is: a copied one is a run of its own.
            override(tree, f"run.dir={json.dumps(str(path.parent))}")
    for assignment in overrides:
        override(tree, assignment)
    return validate(tree, str(path))


def validate(tree: dict[str, Any], where: str) -> RunConfig:
    """A `RunConfig` of a plain tree, or a `ConfigError` that lists every problem."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for detail in error.errors() for line in explain(detail))
        raise ConfigError(f"{where}:\n{problems}") from None


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
