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
# Samples that are compressed together, and tokens of each: 16 KiB, half of what zlib looks back on.
MOST, TOKENS = 64, 128


def find_repetition(suspects: Int32s, ordinary: Int32s, coming: Int32s) -> tuple[bool, Bools]:
    """Whether suspects say next to nothing, and which samples of the data to come do not say more, once the suspects
    are known.

    Args:
        suspects, ordinary: token ids, [n, l] and [m, l]; the first `MOST` of them and `TOKENS` of each count.
        coming: token ids, [k, l].

    Returns:
        The answers; bool and [k]. Without ordinary text: False.
    """
    none = np.zeros(len(coming), dtype=bool)
    count = min(len(suspects), len(ordinary), MOST)
    if not count:
        return False, none
    parts = suspects[:count, :TOKENS], ordinary[:count, :TOKENS], coming[:, :TOKENS]
    # Numbered anew, so that any vocabulary fits: there are fewer than 2^16 tokens in all.
    _, numbers = np.unique(np.concatenate(parts), return_inverse=True)
    known, usual, following = np.split(
        numbers.reshape(-1, parts[0].shape[1]).astype("<u2"), [count, 2 * count]
    )
    size, usual_size = _compressed_size(known), _compressed_size(usual)
    if size > LITTLE * usual_size:
        return False, none
    said = [_compressed_size(np.vstack([known, row])) - size for row in following]
    return True, np.array(said) < 2 * LITTLE * usual_size / count


def _compressed_size(numbers: npt.NDArray[np.uint16]) -> int:
    return len(zlib.compress(numbers.tobytes(), 9))
