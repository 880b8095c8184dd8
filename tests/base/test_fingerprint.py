from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base import fingerprint as module
from megastable.base import reproducible
from megastable.base.fingerprint import ROW, compare_marks, fingerprint_tensors, mark_of, marks_of

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.float64]


def drawn(size: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, 256, (size * dtype.itemsize,), dtype=torch.uint8, generator=g)
    return raw.view(dtype)


def plainly(tensors: list[torch.Tensor]) -> int:
    """The definition, in Python's integers."""
    mask, total = (1 << 64) - 1, 0
    for t in tensors:
        raw = bytes(t.contiguous().flatten().view(torch.uint8).tolist())
        padded = raw + bytes(-len(raw) % 8)
        words = [int.from_bytes(padded[i : i + 8], "little") for i in range(0, len(padded), 8)]
        of_words = sum(w * factor(i) for i, w in enumerate(words))
        total = (total * module.STEP + len(raw)) * module.STEP + of_words
    return total & mask


def factor(word: int) -> int:
    row, column = divmod(word, ROW)
    return odd_number(module.ROWS, row) * odd_number(module.COLUMNS, column)


def odd_number(key: int, index: int) -> int:
    return reproducible.mix_number((index + 1) * reproducible.GOLDEN + key) | 1


def test_fingerprint_is_the_definition_over_several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CACHED", 4 * ROW)
    t = drawn(8 * 9 * ROW + 13, torch.uint8)
    assert int(fingerprint_tensors([t])) % (1 << 64) == plainly([t])


@given(st.data())
def test_fingerprint_shows_every_flipped_bit(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(DTYPES))
    t = drawn(data.draw(st.integers(1, 100)), dtype)
    other = t.clone()
    place = data.draw(st.integers(0, t.numel() * dtype.itemsize - 1))
    other.view(torch.uint8)[place] ^= 1 << data.draw(st.integers(0, 7))
    assert int(fingerprint_tensors([t])) != int(fingerprint_tensors([other]))


def test_fingerprint_counts_order_lengths_and_signs() -> None:
    a, b = drawn(5, torch.float32, 1), drawn(5, torch.float32, 2)
    assert int(fingerprint_tensors([a, b])) != int(fingerprint_tensors([b, a]))
    assert int(fingerprint_tensors([a, b])) != int(fingerprint_tensors([torch.cat([a, b])]))
    zeros = torch.zeros(3)
    assert int(fingerprint_tensors([zeros])) != int(fingerprint_tensors([torch.zeros(4)]))
    assert int(fingerprint_tensors([zeros])) != int(fingerprint_tensors([-zeros]))
    assert int(fingerprint_tensors([])) == 0
    assert len({factor(i) for i in range(3 * ROW)}) == 3 * ROW
    assert all(factor(i) % 2 for i in range(0, 3 * ROW, 7))


@given(st.sampled_from(DTYPES), st.integers(0, 300), st.integers(0, 7))
def test_marks_tell_any_bit_on_whatever_they_were_made(dtype: torch.dtype, size: int, bit: int) -> None:
    """A GPU's mark of a tensor can be compared with a copy on the CPU, and a CPU's with a CPU's."""
    tensor = drawn(size, dtype)
    for device in ("cpu", "cuda"):
        marks = {"a": mark_of(tensor, device)}
        assert not compare_marks(marks, marks_of({"a": tensor.clone()}, marks))
        assert compare_marks(marks, marks_of({"b": tensor}, marks)) == ["a", "b"]
        if size:
            other = tensor.clone()
            other.view(torch.uint8)[-1] ^= 1 << bit
            assert compare_marks(marks, marks_of({"a": other}, marks)) == ["a"]
    assert mark_of(tensor).device == "cpu"
    assert int(mark_of(tensor, "cuda").value) == int(fingerprint_tensors([tensor]))
