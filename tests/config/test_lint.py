"""Recipe lint: silent on what is shipped, on what the models of public reports used, and on what small models bear."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from typing import Any

import pytest

from megastable.base.process import ROOT
from megastable.config import lint as rules
from megastable.config import recipe
from megastable.config.lint import Hint, lint_recipe
from megastable.config.tree import RunConfig

SMALL = {"layers": 3, "hidden": 128, "heads": 4, "sequence_length": 128}
LARGE = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "sequence_length": 4096}
HEALTHY: dict[str, Any] = {
    "model": SMALL,
    "optimizer": {"lr": 3e-3},
    "schedule": {"kind": "cosine", "warmup_steps": 100},
    "train": {"steps": 1000, "global_batch": 64},
}


def hints(**parts: dict[str, Any]) -> list[str]:
    """Hints on the healthy recipe with other keys."""
    sections = {name: {**HEALTHY.get(name, {}), **keys} for name, keys in parts.items()}
    return lint_recipe(RunConfig.model_validate(HEALTHY | sections))


@pytest.mark.parametrize("path", sorted((ROOT / "launch/recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_lint_is_silent_on_shipped_recipes(path: Path) -> None:
    assert lint_recipe(recipe.load_recipe(path)) == []


# Section, key and value; the last healthy value (None: as HEALTHY), the first bad one, and words of the warning.
EDGES: list[tuple[dict[str, Any], str, Any, Any, str]] = [
    ({}, "schedule.warmup_steps", 999, 1000, "not below train.steps=1000"),
    ({"schedule": {"kind": "constant"}}, "schedule.warmup_steps", 999, 1000, "not below train.steps=1000"),
    ({"optimizer": {"lr": 1e-3}}, "schedule.warmup_steps", 1, 0, "no warm-up"),
    ({}, "schedule.total_steps", 980, 979, "the last 21 of train.steps=1000 have 0.1 of the peak rate"),
    ({}, "schedule.total_steps", 1250, 1251, "1.3 times train.steps=1000"),
    ({}, "schedule.floor", 0.99, 1.0, "the rate stays constant"),
    ({"schedule": {"kind": "wsd"}}, "schedule.decay_steps", 900, 901, "only 900 steps follow the warm-up"),
    ({"precision": {"kind": "fp16"}}, "model.qk_norm", "full", False, "beyond 65,504"),
    ({"model": LARGE, "optimizer": {"lr": 3e-4}}, "model.z_loss", 1e-9, 0.0, "logits may drift"),
    ({"model": {"tied": True}}, "model.init_std", 0.176, 0.177, "the first logits scatter by 2"),
    ({"model": {"tied": True, "mup": {"base_width": 64}}}, "model.init_std", 0.353, 0.354, "logits scatter by 2"),
    ({"model": {"norms": "deep"}}, "model.init", "xavier", "normal", "DeepNorm scales Xavier's initial weights"),
    ({"model": {"norms": "branch"}}, "model.branch_steps", 1000, 1001, "the branches only reach 0.999 of"),
    ({"model": {"norms": "both"}}, "model.residual_init", "depth", "zero", "by 316 (1 / sqrt(norm_eps))"),
    ({"model": {"norms": "after"}}, "model.residual_init", "same", "zero", "by 316 (1 / sqrt(norm_eps))"),
    ({}, "model.window", 127, 128, "not below model.sequence_length=128"),
    ({"model": {"qk_norm": False, "attention_softcap": 50.0}}, "optimizer.qk_clip", None, 100.0, "before the cap"),
    ({}, "model.dropout", 0.0, 0.1, "dropout only raises the loss"),
    ({}, "optimizer.weight_decay", 0.01, 0.0, "weights grow without bound"),
    ({}, "optimizer.weight_decay", 0.01, 0.005, "below 0.01 it is nearly none"),
    ({}, "optimizer.weight_decay", 0.5, 0.51, "pulled to zero"),
    ({}, "optimizer.clip", 0.01, 0.0, "not clipped"),
    ({}, "optimizer.clip", 10.0, 10.1, "hardly any gradient is clipped"),
    ({}, "checkpoint.interval", 1, 0, "a crash loses the run"),
    ({}, "train.eval_samples", 1, 0, "never evaluated"),
    ({"train": {"global_batch": 3907}}, "optimizer.betas", [0.9, 0.99], [0.9, 0.999], "over 1000 updates, of 0.5M"),
    ({}, "optimizer.eps", 1e-4, 1.3e-4, "it damps the updates"),
    ({"optimizer": {"clip": 0.1}}, "optimizer.eps", 1e-5, 1.3e-5, "it damps the updates"),
    ({"optimizer": {"lr": 1e-2}}, "model.qk_norm", "full", False, "attention logits grow"),
    ({}, "optimizer.lr", 1.88e-2, 1.89e-2, "the best rate of AdamW"),
]  # fmt: skip


@pytest.mark.parametrize(("base", "key", "good", "bad", "words"), EDGES)
def test_lint_speaks_at_the_edge_of_every_rule(
    base: dict[str, Any], key: str, good: Any, bad: Any, words: str
) -> None:
    """Silent on the last healthy value, one warning on the next: key=value, what happens, a source, what to set."""
    section, name = key.split(".")

    def of(value: Any) -> list[str]:
        return hints(**base | {section: {**base.get(section, {}), name: value}})

    assert of(good) == []
    (told,) = of(bad)
    assert words in told and "). Set " in told and ("arXiv:" in told or "docs/" in told)
    written = f"[{bad[0]:g}, {bad[1]:g}]" if isinstance(bad, list) else str(bad).lower()
    assert told.startswith(f"{key}={written.removesuffix('.0')}: ")


def test_lint_speaks_where_nothing_balances_the_experts() -> None:
    for balance in ({"bias_rate": 1e-9}, {"balance_loss": 1e-9}):
        experts = {"count": 8, "bias_rate": 0, "balance_loss": 0} | balance
        assert hints(model={"experts": experts}) == []
    (hint,) = hints(model={"experts": {"count": 8, "bias_rate": 0, "balance_loss": 0}})
    assert hint.startswith("model.experts.bias_rate=0: ") and "nothing balances the experts" in hint


def test_lint_has_an_edge_of_every_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hint that is never given would go unnoticed."""
    written, spoken = set[int](), set[int]()
    for node in ast.walk(ast.parse(inspect.getsource(rules))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Hint":
            written.add(node.lineno)

    def record_hint(*texts: str) -> Hint:
        spoken.add(sys._getframe(1).f_lineno)
        return Hint(*texts)

    monkeypatch.setattr(rules, "Hint", record_hint)
    data_warmup = {"start": 32, "tokens": RunConfig.model_validate(HEALTHY).tokens}
    others = [  # with tests of their own below, and what no single key does
        ({}, "model.experts", None, {"count": 8, "bias_rate": 0, "balance_loss": 0}, ""),
        ({"optimizer": {"lr": 2.0}}, "optimizer.weight_decay", None, 0.5, ""),
        ({"optimizer": {"lr": 3e-2}}, "schedule.warmup_steps", None, 1, ""),
        *(({}, f"train.{kind}_warmup", None, data_warmup, "") for kind in ("batch", "sequence")),
    ]
    for base, key, _, bad, _ in [*EDGES, *others]:
        section, name = key.split(".")
        hints(**base | {section: {**base.get(section, {}), name: bad}})
    assert spoken == written and len(written) > 20


# Public runs: layers, width, heads, samples of a batch, their length, steps, peak rate; all trained to the end.
PUBLIC = [
    (12, 768, 12, 256, 2048, 572_000, 6e-4),  # GPT-3 125M (arXiv:2005.14165, table 2.1)
    (96, 12288, 96, 1536, 2048, 95_000, 6e-5),  # GPT-3 175B
    (32, 4096, 32, 1024, 4096, 240_000, 3e-4),  # Llama 7B (arXiv:2302.13971, table 2)
    (80, 8192, 64, 1024, 4096, 350_000, 1.5e-4),  # Llama 65B
    (30, 4096, 32, 2304, 4096, 210_000, 4.2e-4),  # DeepSeek 7B (arXiv:2401.02954, table 2)
]


@pytest.mark.parametrize("run", PUBLIC)
def test_lint_is_silent_on_public_runs(run: tuple[int, int, int, int, int, int, float]) -> None:
    layers, hidden, heads, batch, length, steps, lr = run
    config = RunConfig.model_validate(
        {
            "model": {"layers": layers, "hidden": hidden, "heads": heads, "sequence_length": length},
            "optimizer": {"lr": lr},
            "schedule": {"warmup_steps": 2000},
            "train": {"steps": steps, "global_batch": batch},
        }
    )
    assert lint_recipe(config) == []


@pytest.mark.parametrize("key", ["batch_warmup", "sequence_warmup"])
def test_lint_tells_of_a_data_warmup_as_long_as_the_run(key: str) -> None:
    def said(tokens: int) -> list[str]:
        train = HEALTHY["train"] | {key: {"start": 32, "tokens": tokens}}
        return lint_recipe(RunConfig.model_validate(HEALTHY | {"train": train}))

    run = RunConfig.model_validate(HEALTHY).tokens
    assert said(run // 4) == []
    (told,) = said(run)
    assert f"train.{key}.tokens={run}: not below the" in told and "arXiv:" in told
