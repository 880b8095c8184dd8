"""`run.deterministic`: what it sets, that it reaches every rank, and that steps read no memory that nobody wrote."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import reproducible
from megastable.base.errors import ConfigError
from megastable.base.reproducible import GOLDEN, mix_number, random_sequence, to_signed
from megastable.config import deepspeed_json
from megastable.config.tree import RunConfig
from megastable.data.loader import MicroBatch
from megastable.run.directory import RunDirectory
from tests.conftest import tiny
from tests.distributed import run_ranks

KEPT = (reproducible.CUBLAS, *reproducible.ENVIRONMENT)


@pytest.fixture(autouse=True)
def _left_alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in KEPT:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    yield
    reproducible.switch_determinism(False)
    for name in KEPT:
        os.environ.pop(name, None)


def test_prepare_keeps_or_refuses_what_the_user_chose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(reproducible.CUBLAS, ":16:8")
    for value in ("Ring", "tree", "TREE,ring"):
        monkeypatch.setenv("NCCL_ALGO", value)
        reproducible.prepare_determinism()
        assert os.environ["NCCL_ALGO"] == value and os.environ[reproducible.CUBLAS] == ":16:8"
    refused = [(reproducible.CUBLAS, ":0:0"), ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")]
    # The last three leave NVLS to NCCL: for some collectives, or for all.
    for value in ("NVLS", "Ring,NVLSTree", "", "allreduce:ring", "tree;broadcast:nvls", "^CollNetDirect"):
        refused.append(("NCCL_ALGO", value))
    for name, value in refused:
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=re.escape(f"run.deterministic=true and {name}={value}: ")):
                reproducible.prepare_determinism()


# On ranks


def train(config: RunConfig) -> tuple[int, bool, str | None]:
    """Its exit code, and what torch says afterwards."""
    from megastable.train import train as run

    if config.run.deterministic:
        reproducible.prepare_determinism()
    code = run(config, Path("recipe.yaml"))
    return code, torch.are_deterministic_algorithms_enabled(), os.environ.get(reproducible.CUBLAS)


@pytest.mark.slow
def test_deterministic_run_gives_the_same_bytes(corpus: Path, tmp_path: Path) -> None:
    """On a CPU it changes nothing: no operation of a step is refused, no bit becomes another."""
    lengths = {"steps": 6, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}

    def config(name: str, on: bool, steps: int) -> RunConfig:
        made = tiny(corpus, tmp_path / name, train=lengths | {"steps": steps})
        return made.model_copy(update={"run": made.run.model_copy(update={"deterministic": on})})

    weights = [f"checkpoints/step-6/rank-{rank:05}.safetensors" for rank in range(2)]
    assert run_ranks(2, train, config("off", False, 6)) == [(0, False, None)] * 2
    assert run_ranks(2, train, config("changed", False, 3)) == [(0, False, None)] * 2
    assert run_ranks(2, train, config("changed", True, 6)) == [(0, True, ":4096:8")] * 2
    for file in weights:
        assert (tmp_path / "changed" / file).read_bytes() == (tmp_path / "off" / file).read_bytes()
    run = RunDirectory(tmp_path / "changed")
    assert "run.deterministic: False -> True" in str(list(run.iterate_events()))
    assert "deterministic: true" in run.recipe.read_text()


def poisoned(config: RunConfig) -> list[list[tuple[float, float]]]:
    """Losses and gradient norms of some steps; the second time all memory that is new begins as NaN."""
    return [measured(config, poison) for poison in (False, True)]


def measured(config: RunConfig, poison: bool) -> list[tuple[float, float]]:
    from megastable.engine.engine import Engine
    from megastable.parallel.layout import Layout
    from megastable.parallel.topology import Topology

    torch.use_deterministic_algorithms(poison)
    engine = Engine(config, deepspeed_json.build_deepspeed_json(config, 1), Topology(Layout(1, 1, 1), 0, 120))
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(4):
        drawn = torch.randint(250, (2, 65), generator=generator)
        batch = MicroBatch(drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous(), torch.arange(2), None)
        step, _ = engine.train_step([batch], 1e-3, lambda m: m.finite)
        found.append((step.loss, step.grad_norm))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "attention"), [("bf16", "blocked"), ("fp32", "sdpa")])
def test_train_step_reads_no_memory_that_nobody_wrote(kind: str, attention: str) -> None:
    """The vocabulary is padded and the batch odd: rows have ends that no product may see."""
    config = RunConfig.model_validate(
        {
            "model": {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64}
            | {"sequence_length": 64, "vocab_size": 250, "vocab_multiple": 64},
            "train": {"global_batch": 2, "micro_batch": 2},
            "precision": {"kind": kind},
            "kernels": {"attention": attention},
        }
    )
    ((clean, spoilt),) = run_ranks(1, poisoned, config)
    assert spoilt == clean


def test_sequence_gives_published_numbers() -> None:
    """Of splitmix64 with the seeds 0 and 1234567 (Vigna's C program, and Rosetta Code)."""
    assert [int(n) % 2**64 for n in random_sequence(0, 0, 2)] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]
    assert int(random_sequence(1234567, 0, 1)[0]) % 2**64 == 6457827717110365317


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**40), st.integers(0, 9))
def test_sequence_gives_any_part_alike(key: int, start: int, at: int) -> None:
    whole = random_sequence(key, start, 10)
    assert torch.equal(random_sequence(key, start + at, 10 - at), whole[at:])
    assert to_signed(mix_number(key + (start + at + 1) * GOLDEN)) == int(whole[at])
