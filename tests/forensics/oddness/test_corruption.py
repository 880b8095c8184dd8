from __future__ import annotations

import numpy as np
import pytest

from megastable_tools.forensics.oddness.corruption import LANGUAGES, PLANTED, babble, corrupt
from megastable_tools.forensics.oddness.kinds import KINDS
from tests.forensics.texts import documents, scores, tokenizer, yardstick

LONG = next(document for document in documents() if len(document) >= 500)


@pytest.mark.parametrize("kind", PLANTED)
def test_it_is_the_same_for_a_seed_and_another_for_another(kind: str) -> None:
    first, again, other = (
        corrupt(kind, LONG, tokenizer(), np.random.default_rng(seed)).tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


@pytest.mark.parametrize("kind", PLANTED)
@pytest.mark.parametrize("length", [1, 2, 40])
def test_any_length_is_kept_and_every_id_is_a_token_of_text(kind: str, length: int) -> None:
    for seed in range(20):
        found = corrupt(kind, LONG[:length], tokenizer(), np.random.default_rng(seed))
        assert 1 <= len(found) <= length
        assert found.min() >= 0 and found.max() < tokenizer().vocab_size
        assert tokenizer().eod not in found


def test_shuffled_tokens_are_the_same_tokens() -> None:
    found = corrupt("shuffled", LONG, tokenizer(), np.random.default_rng(0))
    assert sorted(found) == sorted(LONG) and found.tolist() != LONG.tolist()


def test_a_kind_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="no corruption 'nonsense'"):
        corrupt("nonsense", LONG, tokenizer(), np.random.default_rng(0))


def test_babble_has_the_letters_of_its_language_and_says_something_else() -> None:
    for text in LANGUAGES.values():
        said = babble(text, 500, np.random.default_rng(0))
        assert len(said) == 500
        assert set(said) <= set(text)
        assert said[20:80] not in text


def test_the_names_that_are_right_are_names() -> None:
    assert {name for names in PLANTED.values() for name in names} <= set(KINDS)


@pytest.mark.quick("shuffled", "loop")
@pytest.mark.parametrize("kind", PLANTED)
def test_every_kind_is_odder_than_text(kind: str) -> None:
    random = np.random.default_rng(5)
    some = [document for document in documents() if len(document) >= 300][:30]
    spoiled = [corrupt(kind, document, tokenizer(), random) for document in some]
    limit = np.quantile(scores(yardstick(), documents()), 0.99)
    assert (scores(yardstick(), spoiled) > limit).mean() > 0.8
