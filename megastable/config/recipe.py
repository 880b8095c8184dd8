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
from megastable.base.process import IS_CHECKOUT, ROOT
from megastable.config.keys import Key, all_keys, key_at, keys_of, known_elsewhere, section_at
from megastable.config.tree import RunConfig
from megastable_guard.section import BEYOND_RANGE, BOOL_FOR_ANOTHER_KIND

# What comes along in every installation, below the paths that it has in a checkout, where links lead here.
SHIPPED = Path(__file__).resolve().parents[1] / "shipped"


def find_recipe(path: str | Path) -> Path:
    """`path` from the working directory, or else from the checkout, or of what comes along: recipes work from anywhere,
    also without a checkout."""
    given_path = Path(path)
    # Beside an installed package lie those of others.
    base_folders = [ROOT, SHIPPED] if IS_CHECKOUT else [SHIPPED]
    possible_paths = [given_path, *(base_folder / given_path for base_folder in base_folders)]
    return next((possible_path for possible_path in possible_paths if possible_path.exists()), given_path)


def list_shipped_files(folder: str) -> str:
    """The names of the files that come along in a folder, for messages."""
    return ", ".join(f"{folder}/{file_path.name}" for file_path in sorted((SHIPPED / folder).iterdir()))


class _Loader(yaml.SafeLoader):
    """YAML with unique keys: the plain loader silently keeps the last duplicate."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen_keys: set[str] = set()
        for key_node, _ in node.value:
            if key_node.value in seen_keys:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} stands here twice", key_node.start_mark
                )
            seen_keys.add(str(key_node.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; `ConfigError` with line and column if it is not one."""
    try:
        yaml_content = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: no such recipe; these come along: {list_shipped_files('launch/recipes')}"
        ) from None
    except (OSError, UnicodeDecodeError) as read_error:
        raise ConfigError(f"{path}: cannot be read: {read_error}") from None
    except yaml.YAMLError as read_error:
        raise ConfigError(f"{path}: not valid YAML: {read_error}") from None
    if yaml_content is None:
        return {}
    if not isinstance(yaml_content, dict):
        raise ConfigError(
            f"{path}: expected keys such as 'model:' at the top, found a {type(yaml_content).__name__}"
        )
    return yaml_content


def load_recipe(recipe: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a recipe, apply overrides in order, validate. Raises ConfigError."""
    recipe_path = find_recipe(recipe)
    recipe_tree = read_yaml(recipe_path)
    if not (recipe_tree or overrides):
        raise ConfigError(
            f"{recipe} is empty: it names no model and no corpus; these come along: "
            f"{list_shipped_files('launch/recipes')}"
        )
    if "manifests" in recipe_tree and isinstance(recipe_tree.get("config"), dict):
        recipe_tree = recipe_tree["config"]  # the frozen recipe of a run directory
        if (recipe_path.parent / "checkpoints").is_dir():
            # The run directory is where its recipe is: a copied one is a run of its own.
            override_key(recipe_tree, f"run.dir={json.dumps(str(recipe_path.parent))}")
    for assignment in overrides:
        override_key(recipe_tree, assignment)
    return validate_tree(recipe_tree, str(recipe_path))


def validate_tree(tree: dict[str, Any], where: str) -> RunConfig:
    """A `RunConfig` of a plain tree, or a `ConfigError` that lists every problem."""
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        problems = "\n".join(f"  {line}" for detail in error.errors() for line in explain_error(detail))
        raise ConfigError(f"{where}:\n{problems}") from None


def explain_error(detail: ErrorDetails) -> list[str]:
    """The message lines for one of pydantic's errors; more than one if a whole section is unknown."""
    location = [str(path_part) for path_part in detail["loc"]]
    error_kind, message, given_text = detail["type"], detail["msg"], repr(detail["input"])
    if error_kind in ("extra_forbidden", "invalid_key"):  # the second: a number
        return list(_unknown(location, detail["input"]))
    if error_kind == BOOL_FOR_ANOTHER_KIND:
        location, given_text = [*location, detail["ctx"]["name"]], detail["ctx"]["given"]
    path, nearest_key = ".".join(location), key_at(location)
    if error_kind == "value_error":  # raised by a rule of the tree
        message = message.removeprefix("Value error, ")
        return [f"{path}: {message}" if path else message]
    if nearest_key is None:
        return [f"{path}={given_text}: {message}"]
    if error_kind == "missing":
        return [f"{path}: missing, e.g. {nearest_key.example}"]
    if error_kind == BEYOND_RANGE:
        return [f"{path}={given_text}: {message}, e.g. {nearest_key.example}"]
    expected_words = nearest_key.expected
    if error_kind == "finite_number":
        expected_words = expected_words.replace("number", "finite number", 1)
    if expected_words.startswith(("whole number", "number", "finite number", "path")):
        expected_words = f"a {expected_words}"
    meant_key = "" if nearest_key.path == path else f" {nearest_key.path} to be"
    return [f"{path}={given_text}: expected{meant_key} {expected_words}, e.g. {nearest_key.example}"]


CHOICES = ("kind", "type")  # as other trainers choose an optimizer by


def _unknown(location: Sequence[str], given: Any) -> Iterator[str]:
    """The key that an unknown key may have meant."""
    path, name = ".".join(location), location[-1]
    inner_keys = given if isinstance(given, dict) else {}
    known_children = [str(child_name) for child_name in inner_keys if known_elsewhere(str(child_name))]
    lines_below = (
        line for child in known_children for line in _unknown([*location, child], inner_keys[child])
    )
    if other_name := known_elsewhere("optim" if location[0] == "optimizer" and name in CHOICES else name):
        if not other_name.ours:
            yield f"{path}: no such key: {other_name.note}"
            return
        own_name, _, ours = other_name.ours.partition("=")
        own_key = key_at(own_name.split("."))
        key_example = "" if ours or own_key is None else f" e.g. {own_key.example}"
        note = f" ({other_name.note})" if other_name.note else ""
        if ours and (given is False or inner_keys.get("enabled") is False):
            yield f"{path}: unknown key; when true it stands for {other_name.ours}: leave it out"
            return
        yield f"{path}: unknown key; did you mean {other_name.ours}?{note}{key_example}"
        yield from lines_below
        return
    # A section of another trainer, whose keys may be known.
    yield from lines_below
    if known_children and len(known_children) == len(inner_keys):
        return
    *parents, _ = location
    sibling_keys = {key.name: key for key in keys_of(".".join(parents), section_at(parents))}
    near_names = difflib.get_close_matches(name, sibling_keys, n=1)
    near_keys = [sibling_keys[near_name] for near_name in near_names] or _elsewhere(name)
    if not near_keys:
        yield f"{path}: unknown key; known here: {', '.join(sibling_keys)}"
        return
    key_example = f" e.g. {near_keys[0].example}" if len(near_keys) == 1 else ""
    yield f"{path}: unknown key; did you mean {' or '.join(own_name.path for own_name in near_keys)}?{key_example}"


def _elsewhere(name: str) -> list[Key]:
    """Keys of other sections with this name, or a similar one."""
    tree_keys = all_keys()
    best_names = difflib.get_close_matches(name, [any_key.name for any_key in tree_keys], n=1, cutoff=0.8)
    return [any_key for any_key in tree_keys if any_key.name in best_names]


def override_key(tree: dict[str, Any], assignment: str) -> None:
    """Put one `a.b.c=value` into `tree`; the value is read as YAML."""
    dotted_key, equals, value_text = assignment.partition("=")
    if not equals or not all(dotted_key.split(".")):
        raise ConfigError(f"{assignment!r}: an override is written key=value, e.g. model.layers=12")
    try:
        new_value = yaml.safe_load(value_text)
    except yaml.YAMLError as yaml_error:
        raise ConfigError(f"{assignment!r}: the value is not valid YAML: {yaml_error}") from None
    *parent_names, last_name = dotted_key.split(".")
    tree_node: Any = tree
    for path_depth in range(len(parent_names)):
        tree_node = _child(tree_node, parent_names[: path_depth + 1])
    if isinstance(tree_node, list):
        tree_node[_index(tree_node, last_name, dotted_key)] = new_value
        return
    short_key = section_at(parent_names).in_a_word.get(last_name)
    if short_key is not None and isinstance(tree_node.get(last_name), dict):
        if new_value is True:
            return
        if isinstance(new_value, str) and new_value not in ("off", "none"):
            tree_node[last_name][short_key] = new_value  # the other keys stay
            return
    tree_node[last_name] = new_value


def _child(node: Any, path: Sequence[str]) -> Any:
    *parent_names, child_name = path
    if isinstance(node, list):
        child_node = node[_index(node, child_name, ".".join(path))]
    else:
        child_node = node.setdefault(child_name, {})
        short_key = section_at(parent_names).in_a_word.get(child_name)
        if child_node is None or (short_key is not None and child_node in (True, False, "off", "none")):
            child_node = node[child_name] = {}
        elif short_key is not None and isinstance(child_node, str):
            child_node = node[child_name] = {short_key: child_node}
    if not isinstance(child_node, dict | list):
        raise ConfigError(f"{'.'.join(path)} is a value ({child_node!r}), it has no keys below it")
    return child_node


def _index(node: list[Any], name: str, path: str) -> int:
    if not name.isdecimal() or int(name) >= len(node):
        raise ConfigError(f"{path}: {name!r} is not an entry of a list of {len(node)}")
    return int(name)
