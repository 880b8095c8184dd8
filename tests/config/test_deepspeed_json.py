"""The DeepSpeed JSON: what is filled in, and what a file may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.base.installation import ROOT
from megastable.base.text import plural
from megastable.config.deepspeed_json import KNOWN, REFUSED, accumulation, build, data_parallel
from megastable.config.tree import RunConfig


def config(**parts: Any) -> RunConfig:
    return RunConfig.model_validate(parts)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "ds.json"


def using(file: Path, content: Any, **parts: Any) -> RunConfig:
    """A configuration whose DeepSpeed file says `content`."""
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return config(deepspeed=str(file), **parts)


def refused(c: RunConfig, world: int = 1) -> str:
    with pytest.raises(ConfigError) as error:
        build(c, world)
    return str(error.value)


# The layout


@settings(deadline=None)
@given(*[st.integers(1, 4)] * 3, st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_batch_sizes_add_up(
    tensor: int, pipeline: int, context: int, groups: int, micro: int, steps: int
) -> None:
    c = config(
        model={"heads": 144, "head_dim": 8, "vocab_multiple": 12, "ffn": 1536, "sequence_length": 24},
        parallel={"tensor": tensor, "pipeline": pipeline, "context": context},
        train={"global_batch": micro * groups * steps, "micro_batch": micro},
    )
    data = groups * context
    world = tensor * pipeline * data
    assert data_parallel(c, world) == data and accumulation(c, world) == steps
    ds = build(c, world)
    assert (
        ds["train_batch_size"]
        == ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"] * data
    )


@pytest.mark.parametrize("world", [1, 6, 7, -4, 0])
def test_a_world_that_does_not_factor(world: int) -> None:
    message = refused(config(parallel={"tensor": 2, "pipeline": 2}), world)
    for word in (plural(world, "rank"), "parallel.tensor=2", "parallel.pipeline=2", "multiple of 4"):
        assert word in message


def test_a_global_batch_that_does_not_divide() -> None:
    message = refused(
        config(parallel={"tensor": 2}, train={"global_batch": 16, "micro_batch": 4}),
        world=6,
    )
    for word in ("train.global_batch=16", "train.micro_batch=4 x 3", "6 ranks / tensor 2", "change one"):
        assert word in message


# What is filled in


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "fp16"])
def test_the_recipe_decides(kind: str, zero: int) -> None:
    c = config(
        parallel={"zero": zero},
        precision={"kind": kind, "initial_scale_power": 12, "scale_window": 50},
        optimizer={"clip": 0.5},
        train={"global_batch": 32, "micro_batch": 2},
    )
    ds = build(c, world=4)
    given = json.loads((ROOT / f"ds_configs/zero{zero}.json").read_text())
    assert ds["zero_optimization"] == given["zero_optimization"] and ds["zero_optimization"]["stage"] == zero
    assert (ds["train_batch_size"], ds["train_micro_batch_size_per_gpu"]) == (32, 2)
    assert (ds["gradient_accumulation_steps"], ds["gradient_clipping"]) == (4, 0.5)
    assert (ds["bf16"]["enabled"], ds["fp16"]["enabled"]) == (kind == "bf16", kind == "fp16")
    # What DeepSpeed's defaults get wrong.
    assert ds["communication_data_type"] == "fp32" and ds["data_types"] == {"grad_accum_dtype": "fp32"}
    assert ds["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
    if kind == "bf16":
        assert ds["bf16"]["check_grad_overflow"] is True
    if kind == "fp16":
        assert ds["fp16"] == {
            "enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 50,
        }  # fmt: skip


def test_what_is_deepspeeds_alone_comes_from_the_file(file: Path) -> None:
    content = {
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1234},
        "flops_profiler": {"enabled": True},
        "fp16": {"hysteresis": 4},
        "steps_per_print": 10,
    }
    ds = build(using(file, content), 1)
    assert ds["zero_optimization"] == {"stage": 1, "reduce_bucket_size": 1234}
    assert ds["flops_profiler"] == {"enabled": True} and ds["steps_per_print"] == 10
    assert ds["fp16"] == {"hysteresis": 4, "enabled": False}


def test_a_file_may_repeat_what_the_recipe_says_or_leave_it_open(file: Path) -> None:
    content = {
        "train_batch_size": 64, "gradient_accumulation_steps": "auto", "gradient_clipping": 1.0,
        "bf16": {"enabled": True}, "zero_optimization": {"stage": "auto"},
    }  # fmt: skip
    ds = build(using(file, content), 2)
    assert ds["gradient_accumulation_steps"] == 32 and ds["zero_optimization"] == {"stage": 1}


def test_the_stage_chooses_the_file(tmp_path: Path) -> None:
    for zero in (1, 2):
        content = {"zero_optimization": {"stage": zero, "reduce_bucket_size": zero}}
        (tmp_path / f"my{zero}.json").write_text(json.dumps(content))
        c = config(deepspeed=f"{tmp_path}/my{{zero}}.json", parallel={"zero": zero})
        assert build(c, 1)["zero_optimization"] == content["zero_optimization"]


# What is refused


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"train_batch_size": 128}, "train_batch_size=128"),
    "micro-batch": ({"train_micro_batch_size_per_gpu": 4}, "train_micro_batch_size_per_gpu=4"),
    "accumulation": ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
    "clipping": ({"gradient_clipping": 0.5}, "gradient_clipping=0.5"),
    "stage": ({"zero_optimization": {"stage": 2}}, "zero_optimization.stage=2"),
    "precision": ({"bf16": {"enabled": False}}, "bf16.enabled=False"),
    "other precision": ({"fp16": {"enabled": True}}, "fp16.enabled=True"),
    "overflow check": ({"bf16": {"check_grad_overflow": False}}, "bf16.check_grad_overflow=False"),
    "communication": ({"communication_data_type": "bf16"}, "communication_data_type='bf16'"),
    "accumulation type": ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype='bf16'"),
    "reentrant": ({"pipeline": {"use_reentrant": True}}, "pipeline.use_reentrant=True"),
    "timer": ({"timers": {"throughput": {"enabled": True}}}, "timers.throughput.enabled=True"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_refused_with_the_key(name: str, file: Path) -> None:
    content, key = CONTRADICTIONS[name]
    message = refused(using(file, content))
    assert message.startswith(f"{file}: {key} contradicts the recipe") and "leave the key out" in message


def nested(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    section, _, key = name.rpartition(".")
    return {section: {key: value}} if section else {key: value}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_key_is_named_with_the_reason(name: str, file: Path) -> None:
    message = refused(using(file, nested(name, {"device": "cpu"})))
    assert message.startswith(f"{file}: {name} is not used here: {REFUSED[name]}")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("gradient_cliping", "did you mean 'gradient_clipping'?"),
        ("zero_optimisation", "did you mean 'zero_optimization'?"),
        ("zero_optimization.overlap_com", "did you mean 'overlap_comm'?"),
        ("zero_optimization.contiguous_gradient", "did you mean 'contiguous_gradients'?"),
        ("fp16.loss_scale_windows", "did you mean 'loss_scale_window'?"),
        ("bf16.enable", "did you mean 'enabled'?"),
        ("data_types.x", "known here: grad_accum_dtype."),
        ("aio", "known here: bf16, comms_logger,"),
        ("", "known here: bf16, comms_logger,"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(name: str, hint: str, file: Path) -> None:
    message = refused(using(file, nested(name, 1)))
    assert message.startswith(f"{file}: {name}: unknown key; {hint}") and message.endswith("or remove it")


def test_every_known_key_is_one_of_deepspeed_and_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ):
        assert KNOWN[section] <= {field.alias or name for name, field in model.model_fields.items()}
    for section, keys in KNOWN.items():
        assert not {f"{section}.{key}" if section else key for key in keys} & set(REFUSED)


@pytest.mark.parametrize("content", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_timers_are_refused_with_a_pipeline(content: dict[str, Any], file: Path) -> None:
    message = refused(using(file, content, parallel={"pipeline": 2}), world=2)
    (key,) = content
    assert message.startswith(f"{file}: {key} with parallel.pipeline=2") and "remove the key" in message
    assert build(using(file, content), 1)[key] == content[key]
    off = {key: {"enabled": False} if key == "flops_profiler" else False}
    assert build(using(file, off, parallel={"pipeline": 2}), 2)[key] == off[key]


@pytest.mark.parametrize("value", [True, None, 3, [1]])
def test_a_value_where_an_object_belongs(value: Any, file: Path) -> None:
    assert "zero_optimization must be an object" in refused(using(file, {"zero_optimization": value}))


@pytest.mark.parametrize(
    ("content", "word"),
    [("{", "not a readable JSON file"), ("", "not a readable JSON file"), ("[1]", "expected a JSON object")],
)
def test_a_broken_file_is_named(content: str, word: str, file: Path) -> None:
    message = refused(using(file, content))
    assert str(file) in message and word in message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "none.json: no such file" in refused(config(deepspeed=str(tmp_path / "none.json")))
    assert "not a readable" in refused(config(deepspeed=str(tmp_path)))


@pytest.mark.parametrize("name", ["ds_configs/{stage}.json", "ds_configs/{.json", "ds_configs/{zero.x}"])
def test_other_braces_are_part_of_the_name(name: str) -> None:
    assert f"{name}: no such file" in refused(config(deepspeed=name))


def test_deepspeed_itself_accepts_what_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own configuration object, with all its checks, for every stage and precision that is allowed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    from deepspeed.runtime.config import DeepSpeedConfig

    for kind in ("bf16", "fp32", "fp16"):
        for zero in (1, 2, 3):
            c = config(
                precision={"kind": kind}, parallel={"zero": zero}, train={"global_batch": 2, "micro_batch": 2}
            )
            built = DeepSpeedConfig(build(c, 1))
            assert built.zero_config.stage == zero and built.train_batch_size == 2
            assert built.gradient_clipping == 1.0 and built.communication_data_type.itemsize == 4
