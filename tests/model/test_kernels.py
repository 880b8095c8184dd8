"""What is chosen on a CPU, and what is said where it is not what was asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine import kernel_choice
from megastable.engine.kernel_choice import choose
from megastable_tools.plan.memory import kernels_on

CPU = torch.device("cpu")


def chosen(**parts: Any) -> Any:
    return choose(RunConfig.model_validate({"precision": {"kind": "fp32"}} | parts), CPU)


def test_what_is_best_without_a_word() -> None:
    found = chosen()
    assert (found.attention, found.loss, found.compile, found.fp8) == ("blocked", "chunked", False, "off")
    assert found.notes == () and "FP8" not in str(found)


def test_fp8_is_emulated_without_a_word() -> None:
    found = chosen(precision={"kind": "fp32", "fp8": "current"})
    assert found.fp8 == "emulated" and found.notes == () and "FP8 emulated" in str(found)


@pytest.mark.parametrize(
    ("parts", "key"),
    [
        ({"data": {"keep_documents_apart": True}}, "data.keep_documents_apart"),
        ({"train": {"sequence_warmup": {"start": 64, "tokens": 9}}}, "train.sequence_warmup"),
    ],
)
def test_transformer_engine_keeps_no_parts_apart(
    parts: dict[str, Any], key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of documents or of pieces: another core is used."""
    monkeypatch.setattr(kernel_choice, "find_spec", lambda name: object())
    config = RunConfig.model_validate({"kernels": {"attention": "te"}} | parts)
    reason = kernel_choice._no_attention("te", config, torch.device("cuda"), torch.bfloat16)
    assert reason == f"it does not keep parts of a sample apart as {key} asks for"
    plain = RunConfig.model_validate({"kernels": {"attention": "te"}})
    assert kernel_choice._no_attention("te", plain, torch.device("cuda"), torch.bfloat16) is None
    assert [kernels_on(c, "cuda").attention for c in (config, plain)] == ["sdpa", "te"]


@pytest.mark.parametrize("cap", [None, 50.0])
@pytest.mark.parametrize("kind", ["fp32", "fp16"])
@pytest.mark.parametrize("attention", ["auto", "reference", "sdpa", "blocked", "te"])
def test_the_planner_chooses_alike(attention: str, kind: str, cap: float | None) -> None:
    config = RunConfig.model_validate(
        {
            "kernels": {"attention": attention},
            "precision": {"kind": kind},
            "model": {"attention_softcap": cap},
        }
    )
    assert kernels_on(config, "cpu").attention == choose(config, CPU).attention


def test_the_planner_takes_no_transformer_engine_for_capped_logits() -> None:
    tree = {"kernels": {"attention": "te"}, "model": {"attention_softcap": 50.0}}
    assert kernels_on(RunConfig.model_validate(tree), "cuda").attention == "sdpa"


@pytest.mark.parametrize(
    ("parts", "note"),
    [
        ({"kernels": {"attention": "te"}}, r"attention=te: Transformer Engine .*; blocked is used"),
        (
            {"kernels": {"attention": "te"}, "precision": {"kind": "fp32", "fp8": "delayed"}},
            r"attention=te: with FP8's delayed scales .*; blocked is used",
        ),
        (
            {"precision": {"kind": "fp32", "fp8": {"backend": "te"}}},
            r"precision\.fp8\.backend=te: Transformer Engine computes on GPUs only; FP8 is emulated",
        ),
        (
            {"kernels": {"compile": True}, "precision": {"kind": "fp32", "fp8": "block"}},
            r"compile=true: emulated FP8 .*; nothing is compiled",
        ),
        (
            {"kernels": {"compile": True}, "parallel": {"zero": 3}},
            r"compile=true: ZeRO 3 .*; nothing is compiled",
        ),
    ],
)
def test_what_cannot_be_had_is_said(parts: dict[str, Any], note: str) -> None:
    found = chosen(**parts)
    (said,) = found.notes
    assert re.search(note, said), said
    assert found.attention == "blocked" and found.compile is False and found.fp8 in ("off", "emulated")
