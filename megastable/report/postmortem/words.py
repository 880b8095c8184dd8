"""What the facts of an incident mean, in sentences: headline, class, cause, outcome, cost, what to do next. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence

from megastable.report.postmortem.facts import Evidence
from megastable.report.postmortem.texts import Facts, count

NAMED = 1000  # as many documents as an incident names at most (casebook.py)
TYPES = {
    "recoverable": ("type 1, recoverable", "a jump that one way back undoes"),
    "lingering": ("type 2, lingering", "it settled higher, swung, or came back"),
    "divergent": ("type 3, divergent", "it went away from the trend, or kept coming back"),
}
CAUSES = {
    "data": "data: samples that are bad on the good state, too",
    "state": "state: the weights or the optimizer's state: the same data is harmless on the good state",
    "learning_rate": "learning rate: it came back with other data, and nobody was guilty",
    "hardware": "hardware: the same data on the same state gave something else",
    "process": "process: one that died, was killed or hung",
    "storage": "storage: a checkpoint was damaged",
    "code": "code: it fails at the same step with other data, too",
    "unknown": "not known",
}
ACTIONS = {
    "discard": "The updates were refused: the weights never saw them.",
    "rewind": "The run went back in memory to before the onset and went on, without a restart.",
    "cut_lr": "The run went back in memory to before the onset and went on with a smaller learning rate.",
    "swap_corpus": "The run went back in memory to before the onset and went on without the corpus.",
    "handover": "The processes were ended, to be started again from a checkpoint of before the onset.",
    "restart": "The processes were started again from the newest good checkpoint.",
    "stop": "The run was stopped: a person is needed.",
}
OUTCOMES = {
    "open": "It is still open: no proof yet that it is over.",
    "healed": "It is over.",
    "handed over": "It was handed over: the next process goes on from a checkpoint of before the onset.",
    "stopped": "The run was stopped: a person is needed.",
}


class FollowUp(Facts):
    """Something to do, and the command that does it."""

    text: str
    command: str = ""


def headline(e: Evidence) -> str:
    """The incident in two or three sentences."""
    return f"{seen(e)} {sequel(e)}"


def sequel(e: Evidence) -> str:
    """What was found, what was done, how it ended."""
    return " ".join(part for part in (_found_and_done(e), outcome(e)) if part)


def type_remark(e: Evidence) -> str:
    """What the type means; of a process or a file that failed it says nothing."""
    return "" if e.incident.breakdown else TYPES.get(e.incident.kind, ("", ""))[1]


def type_of(kind: str) -> str:
    return TYPES.get(kind, (kind, ""))[0]


def cause_of(cause: str) -> str:
    return CAUSES.get(cause, cause)


def jumped(e: Evidence) -> bool:
    """Whether the loss itself went up, not the gradient norm alone."""
    before, peak = e.incident.loss_before, e.incident.loss_peak
    return before is not None and peak is not None and peak > 1.02 * before


def seen(e: Evidence) -> str:
    """What happened."""
    i = e.incident
    if i.failure:
        return _sentence(i.failure)
    if i.breakdown:
        what = {"crash": "a process ended that should have gone on", "hang": "the run hung"}
        return f"After step {i.step:,} {what.get(i.verdict, 'a checkpoint was damaged')}."
    from_to = f" from {i.loss_before:.2f} to {i.loss_peak:.2f}" if jumped(e) else ""
    if i.verdict == "non_finite":
        return f"At step {i.onset:,} the loss or the gradients were not finite."
    if not from_to:
        norm = (
            ""
            if i.norm_peak is None
            else f" to {i.norm_peak:.3g}"
            if math.isfinite(i.norm_peak)
            else " beyond all bounds"
        )
        return f"At step {i.onset:,} the gradient norm went up{norm}."
    verbs = {
        "drift": f"From step {i.onset:,} on the loss drifted away,{from_to}.",
        "plateau": f"From step {i.onset:,} on the loss stayed above its old level: it went{from_to}.",
        "oscillation": f"From step {i.onset:,} on the loss swung,{from_to}.",
    }
    return verbs.get(i.verdict, f"At step {i.onset:,} the loss jumped{from_to}.")


def _found_and_done(e: Evidence) -> str:
    i = e.incident
    back = f"step {e.back_to[-1]:,}" if e.back_to else "before the onset"
    if i.breakdown:
        return f"The run went on from {back}; steps done again: {i.steps_lost:,}." if e.back_to else ""
    guilty = f"{plural(count(i.guilty), 'sample')} of {documents(e)}"
    found = {
        "data": f"{guilty} {'was' if count(i.guilty) == 1 else 'were'} guilty.",
        "state": "No sample was guilty: the state was.",
        "learning_rate": "No sample was guilty: the learning rate was.",
        "hardware": "The same data on the same state gave something else: hardware.",
    }.get(i.cause, "")
    skipped = {"data": ", skipped them", "state": ", skipped the window"}.get(i.cause, "")
    went = f"The run went back in memory to {back}{skipped} and went on"
    done = {
        "rewind": f"{went}.",
        "cut_lr": f"{went} with a smaller learning rate.",
        "swap_corpus": f"{went} without their corpus.",
        "handover": f"A new process went on from {back}." if e.back_to else "",
    }.get(i.actions[-1] if i.actions else "", "")
    return f"{found} {done}".strip()


def outcome(e: Evidence) -> str:
    """How it ended."""
    i = e.incident
    if i.outcome != "healed":
        return OUTCOMES.get(i.outcome, f"Outcome: {i.outcome}.")
    if i.breakdown:
        return OUTCOMES["healed"]
    after = f", at {i.loss_after:.2f}" if i.loss_after is not None else ""
    at = f"By step {e.healed_at:,} the" if e.healed_at is not None else "The"
    return f"{at} loss was on its trend again{after}."


def found(e: Evidence) -> str:
    """What attribution concluded, with the numbers it rests on."""
    return "; then ".join(e.incident.reasons)


def figures(e: Evidence) -> list[tuple[str, str, str]]:
    """Key figures: (name, value, remark)."""
    i, c = e.incident, e.cost
    shown: list[tuple[str, str, str]] = []
    if not i.breakdown or i.loss_peak is not None:
        shown.append(
            (
                "peak loss",
                number(i.loss_peak),
                f"{number(i.loss_before)} before, {number(i.loss_after)} after",
            )
        )
        shown.append(("gradient norm", number(i.norm_peak), "its peak, before clipping"))
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
    return shown


def cost_explained(e: Evidence) -> str:
    """How the cost is computed."""
    c, r = e.cost, e.run
    parts = [
        f"{plural(c.steps, 'step')} done again at {c.step_seconds:.3g} s (the median): {duration(c.redone_seconds)}"
        if c.step_seconds else f"{plural(c.steps, 'step')} done again, of unknown length",
        f"finding and undoing it: {duration(c.recovery_seconds)}",
        f"from the end of a process to the first step of the next: {duration(c.downtime_seconds)}",
    ]  # fmt: skip
    told = "; ".join(parts) + "."
    if c.gpu_hours is not None:
        told += f" GPU-hours are {r.world} ranks times these {c.seconds:,.1f} seconds, over 3600"
        told += f"; a GPU-hour costs {r.price:g} {r.currency}." if r.price is not None else (
            "; supervise.gpu_hour_price in the recipe gives them a price."
        )  # fmt: skip
    if c.tokens is not None:
        told += f" Tokens are steps times {r.global_batch} samples of {r.sequence_length} tokens."
    return told


def follow_ups(e: Evidence) -> list[FollowUp]:
    """What a person should do now, by cause and outcome."""
    return [*_by_outcome(e), *_by_cause(e), *_logs(e)]


def _by_outcome(e: Evidence) -> Iterator[FollowUp]:
    i = e.incident
    if i.outcome == "stopped":
        yield FollowUp(
            text="The run stands still. Decide on the cause below, then start it again with the same command."
        )
    elif i.outcome == "handed over":
        yield FollowUp(
            text="Start the run again with the same command, unless a supervisor does: it goes on by itself."
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
        for corpus in r.corpora:
            yield FollowUp(
                text="Make sure that the corpus is still the one that was prepared: every file is hashed again.",
                command=f"python tools/prepare_data.py verify {shlex.quote(corpus)}",
            )
        ranges = ", ".join(f"[{first}, {end}]" for first, end in i.guilty[:8])
        if len(i.guilty) <= 8:
            yield FollowUp(
                text="This run skips them. Another one with the same corpora, seed and sequence length has to be told.",
                command=f"data.skip='[{ranges}]'",
            )
        if "swap_corpus" in i.actions:
            yield FollowUp(
                text="A corpus is left out from here on: clean it, or raise the weights of the others knowingly."
            )
    elif i.cause == "learning_rate":
        lower = (
            f" (optimizer.lr, now {r.lr:g}; this run goes on with {r.lr * r.cut_factor:g})"
            if r.lr and r.cut_factor
            else ""
        )
        yield FollowUp(
            text=f"Begin the next run of this size with a lower peak rate{lower}, or a longer schedule.warmup_steps."
        )
        yield FollowUp(
            text="Try other thresholds on this very run before changing them.",
            command=f"python tools/backtest.py {shlex.quote(r.directory)} --plot decisions.png",
        )
    elif i.cause == "state":
        yield FollowUp(
            text="Look for the layer that changed most in layers.csv: second moments and attention logits tell first."
        )
        yield FollowUp(
            text="If it comes back, lower optimizer.betas[1] or the rate: the optimizer's memory outlived its data."
        )
    elif i.cause == "hardware":
        yield FollowUp(text="Check the hosts of this attempt: GPU error counters (ECC, Xid), then a burn-in.")
    elif i.cause == "storage":
        yield FollowUp(
            text="Check the disk that held the damaged checkpoint, and the kernel's log of the host that wrote it."
        )
    elif i.cause == "code":
        yield FollowUp(
            text="It fails at the same step with other data: reproduce it from the checkpoint before, on few ranks."
        )
    elif i.cause == "process":
        yield FollowUp(
            text="Find out what ended or held up the process: the kernel's log tells of memory (OOM) and GPU faults.",
            command="dmesg -T | tail -50",
        )


def _logs(e: Evidence) -> Iterator[FollowUp]:
    for log in e.logs:
        what = "stacks: where did this rank stand" if log.source.endswith(".stacks") else "its last lines"
        yield FollowUp(
            text=f"Read {log.source} ({what}).",
            command=f"less {shlex.quote(f'{e.run.directory}/{log.source}')}",
        )


def _here(e: Evidence) -> str:
    return shlex.quote(f"{e.run.directory}/incidents/{e.incident.number:04d}")


# Numbers


def number(value: float | None) -> str:
    """A loss or a norm."""
    return (
        "–"
        if value is None
        else "not finite"
        if not math.isfinite(value)
        else f"{value:.2f}"
        if value < 1000
        else f"{value:.3g}"
    )


def plural(n: int, noun: str) -> str:
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def documents(e: Evidence) -> str:
    """How many documents are named; an incident names no more than so many."""
    some = len(e.incident.documents)
    return f"{some:,} or more documents" if some >= NAMED else plural(some, "document")


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60:02d} min"


def ranges(given: Sequence[tuple[int, int]], most: int = 12) -> str:
    """Positions for people: both ends included."""
    shown = ", ".join(str(a) if b == a + 1 else f"{a}–{b - 1}" for a, b in given[:most])
    return shown + (f" and {len(given) - most} more ranges" if len(given) > most else "")


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:].rstrip(".") + "."
