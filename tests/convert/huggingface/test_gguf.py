"""What llama.cpp gets: the same weights; and, where it is installed, the ids and greedy tokens of transformers."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megastable.base.errors import CheckpointError
from megastable.data.tokenizer import SPACE, Tokenizer
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder
from megastable_tools.convert.huggingface.gguf import to_gguf
from megastable_tools.convert.huggingface.tokenizer_export import texts
from tests.convert.huggingface.clients import ROOT, documented, llama_cpp
from tests.convert.huggingface.conftest import (
    MODELS,
    Make,
    configured,
    write_random,
    write_text_corpus,
)
from tests.convert.huggingface.test_llama_cpp import CUTS, byte_level
from tests.convert.huggingface.test_tokenizer import trained
from tests.full_disk import files_no_larger_than
from tests.tools.test_convert_checkpoint import run as convert

PROMPTS = (
    "x = 1", " x", "   three", "\n", "\n\n  a", "a  b   c", "Zażółć gęślą", "👩\u200d👩\u200d👧 🏳\ufe0f e\u0301", "",
    "def f(self):\n    return", "a</s>b", "<s>x", "<unk>", "a<|endoftext|>b", "<0x0A>", "3.14159 x10", "\t\tif",
    "it's we'll", "敏捷的棕色狐狸", " ",
)  # fmt: skip
NEW = 12


@pytest.fixture(autouse=True)
def _writes_gguf() -> None:
    pytest.importorskip("gguf", reason="bash launch/install.sh gguf")


def read(file: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    from gguf import GGUFReader

    held = GGUFReader(file)
    return {f.name: f.contents() for f in held.fields.values()}, {t.name: t for t in held.tensors}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2", "llama-tied", "qwen2", "llama3"])
def test_weights_are_the_same_bits(make: Make, tmp_path: Path, kind: str, dtype: Any) -> None:
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
        wanted, held = folder.tensor(f"{theirs}.weight"), tensors[f"{name}.weight"]
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


def test_what_a_fine_tuned_folder_adds_is_kept(make: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    out = to_hf(make(MODELS["qwen3"]), tmp_path / "out").out
    auto = AutoTokenizer.from_pretrained(out)
    auto.chat_template = "{{ messages }}"
    (out / "tokenizer.model").unlink()
    auto.save_pretrained(out)
    fields, _ = read(to_gguf(out, tmp_path / "out.gguf").out)
    assert (
        fields["tokenizer.chat_template"] == "{{ messages }}" and len(fields["tokenizer.ggml.tokens"]) == 700
    )


def test_what_a_killed_export_left_is_removed_by_the_next(make: Make, tmp_path: Path) -> None:
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


def test_mistakes_are_told_and_leave_nothing(make: Make, tmp_path: Path) -> None:
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
    scaled = to_hf(
        make(MODELS["qwen3"] | {"rope_scaling": MODELS["llama3"]["rope_scaling"]}), tmp_path / "scaled"
    ).out
    with pytest.raises(
        CheckpointError, match="scales rotary embeddings as llama3 only in a Llama, not in Qwen3"
    ):
        to_gguf(scaled, tmp_path / "scaled.gguf")
    wide = to_hf(make(MODELS["olmo2-wide"]), tmp_path / "wide").out
    with pytest.raises(CheckpointError, match="heads of hidden / heads = 8, and this model has head_dim 16"):
        to_gguf(wide, tmp_path / "wide.gguf")


def some(tokenizer: Tokenizer, but: str = "\0") -> list[str]:
    """Texts to compare ids on: all kinds of them."""
    first, *random = (text for text in texts(tokenizer, seed=1) if but not in text)
    return [*PROMPTS, first, *random[:20], *random[20::4]]


def same(folder: Path, file: Path, given: list[str], greedy: bool) -> None:
    """llama.cpp gives the ids of transformers, and the greedy tokens."""
    pytest.importorskip("xllamacpp", reason="pip install xllamacpp")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    # Not the automatic class: for a Qwen2 transformers 5 take Qwen's, and to-hf says so.
    auto = PreTrainedTokenizerFast.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) if greedy else None
    with llama_cpp(file) as ask:
        for text in given:
            for special in (True, False):
                body = {"content": text, "add_special": True, "parse_special": special}
                assert ask("/tokenize", body) == auto(text, split_special_tokens=not special)["input_ids"]
        for text in PROMPTS if model is not None else ():
            ids = auto(text)["input_ids"] or [auto.eos_token_id]
            prompt = torch.tensor([ids])
            whole = torch.ones_like(prompt)  # else transformers take a prompt's <unk> for padding
            made = model.generate(prompt, attention_mask=whole, max_new_tokens=NEW, do_sample=False)
            new = made[0, len(ids) :].tolist()
            body = {
                "prompt": ids,
                "n_predict": NEW,
                "temperature": 0,
                "return_tokens": True,
                "cache_prompt": False,
            }
            found = ask("/completion", body)
            assert [t for t in found if t != auto.eos_token_id] == [t for t in new if t != auto.eos_token_id]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "olmo2", "qwen2", "llama3", "llama-linear"])
def test_llama_cpp_gives_the_ids_and_greedy_tokens_of_transformers(
    make: Make, tokenizer: Tokenizer, tmp_path: Path, kind: str
) -> None:
    """By the command of docs/checkpoints.md."""
    to_hf(make(MODELS[kind]), tmp_path / "exported", dtype="fp32")
    (command,) = [line for line in documented("bash", "to-gguf").splitlines() if "to-gguf" in line]
    assert "note: a literal ▁" in convert(*shlex.split(command, comments=True)[2:], cwd=tmp_path).stdout
    same(tmp_path / "exported", tmp_path / "exported.gguf", some(tokenizer, but=SPACE), greedy=True)


@pytest.mark.parametrize("name", [*CUTS, "llama-2"])
def test_other_tokenizers_too(tmp_path: Path, name: str) -> None:
    (tmp_path / "given").mkdir()
    if name == "llama-2":
        given = trained(
            tmp_path / "given/llama.model",
            model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False,
        )  # fmt: skip
    else:
        before, options = CUTS[name]
        given = byte_level(tmp_path / "given", before, **options)
    (tmp_path / "corpus").mkdir()
    corpus = write_text_corpus(tmp_path / "corpus", given)
    run = configured(corpus, tmp_path / "run", MODELS["llama"] | {"vocab_size": given.vocab_size})
    out = to_hf(write_random(tmp_path / "run", run), tmp_path / "out", dtype="fp32").out
    same(out, to_gguf(out, tmp_path / "out.gguf").out, some(given), greedy=False)


def test_llama_cpps_own_converter_is_right_for_a_llama(
    make: Make, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    converter = Path(os.environ.get("LLAMA_CPP", "/nowhere")) / "convert_hf_to_gguf.py"
    if not converter.is_file():
        pytest.skip("LLAMA_CPP=FOLDER names a checkout of llama.cpp")
    out = to_hf(make(MODELS["llama"]), tmp_path / "out", dtype="fp32").out
    # A process: it brings a gguf of its own.
    command = [sys.executable, str(converter), str(out), "--outfile", str(tmp_path / "theirs.gguf")]
    subprocess.run([*command, "--outtype", "f32"], check=True, capture_output=True)
    same(out, tmp_path / "theirs.gguf", some(tokenizer, but=SPACE), greedy=True)
    ours, theirs = read(to_gguf(out, tmp_path / "ours.gguf").out)[1], read(tmp_path / "theirs.gguf")[1]
    assert ours.keys() == theirs.keys()
    assert all(np.array_equal(ours[name].data, theirs[name].data) for name in ours)
