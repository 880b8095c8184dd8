"""Builds the DeepSpeed JSON of a run: a file of ds_configs/ completed from the `RunConfig`. Pure, without DeepSpeed.

The file holds settings of DeepSpeed alone (buckets, overlap, profilers). megastable fills in batch sizes, clipping,
precision and the pipeline's settings, and refuses a file that contradicts them, or has a key that DeepSpeed would
silently ignore.
"""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from megastable.base.errors import ConfigError
from megastable.base.text import count_noun
from megastable.config.recipe import find_recipe, list_shipped_files
from megastable.config.training import ParallelConfig
from megastable.config.tree import RunConfig

# The keys allowed in a file, by section: what megastable fills in, and what it has been run with.
KNOWN: dict[str, set[str]] = {
    "": {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "zero_allow_untested_optimizer", "communication_data_type", "zero_optimization", "data_types", "bf16", "fp16",
        "pipeline", "steps_per_print", "wall_clock_breakdown", "memory_breakdown", "dump_state", "comms_logger",
        "flops_profiler", "timers",
    },
    "zero_optimization": {
        "stage", "allgather_partitions", "allgather_bucket_size", "overlap_comm", "reduce_scatter",
        "reduce_bucket_size", "contiguous_gradients",
        "ignore_unused_parameters",
        "sub_group_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_module_granularity_threshold", "stage3_use_all_reduce_for_fetch_params",
        "stage3_allgather_sequential", "log_trace_cache_warnings", "enable_sanity_checks",
    },
    "data_types": {"grad_accum_dtype"},
    "bf16": {"enabled", "check_grad_overflow", "immediate_grad_update"},
    "fp16": {
        "enabled", "loss_scale", "initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis",
        "min_loss_scale",
    },
    "pipeline": {"pipe_partitioned", "grad_partitioned", "use_reentrant"},
}  # fmt: skip

_OFFLOADING = (
    "offloading is not supported: with pipelines and tied embeddings it lets the copies drift apart silently; use "
    "more ranks or a higher parallel.zero"
)
_PIECES = "it lays out the pieces of the parameters in a way that checkpoints and norms here do not know"
_QUANTIZED = (
    "it rounds what the ranks exchange to a few bits: a resumed or reshaped run is no longer the same"
)
_LOW_MASTERS = (
    "master weights and gradients are fp32 here: updates below the precision of the weights get lost"
)

# DeepSpeed keys not allowed in our files, with the reason.
REFUSED = {
    "optimizer": "the optimizer is set by optimizer.* in the recipe",
    "scheduler": "the learning rate is set by schedule.* in the recipe",
    "tensor_parallel": "tensor parallelism is megastable's own: parallel.tensor",
    "activation_checkpointing": "use parallel.recompute",
    "autotuning": "it restarts the job with other settings behind the run directory's back",
    "elasticity": "DeepSpeed has removed it; a run goes on with another number of ranks when it is started again",
    "amp": "use precision.kind",
    "torch_autocast": "use precision.kind",
    "curriculum_learning": "use train.sequence_warmup",
    "data_efficiency": "it changes the order of the data, which is a pure function here",
    "prescale_gradients": "ZeRO 2 and 3 do not do it; gradients are averaged in fp32 anyway",
    "gradient_allreduce_op": "gradients are averaged over the data-parallel ranks, whatever it says",
    "gradient_predivide_factor": "ZeRO 2 and 3 do not do it; gradients are averaged in fp32 anyway",
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor"), "use logging.trackers"),
    "bf16.bf16_master_weights_and_grads": _LOW_MASTERS,
    "bf16.bf16_optimizer_states": _LOW_MASTERS,
    "fp16.fp16_master_weights_and_grads": _LOW_MASTERS,
    "zero_optimization.zero_hpz_partition_size": _PIECES,
    # 0.19.8 pairs parameters with each other's pieces under it (tested: 16 of 19 on two ranks).
    "zero_optimization.round_robin_gradients": _PIECES,
    "zero_optimization.use_multi_rank_bucket_allreduce": "every rank gets just the part of a bucket that it updates",
    "zero_optimization.mics_shard_size": _PIECES,
    "zero_optimization.mics_hierarchical_params_gather": _PIECES,
    "zero_optimization.zero_quantized_weights": _QUANTIZED,
    "zero_optimization.zero_quantized_gradients": _QUANTIZED,
    "zero_optimization.offload_optimizer": _OFFLOADING,
    "zero_optimization.offload_param": _OFFLOADING,
    "zero_optimization.cpu_offload": _OFFLOADING,  # this and the next: older names that DeepSpeed still accepts
    "zero_optimization.cpu_offload_param": _OFFLOADING,
}


def size_of_data_parallel(config: RunConfig, world: int) -> int:
    """Data-parallel size of `world` ranks, including context parallelism; `ConfigError` if the layout does not
    factor."""
    p = config.parallel
    model_ranks = p.tensor * p.pipeline
    context_text = f" x parallel.context={p.context}" if p.context > 1 else ""
    replicas_text = f" with parallel.replicas={p.replicas}" if p.replicas > 1 else ""
    replicas_text += f" with parallel.expert={p.expert}" if p.expert > 1 else ""
    if world < 1 or world % p.least_ranks:
        raise ConfigError(
            f"{count_noun(world, 'rank')} cannot be laid out as parallel.tensor={p.tensor} x "
            f"parallel.pipeline={p.pipeline}{context_text}{replicas_text}: the number of ranks must be a multiple of "
            f"{p.least_ranks}"
        )
    data_ranks = world // model_ranks
    t, sample_groups = config.train, data_ranks // p.context
    if t.global_batch % (t.micro_batch * sample_groups):
        context_text = f" / context {p.context}" if p.context > 1 else ""
        raise ConfigError(
            f"train.global_batch={t.global_batch} is not a multiple of train.micro_batch={t.micro_batch} x "
            f"{sample_groups} data-parallel ranks ({count_noun(world, 'rank')} / tensor {p.tensor} / pipeline "
            f"{p.pipeline}{context_text}): change one of them"
        )
    samples_of_pass = t.micro_batch * sample_groups
    if odd_batches := [batch_size for batch_size in config.batches.values if batch_size % samples_of_pass]:
        listed_sizes = ", ".join(map(str, odd_batches[:8])) + (", ..." if len(odd_batches) > 8 else "")
        raise ConfigError(
            f"train.batch_warmup: batches of {listed_sizes} occur, which are not multiples of train.micro_batch="
            f"{t.micro_batch} x {sample_groups} data-parallel ranks: make start and increment multiples of "
            f"{samples_of_pass}, or run on fewer ranks until the warm-up is over"
        )
    return data_ranks


def count_micro_batches(config: RunConfig, world: int) -> int:
    """Micro-batches per step and rank, after a batch warm-up."""
    sample_ranks = size_of_data_parallel(config, world) // config.parallel.context
    return config.train.global_batch // (config.train.micro_batch * sample_ranks)


def build_deepspeed_json(config: RunConfig, world: int) -> dict[str, Any]:
    """The complete DeepSpeed configuration of `config` on `world` ranks."""
    file_path = find_recipe(config.deepspeed.replace("{zero}", str(config.parallel.zero)))
    given_keys = _read(file_path)
    _check(given_keys, file_path, config.parallel)
    return _merge(given_keys, _filled(config, world), file_path, "")


def _read(path: Path) -> dict[str, Any]:
    try:
        file_content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"deepspeed={path}: no such file; these come along: {list_shipped_files('ds_configs')}"
        ) from None
    except (OSError, ValueError) as file_error:
        raise ConfigError(f"deepspeed={path}: not a readable JSON file: {file_error}") from None
    if not isinstance(file_content, dict):
        raise ConfigError(f"deepspeed={path}: expected a JSON object at the top")
    return file_content


def _check(given: dict[str, Any], path: Path, p: ParallelConfig) -> None:
    """Refuse keys that DeepSpeed would ignore, or that break a run."""
    for section, known in KNOWN.items():
        content = given.get(section) if section else given
        for key in content if isinstance(content, dict) else ():
            name = f"{section}.{key}" if section else key
            if name in REFUSED:
                raise ConfigError(f"{path}: {name} is not used here: {REFUSED[name]}. Remove the key")
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known here: {', '.join(sorted(known))}."
                raise ConfigError(f"{path}: {name}: unknown key; {hint} Correct it, or remove it")
    profiler = given.get("flops_profiler")
    profiling = isinstance(profiler, dict) and profiler.get("enabled")
    if p.pipeline > 1 and (given.get("wall_clock_breakdown") or profiling):
        key = "wall_clock_breakdown" if given.get("wall_clock_breakdown") else "flops_profiler"
        raise ConfigError(
            f"{path}: {key} with parallel.pipeline={p.pipeline}: DeepSpeed's pipeline starts a timer twice and fails "
            "in the first step; remove the key, or use parallel.pipeline=1"
        )
    zero_section = given.get("zero_optimization")
    if p.expert > 1 and isinstance(zero_section, dict) and zero_section.get("reduce_scatter") is False:
        raise ConfigError(
            f"{path}: zero_optimization.reduce_scatter=false with parallel.expert={p.expert}: DeepSpeed would sum "
            "experts over ranks with others; remove the key, or use parallel.expert=1"
        )


def _filled(config: RunConfig, world: int) -> dict[str, Any]:
    o, precision_kind, micro_batches = (
        config.optimizer,
        config.precision.kind,
        count_micro_batches(config, world),
    )
    filled_keys: dict[str, Any] = {
        # DeepSpeed has no context parallelism: ranks that share a sample count as data-parallel ranks.
        "train_batch_size": config.train.global_batch * config.parallel.context,
        "train_micro_batch_size_per_gpu": config.train.micro_batch,
        "gradient_accumulation_steps": micro_batches,
        "gradient_clipping": o.clip if o.clipping.kind == "norm" else 0.0,  # others: optim/clipping.py
        "zero_optimization": {"stage": config.parallel.zero},
        "zero_allow_untested_optimizer": True,
        # Gradients are reduced and accumulated in fp32, whatever the parameters' precision.
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "bf16": {"enabled": precision_kind == "bf16"},
        "fp16": {"enabled": precision_kind == "fp16"},
        # The defaults of these three corrupt activations under sequence parallelism or break the first stage.
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False},
        # It synchronizes the device twice per micro-batch, for a report that is not shown: records.py has the speed.
        "timers": {"throughput": {"enabled": False}},
    }
    if precision_kind == "bf16":
        filled_keys["bf16"]["check_grad_overflow"] = True
        # A bf16 gradient is added to the fp32 buffer and freed at once: otherwise all of them are kept, zeroed and
        # added again in every backward pass.
        filled_keys["bf16"]["immediate_grad_update"] = True
    if precision_kind == "fp16":
        p = config.precision
        filled_keys["fp16"] |= {
            "loss_scale": 0,
            "initial_scale_power": p.initial_scale_power,
            "loss_scale_window": p.scale_window,
        }
    return filled_keys


def _merge(given: dict[str, Any], filled: dict[str, Any], path: Path, prefix: str) -> dict[str, Any]:
    merged_keys = dict(given)
    for filled_key, filled_value in filled.items():
        dotted_name = f"{prefix}{filled_key}"
        if isinstance(filled_value, dict):
            given_below = given.get(filled_key, {})
            if not isinstance(given_below, dict):
                raise ConfigError(f"{path}: {dotted_name} must be an object, found {given_below!r}")
            merged_keys[filled_key] = _merge(given_below, filled_value, path, f"{dotted_name}.")
        elif filled_key in given and given[filled_key] not in (filled_value, "auto"):
            raise ConfigError(
                f"{path}: {dotted_name}={given[filled_key]!r} contradicts the recipe, from which "
                f"{filled_value!r} follows: leave the key out (megastable fills it in), or change the recipe"
            )
        else:
            merged_keys[filled_key] = filled_value
    return merged_keys
