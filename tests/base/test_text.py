"""Events in words, spans of time, text from outside: the same wherever a person is told something."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megastable.base.text import TOLD, duration, number, plural, ranges, say, sentence, size, visible

JUNK = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.just([1])
    | st.just([[1, math.inf]])
    | st.just({"a": 1})
)
PACKAGE = Path(__file__).parents[2] / "megastable"
WRITERS = ("note", "commit", "_commit")  # the first argument of what they are called with is an event
KEYS = """what step to_step loss grad_norm attempt code signal failure number summary bytes name world seconds delay
reason waited limit phase changes action remedy cause before text problem cursor sentence steps val_loss to positions
next_epoch first last lines
deferred returns lost""".split()


@given(st.sampled_from(sorted(TOLD)), st.dictionaries(st.sampled_from(KEYS), JUNK))
def test_every_event_has_a_sentence_whatever_it_lacks(kind: str, fields: dict[str, Any]) -> None:
    told = sentence({"event": kind, **fields})
    assert told and told.isprintable() and len(told) <= 2000
    assert say({"event": kind, **fields}).endswith(told)


def written() -> Iterator[str]:
    """The names of all events that the package writes into a journal; where a name is computed, all that it may be."""
    for path in PACKAGE.rglob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        for call in nodes:
            if not isinstance(call, ast.Call) or not call.args or not call.keywords:
                continue
            if isinstance(call.func, ast.Attribute) and call.func.attr in WRITERS:
                named = ast.dump(call.args[0]).replace("Load()", "Store()")
                chosen = [
                    n.value for n in nodes if isinstance(n, ast.Assign) and named == _first(n.targets[0])
                ]
                for result in (r for part in [call.args[0], *chosen] for r in _results(part)):
                    if isinstance(result, ast.Constant) and isinstance(result.value, str):
                        yield result.value


def _first(target: ast.expr) -> str:
    return ast.dump(target.elts[0] if isinstance(target, ast.Tuple) else target)


def _results(value: ast.expr) -> Iterator[ast.expr]:
    """What an expression may be: of a condition, both sides; of a tuple, the first."""
    if isinstance(value, ast.IfExp):
        yield from (*_results(value.body), *_results(value.orelse))
    else:
        yield value.elts[0] if isinstance(value, ast.Tuple) else value


def test_every_event_that_is_written_has_a_sentence() -> None:
    names = set(written())
    assert {"discard_examined", "samples_examined", "fell_back", "returned", "handover", "alert"} <= names
    assert len(names) >= 50 and names <= set(TOLD)


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ({"event": "discarded", "step": 9, "loss": 8.7942, "grad_norm": "inf", "reason": "up"},
         "step 9: update refused, loss 8.794, gradient norm inf: up"),
        ({"event": "training", "step": 0, "cursor": 16, "world": 2}, "step 0: training from position 16 on 2 ranks"),
        ({"event": "skips_added", "documents": 3, "samples": 5},
         "5 samples of 3 documents are skipped, as a person asked"),
        ({"event": "skips_added", "documents": 3, "samples": 0},
         "3 documents are named, as a person asked; their samples were skipped already"),
        ({"event": "ended", "attempt": 2, "code": 0, "failure": ""}, "attempt 2 ended: as it should"),
        ({"event": "ended", "attempt": 2, "code": 75}, "attempt 2 ended: code 75"),
        ({"event": "ended", "attempt": 2, "failure": "rank 1 was killed"}, "attempt 2 ended: rank 1 was killed"),
        ({"event": "hang", "phase": "step", "waited": 61.2, "limit": 60}, "no progress for 61 s in step, 60 s is the"),
        ({"event": "incident", "what": "opened", "number": 3, "summary": {"failure": "gone"}}, "incident 3: opened"),
        ({"event": "incident", "what": "attributed", "number": 3, "summary": {"cause": "code", "reasons": ["a", "b"]}},
         "incident 3: cause: code: b"),
        ({"event": "incident", "what": "closed", "step": 5, "number": 3, "summary": {"outcome": "healed"}},
         "step 5: incident 3: closed: healed"),
        ({"event": "incident", "what": "attributed", "number": 3, "cause": "state", "reason": "b",
          "deferred": [[0, 9], [12, 14]], "returns": [[90, 99], [101, 103]], "lost": 1},
         "incident 3: cause: state: b; 11 samples deferred; read again from position 90, 1 sample skipped in this epoch"
         ": no room to read them later"),
        ({"event": "fell_back", "step": 46, "to": "bf16", "reason": "fall-back 1 of 3"},
         "step 46: goes on without FP8, in bf16: fall-back 1 of 3"),
        ({"event": "returned", "step": 300, "to": "FP8", "reason": "it is calm"},
         "step 300: computes in FP8 again: it is calm"),
        ({"event": "alert", "what": "begun", "step": 7, "reason": "the 8 rewinds are spent"},
         "step 7: ALERT: nothing more is done automatically, training goes on: the 8 rewinds are spent"),
        ({"event": "alert", "what": "over", "step": 70}, "step 70: the alert is over"),
        ({"event": "discard_examined", "step": 30, "first": 25, "last": 25, "reason": "nobody is guilty"},
         "step 30: samples of step 25 examined, nothing is skipped: nobody is guilty"),
        ({"event": "samples_dropped", "step": 30, "first": 7, "last": 7, "reason": "8 later ones wait"},
         "step 30: samples of step 7 not examined: 8 later ones wait"),
        ({"event": "samples_examined", "step": 30, "first": 5, "last": 25}, "step 30: samples of steps 5 to 25 exam"),
        ({"event": "incident", "what": "released", "number": 2, "step": 9, "reason": "it was the rate",
          "positions": [[5, 8]], "next_epoch": [[1, 2]]},
         "step 9: incident 2: 4 skipped samples found innocent, to be read after all: it was the rate"),
        ({"event": "mix_changed", "step": 9, "old": {}, "new": {}}, "step 9: data mix changed"),
        ({"event": "baseline_reset", "step": 9, "reason": "it stays"}, "step 9: detector baseline reset: it stays"),
        ({"event": "rate_lifted", "step": 9, "reason": "200 steps"}, "step 9: a limit of the learning rate is"),
        ({"event": "config_changed", "changes": ["a: 1 -> 2", "b: 3 -> 4"]}, "recipe changed: a: 1 -> 2; b: 3 -> 4"),
        ({"event": "finished", "steps": 220, "val_loss": None}, "finished after 220 steps"),
        ({"event": "warning", "step": 5, "text": "a\x1b[31m\nb"}, "step 5: warning: a\\x1b[31m\\nb"),
        ({"event": "of another version", "x": 1}, ""),
        ({"event": ["odd"]}, ""),
    ],
)  # fmt: skip
def test_events_in_words(event: dict[str, Any], said: str) -> None:
    assert say(event).startswith(said) and bool(say(event)) == bool(said)


@given(st.text(max_size=20), st.integers(1, 30))
def test_visible_text_is_short_and_acts_on_nothing(text: str, most: int) -> None:
    assert visible(text).isprintable() and visible(visible(text)) == visible(text)
    assert len(visible(text, most)) <= most
    assert visible(text, 400) == visible(text)
    visible(text).encode()


def test_text_that_is_cut_says_so() -> None:
    assert (visible("abcdef", 4), visible("abcd", 4), visible("a\x07b", 4)) == ("abc…", "abcd", "a\\x…")
    assert visible(5) == "5" and visible("a\nb", keep="\n") == "a\nb"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.4 s"), (9.96, "10 s"), (59.4, "59 s"), (59.9, "1 min"), (3599, "1 h 0 min"), (12_000, "3 h 20 min"),
     (360_000, "4 d 4 h"), (float("nan"), "?"), (float("inf"), "?")],
)  # fmt: skip
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_numbers_of_all_kinds() -> None:
    assert (size(73_509_951), size(9.8e10), size(None), size(True)) == ("73.5 MB", "98 GB", "?", "?")
    assert (plural(1, "step"), plural(2000, "step")) == ("1 step", "2,000 steps")
    assert ranges([(1, 2), (5, 9), (20, 30)], 2) == "1, 5-8 and 1 more range"
    assert (number("nan"), number(None), number(10**400), number(2)) == ("nan", "?", "?", "2.000")
