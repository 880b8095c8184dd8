"""Fingerprints of messages between stages, as a CPU and as a GPU makes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megastable.base.fingerprint import Mark, fingerprint
from megastable.engine import zero
from megastable.engine.zero import StageMessages


@pytest.fixture(params=["cpu", "gpu"])
def messages(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> StageMessages:
    if request.param == "gpu":
        monkeypatch.setattr(zero, "mark_of", lambda x: Mark("cuda", fingerprint([x])))
    monkeypatch.setattr(zero.patches, "watched_messages", lambda sent, received: None)
    return StageMessages(torch.device("cpu"))


def left(messages: StageMessages, sent: list[Tensor], received: list[Tensor]) -> float:
    """As on one rank that sends to itself."""
    messages.begin()
    for message in sent:
        messages._add_sent(message, 1)
    for message in received:
        messages._add_received(message, 1)
    return messages.left


def flipped(message: Tensor, element: int, bit: int) -> Tensor:
    wrong = message.clone()
    kind = {2: torch.int16, 4: torch.int32}[message.element_size()]
    bits = 8 * message.element_size()
    mask = 1 << bit if bit < bits - 1 else -(1 << bit)
    wrong.view(kind)[element] ^= mask
    return wrong


@pytest.mark.quick("cpu-dtype0")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_any_bit_of_any_element_counts(messages: StageMessages, dtype: torch.dtype) -> None:
    sent = [torch.randn(24).to(dtype) for _ in range(3)]
    assert left(messages, sent, [x.clone() for x in sent]) == 0.0
    for element in range(24):
        for bit in range(8 * dtype.itemsize):
            for which in range(3):
                got = [flipped(x, element, bit) if i == which else x for i, x in enumerate(sent)]
                assert left(messages, sent, got) != 0.0, (element, bit, which)


def test_the_order_counts(messages: StageMessages) -> None:
    a, b = torch.randn(8), torch.randn(8)
    assert left(messages, [a, b], [b, a]) != 0.0 and left(messages, [a, b], [a]) != 0.0
