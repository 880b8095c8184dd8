"""What llama.cpp gets: the same weights; and, where it is installed, the ids and greedy tokens of transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as HuggingFaceModel

from megastable.base.errors import CheckpointError
from megastable.config.model import ModelConfig
from megastable.data.tokenizer import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, Tokenizer, load_tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.gguf import (
    LLAMA3_WORDS,
    QWEN2_WORDS,
    Vocabulary,
    find_unsupported,
    to_gguf,
    translate_vocabulary,
)
from megastable_tools.convert.huggingface.tokenizer_export import (
    make_fast_tokenizer,
    make_sample_texts,
    real_text,
)
from tests.convert.huggingface.conftest import MODELS, ROOT, Make, llama_cpp
from tests.full_disk import files_no_larger_than

# Models and tokenizers

NOT_WRITTEN = {
    "olmo2-wide": "heads of hidden / heads = 8, and this model has head_dim 16",
    "qwen3-yarn": "scaled as yarn", "qwen2-windows": "no windows of a Qwen2ForCausalLM, and this model's are of 7",
    "mistral": "MistralForCausalLM is not written", "olmo3": "Olmo3ForCausalLM is not written",
    "gemma2": "Gemma2ForCausalLM is not written as GGUF, only Qwen3",
    "qwen3-moe": "Qwen3MoeForCausalLM is not written", "mixtral": "MixtralForCausalLM is not written",
    "olmoe": "OlmoeForCausalLM is not written", "dots1": "Dots1ForCausalLM is not written",
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_unsupported_names_what_llama_cpp_would_compute_differently(name: str) -> None:
    model = ModelConfig(**{"hidden": 32, "heads": 4, "sequence_length": 48} | MODELS[name])
    assert NOT_WRITTEN.get(name, "") in find_unsupported(model)
    assert bool(find_unsupported(model)) == (name in NOT_WRITTEN)


def content(tokenizer: Tokenizer) -> dict[str, Any]:
    model = HuggingFaceModel.from_str(json.dumps(make_fast_tokenizer(tokenizer)))
    return dict(json.loads(model.to_str()))


def merged_by_scores(words: Vocabulary, text: str) -> list[int]:
    """llm_tokenizer_spm_session of llama.cpp's llama-vocab.cpp, slowly: the best neighbours first, from the left."""
    ids = {token: id for id, token in enumerate(words.tokens)}
    symbols = [*((" " if words.space else "") + text).replace(" ", SPACE)]
    while pairs := [
        (-words.scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in ids
    ]:
        _, at = min(pairs)
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    spelled = ([s] if s in ids else [f"<0x{byte:02X}>" for byte in s.encode()] for s in symbols)
    return [ids[token] for tokens in spelled for token in tokens]


def test_vocabulary_has_scores_that_give_the_ids_of_training(tokenizer: Tokenizer) -> None:
    words = translate_vocabulary(content(tokenizer), tokenizer.vocab_size + 3)
    assert (words.model, words.space, words.begin) == ("llama", False, "")
    for text in make_sample_texts(tokenizer, seed=1):
        if SPACE not in text and len(text) < 2000 and "<" not in text:
            assert merged_by_scores(words, text) == tokenizer.encode(text)
    assert words.notes == ("a literal ▁ (U+2581) in a text becomes a space in llama.cpp",)
    assert words.types[:4] == [UNKNOWN, CONTROL, CONTROL, BYTE] and words.tokens[3] == "<0x00>"
    assert words.types[-4:] == [NORMAL, UNUSED, UNUSED, UNUSED]
    assert not any(" " in token for token in words.tokens)


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def byte_level(folder: Path, before: Any, **options: Any) -> Tokenizer:
    model = HuggingFaceModel(models.BPE(**options))
    model.pre_tokenizer, model.decoder = GPT2, decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    model.train_from_iterator([real_text()], trainer)
    model.pre_tokenizer = before  # some are slow in training
    model.save(str(folder / "tokenizer.json"))
    return load_tokenizer(folder / "tokenizer.json")


def cut(regex: str) -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), "isolated"), BYTES])


DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2])
# How a byte-level tokenizer cuts texts, and what llama.cpp calls it.
CUTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gpt-2": (GPT2, {}),
    "starcoder": (DIGITS, {}),
    "llama-bpe": (cut(LLAMA3_WORDS), {"ignore_merges": True}),
    "dbrx": (cut(LLAMA3_WORDS), {}),
    "qwen2": (cut(QWEN2_WORDS), {}),
}


@pytest.mark.parametrize("name", CUTS)
def test_vocabulary_names_how_a_tokenizer_cuts_texts(tmp_path: Path, name: str) -> None:
    before, options = CUTS[name]
    words = translate_vocabulary(content(byte_level(tmp_path, before, **options)), 600)
    assert (words.model, words.pre, words.scores, words.notes) == ("gpt2", name, [], ())
    assert words.types == [CONTROL] + [NORMAL] * 599
    assert words.merges[0].count(" ") == 1 and len(words.merges) == 600 - 1 - 256


# The file

PROMPTS = (
    "x = 1", " x", "   three", "\n\n  a", "a  b   c", "Zażółć gęślą", "👩\u200d👩\u200d👧 🏳\ufe0f e\u0301", "",
    "def f(self):\n    return", "a</s>b", "<s>x", "<unk>", "a<|endoftext|>b", "<0x0A>", "3.14159 x10", "\t\tif",
    "it's we'll", "敏捷的棕色狐狸", " ",
)  # fmt: skip
NEW = 12


@pytest.fixture
def gguf() -> None:
    pytest.importorskip("gguf", reason="bash launch/install.sh gguf")


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from gguf import GGUFReader

    held = GGUFReader(file)
    return {f.name: f.contents() for f in held.fields.values()}, {t.name: t for t in held.tensors}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2", "llama-tied", "qwen2", "llama3"])
def test_to_gguf_writes_the_same_bits(make: Make, gguf: None, tmp_path: Path, kind: str, dtype: Any) -> None:
    folder = HuggingFaceFolder(to_hf(make(MODELS[kind]), tmp_path / "out", dtype=dtype).out)
    made = to_gguf(folder.path, tmp_path / "new/folder/out.gguf")
    fields, tensors = read(made.out)
    assert len(tensors) == made.tensors == len(folder.files) + (kind == "llama3")
    assert made.dtype == {"fp32": "f32"}.get(dtype, dtype)
    for theirs, name in (
        ("model.embed_tokens", "token_embd"), ("model.layers.1.self_attn.v_proj", "blk.1.attn_v"),
        ("model.layers.0.mlp.down_proj", "blk.0.ffn_down"), ("model.layers.1.self_attn.q_proj", "blk.1.attn_q"),
        ("model.norm", "output_norm"),
    ):  # fmt: skip
        wanted, held = folder.read_tensor(f"{theirs}.weight"), tensors[f"{name}.weight"]
        assert [*reversed(held.shape)] == [*wanted.shape]
        if wanted.dim() == 1:
            wanted = wanted.float()
        if kind.startswith("llama") and theirs.endswith("q_proj"):  # pairs of a rotation are neighbours there
            width = folder.config.head_width
            heads = [
                rows for head in wanted.split(width) for rows in zip(head[: width // 2], head[width // 2 :])
            ]
            wanted = torch.stack([row for pair in heads for row in pair])
        assert held.data.tobytes() == wanted.contiguous().view(torch.uint8).numpy().tobytes()
    kind = folder.settings["model_type"]
    assert fields[f"{kind}.context_length"] == 48 and fields[f"{kind}.attention.head_count_kv"] >= 1
    assert fields["tokenizer.ggml.eos_token_id"] == 2 and fields["tokenizer.ggml.padding_token_id"] == 0
    for key in ("add_bos_token", "add_eos_token", "add_space_prefix"):
        assert fields[f"tokenizer.ggml.{key}"] is False


def test_to_gguf_removes_what_a_killed_one_left(make: Make, gguf: None, tmp_path: Path) -> None:
    folder = to_hf(make(MODELS["qwen3"]), tmp_path / "out").out
    program = (
        "import os, sys; from pathlib import Path; from megastable_tools.convert.huggingface.gguf import to_gguf; "
        "to_gguf(Path(sys.argv[1]), Path(sys.argv[2]), lambda done, total: os.kill(os.getpid(), 9))"
    )
    command = [sys.executable, "-c", program, str(folder), str(tmp_path / "out.gguf")]
    assert subprocess.run(command, cwd=ROOT).returncode == -9
    (left,) = {*tmp_path.iterdir()} - {folder}
    other = tmp_path / left.name.replace("out.gguf", "other.gguf")
    other.write_text("of another name")
    to_gguf(folder, tmp_path / "out.gguf")
    assert {*tmp_path.iterdir()} == {folder, tmp_path / "out.gguf", other}


def test_to_gguf_refuses_and_leaves_nothing(make: Make, gguf: None, tmp_path: Path) -> None:
    out = to_hf(make(MODELS["qwen3"]), tmp_path / "out").out

    def refused(message: str, name: str = "out.gguf") -> None:
        before = sorted(tmp_path.iterdir())
        with pytest.raises(CheckpointError, match=message):
            to_gguf(out, tmp_path / name)
        assert sorted(tmp_path.iterdir()) == before

    with files_no_larger_than(30_000):
        refused("out.gguf could not be written .*Nothing was left there")
    refused("config.json/in.gguf could not be written .*Nothing was left there", "out/config.json/in.gguf")
    (tmp_path / "out.gguf").write_text("mine")
    refused("out.gguf exists already")
    (tmp_path / "out.gguf").unlink()
    config = (out / "tokenizer_config.json").read_text()
    (out / "tokenizer_config.json").write_text("[]")
    refused("tokenizer_config.json or chat_template.jinja has an unexpected format")
    (out / "tokenizer_config.json").unlink()
    refused("tokenizer_config.json cannot be read: No such file")
    (out / "tokenizer_config.json").write_text(config)
    words = json.loads((out / "tokenizer.json").read_text())
    (out / "tokenizer.json").write_text(json.dumps(words | {"normalizer": {"type": "Lowercase"}}))
    refused("tokenizer.json: llama.cpp has no Lowercase .* For llama.cpp train with SentencePiece")
    (out / "tokenizer.json").unlink()
    refused("tokenizer.json cannot be read: No such file")
    scaled_model = MODELS["qwen3"] | {"rope_scaling": MODELS["llama3"]["rope_scaling"]}
    for name, model, message in (
        ("scaled", scaled_model, "scales rotary embeddings as llama3 only in a Llama, not in Qwen3"),
        ("wide", MODELS["olmo2-wide"], "heads of hidden / heads = 8, and this model has head_dim 16"),
    ):
        out = to_hf(make(model), tmp_path / name).out
        refused(message, f"{name}.gguf")


@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2", "qwen2", "llama3", "llama-linear"])
def test_to_gguf_gives_the_ids_and_greedy_tokens_of_transformers(
    make: Make, gguf: None, tokenizer: Tokenizer, tmp_path: Path, kind: str
) -> None:
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    folder = to_hf(make(MODELS[kind]), tmp_path / "exported", dtype="fp32").out
    made = to_gguf(folder, tmp_path / "exported.gguf")
    assert made.notes == ("a literal ▁ (U+2581) in a text becomes a space in llama.cpp",)
    # Not the automatic class: for a Qwen2 transformers 5 take Qwen's, and to-hf says so.
    auto = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    first, *random = (text for text in make_sample_texts(tokenizer, seed=1) if SPACE not in text)
    with llama_cpp(made.out) as ask:
        for text in (*PROMPTS, first, *random[:20], *random[20::4]):
            for special in (True, False):
                body = {"content": text, "add_special": True, "parse_special": special}
                assert ask("/tokenize", body) == auto(text, split_special_tokens=not special)["input_ids"]
        for text in PROMPTS:
            ids = auto(text)["input_ids"] or [auto.eos_token_id]
            prompt = torch.tensor([ids])
            whole = torch.ones_like(prompt)  # else transformers take a prompt's <unk> for padding
            written = model.generate(prompt, attention_mask=whole, max_new_tokens=NEW, do_sample=False)
            new = written[0, len(ids) :].tolist()
            body = {
                "prompt": ids,
                "n_predict": NEW,
                "temperature": 0,
                "return_tokens": True,
                "cache_prompt": False,
            }
            found = ask("/completion", body)
            assert [t for t in found if t != auto.eos_token_id] == [t for t in new if t != auto.eos_token_id]
