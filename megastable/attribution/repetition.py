"""Tells text that says the same again and again, which a model learns by heart and from which it learns nothing else.

The measure is how far text can be compressed, against as much ordinary text. Pure.
"""

from __future__ import annotations

import zlib

import numpy as np
import numpy.typing as npt

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

# Of the compressed size of ordinary text. One sentence 48 times is at 0.07, one character at 0.05, log lines of a few
# templates at 0.23, code and another language at 0.9 to 1 (the drills' texts, 128 or 64 tokens a sample).
LITTLE = 0.125
MOST = 64  # samples that are compressed together


def find_repetition(suspects: Int32s, ordinary: Int32s, coming: Int32s) -> tuple[bool, Bools]:
    """Whether suspects say next to nothing, and which samples of the data to come do not say more, once the suspects
    are known.

    Args:
        suspects, ordinary: token ids, [n, l] and [m, l]; the first `MOST` of them count.
        coming: token ids, [k, l].

    Returns:
        The answers; bool and [k]. Without ordinary text: False.
    """
    none = np.zeros(len(coming), dtype=bool)
    count = min(len(suspects), len(ordinary), MOST)
    if not count:
        return False, none
    known, usual = suspects[:count], ordinary[:count]
    if _compressed_size(known) > LITTLE * _compressed_size(usual):
        return False, none
    each = _compressed_size(usual) / count
    said = [_compressed_size(np.vstack([known, row])) - _compressed_size(known) for row in coming]
    return True, np.array(said) < 2 * LITTLE * each


def _compressed_size(tokens: Int32s) -> int:
    return len(zlib.compress(np.ascontiguousarray(tokens, dtype="<u4").tobytes(), 9))
