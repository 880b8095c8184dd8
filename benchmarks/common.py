"""A description of what is measured, and of the machine."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megastable.config.tree import RunConfig
from megastable.data.manifest import TokenizerInfo, adopt_shards
from megastable.data.shard_format import ShardWriter
from megastable.engine.measured import Measured
from megastable.model.sizes import count_parameters


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Hardware and software of a measurement."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else name_processor(),
        "kind": device.type,
        "threads": torch.get_num_threads(),
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deepspeed": importlib.metadata.version("deepspeed"),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def is_finite(measured: Measured) -> bool:
    """Judges a step as an engine without a guard does."""
    return measured.finite


def write_random_corpus(folder: Path, vocabulary: int, tokens: int) -> None:
    """A corpus of at least `tokens` tokens: random walks over the ids, in documents of 5 to 200, ended by 0."""
    folder.mkdir(parents=True, exist_ok=True)
    random_draws = np.random.default_rng(0)
    with ShardWriter(folder / "part-0", vocabulary) as writer:
        while writer.tokens < tokens:
            walk_steps = random_draws.integers(-3, 4, random_draws.integers(5, 200))
            document = (random_draws.integers(1, vocabulary) + walk_steps.cumsum()) % (vocabulary - 1) + 1
            writer.add_document(np.append(document, 0))
    tokenizer_info = TokenizerInfo(
        file="tokenizer.model", kind="sentencepiece", xxh3="0" * 32, vocab_size=vocabulary, eod=0
    )
    adopt_shards(folder, tokenizer_info, validation=0.05).save_manifest(folder)


def name_processor() -> str:
    """The name of this machine's processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [info_line.partition(":")[2].strip() for info_line in lines if info_line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_run(config: RunConfig) -> dict[str, Any]:
    """The model, the batch and the precision of a measurement."""
    run_config = config
    return {
        "parameters": count_parameters(run_config.model),
        "vocabulary": run_config.model.vocab_size,
        "sequence_length": run_config.model.sequence_length,
        "micro_batch": run_config.train.micro_batch,
        "global_batch": run_config.train.global_batch,
        "tokens": run_config.train.global_batch * run_config.model.sequence_length,
        "precision": run_config.precision.kind,
        "fp8": run_config.precision.fp8.recipe if run_config.precision.fp8 else None,
        "zero": run_config.parallel.zero,
        "recompute": run_config.parallel.recompute,
        "moments": run_config.optimizer.moments,
        "clip": run_config.optimizer.clip,
    }
