"""Every key says what it means and what it expects, and its example is valid."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from megastable.base.errors import ConfigError
from megastable.config.keys import Key, all_keys, key_at, section_at, sections
from megastable.config.recipe import override, validate
from megastable.config.reference import meanings
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
BESIDE = {
    "model.full_attention_every": ["model.window=4096"],
    "model.rope_scaling.attention_factor": ["model.rope_scaling.kind=yarn"],
    "optimizer.momentum": ["optimizer.name=muon"],
    "optimizer.qk_clip": ["model.qk_norm=false"],
    "schedule.decay_tokens": ["schedule.warmup_tokens=0"],
    "schedule.total_tokens": ["schedule.warmup_tokens=0"],
}


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.path)
def test_the_example_is_valid_alone(key: Key) -> None:
    """But for the keys of a section that is not there by default: they follow the section's own example."""
    tree: dict[str, Any] = {}
    examples = [*(holder.example for holder in holders(key)), *BESIDE.get(key.path, ()), key.example]
    for example in examples:
        (written,) = shlex.split(example)
        override(tree, written)
    path, _, text = shlex.split(examples[-1])[0].partition("=")
    assert path == key.path or path.startswith(f"{key.path}.")  # of a section: its first key
    shown = yaml.safe_load(text)
    assert shown not in (None, [], "")
    c = validate(tree, "test").model_dump(mode="json")
    taken = value_at(c, path)
    assert taken == shown or (key.section is not None and shown is not taken)


@pytest.mark.parametrize("path", [path for path, _ in sections()])
def test_every_section_and_key_says_what_it_means(path: str) -> None:
    section = dict(sections())[path]
    assert (section.__doc__ or "").strip().endswith((".", ").")), section
    for name, field in section.model_fields.items():
        if field.annotation is Key(name, field).section:
            continue  # a section that is always there: its class says it
        assert meanings(section).get(name, "").endswith((".", "]")), f"{path}.{name}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("model.layers", "whole number above 0"),
        ("model.kv_heads", "whole number above 0 or null"),
        ("model.qk_norm", "true, false or full"),
        ("optimizer.lr", "number above 0"),
        ("optimizer.betas", "[number from 0 to 1, number from 0 to 1]"),
        ("train.eval_samples", "whole number from 0 to 1e+06"),
        ("parallel.zero", "0, 1, 2 or 3"),
        ("precision.fp8.history", "whole number from 1 to 1024"),
        ("supervise.metrics_port", "whole number from 0 to 65535"),
        ("stability.policy.cut_factor", "number above 0 and below 1"),
        ("stability.detector.window", "whole number at least 30"),
        ("stability.signs.looks", "[whole number above 0, ...]"),
        ("data.skip", "[[whole number at least 0, whole number at least 0], ...]"),
        ("data.corpora", "[keys below it, ...]"),
        ("data.corpora.0.path", "path"),
        ("model.rope_scaling", "keys below it or null"),
        ("logging.per_layer_scalars", "true or false"),
        ("logging.trackers", "[tensorboard, wandb, mlflow, jsonl or command, ...]"),
        ("run.name", "text or null"),
        ("supervise.webhook", "text or null"),
    ],
)
def test_what_a_key_expects(path: str, expected: str) -> None:
    (key,) = [key for key in KEYS if key.path == path]
    assert key.expected == expected


def test_the_words_are_true_at_the_limits() -> None:
    """Of every number with a bound: what lies beyond it is refused."""
    checked = 0
    for key in KEYS:
        for word, outside in (("above 0", 0), ("at least 0", -1), ("from 0 to 1", 1.5), ("below 1", 1)):
            if not key.expected.startswith("[") and key.expected.removesuffix(" or null").endswith(word):
                tree: dict[str, Any] = {}
                for holder in holders(key):
                    override(tree, shlex.split(holder.example)[0])
                override(tree, f"{key.path}={outside}")
                with pytest.raises(ConfigError, match="expected a "):
                    validate(tree, "test")
                checked += 1
    assert checked > 100


def test_places_of_the_tree() -> None:
    assert section_at(["data", "corpora", "0"]) is CorpusConfig and section_at([]) is RunConfig
    assert [key_at(place.split(".")) and key_at(place.split(".")).path for place in (  # type: ignore[union-attr]
        "model.layers", "data.corpora.3.path", "optimizer.betas.1", "model.nothing", "nothing.layers",
    )] == ["model.layers", "data.corpora.3.path", "optimizer.betas", "model", None]  # fmt: skip
