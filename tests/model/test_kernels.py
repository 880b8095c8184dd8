"""What is chosen on a CPU, and what is said where it is not what was asked for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megastable.config.tree import RunConfig
from megastable.engine.kernel_choice import choose

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
