"""The DeepSpeed JSON of a run: a file of ds_configs/, completed from the `RunConfig`. Pure; imports no DeepSpeed.

The file holds what is DeepSpeed's alone (buckets, overlap, profilers). megastable fills in batch sizes,
clipping, precision and the pipeline's settings, and refuses a file that says otherwise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megastable.config import RunConfig
from megastable.errors import ConfigError
from megastable.recipe import find

# Keys that megastable answers by itself, with the reason why a file may not hold them.
FORBIDDEN = {
    "optimizer": "the optimizer is set by optimizer.* in the recipe",
    "scheduler": "the learning rate is set by schedule.* in the recipe",
    "tensor_parallel": "tensor parallelism is megastable's own: parallel.tensor",
    "autotuning": "it restarts the job with other settings behind the run directory's back",
    "amp": "use precision.kind",
    "curriculum_learning": "it changes the order of the data, which is a pure function here",
    "data_efficiency": "it changes the order of the data, which is a pure function here",
}

# The last two are older names, which DeepSpeed still follows.
OFFLOADING = {"offload_optimizer", "offload_param", "cpu_offload", "cpu_offload_param"}


def data_parallel(config: RunConfig, world: int) -> int:
    """Data-parallel size of `world` ranks; `ConfigError` when the layout does not factor."""
    p = config.parallel
    model = p.tensor * p.pipeline
    if world < 1 or world % model:
        raise ConfigError(
            f"{world} ranks cannot be laid out as parallel.tensor={p.tensor} x parallel.pipeline={p.pipeline}: "
            f"the number of ranks must be a multiple of {model}"
        )
    data = world // model
    t = config.train
    if t.global_batch % (t.micro_batch * data):
        raise ConfigError(
            f"train.global_batch={t.global_batch} is not a multiple of train.micro_batch={t.micro_batch} x {data} "
            f"data-parallel ranks ({world} ranks / tensor {p.tensor} / pipeline {p.pipeline}): change one of them"
        )
    return data


def accumulation(config: RunConfig, world: int) -> int:
    """Micro-batches per step and rank."""
    return config.train.global_batch // (config.train.micro_batch * data_parallel(config, world))


def build(config: RunConfig, world: int) -> dict[str, Any]:
    """The complete DeepSpeed configuration of `config` on `world` ranks."""
    path = find(config.deepspeed.replace("{zero}", str(config.parallel.zero)))
    given = _read(path)
    for key, why in FORBIDDEN.items():
        if key in given:
            raise ConfigError(f"{path}: key {key!r} is not used here: {why}")
    zero = given.get("zero_optimization")
    for key in sorted(OFFLOADING & set(zero if isinstance(zero, dict) else ())):
        raise ConfigError(
            f"{path}: zero_optimization.{key}: offloading is not supported: with pipelines and tied embeddings it "
            "lets the copies drift apart silently; use more ranks or a higher parallel.zero"
        )
    steps = accumulation(config, world)
    if config.precision.kind == "fp16" and config.parallel.zero == 0 and steps > 1:
        raise ConfigError(
            f"parallel.zero=0 with precision.kind=fp16 and {steps} micro-batches a step and rank: DeepSpeed then "
            "accumulates gradients in fp16; use parallel.zero=1, or raise train.micro_batch until one is left"
        )
    return _merge(given, _filled(config, world), path, "")


def _read(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"deepspeed={path}: no such file; the ones that come along are in ds_configs/"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed={path}: not a readable JSON file: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"deepspeed={path}: expected a JSON object at the top")
    return given


def _filled(config: RunConfig, world: int) -> dict[str, Any]:
    kind, steps = config.precision.kind, accumulation(config, world)
    filled: dict[str, Any] = {
        "train_batch_size": config.train.global_batch,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": steps,
        "gradient_clipping": config.optimizer.clip,
        "zero_optimization": {"stage": config.parallel.zero},
        "zero_allow_untested_optimizer": True,
        # Gradients are reduced and accumulated in fp32 whatever the parameters are.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": kind == "bf16"},
        "fp16": {"enabled": kind == "fp16"},
        # The defaults of these three corrupt activations under sequence parallelism or break the first stage.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
    }
    if kind == "bf16":
        filled["bf16"]["check_grad_overflow"] = True
    if kind == "fp16":
        p = config.precision
        filled["fp16"] |= {
            "loss_scale": 0,
            "initial_scale_power": p.initial_scale_power,
            "loss_scale_window": p.scale_window,
        }
        if config.parallel.zero == 0:
            # Its wrapper keeps gradients in fp16: `build` allows it where nothing is accumulated.
            del filled["data_types"]
    return filled


def _merge(given: dict[str, Any], filled: dict[str, Any], path: Path, prefix: str) -> dict[str, Any]:
    merged = dict(given)
    for key, value in filled.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            below = given.get(key, {})
            if not isinstance(below, dict):
                raise ConfigError(f"{path}: {name} must be an object, found {below!r}")
            merged[key] = _merge(below, value, path, f"{name}.")
        elif key in given and given[key] not in (value, "auto"):
            raise ConfigError(
                f"{path}: {name}={given[key]!r} contradicts the recipe, from which {value!r} follows: "
                "leave the key out (megastable fills it in), or change the recipe"
            )
        else:
            merged[key] = value
    return merged
