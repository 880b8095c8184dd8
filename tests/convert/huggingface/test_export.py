"""What is exported computes what the checkpoint does, in transformers; and where it cannot, nothing is left behind."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.files import hash_file
from megastable.checkpoint.plain import load_plain, set_biases
from megastable_tools.convert.huggingface import export
from megastable_tools.convert.huggingface.architectures import BIAS
from megastable_tools.convert.huggingface.export import NotTheSame, to_hf
from megastable_tools.convert.huggingface.folder import (
    SINGLE,
    HuggingFaceFolder,
    bytes_of,
    load_folder,
    plan_weight_files,
    read_size,
    write_weight_index,
)
from megastable_tools.convert.huggingface.parity import compare_logits
from tests.convert.huggingface.conftest import MODELS, VOCABULARY, Make, configured, write_random


def exported(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as held:
            assert held.metadata() == {"format": "pt"}
            found |= {name: held.get_tensor(name) for name in held.keys()}  # noqa: SIM118
    return found


@pytest.mark.quick("qwen3-tied-fp32")
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_to_hf_gives_the_same_logits_in_transformers(
    make: Make, tmp_path: Path, name: str, dtype: Any
) -> None:
    checkpoint = make(MODELS[name], parallel={"tensor": 2} if MODELS[name].get("kv_heads") != 1 else {})
    made = to_hf(checkpoint, tmp_path / "out", dtype=dtype, check=compare_logits)
    found = made.checked
    assert found is not None and not found.why and not found.failed and not found.unequal
    assert [row.of for row in found.rows] == ["random tokens", "text of the validation corpus"]
    assert all(row.largest < 2e-5 and row.kl < 1e-11 for row in found.rows)
    assert all(row.agree == 1 and row.tokens == 96 for row in found.rows)
    dtypes = {(tensor.dtype, name.endswith(BIAS)) for name, tensor in exported(tmp_path / "out").items()}
    assert dtypes - {(torch.float32, True)} == {(export.DTYPES[dtype], False)}
    assert ((torch.float32, True) in dtypes) == (name == "dots1")
    # And by our own reader.
    ours, theirs = load_plain(checkpoint), load_folder(tmp_path / "out")
    if dtype == "fp32":
        tokens = torch.arange(VOCABULARY)[:40].unsqueeze(0)
        assert torch.equal(ours(tokens), theirs(tokens))


MUP = {"base_width": 8, "base_layers": 1, "base_head_dim": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mup", "exactly"),
    [
        ({"layers": 4}, MUP, True),
        ({"layers": 3, "qk_norm": False}, {"base_width": 24, "base_layers": 1}, False),
        ({"layers": 2, "qk_norm": "full", "norms": "after"}, MUP, True),
    ],
    ids=["qwen3", "llama", "olmo2"],
)
def test_to_hf_multiplies_mups_scales_into_the_weights(
    make: Make, tmp_path: Path, model: dict[str, Any], mup: dict[str, int], exactly: bool
) -> None:
    checkpoint = make(model | {"mup": mup})
    made = to_hf(checkpoint, tmp_path / "out", dtype="fp32", check=compare_logits)
    assert made.checked is not None and not made.checked.failed
    assert all(row.largest < 1e-4 for row in made.checked.rows)
    (note,) = (note for note in made.notes if "muP" in note)
    assert ("exactly" in note) == exactly
    ours, theirs = load_plain(checkpoint), load_folder(tmp_path / "out")
    tokens = torch.arange(VOCABULARY)[:40].unsqueeze(0)
    logits = ours(tokens)
    torch.testing.assert_close(logits, theirs(tokens), rtol=1e-5, atol=1e-5)
    assert theirs.config.mup is None and float(logits.detach().std()) > 0.01


@pytest.mark.parametrize(
    ("model", "named"),
    [
        ({"layers": 1, "tied": True}, "model.mup with model.tied"),
        ({"layers": 1, "qk_norm": False}, "model.mup.base_head_dim with model.qk_norm=false"),
        ({"layers": 1, "zero_centered_norms": True}, "model.mup with model.zero_centered_norms"),
    ],
)
def test_to_hf_refuses_scales_that_no_weight_can_take(
    make: Make, tmp_path: Path, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        to_hf(make(model | {"mup": MUP}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_to_hf_refuses_a_bias_without_a_home_unless_it_may_be_dropped(
    text_corpus: Path, tmp_path: Path
) -> None:
    run = configured(text_corpus, tmp_path / "run", MODELS["olmoe"])
    biases = torch.zeros(2, 4)
    biases[1, 2] = -0.125
    checkpoint = write_random(tmp_path / "run", run, expert_state={"experts/bias": biases})
    largest = r"the largest is -0.125 \(block 1, expert 2\), and OlmoeForCausalLM has none"
    with pytest.raises(
        CheckpointError, match=rf"{largest}\. --drop-expert-bias .*Dots1ForCausalLM has a bias"
    ):
        to_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    drop = functools.partial(compare_logits, drop_expert_bias=True)
    made = to_hf(checkpoint, tmp_path / "out", dtype="fp32", drop_expert_bias=True, check=drop)
    assert made.checked is not None and not made.checked.failed
    assert any(re.search(largest + ": it was left out", note) for note in made.notes)
    # What that costs is said: the share of choices, which are counted here by another way.
    (note,) = (note for note in made.checked.notes if "choices" in note)
    said = re.search(r"without the bias ([\d.]+)% of the choices of experts are others", note)
    assert (
        said and 2 < float(said[1]) < 17
    )  # a bias of one expert, in one of two layers; a third of three choices
    # Without leave the difference is one.
    assert re.search(largest, compare_logits(checkpoint, made.out).verdict)
    with_it, without = load_plain(checkpoint), load_folder(made.out)
    tokens = torch.arange(VOCABULARY)[:40].unsqueeze(0)
    assert not torch.equal(with_it(tokens), without(tokens))
    set_biases(with_it.gpt, None, with_it.device)
    assert torch.equal(with_it(tokens), without(tokens))


def test_to_hf_leaves_nothing_that_computes_something_else(make: Make, tmp_path: Path) -> None:
    def spoilt(checkpoint: Path, folder: Path) -> Any:
        settings = json.loads((folder / "config.json").read_text())
        settings["rope_parameters"]["rope_theta"] = settings["rope_theta"] = 10_300.0
        (folder / "config.json").write_text(json.dumps(settings))
        return compare_logits(checkpoint, folder)

    with pytest.raises(NotTheSame, match=r"on random tokens logits differ by up to"):
        to_hf(make(MODELS["qwen3"]), tmp_path / "out", check=spoilt)
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200))
def test_plan_puts_every_tensor_in_one_file(sizes: list[int], limit: int) -> None:
    entries = [(f"t{i}", torch.bfloat16, (n,)) for i, n in enumerate(sizes)]
    planned = plan_weight_files(entries, limit)
    assert [entry for held in planned.values() for entry in held] == entries
    for held in planned.values():
        assert sum(map(bytes_of, held)) <= limit or len(held) == 1
    whole = sum(2 * n for n in sizes) <= limit or len(sizes) == 1
    assert (list(planned) == [SINGLE]) == whole
    content = json.loads(write_weight_index(planned))
    assert content["metadata"] == {"total_parameters": sum(sizes), "total_size": 2 * sum(sizes)}
    assert {n: f for f, held in planned.items() for n, *_ in held} == content["weight_map"]


def test_read_size() -> None:
    given = {
        "5GB": 5 * 10**9,
        "500MB": 5 * 10**8,
        "1.5 GiB": 3 * 2**29,
        "100": 100,
        "2g": 2 * 10**9,
        "7kb": 7000,
    }
    assert {text: read_size(text) for text in given} == given
    for text in ("", "GB", "5TB", "-1GB", "0", "1e9", "five"):
        with pytest.raises(ConfigError, match=r"write a size such as 5GB"):
            read_size(text)


def test_to_hf_refuses_weights_that_are_not_finite(text_corpus: Path, tmp_path: Path) -> None:
    # write_run refuses them, so the file is changed afterwards, and its checksum with it.
    checkpoint = write_random(tmp_path / "run", configured(text_corpus, tmp_path / "run", MODELS["llama"]))
    file = checkpoint / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # nan
    file.write_bytes(content)
    contents = store.read_contents(checkpoint)
    files = {**contents.files, file.name: hash_file(file)}
    (checkpoint / store.MANIFEST).write_bytes(contents.model_copy(update={"files": files}).to_sealed_bytes())
    with pytest.raises(CheckpointError, match=r"holds values that are not finite"):
        to_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_to_hf_tells_a_missing_or_wrong_tokenizer(make: Make, text_corpus: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(text_corpus, tmp_path / "corpus")
    run = configured(corpus, tmp_path / "run", MODELS["llama"])
    checkpoint = write_random(tmp_path / "run", run)
    model = corpus / "tokenizer.model"
    kept = model.read_bytes()
    model.unlink()
    with pytest.raises(CheckpointError, match=r"model cannot be read.*--tokenizer; .*--no-tokenizer"):
        to_hf(checkpoint, tmp_path / "out")
    made = to_hf(checkpoint, tmp_path / "out", tokenizer=text_corpus)
    assert made.tokenizer and not made.notes
    model.write_bytes(kept + kept[-9:])
    with pytest.raises(CheckpointError, match=r"not the file that the corpus was made with"):
        to_hf(checkpoint, tmp_path / "other")
    made = to_hf(checkpoint, tmp_path / "without", without_tokenizer=True, check=compare_logits)
    assert not (tmp_path / "without/tokenizer.json").exists()
    assert made.notes == ["no tokenizer was written, as you asked"]
    assert made.checked is not None and not made.checked.failed
    assert HuggingFaceFolder(tmp_path / "without").settings["eos_token_id"] is None
    shutil.rmtree(corpus)
    with pytest.raises(CheckpointError, match=r"the tokenizer was not found: .*manifest.json is not there"):
        to_hf(checkpoint, tmp_path / "more")
