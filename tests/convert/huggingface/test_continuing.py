"""A model of transformers is imported, trained on, and goes out again as one that computes what ours does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.whole import WholeState
from megastable.config import recipe
from megastable.config.tree import RunConfig
from megastable.data.tokenizer import Tokenizer
from megastable.run import records
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.importing import from_hf
from megastable_tools.convert.huggingface.parity import compare_logits
from tests.convert.huggingface.conftest import THEIR_YARN, VOCABULARY
from tests.distributed import run_ranks

GEMMA2 = {
    "sliding_window": 7, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
}  # fmt: skip

DOTS1 = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
}  # fmt: skip


def train(config: RunConfig) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


@pytest.mark.quick("mistral-yarn")
@pytest.mark.parametrize(
    ("kind", "options", "parts", "world"),
    [
        ("qwen2", {}, {"parallel": {"tensor": 2}, "precision": {"kind": "bf16", "fp8": "delayed"}}, 2),
        ("gemma2", GEMMA2, {"parallel": {"pipeline": 2}, "precision": {"kind": "fp32"}}, 2),
        ("mistral", {"sliding_window": 7, "rope_parameters": THEIR_YARN}, {"precision": {"kind": "fp32"}}, 1),
        ("dots1", DOTS1, {"parallel": {"pipeline": 2}, "precision": {"kind": "fp32"}}, 2),
    ],
    ids=["qwen2-tp2-fp8", "gemma2-pp2", "mistral-yarn", "dots1-pp2"],
)  # fmt: skip
def test_import_continue_export(
    text_corpus: Path, tokenizer: Tokenizer, tmp_path: Path, kind: str, options: dict[str, Any],
    parts: dict[str, Any], world: int,
) -> None:  # fmt: skip
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=8192, eos_token_id=tokenizer.eod, **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(std=0.2)
    model.save_pretrained(tmp_path / "theirs")
    tokenizer.copy_to(tmp_path / "theirs")
    tree = {
        "model": {"sequence_length": 32, "vocab_multiple": 64},
        "data": {"corpora": [{"path": str(text_corpus)}]},
        "optimizer": {"lr": 1e-3}, "schedule": {"warmup_steps": 0},
        "train": {"steps": 3, "global_batch": 4, "micro_batch": 2, "eval_samples": 4},
        "logging": {"trackers": [], "layers_interval": 1},
    }  # fmt: skip
    (tmp_path / "base.yaml").write_text(yaml.safe_dump(tree | parts))
    made = from_hf(tmp_path / "theirs", tmp_path / "run", tmp_path / "base.yaml")
    assert not compare_logits(made.checkpoint, tmp_path / "theirs").failed

    run_ranks(world, train, recipe.load_recipe(tmp_path / "run/recipe.yaml"))

    before, after = WholeState(made.checkpoint), WholeState(find_checkpoint(tmp_path / "run"))
    assert after.checkpoint.name == "step-3" and after.names == before.names
    for name in after.names:
        assert not torch.equal(before.read_tensor(name, "weight"), after.read_tensor(name, "weight")), name
    if kind == "dots1":
        assert before.biases is not None and after.biases is not None and before.biases[1].all()
        moves = (after.biases - before.biases)[1].abs() / 1e-3  # once per update, by the rate
        assert not before.biases[0].any() and not after.biases[0].any()  # a dense layer
        assert 0 < float(moves.max()) < 3.001 and torch.allclose(moves, moves.round(), atol=1e-3)
    losses = records.read_newest_records(tmp_path / "run/steps")["loss"].to_pylist()
    assert len(losses) == 3 and all(map(math.isfinite, losses))
    layers = records.read_newest_records(tmp_path / "run/layers", records.LAYER_SCHEMA)["name"].to_pylist()
    assert ("blocks.1.attention.qkv.bias" in layers) == (kind == "qwen2")

    out = to_hf(tmp_path / "run", tmp_path / "out", check=compare_logits)
    assert out.checked is not None and out.checked.rows and not out.checked.failed
    settings = json.loads((out.out / "config.json").read_text())
    assert (settings["model_type"], settings["max_position_embeddings"]) == (kind, 8192)
    rope = {"rope_type": "default", "rope_theta": 1e4} | options.get("rope_parameters", {})
    assert settings["rope_parameters"].items() >= rope.items()
    assert (
        settings.items() >= {key: value for key, value in options.items() if key != "rope_parameters"}.items()
    )
