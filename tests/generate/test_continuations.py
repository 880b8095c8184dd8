"""The loop over samples: what ends one, and what its tokens depend on."""

from __future__ import annotations

import pytest
import torch

from megastable.base.errors import CheckpointError
from megastable.checkpoint.plain import PlainModel
from megastable.data.tokenizer import Tokenizer, load_tokenizer
from megastable_tools.generate.decode import Sampling, write_continuations
from megastable_tools.generate.talk import Continuation
from tests.data.texts import sentencepiece_file
from tests.generate.models import model

WARM = Sampling(1.0, 0, 1.0)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(sentencepiece_file(tmp_path_factory.mktemp("tokenizer"), 400))


@pytest.fixture(scope="module")
def plain(tokenizer: Tokenizer) -> PlainModel:
    return model(vocabulary=tokenizer.vocab_size + 7)


def samples(
    plain: PlainModel, tokenizer: Tokenizer, sampling: Sampling = WARM, **options: object
) -> list[Continuation]:
    settings: dict[str, object] = {"number": 1, "most": 12, "seed": (1, 0), "ends": (), **options}
    found = [Continuation() for _ in range(int(str(settings["number"])))]
    for piece in write_continuations(plain, tokenizer, tokenizer.encode("def f("), sampling, **settings):  # type: ignore[arg-type]
        assert not found[piece.sample].end  # nothing comes behind an end
        found[piece.sample].add_piece(piece)
    return found


def test_write_depends_on_seed_and_number_only(plain: PlainModel, tokenizer: Tokenizer) -> None:
    alone, (first, second, third) = samples(plain, tokenizer)[0], samples(plain, tokenizer, number=3)
    assert alone.tokens == first.tokens and alone.text == first.text
    assert len({tuple(s.tokens) for s in (first, second, third)}) == 3
    for sample in (first, second, third):
        assert len(sample.tokens) == 12 and sample.end == "length"
        assert "def f(" + sample.text == tokenizer.decode(tokenizer.encode("def f(") + sample.tokens)
        assert max(sample.tokens) < tokenizer.vocab_size  # the model has seven more
    assert samples(plain, tokenizer, seed=(2, 0))[0].tokens != alone.tokens
    assert samples(plain, tokenizer, seed=(1, 1))[0].tokens != alone.tokens


def test_write_tells_the_models_own_logprobs(plain: PlainModel, tokenizer: Tokenizer) -> None:
    """Whatever the sampling leaves out."""
    (sample,) = samples(plain, tokenizer, Sampling(0.5, 5, 0.9))
    prompt = tokenizer.encode("def f(")
    with torch.no_grad():
        logits = plain(torch.tensor([prompt + sample.tokens]))[0].log_softmax(-1)
    wanted = [float(logits[len(prompt) - 1 + i, token]) for i, token in enumerate(sample.tokens)]
    assert sample.logprobs == pytest.approx(wanted, abs=1e-4)


def test_write_ends_samples_one_by_one(plain: PlainModel, tokenizer: Tokenizer) -> None:
    """Tokens taken as ends where they come in two of three samples, at different places."""
    free = samples(plain, tokenizer, number=3)
    ends = {free[0].tokens[3], free[2].tokens[6]}
    for before, after in zip(free, samples(plain, tokenizer, number=3, ends=ends), strict=True):
        at = next((i for i, token in enumerate(before.tokens) if token in ends), None)
        if at is None:
            assert (after.tokens, after.text, after.end) == (before.tokens, before.text, "length")
        else:
            assert after.tokens == before.tokens[: at + 1] and after.end == "eod"
            prompt = tokenizer.encode("def f(")
            assert "def f(" + after.text == tokenizer.decode(prompt + after.tokens[:-1])


def test_write_leaves_a_stop_text_out(plain: PlainModel, tokenizer: Tokenizer) -> None:
    (free,) = samples(plain, tokenizer)
    stop = free.text[5:8]
    (sample,) = samples(plain, tokenizer, stops=("never there", stop))
    assert sample.end == "stop" and sample.text == free.text[: free.text.index(stop)]
    assert sample.tokens == free.tokens[: len(sample.tokens)]
    # A beginning of a stop at the very end is text.
    (sample,) = samples(plain, tokenizer, stops=(free.text[-1] + "\0",))
    assert sample.end == "length" and sample.text == free.text


def test_write_names_a_model_that_says_nothing(tokenizer: Tokenizer) -> None:
    broken = model(vocabulary=tokenizer.vocab_size)
    with torch.no_grad():
        next(broken.parameters())[:] = float("nan")
    with pytest.raises(CheckpointError, match=r"step-3: the model's logits are not finite"):
        samples(broken, tokenizer)
