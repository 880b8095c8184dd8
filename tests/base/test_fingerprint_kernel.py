"""The kernel that fingerprints on GPUs, in Triton's interpreter: the same bits as torch's operations."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megastable.base import fingerprint as module

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")

SIZES = (0, 1, 7, 8, 9, 8 * module.ROW - 1, 8 * module.ROW, 40 * module.ROW + 13)


def by_the_kernel(flat: torch.Tensor, start: int, scale: int, programs: int) -> int:
    from megastable.base.fingerprint_kernel import add_words_kernel

    whole = flat.numel() // 8 * 8
    words, rest = flat[:whole].view(torch.int64), flat[whole:]
    total = torch.zeros((), dtype=torch.int64)
    keys = module.ROWS, module.COLUMNS
    add_words_kernel[(programs,)](
        words, rest, total, words.numel(), rest.numel(), start, scale, *keys, module.ROW
    )
    return int(total)


def compare() -> None:
    """In a process of the interpreter."""
    for seed, size in enumerate(SIZES):
        drawn = torch.randint(
            0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        for scale in (1, pow(module.STEP, 2, 1 << 64)):
            wanted = torch.zeros((), dtype=torch.int64)
            module._add(wanted, drawn, scale)
            start = size * module.STEP * scale & module.MASK
            found = {by_the_kernel(drawn, start, scale, programs) for programs in (1, 3)}
            assert found == {int(wanted)}, (size, scale)
    print("equal")


def test_kernel_sums_as_torch_does() -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            "from tests.base import test_fingerprint_kernel as t; t.compare()",
        ],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.stdout == "equal\n", done.stderr[-2000:]
