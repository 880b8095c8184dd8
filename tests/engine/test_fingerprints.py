"""Fingerprints of what ranks hold alike, and of messages between stages, as a CPU and as a GPU makes them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megastable.base.fingerprint import Mark, fingerprint_tensors
from megastable.engine import zero
from megastable.engine.rank_checks import MOST, are_equal, split_fingerprint
from megastable.engine.zero import StageMessages

PRINTS = st.integers(-(1 << 63), (1 << 63) - 1)


def summed(prints: list[int]) -> list[float]:
    return [sum(column) for column in zip(*map(split_fingerprint, prints), strict=True)]


@given(st.lists(PRINTS, min_size=2, max_size=12))
def test_are_equal_says_so_of_equal_ones_alone(prints: list[int]) -> None:
    assert are_equal(summed(prints[:1] * len(prints)), len(prints))
    assert are_equal(summed(prints), len(prints)) == (len(set(prints)) == 1)


@given(PRINTS, st.integers(0, 63))
def test_are_equal_sees_one_bit_of_one_among_very_many(print_: int, bit: int) -> None:
    """The sums are exact up to the largest group."""
    ordinary, other = split_fingerprint(print_), split_fingerprint(print_ ^ (1 << bit))
    sums = [a * (MOST - 1) + b for a, b in zip(ordinary, other, strict=True)]
    assert max(sums) <= 2**53
    assert are_equal([a * MOST for a in ordinary], MOST)
    assert not are_equal(sums, MOST)


@pytest.fixture(params=["cpu", "gpu"])
def messages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StageMessages:
    if request.param == "gpu":
        monkeypatch.setattr(zero, "mark_of", lambda x: Mark("cuda", fingerprint_tensors([x])))
    monkeypatch.setattr(zero.patches, "watch_messages", lambda stage, sent, received: None)
    return StageMessages(torch.device("cpu"), 0)


def left(messages: StageMessages, sent: list[Tensor], received: list[Tensor]) -> float:
    """As on one rank that sends to itself."""
    messages.begin_step()
    for message in sent:
        messages._add_sent(message, (0, 1))
    for message in received:
        messages._add_received(message, (0, 1))
    return messages.left


def flipped(message: Tensor, element: int, bit: int) -> Tensor:
    wrong = message.clone()
    wrong.view(torch.uint8)[element * message.element_size() + bit // 8] ^= 1 << bit % 8
    return wrong


@pytest.mark.quick("cpu-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_messages_left_count_any_bit_of_any_element(messages: StageMessages, dtype: torch.dtype) -> None:
    sent = [torch.randn(24).to(dtype) for _ in range(3)]
    assert left(messages, sent, [x.clone() for x in sent]) == 0.0
    for element in range(24):
        for bit in range(8 * dtype.itemsize):
            for which in range(3):
                got = [flipped(x, element, bit) if i == which else x for i, x in enumerate(sent)]
                assert left(messages, sent, got) != 0.0, (element, bit, which)


def test_messages_left_count_the_order(messages: StageMessages) -> None:
    a, b = torch.randn(8), torch.randn(8)
    assert left(messages, [a, b], [b, a]) != 0.0 and left(messages, [a, b], [a]) != 0.0
