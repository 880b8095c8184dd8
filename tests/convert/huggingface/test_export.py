"""What is exported computes what the checkpoint does, in transformers; and where it cannot, nothing is left behind."""

from __future__ import annotations

import json
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
from megastable.checkpoint.plain import load_plain
from megastable.data.manifest import Manifest
from megastable.data.tokenizer import load_tokenizer
from megastable_tools.convert.huggingface import export
from megastable_tools.convert.huggingface.export import NotTheSame, to_hf
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder, load_folder
from megastable_tools.convert.huggingface.parity import compare
from megastable_tools.convert.huggingface.tokenizer_export import fast
from megastable_tools.convert.huggingface.weight_files import SINGLE, bytes_of, index, plan, read_size
from tests.convert.huggingface.conftest import MODELS, VOCABULARY, Make, configured, write_random
from tests.data.texts import hugging_face_file
from tests.full_disk import files_no_larger_than


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
def test_logits_are_the_same_in_transformers(make: Make, tmp_path: Path, name: str, dtype: Any) -> None:
    checkpoint = make(MODELS[name], parallel={"tensor": 2} if MODELS[name].get("kv_heads") != 1 else {})
    made = to_hf(checkpoint, tmp_path / "out", dtype=dtype, check=compare)
    found = made.checked
    assert found is not None and not found.why and not found.failed and not found.unequal
    assert [row.of for row in found.rows] == ["random tokens", "text of the validation corpus"]
    assert all(
        row.largest < 2e-5 and row.kl < 1e-11 and row.agree == 1 and row.tokens == 96 for row in found.rows
    )
    assert {tensor.dtype for tensor in exported(tmp_path / "out").values()} == {export.DTYPES[dtype]}
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
def test_mups_scales_become_a_part_of_the_weights(
    make: Make, tmp_path: Path, model: dict[str, Any], mup: dict[str, int], exactly: bool
) -> None:
    checkpoint = make(model | {"mup": mup})
    made = to_hf(checkpoint, tmp_path / "out", dtype="fp32", check=compare)
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
def test_scales_that_no_weight_can_take_are_refused(
    make: Make, tmp_path: Path, model: dict[str, Any], named: str
) -> None:
    with pytest.raises(ConfigError, match=named):
        to_hf(make(model | {"mup": MUP}), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_shards_hold_what_one_file_would(make: Make, tmp_path: Path) -> None:
    checkpoint = make(MODELS["qwen3"])
    one = to_hf(checkpoint, tmp_path / "one")
    many = to_hf(checkpoint, tmp_path / "many", shard_size=20_000)
    assert one.files == 1 and many.files > 3
    assert (tmp_path / "one/model.safetensors").is_file()
    single, sharded = exported(tmp_path / "one"), exported(tmp_path / "many")
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
    assert single["model.embed_tokens.weight"].shape == (VOCABULARY, 32)  # without padding
    where = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert where["metadata"]["total_size"] == many.bytes == sum(2 * t.numel() for t in single.values())
    assert where["weight_map"].keys() == single.keys()
    assert compare(checkpoint, tmp_path / "many").failed is False


@pytest.mark.slow
def test_the_card_says_where_it_came_from_and_how_it_was_checked(make: Make, tmp_path: Path) -> None:
    checkpoint = make(MODELS["llama"])
    made = to_hf(checkpoint, tmp_path / "out", check=compare)
    card = (tmp_path / "out/README.md").read_text()
    assert f"| step 7 |\n| manifest of the checkpoint (xxh3-128) | `{made.manifest}` |" in card
    assert "| random tokens | 96 |" in card and "the same: all 21 tensors bit for bit" in card
    assert str(tmp_path) not in card and str(checkpoint) not in card
    to_hf(checkpoint, tmp_path / "other")
    assert "It was not: the check was skipped at export." in (tmp_path / "other/README.md").read_text()


def test_a_full_disk_leaves_nothing(make: Make, tmp_path: Path) -> None:
    with (
        files_no_larger_than(60_000),
        pytest.raises(CheckpointError, match=r"could not be written.*Nothing was left"),
    ):
        to_hf(make(MODELS["llama"]), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"0.00 GB are free on that disk: make room"):
        to_hf(make(MODELS["llama"]), tmp_path / "new/out")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_are_not_finite_are_not_exported(text_corpus: Path, tmp_path: Path) -> None:
    # write_run refuses them, so the file is changed afterwards, and its checksum with it.
    checkpoint = write_random(tmp_path / "run", configured(text_corpus, tmp_path / "run", MODELS["llama"]))
    file = checkpoint / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-4:] = b"\x00\x00\xc0\x7f"  # nan
    file.write_bytes(content)
    contents = store.read_contents(checkpoint)
    files = {**contents.files, file.name: hash_file(file)}
    (checkpoint / store.MANIFEST).write_bytes(contents.model_copy(update={"files": files}).sealed())
    with pytest.raises(CheckpointError, match=r"holds values that are not finite"):
        to_hf(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_that_computes_something_else_does_not_appear(make: Make, tmp_path: Path) -> None:
    def spoilt(checkpoint: Path, folder: Path) -> Any:
        settings = json.loads((folder / "config.json").read_text())
        settings["rope_parameters"]["rope_theta"] = settings["rope_theta"] = 10_300.0
        (folder / "config.json").write_text(json.dumps(settings))
        return compare(checkpoint, folder)

    with pytest.raises(NotTheSame, match=r"on random tokens logits differ by up to"):
        to_hf(make(MODELS["qwen3"]), tmp_path / "out", check=spoilt)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_missing_or_wrong_tokenizer_is_told(make: Make, text_corpus: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(text_corpus, tmp_path / "corpus")
    run = configured(corpus, tmp_path / "run", MODELS["llama"])
    checkpoint = write_random(tmp_path / "run", run)
    model = corpus / "tokenizer.model"
    kept = model.read_bytes()
    model.unlink()
    with pytest.raises(
        CheckpointError, match=r"tokenizer.model cannot be read.*--tokenizer; .*--no-tokenizer"
    ):
        to_hf(checkpoint, tmp_path / "out")
    made = to_hf(checkpoint, tmp_path / "out", tokenizer=text_corpus)
    assert made.tokenizer and not made.notes
    model.write_bytes(kept + kept[-9:])
    with pytest.raises(CheckpointError, match=r"not the file that the corpus was made with"):
        to_hf(checkpoint, tmp_path / "other")
    made = to_hf(checkpoint, tmp_path / "without", without_tokenizer=True, check=compare)
    assert not (tmp_path / "without/tokenizer.json").exists()
    assert made.notes == ["no tokenizer was written, as you asked"]
    assert made.checked is not None and not made.checked.failed
    assert HuggingFaceFolder(tmp_path / "without").settings["eos_token_id"] is None
    shutil.rmtree(corpus)
    with pytest.raises(CheckpointError, match=r"the tokenizer was not found: .*manifest.json is not there"):
        to_hf(checkpoint, tmp_path / "more")


@pytest.mark.slow
def test_no_ordinary_token_becomes_the_end_of_a_text(make: Make, text_corpus: Path, tmp_path: Path) -> None:
    corpus = shutil.copytree(text_corpus, tmp_path / "corpus")
    checkpoint = write_random(tmp_path / "run", configured(corpus, tmp_path / "run", MODELS["llama"]))
    other = hugging_face_file(tmp_path, VOCABULARY)
    with pytest.raises(
        CheckpointError,
        match="ends documents with the token 2, which is '\"' there: it is a different tokenizer; name",
    ):
        to_hf(checkpoint, tmp_path / "out", tokenizer=other)
    assert not (tmp_path / "out").exists()
    # The other form of the same tokenizer is not the corpus's file, and ends texts with the same token, whatever its
    # name is.
    form = tmp_path / "form.json"
    form.write_text(json.dumps(fast(load_tokenizer(text_corpus))))
    to_hf(checkpoint, tmp_path / "usual", tokenizer=form)
    manifest = Manifest.load(corpus)
    info = manifest.tokenizer.model_copy(update={"eod": 1})
    manifest.model_copy(update={"tokenizer": info}).save(corpus)
    made = to_hf(checkpoint, tmp_path / "named", tokenizer=form)
    assert HuggingFaceFolder(made.out).settings["eos_token_id"] == 1
    # The corpus's own file can say so only as long as it is that file.
    with (corpus / "tokenizer.model").open("ab") as file:
        file.write((corpus / "tokenizer.model").read_bytes()[-9:])
    with pytest.raises(CheckpointError, match="which is '<s>' there"):
        to_hf(checkpoint, tmp_path / "lost", tokenizer=form)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30), st.integers(1, 200))
def test_every_tensor_is_in_one_file_in_order_and_no_file_is_too_large(sizes: list[int], limit: int) -> None:
    entries = [(f"t{i}", torch.bfloat16, (n,)) for i, n in enumerate(sizes)]
    planned = plan(entries, limit)
    assert [entry for held in planned.values() for entry in held] == entries
    for held in planned.values():
        assert sum(map(bytes_of, held)) <= limit or len(held) == 1
    whole = sum(2 * n for n in sizes) <= limit or len(sizes) == 1
    assert (list(planned) == [SINGLE]) == whole
    content = json.loads(index(planned))
    assert content["metadata"] == {"total_parameters": sum(sizes), "total_size": 2 * sum(sizes)}
    assert {n: f for f, held in planned.items() for n, *_ in held} == content["weight_map"]


def test_sizes_are_read_as_people_write_them() -> None:
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
