"""The DeepSpeed JSON: what is filled in, and what a file may not say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.base.process import ROOT
from megastable.config.deepspeed_json import build_deepspeed_json, count_micro_batches, size_of_data_parallel
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
        build_deepspeed_json(c, world)
    return str(error.value)


# The layout


@settings(deadline=None)
@given(*[st.integers(1, 4)] * 3, st.integers(1, 8), st.integers(1, 4), st.integers(1, 8))
def test_build_adds_up_batch_sizes(
    tensor: int, pipeline: int, context: int, groups: int, micro: int, steps: int
) -> None:
    c = config(
        model={"heads": 144, "head_dim": 8, "vocab_multiple": 12, "ffn": 1536, "sequence_length": 24},
        parallel={"tensor": tensor, "pipeline": pipeline, "context": context},
        train={"global_batch": micro * groups * steps, "micro_batch": micro},
    )
    data = groups * context
    world = tensor * pipeline * data
    assert size_of_data_parallel(c, world) == data and count_micro_batches(c, world) == steps
    ds = build_deepspeed_json(c, world)
    assert (
        ds["train_batch_size"]
        == ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"] * data
    )


def test_build_refuses_ranks_and_sums_that_experts_on_several_ranks_cannot_have(file: Path) -> None:
    parts = {"parallel": {"expert": 2}, "model": {"experts": {"count": 4, "top_k": 2}}}
    assert size_of_data_parallel(config(**parts), 4) == 4
    assert "with parallel.expert=2: the number of ranks must be a multiple of 2" in refused(
        config(**parts), 3
    )
    everything = {"zero_optimization": {"reduce_scatter": False}}
    message = refused(using(file, everything, **parts), 2)
    assert "zero_optimization.reduce_scatter=false with parallel.expert=2" in message
    build_deepspeed_json(using(file, everything), 2)


# What is filled in


@pytest.mark.parametrize("zero", [1, 2, 3])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "fp16"])
def test_build_lets_the_recipe_decide(kind: str, zero: int) -> None:
    c = config(
        parallel={"zero": zero},
        precision={"kind": kind, "initial_scale_power": 12, "scale_window": 50},
        optimizer={"clip": 0.5},
        train={"global_batch": 32, "micro_batch": 2},
    )
    ds = build_deepspeed_json(c, world=4)
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
def test_build_refuses_a_contradiction_with_the_key(name: str, file: Path) -> None:
    content, key = CONTRADICTIONS[name]
    message = refused(using(file, content))
    assert message.startswith(f"{file}: {key} contradicts the recipe") and "leave the key out" in message


def nested(name: str, value: Any) -> dict[str, Any]:
    """{"a": {"b": value}} of "a.b"."""
    section, _, key = name.rpartition(".")
    return {section: {key: value}} if section else {key: value}


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
def test_build_refuses_an_unknown_key_with_the_nearest(name: str, hint: str, file: Path) -> None:
    message = refused(using(file, nested(name, 1)))
    assert message.startswith(f"{file}: {name}: unknown key; {hint}") and message.endswith("or remove it")


@pytest.mark.parametrize("content", [{"wall_clock_breakdown": True}, {"flops_profiler": {"enabled": True}}])
def test_build_refuses_timers_with_a_pipeline(content: dict[str, Any], file: Path) -> None:
    message = refused(using(file, content, parallel={"pipeline": 2}), world=2)
    (key,) = content
    assert message.startswith(f"{file}: {key} with parallel.pipeline=2") and "remove the key" in message
    assert build_deepspeed_json(using(file, content), 1)[key] == content[key]
    off = {key: {"enabled": False} if key == "flops_profiler" else False}
    assert build_deepspeed_json(using(file, off, parallel={"pipeline": 2}), 2)[key] == off[key]


def test_build_is_accepted_by_deepspeed_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own configuration object, with all its checks, for every stage and precision that is allowed."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("WORLD_SIZE", "1")
    from deepspeed.runtime.config import DeepSpeedConfig

    for kind in ("bf16", "fp32", "fp16"):
        for zero in (1, 2, 3):
            c = config(
                precision={"kind": kind}, parallel={"zero": zero}, train={"global_batch": 2, "micro_batch": 2}
            )
            built = DeepSpeedConfig(build_deepspeed_json(c, 1))
            assert built.zero_config.stage == zero and built.train_batch_size == 2
            assert built.gradient_clipping == 1.0 and built.communication_data_type.itemsize == 4
