"""What is no folder of theirs, is damaged, or does not fit, is named; nothing of it is run."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from megastable.base.errors import CheckpointError
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.folder import HuggingFaceFolder, is_folder, load_folder
from tests.convert.huggingface.conftest import MODELS, Make

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture(scope="module")
def exported(make: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported")
    to_hf(make(MODELS["qwen3"]), folder / "one", dtype="fp32")
    to_hf(make(MODELS["qwen3"]), folder / "many", shard_size=40_000)
    return folder


@pytest.fixture
def folder(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported / "one", tmp_path / "out")


@pytest.fixture
def sharded(exported: Path, tmp_path: Path) -> Path:
    return shutil.copytree(exported / "many", tmp_path / "out")


def tensors_of(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / SINGLE)
    change(tensors)
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / SINGLE, {"format": "pt"})


def settings_of(folder: Path, **changed: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))


def opened(folder: Path) -> Any:
    return HuggingFaceFolder(folder).parts


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.layers.1.self_attn.k_proj.weight"), "'model.layers.1.self_attn.k_proj.weight' is miss"),
        (lambda t: [t.pop("model.norm.weight"), t.pop("lm_head.weight")], "'lm_head.weight' is missing, and 1 more"),
        (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}), "q_proj.bias' is not known"),
        (lambda t: t.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(64, 32)}), "layers.3.mlp.* is not known"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(701, 32)}), r"is \(701, 32\), by config.json .*\(700, 32\)"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "is I8: only weights in"),
        (lambda t: t.update({"a\x1b[31m": torch.zeros(1)}), r"'a\\\\x1b\[31m' is not known"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(folder: Path, change: Any, message: str) -> None:
    opened(folder)
    tensors_of(folder, change)
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


def test_an_old_table_of_rotary_embeddings_does_not_matter(folder: Path) -> None:
    tensors_of(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    opened(folder)


def test_a_tied_head_may_be_there_when_it_is_the_embedding(make: Make, tmp_path: Path) -> None:
    out = to_hf(make(MODELS["llama-tied"]), tmp_path / "out").out
    tensors_of(out, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    opened(out)
    tensors_of(out, lambda t: t["lm_head.weight"].mul_(2))
    with pytest.raises(CheckpointError, match=r"lm_head.weight is not the embedding"):
        opened(out)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read_as_they_are(folder: Path, dtype: torch.dtype) -> None:
    tensors_of(folder, lambda t: t.update({name: w.to(dtype) for name, w in t.items()}))
    held = load_file(folder / SINGLE)
    found = HuggingFaceFolder(folder)
    assert torch.equal(found.ours("head.weight"), held["lm_head.weight"].float())
    model = load_folder(folder, dtype=None)
    assert {p.dtype for p in model.parameters()} == {dtype}
    with torch.no_grad():
        assert model(torch.tensor([[1, 2, 3]])).isfinite().all()


def test_the_model_of_a_folder_is_used_as_that_of_a_checkpoint(folder: Path) -> None:
    model = load_folder(folder)
    assert (model.vocabulary, model.config.layers, model.step, model.training) == (700, 3, 0, False)
    assert model.hidden(torch.tensor([[1, 2, 3]])).shape == (3, 1, 32)
    assert model.checkpoint == folder and len(model.fingerprint) == 32
    again = load_folder(folder)
    assert again.fingerprint == model.fingerprint
    tensors_of(folder, lambda t: t["model.norm.weight"].add_(1))
    assert load_folder(folder).fingerprint != model.fingerprint
    assert is_folder(folder) and not is_folder(folder.parent)


def test_a_truncated_file_is_damaged(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        (folder / SINGLE).write_bytes(content[:size])
        with pytest.raises(CheckpointError, match=r"model.safetensors: damaged or incomplete"):
            HuggingFaceFolder(folder)


def test_a_pickle_is_not_touched(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "pwned",)

    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin, a pickle, .*safe_serialization=True"):
        HuggingFaceFolder(folder)
    assert not (folder / "pwned").exists()


def test_a_tensor_in_two_shards_is_not_taken_from_either(sharded: Path) -> None:
    """Their values may differ, and every loader takes another one."""
    files = sorted(sharded.glob("*.safetensors"))
    twice = load_file(files[-1]) | {"model.embed_tokens.weight": torch.zeros(700, 32, dtype=torch.bfloat16)}
    save_file(twice, files[-1], {"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"holds 'model.embed_tokens.weight', which .* does not list there"
    ):
        HuggingFaceFolder(sharded)


def test_a_config_of_a_billion_layers_takes_no_time(folder: Path) -> None:
    settings_of(folder, num_hidden_layers=2**30)
    with pytest.raises(CheckpointError, match=r"too few tensors for the 1073741824 layers"):
        opened(folder)


def test_shards_and_their_index_must_agree(sharded: Path) -> None:
    opened(sharded)
    index = json.loads((sharded / INDEX).read_text())
    where: dict[str, str] = index["weight_map"]
    files = sorted(set(where.values()))

    def written(**changed: Any) -> None:
        (sharded / INDEX).write_text(json.dumps({"weight_map": {**where, **changed}}))

    written(**{"model.norm.weight": "../../etc/passwd.safetensors"})
    with pytest.raises(CheckpointError, match=r"is not the name of a .safetensors file beside it"):
        HuggingFaceFolder(sharded)
    written(**{"model.norm.weight": files[0]})
    with pytest.raises(CheckpointError, match=r"does not hold 'model.norm.weight'"):
        HuggingFaceFolder(sharded)
    written()
    (sharded / INDEX).write_text(
        json.dumps({"weight_map": {k: v for k, v in where.items() if "norm" not in k}})
    )
    with pytest.raises(CheckpointError, match=r"which model.safetensors.index.json does not list"):
        HuggingFaceFolder(sharded)
    written()
    (sharded / files[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{files[1]} is not there, which {INDEX} names"):
        HuggingFaceFolder(sharded)
    for content in ("[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        (sharded / INDEX).write_text(content)
        with pytest.raises(CheckpointError, match=r"index.json"):
            HuggingFaceFolder(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff", '{"architectures": 3}', "[" * 5000])
def test_a_config_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json"):
        HuggingFaceFolder(folder)


def test_what_is_not_there(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none is not there, or no folder"):
        HuggingFaceFolder(tmp_path / "none")
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        HuggingFaceFolder(tmp_path)
    (folder / SINGLE).unlink()
    with pytest.raises(CheckpointError, match=f"holds neither {SINGLE} nor {INDEX}"):
        HuggingFaceFolder(folder)


def test_sizes_that_cannot_be(folder: Path) -> None:
    settings_of(folder, num_key_value_heads=3)
    with pytest.raises(
        CheckpointError, match=r"config.json, as our model: kv_heads=3 does not divide heads=4"
    ):
        opened(folder)
    settings_of(folder, num_key_value_heads=2, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"layers.2.*is not known"):
        opened(folder)
