"""Streams of tokens: together they are the text, and no piece ends inside of a character or of a stop."""

from __future__ import annotations

import io
import math
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.errors import DataError
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable_tools.generate.decode import Sampling, StreamDecoder, cut_at_stop, pick_tokens
from megastable_tools.generate.talk import read_prompt
from tests.data.texts import hugging_face_file, sentencepiece_file

text = st.text(st.characters(exclude_categories=("Cs",)) | st.sampled_from(" é日🤷🏽\n\ufffd"), max_size=30)


@pytest.fixture(scope="module", params=["sentencepiece", "huggingface"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    make = sentencepiece_file if request.param == "sentencepiece" else hugging_face_file
    return load_tokenizer(make(tmp_path_factory.mktemp("tokenizer")))


def streamed(tokenizer: Tokenizer, before: list[int], ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer, before)
    return [*(decoder.feed_token(token) for token in ids), decoder.end_text()]


@given(before=text, written=text)
def test_stream_decoder_gives_whole_characters(tokenizer: Tokenizer, before: str, written: str) -> None:
    """A character of bytes comes with its last byte: no piece holds a sign that the text does not."""
    pieces = streamed(tokenizer, tokenizer.encode(before), tokenizer.encode(written))
    assert "".join(pieces) == written
    at = 0
    for piece in pieces:
        assert written.startswith(piece, at)
        at += len(piece)


@pytest.mark.quick("huggingface")
@given(ids=st.lists(st.integers(0, 599), max_size=40), data=st.data())
def test_stream_decoder_says_what_the_tokenizer_says(
    tokenizer: Tokenizer, ids: list[int], data: st.DataObject
) -> None:
    """Random tokens: loose bytes, ends of documents, beginnings of characters that never end."""
    low = [token for token in range(tokenizer.vocab_size) if "\ufffd" in tokenizer.decode([token])]
    ids = [data.draw(st.sampled_from(low)) if token % 2 else token % tokenizer.vocab_size for token in ids]
    assert "".join(streamed(tokenizer, [], ids)) == tokenizer.decode(ids)


@given(
    parts=st.lists(st.text("ab", max_size=4), max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=4)),
)
def test_cut_ends_before_the_first_stop(parts: list[str], stops: list[str]) -> None:
    whole, shown, held, met = "".join(parts), "", "", False
    for part in parts:
        new, held, met = cut_at_stop(held + part, stops)
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


def distribution(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """What each token that may be chosen is chosen with."""
    highest = max(logits)
    weights = {i: math.exp((x - highest) / sampling.temperature) for i, x in enumerate(logits)}
    order = sorted(weights, key=lambda i: -logits[i])[: sampling.top_k or None]
    total, kept, mass = sum(weights[i] for i in order), [], 0.0
    for i in order:
        if kept and mass / total >= sampling.top_p:
            break
        kept.append(i)
        mass += weights[i]
    return {i: weights[i] / mass for i in kept}


# Far enough apart that no rounding decides which of two is likelier, or where a share is reached.
hundredths = st.lists(st.integers(-400, 400), min_size=1, max_size=12, unique=True)
scores = hundredths.map(lambda xs: [x / 100 for x in xs])


@given(
    logits=scores, temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]), top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.0123, 0.4567, 0.89, 1.0]), points=st.integers(1, 40),
)  # fmt: skip
def test_pick_gives_every_token_its_share(
    logits: list[float], temperature: float, top_k: int, top_p: float, points: int
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    wanted = distribution(logits, sampling)
    uniforms = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    chosen = pick_tokens(torch.tensor([logits] * points), sampling, uniforms).tolist()
    assert set(chosen) <= wanted.keys()
    for token, share in wanted.items():
        # An interval of that length holds so many of the even points, or one more or less.
        assert abs(chosen.count(token) - share * points) <= 1 + 1e-6


@pytest.mark.parametrize("sampling", [Sampling(1e-6), Sampling(1e-6, top_p=1.0), Sampling(1e-3, 2, 0.1)])
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_pick_at_extremes(sampling: Sampling, uniform: float) -> None:
    """Large logits, a temperature near zero, the first and the last uniform number there is."""
    logits, at = torch.tensor([[-1e30, 5e4, 1e4, -math.inf]]), torch.tensor([uniform], dtype=torch.float64)
    assert pick_tokens(logits, sampling, at).tolist() == [1]
    assert pick_tokens(logits, Sampling(0.0), at).tolist() == [1]
    ruled_out = torch.cat((torch.randn(1, 1000), torch.full((1, 50), -math.inf)), -1)
    assert int(pick_tokens(ruled_out, Sampling(1.0, 0, 1.0), at)) < 1000


@pytest.mark.parametrize(
    ("wrong", "word"),
    [((-0.1,), "temperature -0.1"), ((math.nan,), "temperature nan"), ((1.0, -1), "top-k -1"),
     ((1.0, 0, 0.0), "top-p 0.0"), ((1.0, 0, 1.5), "top-p 1.5"), ((1.0, 0, math.nan), "top-p nan")],
)  # fmt: skip
def test_sampling_refuses_what_cannot_be(wrong: tuple[float, ...], word: str) -> None:
    with pytest.raises(DataError, match=word):
        Sampling(*wrong)  # type: ignore[arg-type]


def test_read_prompt_drops_one_last_newline_and_refuses_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    contents = {b"a\n": "a", b"a\n\n": "a\n", b"a\r\n": "a", b"": "", "é\t".encode(): "é\t"}
    for content, wanted in contents.items():
        path.write_bytes(content)
        assert read_prompt(None, path) == wanted
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_prompt(None, None) == wanted
    assert read_prompt("as it is\n", None) == "as it is\n"
    (tmp_path / "broken").write_bytes(b"ab\xff")
    for text, path, told in (
        ("a", tmp_path, "not both"), (None, tmp_path / "nothing.txt", r"nothing\.txt cannot be read: No such file"),
        (None, tmp_path / "broken", r"broken: byte 2 is no UTF-8"),
    ):  # fmt: skip
        with pytest.raises(DataError, match=told):
            read_prompt(text, path)
