"""Every key says what it means and what it expects, its example is valid, and the reference has it."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest
import yaml

from megastable.base.errors import ConfigError
from megastable.base.process import ROOT
from megastable.config.__main__ import COMMAND, values_of, write_reference
from megastable.config.keys import Key, all_keys, key_at, section_at, walk_sections
from megastable.config.recipe import override_key, validate_tree
from megastable.config.tree import CorpusConfig, RunConfig

KEYS = all_keys()


def value_at(tree: Any, path: str) -> Any:
    for name in path.split("."):
        tree = tree[int(name) if isinstance(tree, list) else name]
    return tree


def holders(key: Key) -> list[Key]:
    """The keys above this one that have no section by default, such as model.rope_scaling."""
    names = key.path.split(".")
    above = [key_at(names[:depth]) for depth in range(1, len(names)) if not names[depth - 1].isdecimal()]
    return [holder for holder in above if holder is not None and holder.field.examples]


# Keys that need another one beside them.
SIBLINGS = {
    "checkpoint.upload": ["run.dir=runs/mine"],
    "data.corpora.0.cache_gib": ["data.corpora.0.path=mine", "data.corpora.0.url=s3://bucket/mine"],
    "model.full_attention_every": ["model.window=4096"],
    "model.rope_scaling.attention_factor": ["model.rope_scaling.kind=yarn"],
    "optimizer.momentum": ["optimizer.name=muon"],
    "optimizer.qk_clip": ["model.qk_norm=false"],
    "schedule.decay_tokens": ["schedule.warmup_tokens=0"],
    "schedule.total_tokens": ["schedule.warmup_tokens=0"],
}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_example_of_a_key_is_valid_alone(key: Key) -> None:
    """But for the keys of a section that is not there by default: they follow the section's own example."""
    tree: dict[str, Any] = {}
    examples = [*(holder.example for holder in holders(key)), *SIBLINGS.get(key.path, ()), key.example]
    for example in examples:
        (written,) = shlex.split(example)
        override_key(tree, written)
    path, _, text = shlex.split(examples[-1])[0].partition("=")
    assert path == key.path or path.startswith(f"{key.path}.")  # of a section: its first key
    shown = yaml.safe_load(text)
    assert shown not in (None, [], "")
    c = validate_tree(tree, "test").model_dump(mode="json")
    taken = value_at(c, path)
    assert taken == shown or (key.section is not None and shown is not taken)


def test_expected_words_are_true_at_the_limits() -> None:
    """Of every number with a bound: what lies beyond it is refused."""
    checked = 0
    for key in KEYS:
        for word, outside in (("above 0", 0), ("at least 0", -1), ("from 0 to 1", 1.5), ("below 1", 1)):
            if not key.expected.startswith("[") and key.expected.removesuffix(" or null").endswith(word):
                tree: dict[str, Any] = {}
                for holder in holders(key):
                    override_key(tree, shlex.split(holder.example)[0])
                override_key(tree, f"{key.path}={outside}")
                with pytest.raises(ConfigError, match="expected a "):
                    validate_tree(tree, "test")
                checked += 1
    assert checked > 100


def test_key_at_a_place_of_the_tree() -> None:
    assert section_at(["data", "corpora", "0"]) is CorpusConfig and section_at([]) is RunConfig
    assert [key_at(place.split(".")) and key_at(place.split(".")).path for place in (  # type: ignore[union-attr]
        "model.layers", "data.corpora.3.path", "optimizer.betas.1", "model.nothing", "nothing.layers",
    )] == ["model.layers", "data.corpora.3.path", "optimizer.betas", "model", None]  # fmt: skip


def test_page_of_the_reference_is_current_and_has_every_key() -> None:
    written = (ROOT / "docs/configuration.md").read_text(encoding="utf-8")
    assert written == write_reference(), f"docs/configuration.md is old, write it again: {COMMAND}"
    parts = re.split(r"^#{2,} (.+)\n", written, flags=re.M)[1:]
    chapters = dict(zip(parts[::2], parts[1::2]))
    for path, section in walk_sections():
        chapter = chapters[path.replace(".0", ".N") or "At the top"]
        assert re.findall(r"^\| `(\w+)` \| ", chapter, re.M) == [key.name for key in values_of(path, section)]
