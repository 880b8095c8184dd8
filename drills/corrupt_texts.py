"""Generate corrupt texts for faults with seeded code, without any input but the training text.

`make("json logs", Random(1), source, 50_000)`: about that many characters. `source`: a passage of the corpus, of the
same length, for the kinds that corrupt it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

Text = Literal[
    "a sentence", "base64", "sorted words", "json logs", "reversed text", "shuffled words", "a character"
]

SENTENCE = "The committee will meet again on Thursday to discuss the budget for the new library.\n"
LINE = 76  # characters of base64 in a line (RFC 2045 section 6.8)
EVENTS = ("request done", "cache miss", "retrying", "connection closed", "token refreshed", "queue is full")


def _base64(random: Random, count: int) -> str:
    coded = base64.b64encode(random.randbytes(count * 3 // 4)).decode()
    return "\n".join(coded[at : at + LINE] for at in range(0, len(coded), LINE))


def _logs(random: Random, count: int) -> str:
    def lines() -> Iterator[str]:
        time, size = 1.7e9, 0
        while size < count:
            time += random.expovariate(4.0)
            line = json.dumps(
                {
                    "ts": round(time, 3), "level": random.choice(["INFO", "INFO", "WARN", "ERROR"]),
                    "service": f"svc-{random.randrange(40):02d}", "host": f"10.0.{random.randrange(256)}."
                    f"{random.randrange(256)}", "trace": f"{random.getrandbits(64):016x}",
                    "ms": round(random.lognormvariate(3, 1), 2), "msg": random.choice(EVENTS),
                }
            )  # fmt: skip
            size += len(line) + 1
            yield line

    return "\n".join(lines())


def _shuffled(random: Random, source: str) -> str:
    words = source.split()
    random.shuffle(words)
    return " ".join(words)


MAKERS: dict[Text, Callable[[Random, str, int], str]] = {
    "a sentence": lambda random, source, count: SENTENCE,
    "base64": lambda random, source, count: _base64(random, count),
    "sorted words": lambda random, source, count: " ".join(sorted(source.split())),
    "json logs": lambda random, source, count: _logs(random, count),
    "reversed text": lambda random, source, count: source[::-1],
    "shuffled words": lambda random, source, count: _shuffled(random, source),
    "a character": lambda random, source, count: "a" * count,
}


def make(text: Text, random: Random, source: str, count: int) -> str:
    """About `count` characters of a kind of text; a sentence occurs once, as short texts are repeated."""
    return MAKERS[text](random, source, count)
