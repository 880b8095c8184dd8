"""Streams of tokens: together they are the text, and no piece ends inside of a character or of a stop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable.generate.decode import StreamDecoder, cut
from tests.data.texts import hugging_face_file, sentencepiece_file

text = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from(" é日🤷🏽\n\ufffd"), max_size=30)


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make = sentencepiece_file if request.param == "sentencepiece" else hugging_face_file
    return load_tokenizer(make(tmp_path_factory.mktemp("tokenizer")))


def streamed(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer, before)
    return [*(decoder.feed(token) for token in ids), decoder.end()]


@given(before=text, written=text)
def test_a_text_comes_whole_and_in_whole_characters(tokenizer: Tokenizer, before: str, written: str) -> None:
    """A character of bytes comes with its last byte: no piece holds a sign that the text does not."""
    pieces = streamed(tokenizer, tokenizer.encode(before), tokenizer.encode(written))
    assert "".join(pieces) == written
    at = 0
    for piece in pieces:
        assert written.startswith(piece, at)
        at += len(piece)


@pytest.mark.quick("huggingface")
@given(ids=st.lists(st.integers(0, 599), max_size=40), data=st.data())
def test_whatever_comes_it_is_what_the_tokenizer_says(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Random tokens: loose bytes, ends of documents, beginnings of characters that never end."""
    low = [token for token in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([token])]
    ids = [data.draw(st.sampled_from(low)) if token % 2 else token % tokenizer.vocab_size for token in ids]
    assert "".join(streamed(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_bytes_are_held_until_they_are_a_character(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🤷")
    assert len(ids) == 4  # a test without bytes would show nothing
    pieces = streamed(tokenizer, tokenizer.encode("a"), [*ids, *ids[:2]])
    assert pieces[:4] == ["", "", "", "🤷"] and pieces[4:6] == ["", ""]
    assert set(pieces[6]) == {"\ufffd"}  # what stays unfinished is shown as that, at the end


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4)),
)
def test_what_is_shown_ends_before_the_first_stop(parts: list[str], stops: list[str]) -> None:
    whole, shown, held, met = "".join(parts), "", "", False
    for part in parts:
        new, held, met = cut(held + part, stops)
        shown += new
        assert not any(stop in shown for stop in stops)
        if met:
            break
    ends = [whole.find(stop) for stop in stops if stop in whole]
    assert met == bool(ends)
    assert shown + held == (whole if not met else shown)
    if met:
        # The earliest that is complete at the end of a part: one that is longer and begins earlier is not waited for.
        assert min(ends) <= len(shown)
    if not met and not any(stop.startswith(held[i:]) for i in range(len(held)) for stop in stops):
        assert held == ""
