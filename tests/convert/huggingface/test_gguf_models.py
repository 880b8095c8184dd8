"""Models that are not written for llama.cpp: refused, and said at export. Needs no package gguf."""

from __future__ import annotations

from pathlib import Path

import pytest

from megastable.config.model import ModelConfig
from megastable_tools.convert.huggingface.architectures import architecture_of
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.gguf import reachable, unsupported
from tests.convert.huggingface.conftest import MODELS, Make

NOT_WRITTEN = {
    "olmo2-wide": "heads of hidden / heads = 8, and this model has head_dim 16",
    "llama-yarn": "scaled as yarn", "qwen3-yarn": "scaled as yarn", "qwen2-yarn": "scaled as yarn",
    "qwen3-window": "no windows of a Qwen3ForCausalLM, and this model's are of 7 tokens",
    "qwen2-windows": "no windows of a Qwen2ForCausalLM", "mistral": "MistralForCausalLM is not written",
    "olmo3": "Olmo3ForCausalLM is not written", "gemma2": "Gemma2ForCausalLM is not written as GGUF, only Qwen3",
    "gemma2-plain": "Gemma2ForCausalLM is not written",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_what_llama_cpp_would_compute_differently_is_refused(name: str) -> None:
    model = ModelConfig(**{"hidden": 32, "heads": 4, "sequence_length": 48} | MODELS[name])
    assert NOT_WRITTEN.get(name, "") in unsupported(model)
    assert bool(unsupported(model)) == (name in NOT_WRITTEN)


def test_llama_3s_scaling_is_a_llamas() -> None:
    scaling = MODELS["llama3"]["rope_scaling"]
    assert "only in a Llama, not in Qwen3ForCausalLM" in unsupported(ModelConfig(rope_scaling=scaling))


def test_a_window_that_no_token_leaves_is_none() -> None:
    model = ModelConfig(qk_norm=False, window=48, sequence_length=48)
    assert architecture_of(model).type == "mistral"
    assert architecture_of(reachable(model)).type == "llama" and not unsupported(model)
    assert unsupported(model.model_copy(update={"max_positions": 49}))


def test_to_hf_says_so(make: Make, tmp_path: Path) -> None:
    (note,) = to_hf(make(MODELS["gemma2"]), tmp_path / "out").notes
    assert note.startswith(
        "to-gguf does not write this model: Gemma2ForCausalLM is not written as GGUF, only "
    )
