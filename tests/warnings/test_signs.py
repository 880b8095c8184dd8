"""Signs of a rate that is too high: each at its threshold, once, and never of numbers that say nothing."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.config.stability import SignsConfig
from megastable.run.events.training_events import Warned
from megastable.warnings.signs import Signs, SignsState, due

CONFIG = SignsConfig()
WIDTH = 256  # sqrt(width) / 2 is 8
LARGE = 2 * CONFIG.rms


def look(rms: float = 0.02, entropy: float = 3.4, block: str = "blocks.1") -> dict[str, dict[str, float]]:
    other = {"activation_rms": 0.02, "attention_entropy": 3.4, "attention_logit": 5.0}
    mine = {"activation_rms": rms, "attention_entropy": entropy, "attention_logit": 300.0}
    return {"blocks.0": other, block: mine, "head.weight": {"weight_rms": 0.02}}


def restored(saved: dict[str, Any]) -> Signs:
    signs = Signs(CONFIG, WIDTH)
    signs.load_state_dict(saved)
    return signs


def names(found: list[Warned]) -> list[str]:
    return [sign["sign"] for sign in found]


@pytest.mark.parametrize(
    ("step", "ratio", "told"),
    [
        (1, CONFIG.change / 8, ["update"]),
        (1, CONFIG.change / 8 * 0.999, []),
        (50, 1.0, ["update"]),
        (101, 1.0, []),  # the start is over
        (40, 1.0, []),  # measured for other reasons
        (1, math.nan, []),
        (1, math.inf, ["update"]),
    ],
)
def test_an_update_that_changes_much(step: int, ratio: float, told: list[str]) -> None:
    found = Signs(CONFIG, WIDTH).measured(step, {"update_ratio": ratio}, {})
    assert names(found) == told
    assert all("schedule.warmup_steps" in sign.text and f"step {step}" in sign.text for sign in found)


def test_the_same_change_of_the_weights_is_more_in_a_wider_model() -> None:
    ratio = {"update_ratio": CONFIG.change / 8 * 0.999}
    assert names(Signs(CONFIG, WIDTH + 1).measured(1, ratio, {})) == ["update"]
    assert names(Signs(CONFIG, 4 * WIDTH).measured(1, ratio, {})) == ["update"]


@pytest.mark.parametrize(
    ("later", "told"),
    [
        (look(rms=CONFIG.rms), ["activations"]),  # grown a thousandfold
        (look(rms=0.999 * CONFIG.rms), []),
        (look(rms=math.nan), []),
        (look(rms=math.inf), []),
        (look(rms=LARGE, block="blocks.9"), []),  # there is nothing to compare it with
        (look(entropy=3.4 * CONFIG.collapse), ["attention"]),
        (look(entropy=3.41 * CONFIG.collapse), []),
        (look(entropy=0.0), []),
        (look(rms=LARGE, entropy=0.1), ["activations", "attention"]),
        ({}, []),
    ],
)
def test_looks_are_compared_with_the_first(later: dict[str, dict[str, float]], told: list[str]) -> None:
    signs = Signs(CONFIG, WIDTH)
    assert signs.measured(1, {}, look()) == []
    found = signs.measured(20, {}, later)
    assert names(found) == told
    assert all("blocks.1" in sign.text for sign in found)


@pytest.mark.parametrize(
    ("first", "now", "told"),
    [
        (1.0, CONFIG.growth, 1),
        (
            1.0,
            0.999 * CONFIG.growth,
            0,
        ),  # large from the start on: another initialisation, or converted weights
        (0.5 * CONFIG.rms / CONFIG.growth, 0.999 * CONFIG.rms, 0),  # twice the growth
        (0.5 * CONFIG.rms / CONFIG.growth, CONFIG.rms, 1),
    ],
)
def test_a_stream_is_told_that_has_grown_much_and_is_large(first: float, now: float, told: int) -> None:
    signs = Signs(CONFIG, WIDTH)
    signs.measured(1, {}, look(rms=first))
    assert len(signs.measured(20, {}, look(rms=now))) == told


def test_one_block_must_be_both() -> None:
    """One is large, but was at the start; the other has grown, but is small."""
    signs = Signs(CONFIG, WIDTH)
    signs.measured(1, {}, look(rms=CONFIG.rms))
    assert signs.measured(20, {}, {**look(rms=CONFIG.rms), "blocks.0": {"activation_rms": 1.5}}) == []


# RMS by block after the steps 1, 20, 50 and 100, as recorded.
QUICKSTART = {
    1: (0.02465, 0.03032, 0.03733, 0.04536),
    20: (0.0725, 0.165, 0.274, 0.407),
    50: (0.435, 0.843, 0.998, 1.125),
    100: (0.906, 1.393, 1.551, 1.713),
}


def test_the_quickstart_is_silent() -> None:
    """Its stream grows 46 times, and it is healthy."""
    signs = Signs(CONFIG, WIDTH)
    for step, column in QUICKSTART.items():
        rows = {f"blocks.{i}": {"activation_rms": rms} for i, rms in enumerate(column)}
        assert signs.measured(step, {}, rows) == []


def test_the_best_of_the_bad_is_told() -> None:
    """Step 20 without QK-norm at a rate of 0.03, 3 layers of 128, as recorded."""
    signs = Signs(CONFIG, 128)
    signs.measured(1, {}, look(rms=0.0221))
    assert names(signs.measured(20, {}, look(rms=221.8))) == ["activations"]


@pytest.mark.parametrize(("width", "told"), [(CONFIG.narrowest, 1), (CONFIG.narrowest - 1, 0)])
def test_a_stream_that_grows_in_a_narrow_model_is_no_sign(width: int, told: int) -> None:
    signs = Signs(CONFIG, width)
    signs.measured(1, {}, look())
    assert len(signs.measured(20, {}, look(rms=LARGE))) == told


def test_a_first_look_that_is_extreme_itself_is_no_sign() -> None:
    assert Signs(CONFIG, WIDTH).measured(1, {}, look(rms=1e6, entropy=0.01)) == []


def test_a_first_look_that_showed_nothing_is_made_up_for_by_the_next() -> None:
    signs = Signs(CONFIG, WIDTH)
    assert signs.measured(1, {}, {}) == signs.measured(20, {}, look()) == []
    assert names(signs.measured(50, {}, look(rms=LARGE))) == ["activations"]


@pytest.mark.parametrize(
    ("step", "undisturbed", "told"), [(20, True, 3), (20, False, 0), (32, True, 0), (10, True, 1)]
)
def test_only_regular_looks_at_an_undisturbed_start_are_judged(
    step: int, undisturbed: bool, told: int
) -> None:
    """The second refused update of a spike is looked into, too; what it shows is the spike."""
    signs = Signs(CONFIG, WIDTH)
    signs.measured(1, {}, look())
    assert len(signs.measured(step, {"update_ratio": 1.0}, look(rms=LARGE, entropy=0.1), undisturbed)) == told
    assert len(signs.measured(50, {"update_ratio": 1.0}, look(rms=LARGE, entropy=0.1))) == 3 - told


def test_a_first_look_at_an_update_that_overflowed_is_one() -> None:
    signs = Signs(CONFIG, WIDTH)
    assert signs.measured(1, {}, look(), undisturbed=False) == []
    assert names(signs.measured(20, {}, look(rms=LARGE))) == ["activations"]


def test_the_loss_is_compared_once() -> None:
    signs = Signs(CONFIG, WIDTH)
    assert not signs.state.compared and signs.unigram(20, [2.0] * 20, 6.0, 0.26) == []
    assert signs.state.compared and restored(signs.state_dict()).state.compared


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([6.0 - CONFIG.below_unigram + 0.001] * 20, ["unigram"]),
        ([6.0 - CONFIG.below_unigram - 0.001] * 20, []),
        ([8.0] * 10 + [5.0] * 10, []),  # the latest count
        ([5.0] * 6 + [9.0] * 4, []),  # single hard batches do not
        ([math.nan] * 10, []),
        ([], []),
    ],
)
def test_a_loss_near_the_unigram_entropy(losses: list[float], told: list[str]) -> None:
    found = Signs(CONFIG, WIDTH).unigram(20, losses, 6.0, 0.26)
    assert names(found) == told
    assert all("unigram entropy 6.000" in sign.text for sign in found)
    assert Signs(CONFIG, WIDTH).unigram(20, losses, math.nan, 0.26) == []


def test_when_the_loss_is_compared() -> None:
    assert due([0.01] * 100, CONFIG)[0] == 25
    assert due([0.1] * 100, CONFIG)[0] == CONFIG.updates  # the latest losses would be the first ones
    assert due([0.001] * 100, CONFIG)[0] == due([], CONFIG)[0] == 0


numbers = st.floats(allow_nan=True, allow_infinity=True)
rows = st.dictionaries(
    st.sampled_from(["blocks.0", "blocks.1", "head.weight"]),
    st.dictionaries(
        st.sampled_from(["activation_rms", "attention_entropy", "attention_logit", "weight_rms"]), numbers
    ),
)
calls = st.lists(
    st.tuples(st.integers(1, 200), st.dictionaries(st.just("update_ratio"), numbers), rows), max_size=12
)


@given(calls=calls, cut=st.integers(0, 12))
def test_each_is_told_once_whatever_comes_and_whenever_the_process_is_another(
    calls: list[Any], cut: int
) -> None:
    whole, parted = Signs(CONFIG, WIDTH), Signs(CONFIG, WIDTH)
    one, other = [], []
    for number, call in enumerate(calls):
        if number == cut:  # by way of a checkpoint
            parted = restored(json.loads(json.dumps(parted.state_dict())))
        one += names(whole.measured(*call))
        other += names(parted.measured(*call))
    assert one == other and len(one) == len(set(one))


def test_what_was_saved_is_a_copy() -> None:
    signs = Signs(CONFIG, WIDTH)
    saved = signs.state_dict()
    signs.measured(1, {"update_ratio": 1.0}, look())
    assert (
        saved == SignsState().model_dump() != signs.state_dict() == restored(signs.state_dict()).state_dict()
    )
    with pytest.raises(ValueError, match="told"):
        signs.load_state_dict({"told": None})


def test_no_looks_and_no_norms_are_asked_for_where_there_are_none() -> None:
    off = Signs(SignsConfig(norms=(), looks=()), WIDTH)
    assert not any(off.measures(step) or off.looks(step) for step in range(200))
    assert off.measured(1, {"update_ratio": 1.0}, look(rms=1e9)) == []
    on = Signs(CONFIG, WIDTH)
    assert [step for step in range(200) if on.looks(step)] == [1, 20, 50, 100]
    assert [step for step in range(200) if on.measures(step)] == [1, 2, 5, 10, 20, 50, 100]
