"""Choices of architecture and transfer in real runs: twenty steps are ten, a resume and ten, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from megastable.checkpoint.plain import load_plain
from megastable.config.tree import RunConfig
from megastable.model.gpt import Block
from megastable.run import records
from tests.conftest import LENGTH, tiny
from tests.distributed import run_ranks, train
from tests.training.test_resume import identical

YARN = {"kind": "yarn", "factor": 4.0, "original_length": 8, "beta_fast": 4.0}
# Between them every choice of tests/parallel/test_choices.py; those that depend on the step or the sample in each half.
CHOICES: dict[str, dict[str, Any]] = {
    "gemma2-dropout": dict(
        norms="both", zero_centered_norms=True, activation="gelu", embedding_scale="sqrt_hidden", qk_norm=False,
        attention_scale=0.3, attention_softcap=2.0, logit_softcap=5.0, window=9, full_attention_every=2, dropout=0.1,
    ),
    "branch": dict(norms="branch", branch_steps=15, swiglu_clamp=0.5, rope_scaling=YARN),
    "deep": dict(norms="deep", init="xavier"),
    "mixed": dict(norms="mixed", mixed_share=0.5, init="fan_in"),
    "scaled": dict(norm_scaling=True, init="small", embedding_scale="sqrt_hidden", residual_init="zero"),
    "mup": dict(mup={"base_width": 8, "base_layers": 1, "base_head_dim": 4}),
}  # fmt: skip
STOP, END = 10, 20


def at(corpus: Path, run: Path, name: str, **parts: Any) -> RunConfig:
    usual = tiny(corpus, run).model.model_dump(exclude_unset=True)
    evaluation = {"train": {"steps": END, "global_batch": 8, "micro_batch": 2, "eval_samples": 0}}
    return tiny(
        corpus, run, model=usual | CHOICES[name], optimizer={"lr": 3e-3, "decay_embeddings": False},
        **evaluation | parts,
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("choices")
    run_ranks(2, train, *(at(corpus, folder / name, name) for name in CHOICES))
    return folder


@pytest.mark.slow
def test_twenty_steps_are_ten_and_ten(straight: Path, corpus: Path, tmp_path: Path) -> None:
    for name in CHOICES:
        shutil.copytree(straight / name, tmp_path / name)
        shutil.rmtree(tmp_path / name / f"checkpoints/step-{END}")
    run_ranks(2, train, *(at(corpus, tmp_path / name, name) for name in CHOICES))
    for name in CHOICES:
        ends = (folder / name / f"checkpoints/step-{END}" for folder in (straight, tmp_path))
        assert identical(*ends) == 6, name


@pytest.mark.slow
def test_another_layout_goes_on(straight: Path, corpus: Path, tmp_path: Path) -> None:
    """What depends on the number of updates or on the sample goes on as well: BranchNorm's growth, dropout's masks."""
    configs = []
    for name in ("branch", "gemma2-dropout"):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        shutil.copytree(
            straight / name / f"checkpoints/step-{STOP}", tmp_path / name / f"checkpoints/step-{STOP}"
        )
        layout = {"tensor": 2, "sequence": True} if name == "branch" else {"context": 2, "zero": 2}
        configs.append(at(corpus, tmp_path / name, name, parallel=layout))
    run_ranks(2, train, *configs)
    for c in configs:
        assert c.run.dir is not None
        there, here = (
            records.read(folder / c.run.dir.name / "steps").column("loss").to_pylist()
            for folder in (tmp_path, straight)
        )
        assert len(there) == END - STOP
        assert there == pytest.approx(here[STOP:], rel=5e-3)


@pytest.mark.slow
def test_a_loaded_model_has_grown_as_far_as_its_run(straight: Path) -> None:
    """BranchNorm's branches at step 10 of 15; at step 20 they have their full size."""
    tokens = torch.arange(LENGTH)[None] % 7
    for step, grown in ((STOP, STOP / 15), (END, 1.0)):
        model = load_plain(straight / f"branch/checkpoints/step-{step}")
        before = model(tokens)
        blocks = [part for part in model.gpt.children() if isinstance(part, Block)]
        for block in blocks:
            assert block.grown is not None and float(block.grown) == pytest.approx(grown)
            block.grown = torch.tensor(0.5)
        assert not torch.allclose(model(tokens), before)
