"""Loads recipes: YAML files and dotted overrides into a `RunConfig`, with actionable error messages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megastable.base.errors import ConfigError
from megastable.base.installation import IS_CHECKOUT, ROOT
from megastable.config.explain import explain
from megastable.config.overrides import override
from megastable.config.tree import RunConfig

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
