"""Texts of faults: the same for the same seed, of the kind that they are said to be."""

from __future__ import annotations

import base64
import json
from random import Random

import pytest

from drills.corrupt_texts import LINE, MAKERS, SENTENCE, Text, make

SOURCE = "zebras are animals that live in Africa\nand eat grass all day\n" * 40
COUNT = 5000


@pytest.mark.parametrize("text", MAKERS)
def test_the_same_seed_makes_the_same_text_and_another_one_another(text: Text) -> None:
    made = make(text, Random(1), SOURCE, COUNT)
    assert made == make(text, Random(1), SOURCE, COUNT) and made.isascii()
    drawn = text in ("base64", "json logs", "shuffled words")
    assert (made != make(text, Random(2), SOURCE, COUNT)) == drawn
    assert text == "a sentence" or 0.9 * len(SOURCE) < len(made) < 1.1 * COUNT


def test_what_they_are() -> None:
    made = {text: make(text, Random(1), SOURCE, COUNT) for text in MAKERS}
    assert made["a sentence"] == SENTENCE
    lines = made["base64"].split("\n")
    assert {len(line) for line in lines[:-1]} == {LINE}
    assert len(set(base64.b64decode(made["base64"]))) == 256
    logs = [json.loads(line) for line in made["json logs"].split("\n")]
    assert len(logs) > 20 and len({log["trace"] for log in logs}) == len(logs)
    assert [log["ts"] for log in logs] == sorted(log["ts"] for log in logs)
    words = SOURCE.split()
    assert made["sorted words"].split() == sorted(words)
    assert sorted(made["shuffled words"].split()) == sorted(words) != made["shuffled words"].split() != words
    assert made["reversed text"][::-1] == SOURCE
    assert set(made["a character"]) == {"a"} and len(made["a character"]) == COUNT
