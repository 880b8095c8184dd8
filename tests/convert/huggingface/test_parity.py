"""Whatever makes the two compute something else is found: that is what the check is for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megastable.base import free_memory
from megastable.report.sheet import as_json
from megastable_tools.convert.huggingface import parity
from megastable_tools.convert.huggingface.export import to_hf
from megastable_tools.convert.huggingface.parity import (
    LogitRow,
    ParityReport,
    compare_logits,
    make_parity_sheet,
)
from tests.convert.huggingface.conftest import MODELS, Make


def test_compare_finds_a_number_that_differs(make: Make, tmp_path: Path) -> None:
    out = to_hf(make(MODELS["qwen3"]), tmp_path / "out", dtype="fp32").out
    tensors = load_file(out / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-6
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    found = compare_logits(make(MODELS["qwen3"]), out)
    assert found.failed and found.unequal == ["model.norm.weight"]
    assert re.match("NOT THE SAME: 1 of .* tensors differ, the first is model.norm.weight", found.verdict)


MIXTURES = ["qwen3-moe", "mixtral", "dots1"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["qwen3", "qwen3-tied", "llama", "olmo2", "olmo3", "mistral", "gemma2", *MIXTURES]
)
def test_compare_goes_layer_by_layer_if_memory_is_short(
    make: Make, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = make({**MODELS[name], "layers": 6})
    out = to_hf(checkpoint, tmp_path / "out").out
    whole = compare_logits(checkpoint, out)
    need: list[tuple[int, int]] = []
    memory = parity._memory
    monkeypatch.setattr(parity, "_memory", lambda *a: need.append(memory(*a)) or need[-1])
    monkeypatch.setattr(free_memory, "free_bytes", lambda: need[-1][0] - 1 if need else 0)
    streamed = compare_logits(checkpoint, out)
    assert (whole.how, streamed.how) == ("loaded whole", "loaded layer by layer, for want of memory")
    assert streamed.rows == whole.rows and not streamed.failed
    assert need[-1][1] < need[-1][0]
    monkeypatch.setattr(free_memory, "free_bytes", lambda: need[-1][1] - 1)
    skipped = compare_logits(checkpoint, out)
    assert not skipped.rows and not skipped.failed
    assert skipped.verdict.startswith("NOT CHECKED: it would take ")


@pytest.mark.parametrize(
    ("kind", "changed", "named", "shows"),
    [
        ("qwen3", {"rms_norm_eps": 1.0000001e-5}, "model.norm_eps is 1.0000001e-05 in the folder, and 1e-05", False),
        ("qwen3", {"rope_parameters": {"rope_type": "linear", "factor": 1.0000001, "rope_theta": 1e4}},
         "model.rope_scaling is kind='linear' factor=1.0000001", False),
        ("gemma2", {"query_pre_attn_scalar": 25}, "model.attention_scale is 0.2 in the folder, and 0.2041", True),
        ("gemma2", {"attn_logit_softcapping": 2.0000001}, "model.attention_softcap is 2.0000001 in the folder", False),
        ("gemma2", {"sliding_window": 8}, r"model.window is \[8, None, 8\] in the folder, and \[7, None, 7\]", True),
    ],
)  # fmt: skip
def test_compare_sees_a_setting_that_hardly_shows(
    make: Make, tmp_path: Path, kind: str, changed: dict[str, Any], named: str, shows: bool
) -> None:
    out = to_hf(make(MODELS[kind]), tmp_path / "out", dtype="fp32").out
    settings = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(settings | changed))
    found = compare_logits(make(MODELS[kind]), out)
    assert found.failed and re.search(named, found.verdict)
    assert all(row.same != shows for row in found.rows)


def test_row_by_hand() -> None:
    ours = torch.tensor([[[0.0, 0.0], [1.0, 3.0]]])
    theirs = torch.tensor([[[0.0, 0.0], [1.0, 2.0]]])
    row = parity._row("these", ours, theirs)
    p = torch.tensor([1.0, 3.0]).double().softmax(0)
    q = torch.tensor([1.0, 2.0]).double().softmax(0)
    assert row.kl == pytest.approx(float((p * (p / q).log()).sum()) / 2)
    assert (row.tokens, row.largest, row.agree, row.scale) == (2, 1.0, 1.0, 3.0)
    theirs[0, 0, 1] = float("nan")
    assert not parity._row("these", ours, theirs).largest < 1


@pytest.mark.parametrize(
    ("largest", "kl"), [(2e-4, 0.0), (0.0, 2e-10), (float("nan"), 0.0), (0.0, float("nan"))]
)
def test_parity_report_fails_beyond_its_limits(largest: float, kl: float) -> None:
    fine = LogitRow("text", 5, 9e-5, 9e-11, 1.0, 3.0)
    assert not ParityReport(Path("a"), Path("b"), rows=[fine]).failed
    found = ParityReport(Path("a"), Path("b"), rows=[fine, LogitRow("text", 5, largest, kl, 1.0, 3.0)])
    assert found.failed and "on text logits differ" in found.verdict
    assert "NOT THE SAME" in json.loads(as_json(make_parity_sheet(found)))["title"]
