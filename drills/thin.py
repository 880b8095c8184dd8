"""Faults with thin evidence, written down before any run: text that looks ordinary, a few bad samples among good ones,
a permanently too high rate, a checkpoint with right hashes over wrong content.

None of them may lose a clean sample for good: if no sample is guilty, samples are deferred.
"""

from __future__ import annotations

from dataclasses import replace

from drills.corrupt_texts import Text
from drills.plan import Fault
from drills.scenario import FAULT_STEP, GLOBAL_BATCH, SAMPLES, STEPS, Scenario, outside
from megastable_guard.actions import Cause
from megastable_guard.incident import Kind

EARLY = 75  # step of the long regions: early, to observe the steps after them
LONG = 480  # samples: 30 steps
TRICKLE = 20  # steps with a single bad sample each
WARNED = 100  # steps within which a bad start must cause a warning

ANY: frozenset[Kind | None] = frozenset({"recoverable", "lingering", "divergent", None})


def _text(
    name: str, title: str, text: Text, why: str, samples: int = SAMPLES, of_each: int | None = None,
    step: int = FAULT_STEP,
) -> Scenario:  # fmt: skip
    steps = -(-samples // of_each) if of_each else -(-(samples + 2) // GLOBAL_BATCH)
    return Scenario(
        name, title, frozenset({Cause.DATA}), why, region="text", text=text, samples=samples,
        of_each=of_each, step=step, steps=steps,
    )  # fmt: skip


def _rate(name: str, factor: float) -> Scenario:
    steps = STEPS - FAULT_STEP
    return Scenario(
        name,
        f"a learning rate {factor:.0f} times too high from step {FAULT_STEP} on",
        frozenset({Cause.LEARNING_RATE}),
        "other data does not help, a smaller rate does; every sample is as good as before",
        # A remedy that is right at once makes it recoverable, by definition.
        frozenset({"recoverable", "lingering", "divergent"}),
        # The first time nothing has recurred yet: only the state can be blamed.
        frozenset({Cause.STATE}),
        fault=Fault(kind="high_rate", step=FAULT_STEP, steps=steps, factor=factor),
        steps=steps,
    )


def _start(name: str, title: str, why: str, *overrides: str) -> Scenario:
    """Settings that are wrong from the first step on. There is nothing to go back to: a person must be warned."""
    return Scenario(
        name, title, frozenset(), why, ANY, frozenset({Cause.LEARNING_RATE, Cause.STATE}), overrides=overrides,
        step=1, steps=STEPS, warning=True,
    )  # fmt: skip


COLD = ("optimizer.betas=[0.9,0.999]", "schedule.warmup_steps=0")

THIN = (
    _text(
        "repeated-sentence",
        f"one sentence over and over in {LONG} samples running",
        "a sentence",
        "the text is bad on every state, from its first sample to its last: one region, one incident, one cause",
        LONG,
        step=EARLY,
    ),
    _text(
        "base64-of-16",
        f"base64 in 4 of 16 samples, {SAMPLES // 4} steps running",
        "base64",
        "those samples are bad on every state, those beside them are good",
        of_each=4,
    ),
    _text(
        "sorted-words",
        "words of the corpus, sorted",
        "sorted words",
        "the words are the corpus's, but no text: as a group they are worse than any batch",
    ),
    _text("json-logs", "log lines in JSON", "json logs", "as a group they are worse than any batch"),
    _text(
        "reversed-text",
        "text of the corpus, backwards",
        "reversed text",
        "the characters are the corpus's, but no text: as a group they are worse than any batch",
    ),
    replace(
        _text(
            "trickle",
            f"one sample of base64 among 16, {TRICKLE} steps running",
            "base64",
            "each is hard, but no step is conspicuous, and the run learns from them (others of their kind get 0.73 nat "
            "easier, at a cost of 0.010 nat): so they may be trained on, without an incident",
            TRICKLE,
            of_each=1,
        ),
        causes=frozenset(),
        kinds=frozenset({"recoverable", None}),
        tolerated=frozenset({Cause.DATA, Cause.NEW_DATA}),
    ),
    _text(
        "shuffled-words",
        "words of the corpus in any order",
        "shuffled words",
        "the words are the corpus's, but no text: as a group they are worse than any batch",
    ),
    _text(
        "repeated-character",
        f"one character over and over in {LONG} samples running",
        "a character",
        "bad on every state; soon learnt by heart, so that only its first steps stand out",
        LONG,
        step=EARLY,
    ),
    outside(
        "poisoned-weight",
        "a weight of 10,000 in the newest checkpoint, its hashes right, then kill -9 of a rank",
        "poison_weight",
        "the checkpoint's own content is wrong: neither data nor rate is; the one before it is good",
        Cause.STORAGE,
        Cause.STATE,
    ),
    outside(
        "poisoned-moments",
        "second moments of zero in the newest checkpoint, its hashes right, then kill -9 of a rank",
        "poison_moments",
        "the checkpoint's own content is wrong: neither data nor rate is; the one before it is good",
        Cause.STORAGE,
        Cause.STATE,
    ),
    _rate("rate-x10", 10.0),
    _rate("rate-x30", 30.0),
    _start(
        "no-warmup",
        "beta2 of 0.999 without a warm-up, at the usual rate",
        "the second moments know a step or two when the rate is full: the first updates are far too large",
        *COLD,
    ),
    _start(
        "no-warmup-high",
        "beta2 of 0.999 without a warm-up, at a rate of 0.02",
        "the same, at seven times the rate",
        *COLD,
        "optimizer.lr=0.02",
    ),
    _start(
        "no-qk-norm",
        "no norm of queries and keys, at a rate of 0.03",
        "the attention's logits grow without a bound, and its entropy vanishes",
        "model.qk_norm=false",
        "optimizer.lr=0.03",
    ),
)
