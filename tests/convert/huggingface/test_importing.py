"""A folder becomes a run: the same weights, bit for bit, and everything else from the recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megastable.base.errors import CheckpointError
from megastable.checkpoint import store
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.whole import WholeState
from megastable.config import recipe
from megastable.data.tokenizer import Tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.importing import from_hf
from megastable_tools.convert.huggingface.parity import compare_logits
from megastable_tools.prepare.corpus_tokenizer import train_sentencepiece
from tests.convert.huggingface.conftest import MODELS, VOCABULARY, Make, write_text_corpus
from tests.convert.huggingface.conftest import THEIR_YARN as YARN
from tests.full_disk import files_no_larger_than


@pytest.fixture
def base(text_corpus: Path, tmp_path: Path) -> Path:
    return written(tmp_path / "base.yaml", text_corpus)


def written(path: Path, corpus: Path, **parts: Any) -> Path:
    tree = {
        "model": {"sequence_length": 32, "vocab_multiple": 64, "z_loss": 3e-4, "layers": 9},
        "data": {"corpora": [{"path": str(corpus)}]}, "parallel": {"tensor": 2, "pipeline": 1, "zero": 1},
        "optimizer": {"lr": 1e-5}, "train": {"steps": 4, "global_batch": 4, "micro_batch": 2},
    }  # fmt: skip
    path.write_text(yaml.safe_dump(tree | parts))
    return path


@pytest.mark.quick("qwen3")
@pytest.mark.parametrize("name", MODELS)
def test_from_hf_gives_back_the_same_bits(make: Make, base: Path, tmp_path: Path, name: str) -> None:
    first = make(MODELS[name])
    folder = to_hf(first, tmp_path / "out", dtype="fp32", shard_size=50_000).out
    parallel = [] if MODELS[name].get("kv_heads") != 1 else ["parallel.tensor=1"]
    made = from_hf(folder, tmp_path / "run", base, parallel)
    assert find_checkpoint(tmp_path / "run") == made.checkpoint
    assert store.step_of(made.checkpoint) == 0
    one, other = WholeState(first), WholeState(made.checkpoint)
    assert one.names == other.names and other.kinds == ("weight",) and other.adam_step == 0
    for tensor in one.names:
        a, b = one.read_tensor(tensor, "weight"), other.read_tensor(tensor, "weight")
        padded = tensor in ("embedding.weight", "head.weight")
        assert torch.equal(a[:VOCABULARY] if padded else a, b[:VOCABULARY] if padded else b)
        assert not padded or (len(b) == 704 and not b[VOCABULARY:].any())
    assert not compare_logits(made.checkpoint, folder).failed
    # And out again: the same files.
    to_hf(made.checkpoint, tmp_path / "again", dtype="fp32", shard_size=50_000)
    for file in folder.glob("*.safetensors*"):
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes()


def test_from_hf_takes_the_folders_model_and_the_recipes_rest(make: Make, base: Path, tmp_path: Path) -> None:
    folder = to_hf(make(MODELS["olmo2"]), tmp_path / "out").out
    made = from_hf(folder, tmp_path / "run", base, ["train.steps=6"])
    run = recipe.load_recipe(tmp_path / "run/recipe.yaml")
    m = run.model
    assert (m.layers, m.hidden, m.heads, m.kv_heads, m.ffn, m.vocab_size) == (2, 32, 4, 2, 64, VOCABULARY)
    assert (m.qk_norm, m.norms, m.norm_eps) == ("full", "after", 1e-5)
    assert (m.sequence_length, m.vocab_multiple, m.z_loss) == (32, 64, 3e-4)
    assert (run.optimizer.lr, run.train.steps, run.parallel.tensor) == (1e-5, 6, 2)
    assert run.run.dir == tmp_path / "run"
    assert made.notes == [f"model.layers: 9 in {base}, 2 in {folder}: using the folder's"]
    journal = (tmp_path / "run/journal.jsonl").read_text().splitlines()
    event = json.loads(journal[0])
    assert len(journal) == 1 and (event["event"], event["what"]) == ("imported", "Olmo2ForCausalLM")
    state = store.read_state(made.checkpoint)
    assert (state.step, state.updates, state.cursor, state.tokens) == (0, 0, 0, 0)
    assert (tmp_path / "run/checkpoints/latest").read_text() == "step-0"


@pytest.mark.slow
def test_from_hf_refuses_a_wrong_tokenizer(make: Make, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = to_hf(make(MODELS["llama"]), tmp_path / "out").out
    other = train_sentencepiece(["other text, " * 50, *"abcdefghij"], tmp_path / "other/tokenizer.model", 290)
    base = written(tmp_path / "base.yaml", write_text_corpus(tmp_path / "other", other))
    with pytest.raises(CheckpointError, match=r"a wrong tokenizer: .*they give"):
        from_hf(folder, tmp_path / "run", base)
    # By the hash of the SentencePiece model that is beside it, it is the same at once; and by its ids, too.
    right = tmp_path / "right"
    right.mkdir()
    good = written(tmp_path / "good.yaml", write_text_corpus(right, tokenizer))
    from_hf(folder, tmp_path / "one", good)
    (folder / "tokenizer.model").unlink()
    from_hf(folder, tmp_path / "two", good)
    (right / "tokenizer.model").unlink()
    with pytest.raises(CheckpointError, match=r"cannot be compared with the folder's.*--any-tokenizer"):
        from_hf(folder, tmp_path / "three", good)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"no tokenizer.json or SentencePiece model.*--any-tokenizer"):
        from_hf(folder, tmp_path / "three", good)
    from_hf(folder, tmp_path / "three", good, any_tokenizer=True)


def test_from_hf_leaves_nothing_after_a_full_disk_or_what_is_not_finite(
    make: Make, base: Path, tmp_path: Path
) -> None:
    folder = to_hf(make(MODELS["llama"]), tmp_path / "out", dtype="fp32").out
    before = sorted(path.name for path in tmp_path.iterdir())
    with files_no_larger_than(60_000), pytest.raises(CheckpointError, match=r"could not be written"):
        from_hf(folder, tmp_path / "run", base)
    content = bytearray((folder / "model.safetensors").read_bytes())
    content[-4:] = b"\x00\x00\x80\x7f"  # infinity
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"not finite"):
        from_hf(folder, tmp_path / "run", base)
    (tmp_path / "there").mkdir()
    with pytest.raises(CheckpointError, match=r"there exists already"):
        from_hf(folder, tmp_path / "there", base)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "there"])


LLAMA_3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 500_000.0,
}  # fmt: skip
WINDOW = {"use_sliding_window": True, "sliding_window": 7}
GEMMA2 = {
    "sliding_window": 7, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 20}
DOTS1 = {"n_routed_experts": 6, "n_shared_experts": 2, "norm_topk_prob": True}
# (type, entries of config.json, in fp16, the class that goes out)
THEIRS: list[tuple[str, dict[str, Any], bool, str]] = [
    ("llama", {}, True, "llama"),
    ("llama", {"rope_parameters": LLAMA_3}, False, "llama"),
    ("mistral", {"sliding_window": None, "rms_norm_eps": 1e-5}, False, "llama"),
    ("mistral", {"sliding_window": 7, "rope_parameters": YARN}, True, "mistral"),
    ("qwen2", WINDOW | {"max_window_layers": 0, "rope_parameters": YARN}, False, "qwen2"),
    ("qwen3", WINDOW | {"layer_types": ["sliding_attention", "full_attention"]}, False, "qwen3"),
    ("qwen3", {"rope_parameters": YARN | {"attention_factor": 1.5, "beta_fast": 9.0}}, False, "qwen3"),
    ("olmo3", {"sliding_window": 7}, False, "olmo3"),
    ("olmo3", {"sliding_window": 7, "layer_types": ["full_attention"] * 2}, False, "olmo2"),
    ("gemma2", GEMMA2, True, "gemma2"),
    ("gemma2", GEMMA2 | {"attn_logit_softcapping": None, "final_logit_softcapping": None}, False, "gemma2"),
    ("gemma2", GEMMA2 | {"layer_types": ["sliding_attention"] * 2, "rope_parameters": YARN}, False, "gemma2"),
    ("qwen3_moe", WINDOW | EXPERTS | {"num_experts": 4, "decoder_sparse_step": 2}, False, "qwen3_moe"),
    ("qwen3_moe", EXPERTS | {"num_experts": 5, "norm_topk_prob": True}, True, "qwen3_moe"),
    ("mixtral", {"num_local_experts": 3, "sliding_window": 7, "rope_parameters": YARN}, False, "mixtral"),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 3, "pad_token_id": None, "head_dim": 8}, False, "olmoe"),
    ("dots1", EXPERTS | DOTS1 | {"first_k_dense_replace": 1}, True, "dots1"),
    ("dots1", EXPERTS | DOTS1 | {"sliding_window": 7, "max_window_layers": 0, "routed_scaling_factor": 2.5}, False,
     "dots1"),
]  # fmt: skip


@pytest.mark.quick("llama-options0-True-llama")
@pytest.mark.parametrize(("kind", "options", "half", "out"), THEIRS)
def test_from_hf_takes_what_transformers_made(
    base: Path, tmp_path: Path, tokenizer: Tokenizer, kind: str, options: dict[str, Any], half: bool, out: str
) -> None:
    """Samples of 32 tokens: longer than the windows, and than the original length of YaRN."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    tied = kind == "gemma2"
    config = AutoConfig.for_model(
        kind, vocab_size=VOCABULARY + 30, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, tie_word_embeddings=tied,
        eos_token_id=2, **{"head_dim": 12} | options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(0.3 * torch.randn(p.shape) + ("norm" in name))  # biases, too
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.2)
    (model.half() if half else model).save_pretrained(tmp_path / "theirs", max_shard_size="40KB")
    tokenizer.copy_to(tmp_path / "theirs")
    made = from_hf(tmp_path / "theirs", tmp_path / "run", base)
    assert made.run.model.vocab_size == VOCABULARY + 30 and made.run.model.max_positions == 64
    found = compare_logits(made.checkpoint, tmp_path / "theirs")
    assert not found.failed and found.precision == ("float16" if half else "float32")
    assert all(row.tokens == 64 and row.scale > 1 for row in found.rows)
    # What goes out again are the same tensors and the same model, made for as many positions.
    again = to_hf(made.checkpoint, tmp_path / "out", dtype="fp32", check=compare_logits)
    theirs, ours = HuggingFaceFolder(tmp_path / "theirs"), HuggingFaceFolder(tmp_path / "out")
    assert theirs.files.keys() == ours.files.keys()
    assert all(torch.equal(theirs.read_tensor(name).float(), ours.read_tensor(name)) for name in ours.files)
    assert theirs.sizes == ours.sizes
    assert ours.settings["model_type"] == out
    assert any("32 tokens at a time" in note for note in again.notes)
    assert json.loads((again.out / "tokenizer_config.json").read_text())["model_max_length"] == 64
    assert any("it is imported as one" in note for note in made.notes) == (out != kind)
    if (experts := made.run.model.experts) is not None:
        assert experts.bias_rate == (1e-3 if kind == "dots1" else 0)
        assert any("model.experts.bias_rate is 0" in note for note in made.notes) == (kind != "dots1")


def test_from_hf_takes_the_training_of_experts_from_the_recipe(
    make: Make, base: Path, tmp_path: Path
) -> None:
    folder = to_hf(make(MODELS["mixtral"]), tmp_path / "out").out
    said = {
        "count": 9,
        "top_k": 2,
        "balance_loss": 0.25,
        "bias_rate": 0.5,
        "router_z_loss": 0.0,
        "capacity": 1.5,
    }
    overrides = [f"model.experts.{key}={value}" for key, value in said.items()]
    made = from_hf(folder, tmp_path / "run", base, overrides)
    experts = made.run.model.experts
    assert experts is not None and (experts.count, experts.ffn, experts.capacity) == (3, 64, None)
    assert (experts.balance_loss, experts.bias_rate, experts.router_z_loss) == (0.25, 0.5, 0.0)
    assert [note.split(" in ")[0] for note in made.notes if "experts" in note] == [
        "model.experts.capacity: 1.5", "model.experts.count: 9",
    ]  # fmt: skip
