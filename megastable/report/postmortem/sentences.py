"""Puts the facts of an incident into sentences: headline, class, cause, outcome, cost, next steps. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from megastable.base.text import count_noun, show_duration, show_ranges
from megastable.base.text import describe_deferral as told_off
from megastable.data.order import LAST_POSITION
from megastable.data.skip_ledger import SampleEntry
from megastable.report.postmortem.facts import Evidence, IncidentFacts, StepRow
from megastable.report.postmortem.sample_texts import count_positions
from megastable_guard.policy_state import JUMP

NEAR = 20  # steps before an onset in which the learning rate is looked at
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
    "skip": "skipped the bad samples from there on; nothing was undone",
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


class FollowUp(NamedTuple):
    """Something to do, and the command that does it."""

    text: str
    command: str = ""


def write_headline(e: Evidence) -> str:
    """The incident in two or three sentences."""
    return f"{describe_symptom(e.incident)} {write_sequel(e)}"


def write_sequel(e: Evidence) -> str:
    """What was found and done, and how it ended."""
    return " ".join(filter(None, [_found_and_done(e), describe_outcome(e)]))


def type_of(kind: str) -> str:
    return TYPES.get(kind, (kind, ""))[0]


def name_mood(outcome: str) -> str:
    """Of the colours of a page."""
    return {"healed": "good", "stopped": "bad"}.get(outcome, "warn")


def type_remark(i: IncidentFacts) -> str:
    """The meaning of the type; "" for a failed process or file."""
    if i.actions == ["discard"]:
        return "over with the refused updates"
    return "" if i.breakdown else TYPES.get(i.kind, ("", ""))[1]


def describe_cause(i: IncidentFacts) -> str:
    """The meaning of the cause, which differs for supervisor and attribution."""
    return (BREAKDOWNS if i.breakdown else CAUSES).get(i.cause, i.cause)


def describe_action(action: str) -> str:
    """The effect of an action."""
    return _sentence(ACTIONS.get(action, action))


def describe_symptom(i: IncidentFacts) -> str:
    """What happened, and when."""
    if i.verdict == "damaged_checkpoint":
        return f"The checkpoint of step {i.step:,} was damaged, and passed over."
    if i.breakdown:
        return _sentence(i.failure) if i.failure else f"After step {i.step:,} {name_symptom(i)}."
    is_lasting = i.verdict in ("drift", "plateau", "oscillation", "shift")
    return f"{f'From step {i.onset:,} on' if is_lasting else f'At step {i.onset:,}'} {name_symptom(i)}."


def name_symptom(i: IncidentFacts) -> str:
    """The symptom, as part of a sentence; with numbers if there are any."""
    if i.breakdown:
        what = {"crash": "a process ended that should have gone on", "hang": "the run hung"}
        return i.failure.rstrip(".") or what.get(i.verdict, "a checkpoint was damaged")
    before, loss_peak, norm_peak = i.loss_before, i.loss_peak, i.norm_peak
    known = before is not None and loss_peak is not None
    went = f" from {format_number(before)} to {format_number(loss_peak)}" if known else ""
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
        case "spike" if before is not None and loss_peak is not None and loss_peak > 1.02 * before:
            return f"the loss jumped{went}"
        case "spike" if known:
            peak_text = "" if norm_peak is None else f" to {format_number(norm_peak)}"
            return f"the gradient norm jumped{peak_text}, the loss did not"
        case "spike":
            return "the loss or the gradient norm jumped"
    return f"the loss went{went}" if known else "something stood out"


def _found_and_done(e: Evidence) -> str:
    i = e.incident
    back_to = f"step {e.back_to[-1]:,}" if e.back_to else "before the onset"
    if i.breakdown:
        skipped = count_noun(count_positions(i.positions), "sample")
        # Older runs wrote positions only: their samples come again.
        for_good = any(isinstance(skip_entry, SampleEntry) for skip_entry in e.skipped)
        until_text = " in this and every later epoch" if for_good else ""
        told = [f"Skipped{until_text}: {skipped}."] if i.positions else []
        told += [f"The run resumed from {back_to}; steps repeated: {i.steps_lost:,}."] if e.back_to else []
        return " ".join(told)
    found_bad = count_noun(count_positions(i.bad), "sample")
    found_bad += "" if e.run.guarded else f" of {count_documents(e)}"
    or_fp8 = ", or FP8 the cause" if _left_first(i) else ""
    cause_text = {
        "data": f"{found_bad} {'was' if count_positions(i.bad) == 1 else 'were'} bad.",
        "state": "No sample was bad: the state was damaged.",
        "new_data": "Nothing was wrong: the data was new.",
        "numerics": f"No sample was bad: without {_left(i)} the same step is harmless.",
        "moments": "No sample was bad: the optimizer's moments were stale.",
        "learning_rate": f"No sample was bad: the learning rate was too high{or_fp8}.",
        "hardware": "The same data on the same state gave something else: hardware.",
    }.get(i.cause, "")
    if i.cause == "hardware" and i.verdict == "corrupted":  # the symptom says so
        cause_text = ""
    if jump := find_rate_jump(e):
        before, row = jump
        rates_text = f"from {before.lr:.3g} to {row.lr:.3g}"
        rate_name = "It" if i.cause == "learning_rate" else "The learning rate"
        cause_text = f"{cause_text} {rate_name} rose {rates_text} at step {row.step:,}.".strip()
    winner = next((b.label for trial in e.trials[-1:] for b in trial.branches if b.name == trial.chosen), "")
    remedy = f"the remedy whose branch was clearly better{winner and f': {winner}'}"
    skipped = ", skipped them" if i.cause == "data" else ""
    went = f"The run was rewound in memory to {back_to}{skipped} and continued"
    action_text = {
        "apply": "The run trained on; nothing was taken away.",
        "discard": f"{count_noun(i.batches_discarded, 'update')} refused: the weights never saw the data.",
        "skip": "The run skipped them from there on. Nothing was undone.",
        "wait": "The run went on and waited for it to heal by itself, as a branch without any change had. Nothing was "
        "undone.",
        "rewind": f"{went}.",
        "fall_back": f"{went} without {_left(i)}.",
        "cap_lr": f"{went} with the learning rate capped at its value there.",
        "cut_lr": f"{went} with a smaller learning rate.",
        "adjust": f"{went} with {remedy}.",
        "alert": "Nothing more was done automatically: training went on, and an alert was raised.",
        "swap_corpus": f"{went} without their corpus.",
        "handover": f"A new process resumed from {back_to}." if e.back_to else "",
    }.get(i.actions[-1] if i.actions else "", "")
    return " ".join(filter(None, [cause_text, action_text, describe_deferral(e)]))


def describe_deferral(e: Evidence) -> str:
    """The fate of samples deferred, or skipped no longer."""
    i, told_parts, return_step = e.incident, list[str](), None
    if i.deferred and i.returns and e.run.global_batch:
        return_step = i.onset + (min(i.returns)[0] - min(i.deferred)[0]) // e.run.global_batch
    if deferral_text := told_off(i.deferred, i.returns, i.lost, return_step):
        told_parts.append(f"{deferral_text}.")
    if i.released:
        told_parts.append(f"{count_noun(i.released, 'sample')} no longer skipped.")
    return " ".join(told_parts)


def what_of(i: IncidentFacts) -> str:
    """Describes the samples whose texts are shown."""
    return "bad" if i.bad else "skipped" if i.positions else "deferred"


def _left(i: IncidentFacts) -> str:
    """What a fall-back left."""
    return " and ".join(i.kernels) or "FP8"


def _left_first(i: IncidentFacts) -> bool:
    """Whether FP8 was left first, before a cut of the rate, which cannot be undone: either may be the cause."""
    return i.cause == "learning_rate" and i.actions[-1:] == ["fall_back"]


def describe_outcome(e: Evidence) -> str:
    """How it ended."""
    i = e.incident
    if i.outcome != "healed":
        return OUTCOMES.get(i.outcome, f"Outcome: {i.outcome}.")
    if i.breakdown or i.actions in (["skip"], ["apply"]):  # nothing was to come back to the trend
        return OUTCOMES["healed"]
    loss_text = f", at {i.loss_after:.2f}" if i.loss_after is not None else ""
    step_text = f"By step {e.healed_at:,} the" if e.healed_at is not None else "The"
    return f"{step_text} loss was on its trend again{loss_text}."


def later_losses(e: Evidence) -> list[str]:
    """What came of it: a sentence for each look, and one whether it was worth what it cost."""
    told = []
    for one in e.later:
        when_text = f"At the end, {one.after:,} steps" if one.at_end else f"{one.after:,} steps"
        text = f"{when_text} after it was over, at step {one.step:,}, the loss was {format_number(one.loss)}"
        if one.expected is not None:
            expected_text = f"{format_number(one.expected)} ± {format_number(one.scatter)}"
            text += f"; the trend of the steps before it leads to {expected_text}"
        told.append(f"{text}.")
    return [*told, *filter(None, [describe_worth(e)])]


def describe_worth(e: Evidence) -> str:
    """Whether what was done was worth it, by the newest look that can be compared with the trend from before. One
    scatter decides, which no set of runs was asked for: it changes nothing but these words."""
    newest = next((later_loss for later_loss in reversed(e.later) if later_loss.expected is not None), None)
    if newest is None or newest.expected is None or newest.scatter is None:
        return ""
    over, verdict = newest.loss - newest.expected, "It was worth it"
    if abs(over) <= newest.scatter:
        trend_text = "where the trend from before leads to"
    elif over < 0:
        trend_text = f"{format_number(-over)} below the trend from before"
    else:
        verdict, trend_text = (
            "It was not, or not yet, worth it",
            f"{format_number(over)} above the trend from before",
        )
    return f"{verdict}: {count_noun(e.cost.steps, 'step')} lost, and the loss is {trend_text}."


def list_figures(e: Evidence) -> list[tuple[str, str, str]]:
    """Key figures: (name, value, remark)."""
    i, c = e.incident, e.cost
    key_figures: list[tuple[str, str, str]] = []
    if not i.breakdown or i.loss_peak is not None:
        loss_range = f"{format_number(i.loss_before)} before, {format_number(i.loss_after)} after"
        key_figures.append(("peak loss", format_peak(i, i.loss_peak), loss_range))
        key_figures.append(("gradient norm", format_peak(i, i.norm_peak), "its peak, before clipping"))
    refused_text = f"{count_noun(c.batches_refused, 'update')} refused" if c.batches_refused else ""
    token_text = "" if c.tokens is None else f"{c.tokens:,} tokens"
    key_figures.append(("steps lost", f"{c.steps:,}", ", ".join(filter(None, [token_text, refused_text]))))
    key_figures.append(("time lost", show_duration(c.seconds), "done again, searching, waiting"))
    if c.gpu_hours is not None:
        money_text = f"{c.money:,.2f} {e.run.currency}" if c.money is not None else "no price is set"
        hours_text = f"{c.gpu_hours:.2g}" if c.gpu_hours < 10 else f"{c.gpu_hours:,.0f}"
        key_figures.append(("GPU-hours", hours_text, money_text))
    if i.positions:
        sample_kind, document_text = ("bad", count_documents(e)) if i.bad else ("skipped", "")
        document_text = "of the dataset" if e.run.guarded else document_text
        key_figures.append((f"samples {sample_kind}", f"{count_positions(i.positions):,}", document_text))
    if i.deferred:
        return_text = f"read again from position {min(i.returns)[0]:,}" if i.returns else ""
        key_figures.append(("samples deferred", f"{count_positions(i.deferred):,}", return_text))
    return key_figures


def cost_explained(e: Evidence) -> str:
    """How the cost is computed."""
    c, r = e.cost, e.run
    repeat_text = f"{count_noun(c.steps, 'step')} done again"
    if c.step_seconds:
        repeat_text += f" at {c.step_seconds:.3g} s (the median): {show_duration(c.redone_seconds)}"
    else:
        repeat_text += ", of unknown length"
    cost_parts = [repeat_text]
    if c.recovery_seconds or not e.incident.breakdown:
        cost_parts.append(f"finding and undoing it: {show_duration(c.recovery_seconds)}")
    if c.silent_seconds:
        cost_parts.append(f"from the last progress until that was noticed: {show_duration(c.silent_seconds)}")
    if c.downtime_seconds or e.incident.breakdown:
        down = show_duration(c.downtime_seconds)
        cost_parts.append(f"from the end of a process to the first step of the next: {down}")
    cost_text = "; ".join(cost_parts) + "."
    if c.gpu_hours is not None:
        ranks_text = count_noun(r.world or 0, "rank")
        cost_text += f" GPU-hours are {ranks_text} times these {c.seconds:,.1f} seconds, over 3600"
        price_text = f"; a GPU-hour costs {r.price:g} {r.currency}" if r.price is not None else ""
        if r.price is None and r.steps is not None:  # there is a recipe
            price_text = "; supervise.gpu_hour_price in the recipe gives them a price"
        cost_text += f"{price_text}."
    if c.tokens is not None:
        cost_text += f" Tokens are steps times {r.global_batch} samples of {r.sequence_length} tokens."
    return cost_text


def list_skipped(e: Evidence) -> list[tuple[str, str, str, str]]:
    """The incident's lines of the skip ledger: what is skipped, which part of it, for how long, and why."""
    skip_rows = []
    for s in e.skipped:
        if isinstance(s, SampleEntry):
            token_ranges = show_ranges([(range_first, range_end) for range_first, range_end in s.tokens], 4)
            what, which = f"samples of corpus {s.corpus}", f"tokens {token_ranges} of its training stream"
            how_long = "in every epoch"
        else:
            what, which = f"corpus {s.corpus}" if s.corpus else "samples", f"from position {s.first}"
            how_long = "for good"
            if s.end < LAST_POSITION:
                which, how_long = f"positions {show_ranges([(s.first, s.end)])}", "in this epoch"
        skip_rows.append((what, which, how_long, s.reason))
    return skip_rows


def follow_ups(e: Evidence) -> list[FollowUp]:
    """Next actions for a person who has the run, by cause and outcome."""
    if e.run.public:
        return []
    cause_steps = _of_breakdown(e) if e.incident.breakdown else _by_cause(e)
    follow_ups = [*_by_outcome(e), *cause_steps]
    if e.logs:
        has_stacks = any(log_facts.source.endswith(".stacks") for log_facts in e.logs)
        until = ", and the stacks below: where every rank stood" if has_stacks else " to its end"
        log_path = shlex.quote(f"{e.run.directory}/{e.logs[0].source}")
        follow_ups.append(FollowUp(f"Read the log{until}.", f"less {log_path}"))
    return follow_ups


def _by_outcome(e: Evidence) -> Iterator[FollowUp]:
    i, status_command = e.incident, f"megastable status {shlex.quote(e.run.directory)}"
    if i.outcome == "stopped":
        yield FollowUp(
            "The run stands still. Decide on the cause below, then start it again: this names the command.",
            status_command,
        )
    elif i.outcome == "handed over":
        yield FollowUp(
            "Start the run again, unless a supervisor does: it goes on by itself. This names the command.",
            status_command,
        )
    elif i.outcome == "open" and i.actions[-1:] == ["alert"]:
        yield FollowUp(
            "Decide on the cause below, and whether the run is worth going on: nothing more is done automatically "
            f"until a budget of {'PolicyConfig' if e.run.guarded else 'stability.policy'} comes back."
        )
    elif i.outcome == "open":
        yield FollowUp(
            "Look again when it is closed: this report is rewritten with every event of the incident."
        )


def _by_cause(e: Evidence) -> Iterator[FollowUp]:
    i, r, run = e.incident, e.run, shlex.quote(e.run.directory)
    if i.cause == "data" and r.guarded:
        yield FollowUp("Look at these samples of the dataset, and find out where they came from.")
    elif i.cause == "data":
        yield FollowUp(
            "Read the bad texts, and find out where these documents came from.",
            f"less {_here(e)}/samples.txt",
        )
        yield FollowUp(
            "Look at each of them, with the document, the bytes and every step that ever read it.",
            f"megastable inspect incident {run} {i.number} --html incident.html",
        )
        for corpus in r.corpora:
            yield FollowUp(
                "Remove them from the corpus, for all later runs: this writes a plan to edit. Then come "
                "megastable prune apply and verify.",
                f"megastable prune plan {shlex.quote(corpus)} --incident {run}:{i.number} --spans",
            )
            yield FollowUp(
                "Check that the corpus is still the one that was prepared: this hashes every file again.",
                f"megastable prepare verify {shlex.quote(corpus)}",
            )
        if any(isinstance(skip_entry, SampleEntry) for skip_entry in e.skipped):
            ledger = shlex.quote(f"{r.directory}/skips.jsonl")
            yield FollowUp(
                "This run skips them in every epoch. To make another run on the same corpora skip them (RUN, with "
                "any seed, blend and sequence length), copy them to its skip ledger before it starts.",
                # Without the incident and step of this run, which RUN would take for its own.
                f'mkdir -p RUN && grep \'"tokens".*"incident":{i.number}[,}}]\' {ledger} | '
                "sed -E 's/,\"(incident|step)\":[0-9]+//g' >> RUN/skips.jsonl",
            )
        if "swap_corpus" in i.actions:
            yield FollowUp(
                "A corpus is left out from here on: clean it, or raise the weights of the others knowingly."
            )
    elif i.cause == "numerics" and i.kernels:
        yield FollowUp(
            f"Look for known faults of {_left(i)}, and report it. Plain PyTorch is slower: until it is mended, "
            "set kernels.attention, kernels.loss or kernels.compile to another kernel. After an update of torch the "
            "run tries it again by itself."
        )
    elif i.cause == "numerics" or _left_first(i):
        yield FollowUp(
            "Find the layers that FP8 does not suit: precision.fp8.keep keeps them in the precision of the rest.",
            f"megastable fp8-check {run}",
        )
        yield FollowUp(
            "If it comes back: another precision.fp8.recipe, precision.fp8.backend=emulated to tell whether it is "
            "the kernels, or precision.fp8=off."
        )
        if i.cause != "numerics":
            yield FollowUp("If it comes back without FP8, the rate is cut next: optimizer.lr was too high.")
    elif r.guarded:
        yield from _advise_loop(e)
    elif i.cause == "learning_rate":
        lower = ""
        if r.lr and r.cut_factor:
            now = r.lr * r.cut_factor ** i.actions.count("cut_lr")
            was_cut = i.outcome != "stopped" and "cut_lr" in i.actions
            goes_on = f"; this run tries {now:g} for a while" if was_cut else ""
            lower = f" (optimizer.lr, now {r.lr:g}{goes_on})"
        yield FollowUp(
            f"Begin the next run of this size with a lower peak rate{lower}, or a longer warm-up "
            "(schedule.warmup_steps or warmup_tokens)."
        )
        yield FollowUp(
            "Try other thresholds on this very run before changing them.",
            f"megastable backtest {run} --plot decisions.png",
        )
    elif i.cause == "state":
        yield FollowUp(
            "Look for the layer that changed most in layers.csv: second moments and attention logits tell first."
        )
        yield FollowUp(
            "If it comes back, lower optimizer.betas[1] or the rate: the optimizer's memory outlived its data."
        )
    elif i.cause == "hardware":
        yield FollowUp(
            "Check the hosts of this attempt: GPU error counters (ECC, Xid), then a burn-in.",
            "megastable preflight --burn-in 30 -- --hostfile hostfile",
        )


def _advise_loop(e: Evidence) -> Iterator[FollowUp]:
    """By cause, for a loop of somebody else, which has no recipe."""
    cause = e.incident.cause
    if cause == "learning_rate":
        yield FollowUp("Begin the next run of this size with a lower peak rate, or a longer warm-up.")
        yield FollowUp("PolicyConfig's cuts and cut_rest say how many limits there may be, and for how long.")
    elif find_rate_jump(e) is not None:
        yield FollowUp(
            "Find out why the learning rate rose. With check(sample_ids=) and use_replay the guard tries limits of it."
        )
    elif cause == "state":
        yield FollowUp("If it comes back, lower beta2 or the rate: the optimizer's memory outlived its data.")


def find_rate_jump(e: Evidence) -> tuple[StepRow, StepRow] | None:
    """The steps before and at which the learning rate of a loop of somebody else rose at once, shortly before an
    incident or in it; None: it did not."""
    first_step, last_step = e.incident.onset - NEAR, e.incident.step
    for before, row in (pair for part in e.passes for pair in pairwise(part)) if e.run.guarded else ():
        if first_step <= row.step <= last_step and 0 < JUMP * (before.lr or 0) < (row.lr or 0):
            return before, row
    return None


def _of_breakdown(e: Evidence) -> Iterator[FollowUp]:
    storage_text = "Restore the file that is named above; where the disk is full, make room."
    if e.incident.verdict == "damaged_checkpoint":
        storage_text = (
            "Check the disk that held the damaged checkpoint, and the kernel's log of the host that wrote it."
        )
    by_cause = {
        "data": FollowUp(
            "It failed at the same place again and again: read the samples that are skipped now.",
            f"less {_here(e)}/samples.txt",
        ),
        "hardware": FollowUp(
            "Take that host out of the hostfile, and check it: GPU error counters (ECC, Xid), then a burn-in.",
            "megastable preflight --burn-in 30    # on that host",
        ),
        "storage": FollowUp(storage_text),
        "code": FollowUp(
            "It fails at the same step with other data: reproduce it from the checkpoint before, on few ranks."
        ),
        "process": FollowUp(
            "Find out what ended or held it up: the kernel's log tells of memory (OOM) and GPU faults.",
            "dmesg -T | tail -50",
        ),
    }
    return iter([by_cause[e.incident.cause]] if e.incident.cause in by_cause else [])


def _here(e: Evidence) -> str:
    return shlex.quote(f"{e.run.directory}/incidents/{e.incident.number:04d}")


# Numbers


def format_number(value: float | None) -> str:
    """A loss or a norm."""
    if value is None:
        return "–"
    return "not finite" if not math.isfinite(value) else f"{value:.2f}" if value < 1000 else f"{value:.3g}"


def format_peak(i: IncidentFacts, value: float | None) -> str:
    """As `format_number`, for a peak: non-finite ones are not stored."""
    return "not finite" if value is None and i.verdict == "non_finite" else format_number(value)


def count_documents(e: Evidence) -> str:
    """The number of documents named; limited per incident."""
    some = len(e.incident.documents)
    return f"{some:,} or more documents" if some >= NAMED else count_noun(some, "document")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
