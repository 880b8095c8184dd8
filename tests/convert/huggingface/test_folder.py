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
from megastable_tools.convert.huggingface.folder import INDEX, SINGLE, HuggingFaceFolder
from tests.convert.huggingface.conftest import MODELS, Make


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


def refused(folder: Path, match: str) -> None:
    with pytest.raises(CheckpointError, match=match):
        HuggingFaceFolder(folder)


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
def test_folder_names_tensors_that_do_not_fit(folder: Path, change: Any, message: str) -> None:
    assert HuggingFaceFolder(folder).parts
    tensors_of(folder, change)
    with pytest.raises(CheckpointError, match=message):
        assert HuggingFaceFolder(folder).parts


def test_folder_refuses_a_truncated_file(folder: Path) -> None:
    content = (folder / SINGLE).read_bytes()
    for size in (0, 7, 100, len(content) - 1):
        (folder / SINGLE).write_bytes(content[:size])
        refused(folder, r"model.safetensors: damaged or incomplete")


def test_folder_does_not_touch_a_pickle(folder: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (folder / "pwned",)

    (folder / SINGLE).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    refused(folder, r"pytorch_model.bin, a pickle, .*safe_serialization=True")
    assert not (folder / "pwned").exists()


def test_folder_refuses_a_tensor_in_two_shards(sharded: Path) -> None:
    """Their values may differ, and every loader takes another one."""
    files = sorted(sharded.glob("*.safetensors"))
    twice = load_file(files[-1]) | {"model.embed_tokens.weight": torch.zeros(700, 32, dtype=torch.bfloat16)}
    save_file(twice, files[-1], {"format": "pt"})
    refused(sharded, r"holds 'model.embed_tokens.weight', which .* does not list there")


def test_folder_refuses_shards_that_their_index_contradicts(sharded: Path) -> None:
    assert HuggingFaceFolder(sharded).parts
    index = json.loads((sharded / INDEX).read_text())
    where: dict[str, str] = index["weight_map"]
    files = sorted(set(where.values()))

    def written(**changed: Any) -> None:
        (sharded / INDEX).write_text(json.dumps({"weight_map": {**where, **changed}}))

    written(**{"model.norm.weight": "../../etc/passwd.safetensors"})
    refused(sharded, r"is not the name of a .safetensors file beside it")
    written(**{"model.norm.weight": files[0]})
    refused(sharded, r"does not hold 'model.norm.weight'")
    without = {name: file for name, file in where.items() if "norm" not in name}
    (sharded / INDEX).write_text(json.dumps({"weight_map": without}))
    refused(sharded, r"which model.safetensors.index.json does not list")
    written()
    (sharded / files[1]).unlink()
    refused(sharded, f"{files[1]} is not there, which {INDEX} names")
    for content in ("[]", "{", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": []}'):
        (sharded / INDEX).write_text(content)
        refused(sharded, r"index.json")


@pytest.mark.parametrize("content", ["", "[]", "{", "\xff", '{"architectures": 3}', "[" * 5000])
def test_folder_refuses_a_config_that_is_none(folder: Path, content: str) -> None:
    (folder / "config.json").write_bytes(content.encode("latin-1"))
    refused(folder, r"config.json")
