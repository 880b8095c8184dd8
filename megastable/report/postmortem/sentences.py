"""Puts the facts of an incident into sentences: headline, class, cause, outcome, cost, next steps. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator

from megastable.base.text import duration, plural, ranges
from megastable.base.text import put_off as told_off
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import SampleEntry
from megastable.report.postmortem.facts import Evidence, IncidentFacts
from megastable.report.postmortem.sample_texts import Facts, count

NAMED = 1000  # most documents named by an incident (incident_log.py)
TYPES = {
    "recoverable": ("type 1, recoverable", "a spike undone by one rewind"),
    "lingering": ("type 2, lingering", "it settled higher, swung, or came back"),
    "divergent": ("type 3, divergent", "it went away from the trend, or kept coming back"),
}
CAUSES = {
    "data": "data: samples that are bad on the good state as well",
    "new_data": "new data: the run learns from it, or it does no harm",
    "numerics": "numerics: the same step is harmless without FP8 or a kernel, or a branch was clearly better",
    "state": "state: the weights or the optimizer's state: the same data is harmless on the good state",
    "moments": "moments: Adam's were stale: with others, or a lower beta2, a branch was clearly better",
    "learning_rate": "learning rate: other data did not help, and a branch with a lower rate was clearly better",
    "hardware": "hardware: the same data on the same state gave something else",
    "unknown": "not known",
}
BREAKDOWNS = {
    "process": "process: a process died, was killed or hung",
    "storage": "storage: a file was damaged or cut on its disk, or the disk is full",
    "code": "code: the same failure at the same step, with other data, too",
    "data": "data: the same failure at the same place, repeatedly; its samples were not measured",
    "hardware": "hardware: one host fails among several",
}
ACTIONS = {
    "apply": "tried the same steps with the data and without it, and trained on: nothing was taken away",
    "discard": "the updates were refused; the weights never saw them",
    "skip": "skipped the guilty samples from there on; nothing was undone",
    "wait": "left it to itself, as a branch without any change had healed; outlier updates were refused",
    "rewind": "rewound in memory to before the onset, without a restart",
    "fall_back": "rewound in memory to before the onset and continued without FP8, or without a kernel",
    "cap_lr": "rewound in memory to before the onset and capped the learning rate at its value there",
    "cut_lr": "rewound in memory to before the onset and cut the learning rate",
    "adjust": "rewound in memory to before the onset and continued with a remedy that was clearly better in a branch",
    "swap_corpus": "rewound in memory to before the onset and continued without the corpus",
    "handover": "ended the processes for a restart from a checkpoint before the onset",
    "restart": "restarted the processes from the newest intact checkpoint, or from the beginning without one",
    "alert": "raised an alert: training continued, outlier updates were refused, nothing else was done automatically",
    "stop": "stopped: a person is needed",
}
OUTCOMES = {
    "open": "It is still open: no proof yet that it is over.",
    "healed": "It is over.",
    "handed over": "It was handed over: the next process resumes from a checkpoint before the onset.",
    "stopped": "The run was stopped: a person is needed.",
}


class FollowUp(Facts):
    """Something to do, and the command that does it."""

    text: str
    command: str = ""


def headline(e: Evidence) -> str:
    """The incident in two or three sentences."""
    return f"{seen(e.incident)} {sequel(e)}"


def sequel(e: Evidence) -> str:
    """What was found and done, and how it ended."""
    return " ".join(part for part in (_found_and_done(e), outcome(e)) if part)


def type_of(kind: str) -> str:
    return TYPES.get(kind, (kind, ""))[0]


def type_remark(i: IncidentFacts) -> str:
    """The meaning of the type; "" for a failed process or file."""
    return "" if i.breakdown else TYPES.get(i.kind, ("", ""))[1]


def cause(i: IncidentFacts) -> str:
    """The meaning of the cause, which differs for supervisor and attribution."""
    return (BREAKDOWNS if i.breakdown else CAUSES).get(i.cause, i.cause)


def acted(action: str) -> str:
    """The effect of an action."""
    return _sentence(ACTIONS.get(action, action))


def seen(i: IncidentFacts) -> str:
    """What happened, and when."""
    if i.verdict == "damaged_checkpoint":
        return f"The checkpoint of step {i.step:,} was damaged, and passed over."
    if i.breakdown:
        return _sentence(i.failure) if i.failure else f"After step {i.step:,} {symptom(i)}."
    lasting = i.verdict in ("drift", "plateau", "oscillation", "shift")
    return f"{f'From step {i.onset:,} on' if lasting else f'At step {i.onset:,}'} {symptom(i)}."


def symptom(i: IncidentFacts) -> str:
    """The symptom, as part of a sentence; with numbers if there are any."""
    if i.breakdown:
        what = {"crash": "a process ended that should have gone on", "hang": "the run hung"}
        return i.failure.rstrip(".") or what.get(i.verdict, "a checkpoint was damaged")
    before, peak, norm = i.loss_before, i.loss_peak, i.norm_peak
    known = before is not None and peak is not None
    went = f" from {number(before)} to {number(peak)}" if known else ""
    match i.verdict:
        case "non_finite":
            return "the loss or the gradients were not finite"
        case "drift":
            return f"the loss drifted away{went and f',{went}'}"
        case "plateau":
            return f"the loss stayed above its old level{went and f': it went{went}'}"
        case "corrupted":
            return f"hardware was wrong: {i.reasons[0].rstrip('.')}" if i.reasons else "hardware was wrong"
        case "damage":
            return "the loss of samples that are never trained on rose"
        case "shift":
            return "the losses or the gradient norms of whole steps lay above what is usual"
        case "oscillation":
            return f"the loss swung{went and f',{went}'}"
        case "spike" if before is not None and peak is not None and peak > 1.02 * before:
            return f"the loss jumped{went}"
        case "spike" if known:
            return (
                f"the gradient norm jumped{'' if norm is None else f' to {number(norm)}'}, the loss did not"
            )
        case "spike":
            return "the loss or the gradient norm jumped"
    return f"the loss went{went}" if known else "something stood out"


def _found_and_done(e: Evidence) -> str:
    i = e.incident
    back = f"step {e.back_to[-1]:,}" if e.back_to else "before the onset"
    if i.breakdown:
        skipped = plural(count(i.positions), "sample")
        # Older runs wrote positions only: their samples come again.
        until = " in this and every later epoch" if any(isinstance(s, SampleEntry) for s in e.skipped) else ""
        told = [f"Skipped{until}: {skipped}."] if i.positions else []
        told += [f"The run resumed from {back}; steps repeated: {i.steps_lost:,}."] if e.back_to else []
        return " ".join(told)
    guilty = f"{plural(count(i.guilty), 'sample')} of {documents(e)}"
    found = {
        "data": f"{guilty} {'was' if count(i.guilty) == 1 else 'were'} guilty.",
        "state": "No sample was guilty: the state was.",
        "new_data": "Nothing was wrong: the data was new.",
        "numerics": f"No sample was guilty: without {_left(i)} the same step is harmless.",
        "moments": "No sample was guilty: the optimizer's moments were stale.",
        "learning_rate": "No sample was guilty: the learning rate was, or FP8."
        if _left_first(i)
        else "No sample was guilty: the learning rate was.",
        "hardware": ""
        if i.verdict == "corrupted"
        else "The same data on the same state gave something else: hardware.",
    }.get(i.cause, "")
    skipped = ", skipped them" if i.cause == "data" else ""
    went = f"The run was rewound in memory to {back}{skipped} and continued"
    done = {
        "apply": "The run trained on; nothing was taken away.",
        "skip": "The run skipped them from there on. Nothing was undone.",
        "wait": "The run went on and waited for it to heal by itself, as a branch without any change had. Nothing was "
        "undone.",
        "rewind": f"{went}.",
        "fall_back": f"{went} without {_left(i)}.",
        "cap_lr": f"{went} with the learning rate capped at its value there.",
        "cut_lr": f"{went} with a smaller learning rate.",
        "adjust": f"{went} with the remedy whose branch was clearly better{_name_winner(e)}.",
        "alert": "Nothing more was done automatically: training went on, and an alert was raised.",
        "swap_corpus": f"{went} without their corpus.",
        "handover": f"A new process resumed from {back}." if e.back_to else "",
    }.get(i.actions[-1] if i.actions else "", "")
    return " ".join(filter(None, [found, done, put_off(e)]))


def put_off(e: Evidence) -> str:
    """The fate of samples deferred without a conviction, or whose conviction was withdrawn."""
    i, told, step = e.incident, list[str](), None
    if i.deferred and i.returns and e.run.global_batch:
        step = i.onset + (min(i.returns)[0] - min(i.deferred)[0]) // e.run.global_batch
    if left := told_off(i.deferred, i.returns, i.lost, step):
        told.append(f"{left}.")
    elif i.positions and not i.guilty and not i.breakdown:  # of a version that deferred none
        told.append(f"{plural(count(i.positions), 'sample')} skipped in this epoch.")
    if i.released:
        told.append(f"{plural(i.released, 'sample')} no longer convicted.")
    return " ".join(told)


def what_of(i: IncidentFacts) -> str:
    """Describes the samples whose texts are shown."""
    return "guilty" if i.guilty else "skipped" if i.positions else "deferred"


def _name_winner(e: Evidence) -> str:
    """After a colon, the remedy that won the last trial; "" if that is not known."""
    labels = [
        branch.label for trial in e.trials[-1:] for branch in trial.branches if branch.name == trial.chosen
    ]
    return f": {labels[0]}" if labels else ""


def _left(i: IncidentFacts) -> str:
    """What a fall-back left."""
    return " and ".join(i.kernels) or "FP8"


def _left_first(i: IncidentFacts) -> bool:
    """Whether FP8 was left first, before a cut of the rate, which cannot be undone: either may be the cause."""
    return i.cause == "learning_rate" and i.actions[-1:] == ["fall_back"]


def outcome(e: Evidence) -> str:
    """How it ended."""
    i = e.incident
    if i.outcome != "healed":
        return OUTCOMES.get(i.outcome, f"Outcome: {i.outcome}.")
    if i.breakdown or i.actions in (["skip"], ["apply"]):  # nothing was to come back to the trend
        return OUTCOMES["healed"]
    after = f", at {i.loss_after:.2f}" if i.loss_after is not None else ""
    at = f"By step {e.healed_at:,} the" if e.healed_at is not None else "The"
    return f"{at} loss was on its trend again{after}."


def later_losses(e: Evidence) -> list[str]:
    """What came of it: a sentence for each look, and one whether it was worth what it cost."""
    told = []
    for one in e.later:
        when = f"At the end, {one.after:,} steps" if one.at_end else f"{one.after:,} steps"
        text = f"{when} after it was over, at step {one.step:,}, the loss was {number(one.loss)}"
        if one.expected is not None:
            text += (
                f"; the trend of the steps before it leads to {number(one.expected)} ± {number(one.scatter)}"
            )
        told.append(f"{text}.")
    return [*told, *filter(None, [describe_worth(e)])]


def describe_worth(e: Evidence) -> str:
    """Whether what was done was worth it, by the newest look that can be compared with the trend from before. One
    scatter decides, which no set of runs was asked for: it changes nothing but these words."""
    newest = next((one for one in reversed(e.later) if one.expected is not None), None)
    if newest is None or newest.expected is None or newest.scatter is None:
        return ""
    cost = plural(e.cost.steps, "step") + " lost"
    over = newest.loss - newest.expected
    if abs(over) <= newest.scatter:
        return f"It was worth it: {cost}, and the loss is where the trend from before leads to."
    if over < 0:
        return f"It was worth it: {cost}, and the loss is {number(-over)} below the trend from before."
    return f"It was not, or not yet, worth it: {cost}, and the loss is {number(over)} above the trend from before."


def figures(e: Evidence) -> list[tuple[str, str, str]]:
    """Key figures: (name, value, remark)."""
    i, c = e.incident, e.cost
    shown: list[tuple[str, str, str]] = []
    if not i.breakdown or i.loss_peak is not None:
        shown.append(
            (
                "peak loss",
                peak(i, i.loss_peak),
                f"{number(i.loss_before)} before, {number(i.loss_after)} after",
            )
        )
        shown.append(("gradient norm", peak(i, i.norm_peak), "its peak, before clipping"))
    refused = f", {plural(c.batches_refused, 'update')} refused" if c.batches_refused else ""
    shown.append(
        ("steps lost", f"{c.steps:,}", ("" if c.tokens is None else f"{c.tokens:,} tokens") + refused)
    )
    shown.append(("time lost", duration(c.seconds), "done again, searching, waiting"))
    if c.gpu_hours is not None:
        money = f"{c.money:,.2f} {e.run.currency}" if c.money is not None else "no price is set"
        shown.append(
            ("GPU-hours", f"{c.gpu_hours:.2g}" if c.gpu_hours < 10 else f"{c.gpu_hours:,.0f}", money)
        )
    if i.positions:
        guilty = "guilty" if i.guilty else "skipped"
        shown.append(
            (
                f"samples {guilty}",
                f"{count(i.positions):,}",
                documents(e) if i.guilty else "",
            )
        )
    if i.deferred:
        again = f"read again from position {min(i.returns)[0]:,}" if i.returns else ""
        shown.append(("samples deferred", f"{count(i.deferred):,}", again))
    return shown


def cost_explained(e: Evidence) -> str:
    """How the cost is computed."""
    c, r = e.cost, e.run
    again = f"{plural(c.steps, 'step')} done again"
    again += f" at {c.step_seconds:.3g} s (the median): {duration(c.redone_seconds)}" if c.step_seconds else (
        ", of unknown length"
    )  # fmt: skip
    parts = [again]
    if c.recovery_seconds or not e.incident.breakdown:
        parts.append(f"finding and undoing it: {duration(c.recovery_seconds)}")
    if c.silent_seconds:
        parts.append(f"from the last progress until that was noticed: {duration(c.silent_seconds)}")
    if c.downtime_seconds or e.incident.breakdown:
        parts.append(
            f"from the end of a process to the first step of the next: {duration(c.downtime_seconds)}"
        )
    told = "; ".join(parts) + "."
    if c.gpu_hours is not None:
        told += f" GPU-hours are {r.world} ranks times these {c.seconds:,.1f} seconds, over 3600"
        told += f"; a GPU-hour costs {r.price:g} {r.currency}." if r.price is not None else (
            "; supervise.gpu_hour_price in the recipe gives them a price."
        )  # fmt: skip
    if c.tokens is not None:
        told += f" Tokens are steps times {r.global_batch} samples of {r.sequence_length} tokens."
    return told


def skipped(e: Evidence) -> list[tuple[str, str, str, str]]:
    """The incident's lines of the skip ledger: what is skipped, which part of it, for how long, and why."""
    told = []
    for s in e.skipped:
        if isinstance(s, SampleEntry):
            which = f"tokens {ranges([(first, end) for first, end in s.tokens], 4)} of its training stream"
            told.append((f"samples of corpus {s.corpus}", which, "in every epoch", s.reason))
        else:
            what = f"corpus {s.corpus}" if s.corpus else "samples"
            which = (
                f"positions {ranges([(s.first, s.end)])}"
                if s.end < LAST_POSITION
                else f"from position {s.first}"
            )
            told.append((what, which, "in this epoch" if s.end < LAST_POSITION else "for good", s.reason))
    return told


def follow_ups(e: Evidence) -> list[FollowUp]:
    """Next actions for a person who has the run, by cause and outcome."""
    if e.run.public:
        return []
    causes = _of_breakdown(e) if e.incident.breakdown else _by_cause(e)
    return [*_by_outcome(e), *causes, *_logs(e)]


def _by_outcome(e: Evidence) -> Iterator[FollowUp]:
    i = e.incident
    if i.outcome == "stopped":
        yield FollowUp(
            text="The run stands still. Decide on the cause below, then start it again: this names the command.",
            command=f"megastable status {shlex.quote(e.run.directory)}",
        )
    elif i.outcome == "handed over":
        yield FollowUp(
            text="Start the run again, unless a supervisor does: it goes on by itself. This names the command.",
            command=f"megastable status {shlex.quote(e.run.directory)}",
        )
    elif i.outcome == "open" and i.actions[-1:] == ["alert"]:
        yield FollowUp(
            text="Decide on the cause below, and whether the run is worth going on: nothing more is done automatically "
            "until a budget of stability.policy comes back."
        )
    elif i.outcome == "open":
        yield FollowUp(
            text="Look again when it is closed: this report is rewritten with every event of the incident."
        )


def _by_cause(e: Evidence) -> Iterator[FollowUp]:
    i, r = e.incident, e.run
    if i.cause == "data":
        yield FollowUp(
            text="Read the guilty texts, and find out where these documents came from.",
            command=f"less {_here(e)}/samples.txt",
        )
        yield FollowUp(
            text="Look at each of them, with the document, the bytes and every step that ever read it.",
            command=f"megastable inspect incident {shlex.quote(r.directory)} {i.number} --html incident.html",
        )
        for corpus in r.corpora:
            yield FollowUp(
                text="Remove them from the corpus, for all later runs: this writes a plan to edit. Then come "
                "megastable prune apply and verify.",
                command=f"megastable prune plan {shlex.quote(corpus)} --incident "
                f"{shlex.quote(r.directory)}:{i.number} --spans",
            )
            yield FollowUp(
                text="Check that the corpus is still the one that was prepared: this hashes every file again.",
                command=f"megastable prepare verify {shlex.quote(corpus)}",
            )
        if any(isinstance(entry, SampleEntry) for entry in e.skipped):
            ledger = shlex.quote(f"{r.directory}/skips.jsonl")
            yield FollowUp(
                text="This run skips them in every epoch. To make another run on the same corpora skip them (RUN, with "
                "any seed, blend and sequence length), copy them to its skip ledger before it starts.",
                # Without the incident and step of this run, which RUN would take for its own.
                command=f'mkdir -p RUN && grep \'"tokens".*"incident":{i.number}[,}}]\' {ledger} | '
                "sed -E 's/,\"(incident|step)\":[0-9]+//g' >> RUN/skips.jsonl",
            )
        if "swap_corpus" in i.actions:
            yield FollowUp(
                text="A corpus is left out from here on: clean it, or raise the weights of the others knowingly."
            )
    elif i.cause == "numerics" and i.kernels:
        yield FollowUp(
            text=f"Look for known faults of {_left(i)}, and report it. Plain PyTorch is slower: until it is mended, "
            "set kernels.attention, kernels.loss or kernels.compile to another kernel. After an update of torch the "
            "run tries it again by itself."
        )
    elif i.cause == "numerics" or _left_first(i):
        yield FollowUp(
            text="Find the layers that FP8 does not suit: precision.fp8.keep keeps them in the precision of the rest.",
            command=f"megastable fp8-check {shlex.quote(r.directory)}",
        )
        yield FollowUp(
            text="If it comes back: another precision.fp8.recipe, precision.fp8.backend=emulated to tell whether it is "
            "the kernels, or precision.fp8=off."
        )
        if i.cause != "numerics":
            yield FollowUp(
                text="If it comes back without FP8, the rate is cut next: optimizer.lr was too high."
            )
    elif i.cause == "learning_rate":
        lower = ""
        if r.lr and r.cut_factor:
            now = r.lr * r.cut_factor ** i.actions.count("cut_lr")
            cut = i.outcome != "stopped" and "cut_lr" in i.actions
            goes_on = f"; this run tries {now:g} for a while" if cut else ""
            lower = f" (optimizer.lr, now {r.lr:g}{goes_on})"
        yield FollowUp(
            text=f"Begin the next run of this size with a lower peak rate{lower}, or a longer warm-up "
            "(schedule.warmup_steps or warmup_tokens)."
        )
        yield FollowUp(
            text="Try other thresholds on this very run before changing them.",
            command=f"megastable backtest {shlex.quote(r.directory)} --plot decisions.png",
        )
    elif i.cause == "state":
        yield FollowUp(
            text="Look for the layer that changed most in layers.csv: second moments and attention logits tell first."
        )
        yield FollowUp(
            text="If it comes back, lower optimizer.betas[1] or the rate: the optimizer's memory outlived its data."
        )
    elif i.cause == "hardware":
        yield FollowUp(
            text="Check the hosts of this attempt: GPU error counters (ECC, Xid), then a burn-in.",
            command="megastable preflight --burn-in 30 -- --hostfile hostfile",
        )


def _of_breakdown(e: Evidence) -> Iterator[FollowUp]:
    match e.incident.cause:
        case "data":
            yield FollowUp(
                text="It failed at the same place again and again: read the samples that are skipped now.",
                command=f"less {_here(e)}/samples.txt",
            )
        case "hardware":
            yield FollowUp(
                text="Take that host out of the hostfile, and check it: GPU error counters (ECC, Xid), then a burn-in.",
                command="megastable preflight --burn-in 30    # on that host",
            )
        case "storage" if e.incident.verdict == "damaged_checkpoint":
            yield FollowUp(
                text="Check the disk that held the damaged checkpoint, and the kernel's log of the host that wrote it."
            )
        case "storage":
            yield FollowUp(text="Restore the file that is named above; where the disk is full, make room.")
        case "code":
            yield FollowUp(
                text="It fails at the same step with other data: reproduce it from the checkpoint before, on few ranks."
            )
        case "process":
            yield FollowUp(
                text="Find out what ended or held it up: the kernel's log tells of memory (OOM) and GPU faults.",
                command="dmesg -T | tail -50",
            )


def _logs(e: Evidence) -> Iterator[FollowUp]:
    if e.logs:
        stood = any(log.source.endswith(".stacks") for log in e.logs)
        yield FollowUp(
            text=f"Read the log{', and the stacks below: where every rank stood' if stood else ' to its end'}.",
            command=f"less {shlex.quote(f'{e.run.directory}/{e.logs[0].source}')}",
        )


def _here(e: Evidence) -> str:
    return shlex.quote(f"{e.run.directory}/incidents/{e.incident.number:04d}")


# Numbers


def number(value: float | None) -> str:
    """A loss or a norm."""
    if value is None:
        return "–"
    return "not finite" if not math.isfinite(value) else f"{value:.2f}" if value < 1000 else f"{value:.3g}"


def peak(i: IncidentFacts, value: float | None) -> str:
    """As `number`, for a peak: non-finite ones are not stored."""
    return "not finite" if value is None and i.verdict == "non_finite" else number(value)


def documents(e: Evidence) -> str:
    """The number of documents named; limited per incident."""
    some = len(e.incident.documents)
    return f"{some:,} or more documents" if some >= NAMED else plural(some, "document")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
