"""Recipe lint: silent on what is shipped, on what the models of public reports used, and on what small models bear."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drills.stage import RECIPE
from megastable.base.installation import ROOT
from megastable.config import lint as rules
from megastable.config import recipe
from megastable.config.lint import lint
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
    return lint(RunConfig.model_validate(HEALTHY | sections))


def first(lr: float, warmup: int, beta2: float = 0.95, **model: Any) -> list[str]:
    return hints(optimizer={"lr": lr, "betas": [0.9, beta2]}, schedule={"warmup_steps": warmup}, model=model)


@pytest.mark.parametrize("path", sorted((ROOT / "launch/recipes").glob("*.yaml")), ids=lambda p: p.stem)
def test_shipped_recipes_are_clean(path: Path) -> None:
    assert lint(recipe.load(path)) == []


def test_the_recipe_of_the_drills_is_clean() -> None:
    assert lint(RunConfig.model_validate(RECIPE)) == []


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
def test_every_rule_at_its_edge(base: dict[str, Any], key: str, good: Any, bad: Any, words: str) -> None:
    """Silent on the last healthy value, one warning on the next: key=value, what happens, a source, what to set."""
    section, name = key.split(".")

    def of(value: Any) -> list[str]:
        return hints(**base | {section: {**base.get(section, {}), name: value}})

    assert of(good) == []
    (told,) = of(bad)
    assert words in told and "). Set " in told and ("arXiv:" in told or "docs/" in told)
    written = f"[{bad[0]:g}, {bad[1]:g}]" if isinstance(bad, list) else str(bad).lower()
    assert told.startswith(f"{key}={written.removesuffix('.0')}: ")


def test_every_rule_has_an_edge() -> None:
    """A rule that never speaks would go unnoticed."""
    spoken, every = (
        {"data_warmup_outlasts_run"},
        (*rules.RULES, *(rule for rule, _ in rules.OF)),
    )  # tested below
    for base, key, _, bad, _ in EDGES:
        section, name = key.split(".")
        parts = base | {section: {**base.get(section, {}), name: bad}}
        sections = {part: {**HEALTHY.get(part, {}), **keys} for part, keys in parts.items()}
        config = RunConfig.model_validate(HEALTHY | sections)
        spoken |= {rule.__name__ for rule in every if rule(config) is not None}
    assert spoken == {rule.__name__ for rule in every}


@pytest.mark.parametrize(
    "parts",
    [
        {"schedule": {"kind": "constant", "total_steps": 10}},
        {"schedule": {"kind": "constant", "total_steps": 10**6}},
        {"schedule": {"kind": "constant", "floor": 1.0}},
        {"schedule": {"decay_steps": 10**6}},
        {"model": {"qk_norm": False}, "optimizer": {"lr": 9.9e-3}},
        {"model": {"z_loss": 0}},
        {"model": {"init_std": 0.3}},
        {"model": {"residual_init": "zero"}},
        {"model": {"norms": "mixed", "residual_init": "zero"}},
        {"model": {"qk_norm": False, "attention_softcap": 50.0}, "optimizer": {"lr": 1.1e-2}},
        {"model": {**LARGE, "z_loss": 0, "logit_softcap": 30.0}, "optimizer": {"lr": 3e-4}},
        {"optimizer": {"betas": [0.9, 0.999]}},
    ],
)
def test_what_does_not_apply_is_not_told(parts: dict[str, Any]) -> None:
    assert hints(**parts) == []


def test_z_loss_in_other_precisions() -> None:
    for kind in ("fp32", "fp16"):
        assert hints(model={**LARGE, "z_loss": 0}, optimizer={"lr": 3e-4}, precision={"kind": kind}) == []


def test_a_decay_that_turns_signs() -> None:
    (told,) = [text for text in hints(optimizer={"lr": 0.02, "weight_decay": 50}) if "weight_decay" in text]
    assert "turns the sign" in told


def test_a_warmup_longer_than_the_schedule() -> None:
    told = hints(schedule={"warmup_steps": 500, "total_steps": 400})
    assert len(told) == 2 and "not below schedule.total_steps=400" in told[0]


# Public runs: layers, width, heads, samples of a batch, their length, steps, peak rate; all trained to the end.
PUBLIC = [
    (12, 768, 12, 256, 2048, 572_000, 6e-4),  # GPT-3 125M (arXiv:2005.14165, table 2.1)
    (96, 12288, 96, 1536, 2048, 95_000, 6e-5),  # GPT-3 175B
    (32, 4096, 32, 1024, 4096, 240_000, 3e-4),  # Llama 7B (arXiv:2302.13971, table 2)
    (80, 8192, 64, 1024, 4096, 350_000, 1.5e-4),  # Llama 65B
    (30, 4096, 32, 2304, 4096, 210_000, 4.2e-4),  # DeepSeek 7B (arXiv:2401.02954, table 2)
]


@pytest.mark.parametrize("run", PUBLIC)
def test_public_runs_are_within_the_scaling_law(run: tuple[int, int, int, int, int, int, float]) -> None:
    layers, hidden, heads, batch, length, steps, lr = run
    config = RunConfig.model_validate(
        {
            "model": {"layers": layers, "hidden": hidden, "heads": heads, "sequence_length": length},
            "optimizer": {"lr": lr},
            "schedule": {"warmup_steps": 2000},
            "train": {"steps": steps, "global_batch": batch},
        }
    )
    assert lint(config) == []


@pytest.mark.parametrize(
    ("layers", "hidden", "ffn", "heads", "kv_heads", "batch", "lr"),
    [(30, 4096, 11008, 32, 32, 2304, 4.2e-4), (95, 8192, 22016, 64, 8, 4608, 3.2e-4)],
)
def test_the_law_gives_the_rates_of_its_paper(
    layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, batch: int, lr: float
) -> None:
    """DeepSeek LLM 7B and 67B, 2T tokens each (arXiv:2401.02954, table 2)."""
    model = {"layers": layers, "hidden": hidden, "ffn": ffn, "heads": heads, "kv_heads": kv_heads}
    train = {"global_batch": batch, "steps": round(2e12 / 4096 / batch)}
    config = RunConfig.model_validate({"model": {**model, "sequence_length": 4096}, "train": train})
    assert rules.best_rate(config) == pytest.approx(lr, rel=0.05)


def test_the_compute_of_a_model() -> None:
    """Six FLOP for each weight of the blocks and token, and attention."""
    config = RunConfig.model_validate(
        {
            "model": {"layers": 2, "hidden": 8, "heads": 2, "ffn": 16, "sequence_length": 32, "kv_heads": 1},
            "train": {"steps": 5, "global_batch": 3},
        }
    )
    weights = 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 16)
    assert rules.block_weights(config.model) == weights
    assert rules.compute(config) == (6 * weights + 12 * 2 * 8 * 32) * 5 * 3 * 32


@pytest.mark.parametrize(
    ("lr", "warmup", "told"),
    [
        (1e-3, 1, 0),
        (3e-3, 20, 0),
        (6e-3, 50, 0),
        (3e-3, 0, 1),
        (1.5e-2, 0, 1),
        (1.5e-2, 10, 1),
        (3e-3, 1, 1),
        (1.76e-3, 1, 0),
        (1.77e-3, 1, 1),
    ],
)
def test_first_updates(lr: float, warmup: int, told: int) -> None:
    said = first(lr, warmup)
    assert len(said) == told
    assert all(f"schedule.warmup_steps={warmup}:" in text and "optimizer.lr" in text for text in said)


def test_mup_bears_what_its_base_bears() -> None:
    """The rates of its matrices, and with these the change of a layer's output, are those of the base."""
    base, wide = {"hidden": 128, "heads": 4}, {"hidden": 1024, "heads": 8}
    for lr in (1.76e-3, 1.77e-3):
        told = first(lr, 1, **base)
        assert bool(first(lr, 1, **wide, mup={"base_width": 128})) == bool(told)
    assert first(1e-3, 1, **wide)


@pytest.mark.parametrize(("init", "std"), [("fan_in", 1 / 8), ("xavier", 1 / 8), ("small", 0.0790569415)])
def test_the_change_of_a_layer_knows_the_initialisation(init: str, std: float) -> None:
    edge = 2 * std / 8 * rules.CHANGE
    assert not first(0.99 * edge, 1, hidden=64, init=init)
    told = first(1.01 * edge, 1, hidden=64, init=init)
    assert f"with weights of {std:g} and a width of 64" in told[0]


def test_a_wider_model_bears_less() -> None:
    """Public runs of 774M parameters without warm-up: 1e-4 is healthy, 1e-3 diverges."""
    big: dict[str, Any] = {"hidden": 1280, "heads": 20, "layers": 36}
    assert first(1e-4, 1, **big) == [] != first(1e-3, 1, **big)


def test_the_rule_of_thumb_knows_beta2() -> None:
    assert "Set schedule.warmup_steps=40 or" in first(3e-3, 0)[0]
    assert "Set schedule.warmup_steps=2000 or" in first(3e-3, 0, 0.999)[0]


def test_a_longer_warmup_is_asked_for_than_there_is() -> None:
    (said,) = [text for text in first(0.05, 60) if text.startswith("schedule.warmup_steps")]
    wanted = int(said.partition("Set schedule.warmup_steps=")[2].split()[0])
    assert wanted > 60
    assert not [text for text in first(0.05, wanted + 1) if text.startswith("schedule.warmup_steps")]


def test_what_bounds_the_logits_is_known() -> None:
    free = {
        "model": {"qk_norm": False},
        "optimizer": {"lr": 2e-2, "qk_clip": 100.0},
        "precision": {"kind": "fp16"},
    }
    assert not [
        text for text in lint(RunConfig.model_validate(HEALTHY | free)) if text.startswith("model.qk_norm")
    ]


@pytest.mark.parametrize("key", ["batch_warmup", "sequence_warmup"])
def test_a_warmup_of_the_data_as_long_as_the_run(key: str) -> None:
    def said(tokens: int) -> list[str]:
        train = HEALTHY["train"] | {key: {"start": 32, "tokens": tokens}}
        return lint(RunConfig.model_validate(HEALTHY | {"train": train}))

    run = RunConfig.model_validate(HEALTHY).tokens
    assert said(run // 4) == []
    (told,) = said(run)
    assert f"train.{key}.tokens={run}: not below the" in told and "arXiv:" in told


def test_other_clipping_is_not_called_none() -> None:
    other = {"optimizer": {"clip": 0, "clipping": "agc"}}
    assert not [
        text for text in lint(RunConfig.model_validate(HEALTHY | other)) if text.startswith("optimizer.clip")
    ]
