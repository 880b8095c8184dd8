"""Scenarios of drills: a fault, its place, and the expected answer; all written down before any run.

`GROSS` are the fifteen gross faults. `THIN` have thin evidence: text that looks ordinary, a few bad samples among good
ones, a permanently too high rate, a checkpoint with right hashes over wrong content; none of them may lose a clean
sample for good: if no sample is bad, samples are deferred. `SLOW` grow slowly: a warning must come before the loss
shows them; nothing acts on a slow signal, so these runs only report what they would do (`stability.dry_run`).
`MIXTURE` are of mixtures of experts: the journal must also name where the fault is. `HEALTHY` are mixtures without a
fault that look strange: nothing may be done.

Causes (guard's actions) direct a person's attention. `causes`: at least one of these must be named.
`tolerated`: may be named as well; any other named cause makes the answer wrong, `data` above all: harmless data
would be skipped. If no incident was opened, as after a single refused update, the answer is the journal's entry on
that update: "not reproduced" means hardware.

Classes (guard's incident): one jump undone by one action is recoverable; a recurring one is lingering; one that
keeps recurring or drifts away is divergent. None: refused before it had any effect: nothing to recover from.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Literal

from pydantic import BaseModel, ConfigDict

from megastable.data.plant import Kind as Region
from megastable_guard.actions import Cause
from megastable_guard.incident import Kind

VARIABLE = "MEGASTABLE_DRILL"
SEARCH = ".search"  # ending of the file, alongside a run, that counts what recovery measured


class Fault(BaseModel):
    """A fault inside a rank.

    kind: "nan_gradient": one of `rank`'s gradients is NaN in the backward pass of step `step`. "inf_loss": the loss of
    its first micro-batch of that step is infinite. "moments": before that step, 16 KiB of its first moments are
    overwritten with random numbers. "bit_flip": before that step, the highest exponent bit of one of its master weights
    flips. Each happens once in the life of a run: a transient fault, not one of the step. "high_rate": a mistake in the
    schedule, which is a function of applied updates: the `steps` updates from `step` on use `factor` times the
    rate, every time they are done. "fp8": from step `step` on, for `steps` steps, one tile of FP8 products is `factor`
    times too large, on all ranks, every time they are computed; products in other precisions are right. "attention":
    for as long, the backward pass of fused attention kernels makes the gradient of the first sample of a micro-batch
    `factor` times as large (NaN: no number). From "growing_gains" to "growing_router": before every one of `steps`
    steps; `factor` is by how much. From "permuted_head" on: what the update of step `step` does besides, once in the
    life of a run; the gradient of `rank`, `factor` times as large for `steps` steps; labels off by one in the samples
    of `steps` steps. "scaled_router", "heavy_expert" and "dead_expert": before that step the weights of all routers
    are scaled, or the bias of the expert at `PLACE` moves, once in the life of a run. "nan_expert": the
    gradient of its weights is NaN in `steps` steps, every time that it is computed. "gamed_balance": from `step` on
    the balance loss is of the scores themselves, which all of them can lower.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal[
        "nan_gradient", "inf_loss", "moments", "bit_flip", "high_rate", "fp8", "attention", "growing_gains",
        "growing_logits", "growing_outputs", "dying_block", "rare_tokens", "permuted_head", "shrunk_moments",
        "cleared_norm", "grown_embeddings", "grown_block", "grown_gradient", "shifted_labels", "growing_router",
        "scaled_router", "heavy_expert", "dead_expert", "nan_expert", "gamed_balance",
    ]  # fmt: skip
    step: int
    rank: int = 1
    steps: int = 1
    factor: float = 10.0

    def with_ranks(self, ranks: int) -> Fault:
        """The same fault in a run with this many ranks."""
        return self.model_copy(update={"rank": min(self.rank, ranks - 1)})


class Plan(BaseModel):
    """The plan of one drilled run. run: its directory. seed: of random choices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run: Path
    seed: int = 0
    fault: Fault | None = None


TextKind = Literal[
    "a sentence", "base64", "sorted words", "json logs", "reversed text", "shuffled words", "a character"
]

SENTENCE = "The committee will meet again on Thursday to discuss the budget for the new library.\n"
BASE64_LINE = 76  # characters of base64 in a line (RFC 2045 section 6.8)
EVENTS = ("request done", "cache miss", "retrying", "connection closed", "token refreshed", "queue is full")


def _base64(random: Random, count: int) -> str:
    coded_text = base64.b64encode(random.randbytes(count * 3 // 4)).decode()
    return "\n".join(coded_text[at : at + BASE64_LINE] for at in range(0, len(coded_text), BASE64_LINE))


def _logs(random: Random, count: int) -> str:
    def lines() -> Iterator[str]:
        log_time, characters_made = 1.7e9, 0
        while characters_made < count:
            log_time += random.expovariate(4.0)
            line = json.dumps(
                {
                    "ts": round(log_time, 3), "level": random.choice(["INFO", "INFO", "WARN", "ERROR"]),
                    "service": f"svc-{random.randrange(40):02d}", "host": f"10.0.{random.randrange(256)}."
                    f"{random.randrange(256)}", "trace": f"{random.getrandbits(64):016x}",
                    "ms": round(random.lognormvariate(3, 1), 2), "msg": random.choice(EVENTS),
                }
            )  # fmt: skip
            characters_made += len(line) + 1
            yield line

    return "\n".join(lines())


def _shuffled(random: Random, source: str) -> str:
    source_words = source.split()
    random.shuffle(source_words)
    return " ".join(source_words)


MAKERS: dict[TextKind, Callable[[Random, str, int], str]] = {
    "a sentence": lambda random, source, count: SENTENCE,
    "base64": lambda random, source, count: _base64(random, count),
    "sorted words": lambda random, source, count: " ".join(sorted(source.split())),
    "json logs": lambda random, source, count: _logs(random, count),
    "reversed text": lambda random, source, count: source[::-1],
    "shuffled words": lambda random, source, count: _shuffled(random, source),
    "a character": lambda random, source, count: "a" * count,
}


def make_text(text: TextKind, random: Random, source: str, count: int) -> str:
    """About `count` characters of a kind of text; a sentence occurs once, as short texts are repeated."""
    return MAKERS[text](random, source, count)


# From outside: SIGKILL or SIGSTOP to a rank; a damaged newest checkpoint and then SIGKILL to a rank; a newest one with
# right hashes over wrong content (poison.py) and then SIGKILL to a rank; SIGKILL to the supervisor.
Outside = Literal[
    "kill_rank", "stop_rank", "damage_checkpoint", "poison_weight", "poison_moments", "kill_parent"
]

STEPS, FAULT_STEP = 160, 100
GLOBAL_BATCH = 16
SAMPLES = 40  # of a bad region: two and a half batches


@dataclass(frozen=True)
class Scenario:
    """A fault that begins at step `step` and lasts for `steps`. reason: why the expected answer is the right one.
    overrides: of the recipe. reference: the fault-free run to compare the loss with. samples: of a
    bad region; of_each: number in each step, consecutive ones without it; text: its kind, if it is text. epochs: number
    of passes over a small corpus. warning: the expected answer is a warning near the start, not a loss as good as the
    reference's. trend: the slow signal that must be warned of before the loss shows the fault. place: the part of the
    model that the journal must name."""

    name: str
    title: str
    causes: frozenset[Cause]
    reason: str
    kinds: frozenset[Kind | None] = frozenset({"recoverable"})
    tolerated: frozenset[Cause] = frozenset()
    region: Region | None = None
    text: TextKind | None = None
    of_each: int | None = None
    fault: Fault | None = None
    outside: Outside | None = None
    overrides: tuple[str, ...] = ()
    reference: str = "clean"
    step: int = FAULT_STEP
    steps: int = 1
    samples: int = SAMPLES
    epochs: int = 1
    warning: bool = False
    trend: str = ""
    place: str = ""

    def at_step(self, step: int) -> Scenario:
        """The same at another step."""
        fault = self.fault and self.fault.model_copy(update={"step": step})
        return replace(self, step=step, fault=fault)


def data(name: str, title: str, region: Region, why: str) -> Scenario:
    """A region of bad samples."""
    return Scenario(name, title, frozenset({Cause.DATA}), why, region=region, steps=3)


def outside(name: str, title: str, outside: Outside, why: str, *causes: Cause) -> Scenario:
    """A fault inflicted from outside; the death of a process may be named as well."""
    right = frozenset(causes or {Cause.PROCESS})
    return Scenario(name, title, right, why, tolerated=frozenset({Cause.PROCESS}) - right, outside=outside)


CLEAN = Scenario(
    "clean", "no fault", frozenset(), "nothing happens, so nothing may be named", frozenset({None})
)


EPOCHS, EPOCHS_STEP, FEW_SAMPLES = (
    3,
    40,
    20,
)  # epochs of a small corpus; step of the fault in the first one; samples
HIGH_RATE_STEPS = 50
# Steps of the broken FP8 kernel; rest of FP8, so that it returns after the repair.
BROKEN_STEPS, REST = 15, 20
# Far beyond what a hard sample does, which a kernel's mistake has no reason to stay below.
WRONG_GRADIENT = 300.0


def _inside(name: str, title: str, kind: str, causes: set[Cause], why: str) -> Scenario:
    fault = Fault.model_validate({"kind": kind, "step": FAULT_STEP})
    kinds: set[Kind | None] = {"recoverable", None} if Cause.STATE not in causes else {"recoverable"}
    return Scenario(name, title, frozenset(causes), why, frozenset(kinds), fault=fault)


# FP8 from the first step on gives such a short run another end, better or worse.
FP8 = ("precision.fp8.recipe=delayed", "precision.fp8.backend=emulated")
CLEAN_FP8 = replace(CLEAN, name="clean-fp8", title="no fault, in FP8", reference="clean-fp8", overrides=FP8)

# The baseline must be known within the first epoch.
SOON = ("stability.detector.warmup_steps=25", "stability.detector.min_values=20")
CLEAN_EPOCHS = replace(
    CLEAN,
    name="clean-epochs",
    title="no fault, three epochs",
    reference="clean-epochs",
    overrides=SOON,
    epochs=EPOCHS,
)

# A finite wrong number in weights or moments looks from outside like an instability of training itself. STATE names
# the damaged part of the run, HARDWARE what was wrong; both send a person to the machine and leave the data alone.
DAMAGED = {Cause.STATE, Cause.HARDWARE}

GROSS = (
    data("random-tokens", "a region of random tokens", "random", "the samples are bad on every state"),
    data(
        "repeated-token", "a region of one repeated token", "repeated", "the samples are bad on every state"
    ),
    data(
        "shuffled-tokens",
        "a region of another corpus's shuffled tokens",
        "shuffled",
        "the samples are bad on every state",
    ),
    replace(
        data(
            "three-epochs",
            f"{FEW_SAMPLES} random samples in the first of {EPOCHS} epochs",
            "random",
            "the samples are bad on every state, and known when they would come again",
        ),
        step=EPOCHS_STEP,
        samples=FEW_SAMPLES,
        epochs=EPOCHS,
        overrides=SOON,
        reference=CLEAN_EPOCHS.name,
    ),
    _inside(
        "nan-gradient",
        "NaN in one rank's gradients",
        "nan_gradient",
        {Cause.HARDWARE},
        "the same samples on the same weights give finite gradients when they are done again",
    ),
    _inside(
        "inf-loss",
        "an infinite loss on one rank",
        "inf_loss",
        {Cause.HARDWARE},
        "the same samples on the same weights give a finite loss when they are done again",
    ),
    Scenario(
        "high-rate",
        f"a learning rate ten times too high for {HIGH_RATE_STEPS} steps",
        frozenset({Cause.LEARNING_RATE}),
        "other data does not help, a smaller rate does",
        # It stays up while the rate does, and recurs with every attempt at the same rate; a remedy that is right at
        # once makes it recoverable, by definition.
        frozenset({"recoverable", "lingering", "divergent"}),
        # The first time nothing has recurred yet: only the state can be blamed.
        frozenset({Cause.STATE}),
        fault=Fault(kind="high_rate", step=FAULT_STEP - 30, steps=HIGH_RATE_STEPS),
        step=FAULT_STEP - 30,
        steps=HIGH_RATE_STEPS,
    ),
    Scenario(
        "fp8-kernel",
        f"an FP8 kernel that gets a tile wrong for {BROKEN_STEPS} steps",
        frozenset({Cause.NUMERICS}),
        "the same samples on the same weights are harmless without FP8, and so is FP8 when the kernel is mended",
        fault=Fault(kind="fp8", step=FAULT_STEP, steps=BROKEN_STEPS),
        overrides=(*FP8, f"stability.policy.fp8_rest={REST}"),
        reference=CLEAN_FP8.name,
        steps=BROKEN_STEPS,
    ),
    Scenario(
        "attention-kernel",
        f"a fused attention kernel whose gradient of a sample is {WRONG_GRADIENT:.0f} times too large, to the end",
        frozenset({Cause.NUMERICS}),
        "the same samples on the same weights are harmless by plain PyTorch in its place",
        fault=Fault(kind="attention", step=FAULT_STEP, steps=STEPS - FAULT_STEP, factor=WRONG_GRADIENT),
        steps=STEPS - FAULT_STEP,
    ),
    _inside(
        "corrupted-moments", "corrupted Adam moments", "moments", DAMAGED, "the state was changed in place"
    ),
    _inside(
        "flipped-bit",
        "a flipped exponent bit in a weight",
        "bit_flip",
        DAMAGED,
        "the state was changed in place",
    ),
    outside("killed-rank", "kill -9 of a rank", "kill_rank", "a process was killed"),
    outside("stopped-rank", "a stopped (hung) rank", "stop_rank", "a process hangs"),
    outside(
        "damaged-checkpoint",
        "a corrupted newest checkpoint, then kill -9 of a rank",
        "damage_checkpoint",
        "the restart meets bytes that are not those that were written; the death that led to it is no storage's",
        Cause.STORAGE,
    ),
    outside("killed-supervisor", "kill -9 of the supervisor", "kill_parent", "a process was killed"),
)


EARLY = 75  # step of the long regions: early, to observe the steps after them
LONG_REGION = 480  # samples: 30 steps
TRICKLE = 20  # steps with a single bad sample each

ANY: frozenset[Kind | None] = frozenset({"recoverable", "lingering", "divergent", None})


def _text(
    name: str, title: str, text: TextKind, why: str, samples: int = SAMPLES, of_each: int | None = None,
    step: int = FAULT_STEP,
) -> Scenario:  # fmt: skip
    step_count = -(-samples // of_each) if of_each else -(-(samples + 2) // GLOBAL_BATCH)
    return Scenario(
        name, title, frozenset({Cause.DATA}), why, region="text", text=text, samples=samples,
        of_each=of_each, step=step, steps=step_count,
    )  # fmt: skip


def _rate(name: str, factor: float) -> Scenario:
    step_count = STEPS - FAULT_STEP
    return Scenario(
        name,
        f"a learning rate {factor:.0f} times too high from step {FAULT_STEP} on",
        frozenset({Cause.LEARNING_RATE}),
        "other data does not help, a smaller rate does; every sample is as good as before",
        # A remedy that is right at once makes it recoverable, by definition.
        frozenset({"recoverable", "lingering", "divergent"}),
        # The first time nothing has recurred yet: only the state can be blamed.
        frozenset({Cause.STATE}),
        fault=Fault(kind="high_rate", step=FAULT_STEP, steps=step_count, factor=factor),
        steps=step_count,
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
        f"one sentence over and over in {LONG_REGION} samples running",
        "a sentence",
        "the text is bad on every state, from its first sample to its last: one region, one incident, one cause",
        LONG_REGION,
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
        f"one character over and over in {LONG_REGION} samples running",
        "a character",
        "bad on every state; soon memorised, so that only its first steps stand out",
        LONG_REGION,
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


SLOW_STEPS, SLOW_FROM = 400, 200
# The faults change weights as training could, but between two updates: memory is not watched.
SLOW_RUN = (
    "train.steps=400",
    "schedule.total_steps=600",
    "stability.dry_run=true",
    "stability.hardware.state=false",
)
BARE = (*SLOW_RUN, "model.qk_norm=false")
STALE = (*SLOW_RUN, "optimizer.betas=[0.9,0.999]")

CLEAN_SLOW = replace(CLEAN, name="clean-slow", reference="clean-slow", overrides=SLOW_RUN)
CLEAN_BARE = replace(
    CLEAN, name="clean-bare", title="no fault, without QK-norm", reference="clean-bare", overrides=BARE
)
CLEAN_ABSENT = replace(
    CLEAN, name="clean-absent", title="half of the vocabulary is absent", reference="clean-absent", overrides=STALE,
    fault=Fault(kind="rare_tokens", step=SLOW_STEPS + 1),
)  # fmt: skip


def _slow(
    name: str,
    title: str,
    trend: str,
    kind: str,
    factor: float,
    why: str,
    clean: Scenario,
    step: int = SLOW_FROM,
) -> Scenario:
    step_count = SLOW_STEPS - step
    fault = Fault.model_validate({"kind": kind, "step": step, "steps": step_count, "factor": factor})
    return Scenario(
        name, title, frozenset(), why, frozenset({None}), fault=fault, overrides=clean.overrides, step=step,
        steps=step_count, reference=clean.name, trend=trend,
    )  # fmt: skip


SLOW = (
    _slow(
        "entropy-collapse", "gains of QK-norm grow by 0.8 % a step", "entropy", "growing_gains", 1.008,
        "attention looks at ever fewer tokens", CLEAN_SLOW,
    ),
    _slow(
        "flat-attention", "gains of QK-norm shrink by 0.8 % a step", "flatness", "growing_gains", 0.992,
        "attention looks at all tokens alike", CLEAN_SLOW,
    ),
    _slow(
        "growing-outputs", "output weights of a block's MLP grow by 2 % a step", "outputs", "growing_outputs", 1.02,
        "what the MLP adds outgrows the residual stream", CLEAN_SLOW,
    ),
    _slow(
        "growing-logits", "weights of q and k grow by 1 % a step, without QK-norm", "logits", "growing_logits", 1.01,
        "attention logits grow exponentially", CLEAN_BARE,
    ),
    _slow(
        "stale-moments", "absent tokens come one by one, then ever more, with beta2 0.999", "tokens", "rare_tokens",
        1.0, "their rows' second moments are nearly zero", CLEAN_ABSENT, step=250,
    ),
    _slow(
        "dying-block", "the output weights of a block lose 2 % a step, and are not trained", "layers", "dying_block",
        0.98, "the block fades from the residual stream", CLEAN_SLOW,
    ),
)  # fmt: skip


# Experts are judged by their own history: it is known, and the rate at its height, when faults begin.
PLACE = "blocks.1.mlp.experts.3"
ROUTER = "mlp.router"
EXPERTS = "model.experts={count: 8, top_k: 2, ffn: 96, bias_rate: 0.001"
SMALL = (
    "model.hidden=64",
    "train.eval_samples=256",
    "stability.trends.start=60",
    "stability.hardware.state=false",
)
OF_EXPERTS = (*SMALL, EXPERTS + "}")
# Of the hack: whatever the scores are, they weigh the experts.
GAMED = (*SMALL, EXPERTS + ", gate: sigmoid, normalize: false, balance_loss: 0.1}")

CLEAN_EXPERTS = replace(
    CLEAN,
    name="clean-experts",
    title="no fault, with experts",
    reference="clean-experts",
    overrides=OF_EXPERTS,
)
CLEAN_SIGMOID = replace(
    CLEAN,
    name="clean-sigmoid",
    title="no fault, with a sigmoid gate",
    reference="clean-sigmoid",
    overrides=GAMED,
)


def _mixture(
    name: str, title: str, kind: str, factor: float, place: str, why: str, causes: set[Cause], trend: str = "",
    steps: int = 1, clean: Scenario = CLEAN_EXPERTS,
) -> Scenario:  # fmt: skip
    fault = Fault.model_validate(
        {"kind": kind, "step": FAULT_STEP + 2, "steps": steps, "factor": factor, "rank": 0}
    )
    # What grows by itself harms no data: a trial may say so.
    tolerated = frozenset({Cause.STATE, Cause.NEW_DATA}) if steps > 1 else frozenset[Cause]()
    return Scenario(
        name, title, frozenset(causes), why, ANY, tolerated, fault=fault,
        overrides=clean.overrides, step=fault.step, steps=steps, reference=clean.name, trend=trend, place=place,
    )  # fmt: skip


MIXTURE = (
    _mixture(
        "router-x30", "weights of all routers times 30", "scaled_router", 1.0, ROUTER,
        "the same steps do not make it again: something else changed the weights", DAMAGED,
    ),
    _mixture(
        "heavy-expert", "every token chooses one expert: its bias is 1 higher", "heavy_expert", 1.0, PLACE,
        "the same steps do not make it again: something else changed the bias", DAMAGED,
    ),
    _mixture(
        "dead-expert", "no token chooses one expert any more: its bias is 5 lower", "dead_expert", 1.0, PLACE,
        "the same steps do not make it again: something else changed the bias", DAMAGED,
    ),
    _mixture(
        "growing-router", "weights of all routers grow by 5 % a step", "growing_router", 1.05, ROUTER,
        "scores collapse long before the loss shows it", set(), "router_entropy", STEPS - FAULT_STEP - 2,
    ),
    _mixture(
        "gamed-balance", "a balance loss that a sigmoid gate lowers by lowering all scores", "gamed_balance", 1.0,
        ROUTER, "a remedy, no balance loss, is clearly better", set(), "", STEPS - FAULT_STEP - 2, CLEAN_SIGMOID,
    ),
    _mixture(
        "nan-expert", "NaN in the gradient of an expert's weights", "nan_expert", 1.0, PLACE,
        "one update is refused, and what its first number without a value is of is told", set(),
    ),
    replace(_rate("experts-rate-x30", 30.0), overrides=OF_EXPERTS, reference=CLEAN_EXPERTS.name),
    replace(
        data("experts-burst", "a region of random tokens", "random", "the samples are bad on every state"),
        overrides=OF_EXPERTS, reference=CLEAN_EXPERTS.name,
    ),
)  # fmt: skip


def _healthy(
    name: str, title: str, *overrides: str, experts: str = EXPERTS + "}", epochs: int = 1
) -> Scenario:
    """A run with experts that is strange, and must be left alone."""
    return replace(
        CLEAN_EXPERTS, name=name, title=title, reference=name, epochs=epochs,
        overrides=(*SMALL, experts, f"train.steps={SLOW_STEPS}", *overrides),
    )  # fmt: skip


HEALTHY = (
    _healthy("usual-experts", "no fault, a longer run"),
    _healthy(
        "unbalanced-experts", "nothing balances", experts=EXPERTS.replace("0.001", "0") + ", balance_loss: 0}"
    ),
    _healthy("fast-bias", "biases move 20 times as fast", experts=EXPERTS.replace("0.001", "0.02") + "}"),
    _healthy("sigmoid-experts", "a sigmoid gate", experts=EXPERTS + ", gate: sigmoid}"),
    _healthy("small-batches", "four samples a step", "train.global_batch=4", "train.micro_batch=4"),
    _healthy("repeated-experts", "a small corpus again and again", *SOON, epochs=EPOCHS),
    _healthy("long-warmup", "the rate rises for half of the run", f"schedule.warmup_steps={SLOW_STEPS // 2}"),
)
