"""What a person is told, wherever it is: text from outside made safe to show, journal events in words, time spans.

Imports nothing of the package: the supervisor, the status and the reports of incidents all speak through it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

Event = dict[str, Any]

LONGEST = 2000  # characters of an event


def visible(text: object, most: int | None = None, keep: str = "") -> str:
    """`text` with every character that does not show, or changes how others do, as an escape such as \\x1b or \\u202e.

    On one line, unless `keep`, the characters that stay as they are, has the newline. most: characters; what is beyond
    is cut off, with an ellipsis.
    """
    whole = str(text)
    cut = whole if most is None else whole[: most + 1]
    shown = (
        cut if cut.isprintable() else "".join(c if c.isprintable() or c in keep else escaped(c) for c in cut)
    )
    return shown if most is None or len(shown) <= most else shown[: most - 1] + "…"


def escaped(character: str) -> str:
    """One character as Python writes it in ASCII."""
    return character.encode("unicode_escape").decode()


def plural(n: int, noun: str) -> str:
    """A count and its noun."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def ranges(given: Sequence[tuple[int, int]], most: int = 12) -> str:
    """Ranges [first, end) for people: both ends included."""
    shown = ", ".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in given[:most])
    return shown + (f" and {plural(len(given) - most, 'more range')}" if len(given) > most else "")


def put_off(
    deferred: Sequence[tuple[int, int]],
    returns: Sequence[tuple[int, int]],
    lost: int = 0,
    step: int | None = None,
) -> str:
    """What became of samples that nobody was guilty of; "" where there are none. Ranges [first, end);
    step: about when they are read again."""
    count, told = sum(end - first for first, end in deferred), list[str]()
    if count:
        again = f"; read again from position {min(returns)[0]:,}" if returns else ""
        again += f" (about step {step:,})" if returns and step is not None else ""
        told.append(f"{plural(count, 'sample')} deferred{again}")
    if lost:
        told.append(f"{plural(lost, 'sample')} skipped in this epoch: no room to read them later")
    return ", ".join(told)


def read_later(e: Event) -> str:
    """As `put_off`, of an event or of the summary of an incident."""
    lost = e.get("lost")
    return put_off(_pairs(e, "deferred"), _pairs(e, "returns"), lost if isinstance(lost, int) else 0)


def duration(seconds: float) -> str:
    """A time span as text: 0.4 s, 59 s, 12 min, 3 h 20 min, 4 d 3 h; a question mark for what is none."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 59.5:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def number(value: object, form: str = ".3f") -> str:
    """A number of an event as text; what is none is a question mark ("nan" and "inf" are numbers)."""
    try:
        return format(float(value), form)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return "?"


def size(of: object) -> str:
    """Bytes as text."""
    if isinstance(of, bool) or not isinstance(of, int | float):
        return "?"
    return f"{of / 1e9:.3g} GB" if of >= 1e9 else f"{of / 1e6:.3g} MB"


def say(event: Event) -> str:
    """An event in a line, made visible, with its step before it; "" for one that tells a person nothing new."""
    text = sentence(event)
    step = event.get("step")
    return f"step {step}: {text}" if text and isinstance(step, int) else text


def sentence(event: Event) -> str:
    """As `say`, without the step."""
    tell = TOLD.get(str(event.get("event")))
    return visible(tell(event), LONGEST) if tell is not None else ""


def _because(e: Event, key: str = "reason") -> str:
    return f": {e[key]}" if e.get(key) else ""


def _changed(e: Event) -> str:
    changes = e.get("changes")
    return f"recipe changed: {'; '.join(map(str, changes)) if isinstance(changes, list) else changes}"


def _incident(e: Event) -> str:
    """Openings by the trainer carry a reason, those by the supervisor only the summary."""
    what, told = e.get("what"), e.get("summary")
    summary: Event = told if isinstance(told, dict) else {}
    about = str(what)
    if what == "opened":
        about += f": {e.get('reason') or summary.get('failure') or summary.get('verdict')}"
        about += f"; action: {e['action']}" if e.get("action") else ""
    elif what == "attributed":
        given = summary.get("reasons")
        reason = e.get("reason") or (given[-1] if isinstance(given, list) and given else "")
        about = f"cause: {e.get('cause') or summary.get('cause')}{f': {reason}' if reason else ''}"
        about += f"; action: {e['action']}" if e.get("action") else ""
        about += f", {e['remedy']}" if e.get("remedy") else ""
        about += f"; {left}" if (left := read_later(e)) else ""
    elif what == "released":
        n = sum(last - first for first, last in _pairs(e, "positions") + _pairs(e, "next_epoch"))
        about = f"{plural(n, 'skipped sample')} found innocent, to be read after all{_because(e)}"
    elif what == "rewound":
        about = f"back at step {e.get('to_step')}, going on from position {e.get('cursor')}"
    elif what == "restarted":
        about = "training goes on in a new process"
    elif what == "handed over":
        about = "handed over to the next process"
    elif what == "closed":
        about = f"closed: {summary.get('outcome')}"
    return f"incident {e.get('number')}: {about}"


def _ended(e: Event) -> str:
    how = e.get("failure")
    if not how:
        code = e.get("code")
        how = "as it should" if code == 0 else f"signal {e['signal']}" if e.get("signal") else f"code {code}"
    return f"attempt {e.get('attempt')} ended: {how}"


def _hang(e: Event) -> str:
    limit = f", {number(e['limit'], '.0f')} s is the limit" if "limit" in e else ""
    return f"no progress for {number(e.get('waited'), '.0f')} s in {e.get('phase')}{limit}"


def _supervisor(e: Event) -> str:
    code = "" if e.get("code") is None else f" with {e['code']}"
    return f"supervisor {e.get('what')}{code}{_because(e)}"


def _discarded(e: Event) -> str:
    numbers = f"loss {number(e.get('loss'))}, gradient norm {number(e.get('grad_norm'), '.3g')}"
    return f"update refused, {numbers}{_because(e)}"


def _pairs(e: Event, key: str) -> list[tuple[int, int]]:
    """Ranges of positions; none where it has something else."""
    try:
        return [(int(a), int(b)) for a, b in e[key]]
    except (KeyError, TypeError, ValueError, OverflowError):
        return []


def _positions(e: Event) -> str:
    return ranges(_pairs(e, "positions"), 4) or "?"


def _examined(e: Event) -> str:
    """A trickle or a refused batch of which nobody is guilty, or that was not looked into."""
    first, last = e.get("first"), e.get("last")
    steps = f"step {first}" if first == last else f"steps {first} to {last}"
    found = "not examined" if e.get("event") == "samples_dropped" else "examined, nothing is skipped"
    return f"samples of {steps} {found}{_because(e)}"


def _skips_added(e: Event) -> str:
    if not e.get("documents"):
        return f"corpus {e.get('corpus')} is swapped out, as a person asked"
    if not e.get("samples"):
        return f"{e['documents']} documents are named, as a person asked; their samples were skipped already"
    return f"{e['samples']} samples of {e['documents']} documents are skipped, as a person asked"


def _kinds(e: Event) -> str:
    kinds = e.get("kinds")
    return ", ".join(f"{n} {kind}" for kind, n in kinds.items()) if isinstance(kinds, dict) else "?"


def _handover(e: Event) -> str:
    return f"handed over to a checkpoint from before step {e.get('before')}{_because(e)}"


def _alert(e: Event) -> str:
    if e.get("what") == "over":
        return "the alert is over"
    return f"ALERT: nothing more is done automatically, training goes on{_because(e)}"


def _finished(e: Event) -> str:
    loss = "" if e.get("val_loss") is None else f", validation loss {number(e['val_loss'])}"
    return f"finished after {e.get('steps')} steps{loss}"


TOLD: dict[str, Callable[[Event], str]] = {
    "training": lambda e: f"training from position {e.get('cursor')} on {e.get('world')} ranks",
    "resumed": lambda e: f"resumed from {e.get('checkpoint')}",
    "reshaped": lambda e: "the checkpoint was written by another layout: reshaped",
    "order_changed": lambda e: "the order of the data changed: positions mean other samples from here on",
    "exchanges_undone": lambda e: f"samples that were put off are not after all{_because(e)}",
    "looked_ahead": lambda e: (
        f"{e.get('samples')} samples to come are skipped, they look corrupt: positions {_positions(e)} ({_kinds(e)})"
    ),
    "look_ahead_spent": lambda e: (
        f"{e.get('found')} samples to come look corrupt, and the budget of data.look_ahead.most is spent: they are not "
        "skipped"
    ),
    "look_ahead_failed": lambda e: f"what looks ahead in the data has failed{_because(e, 'problem')}",
    "skips_added": _skips_added,
    "skips_end": lambda e: (
        f"{e.get('documents')} documents of corpus {e.get('corpus')} are skipped up to position {e.get('until')} only, "
        f"and this run is to go on to {e.get('end')}"
    ),
    "blend_changed": lambda e: (
        f"the corpora are blended by other weights from position {e.get('position')} on"
    ),
    "mix_changed": lambda e: "data mix changed; another level of the loss is no incident",
    "baseline_reset": lambda e: f"detector baseline reset: {e.get('reason')}",
    "baseline_anew": lambda e: (  # of runs of an older version
        "the corpora are mixed in another way from here on: what is usual is learnt anew"
    ),
    "skips_read": lambda e: (
        f"{e.get('entries')} new lines of the skip ledger hold from position {e.get('cursor')} on"
    ),
    "skips_named": lambda e: (
        f"samples that an earlier version convicted for one epoch are skipped in every epoch: {e.get('lines')} new "
        "lines in the skip ledger"
    ),
    "skips_foreign": lambda e: (
        f"the skip ledger names samples of corpus {e.get('corpus')} with fingerprint {str(e.get('fingerprint'))[:12]}, "
        "which is none of this run's: they are not skipped"
    ),
    "skips_refused": lambda e: f"a line of the skip ledger is left out{_because(e, 'problem')}",
    "config_changed": _changed,
    "evaluated": lambda e: f"validation loss {number(e.get('loss'))}",
    "checkpoint": lambda e: (
        f"checkpoint {e.get('name')} saved: {size(e.get('bytes'))} in {number(e.get('seconds'), '.1f')} s"
    ),
    "checkpoint_healthy": lambda e: f"checkpoint {e.get('name')} has proved healthy",
    "checkpoint_recovered": lambda e: (
        f"a checkpoint that was not uploaded yet{_because(e, 'problem') or ': brought over from the local disks'}"
    ),
    "imported": lambda e: (
        f"the run begins with a checkpoint that was made outside of training ({e.get('how')})"
    ),
    "moments_anew": lambda e: "the checkpoint holds no optimizer state: Adam's moments begin anew",
    "checkpoint_failed": lambda e: f"no checkpoint could be written{_because(e, 'problem')}",
    "checkpoint_rejected": lambda e: f"checkpoint {e.get('name')} is damaged{_because(e, 'problem')}",
    "checkpoint_suspect": lambda e: f"checkpoint {e.get('name')} set aside{_because(e)}",
    "records_lost": lambda e: (
        f"the records of the last {e.get('steps')} steps could not be written, and are lost"
    ),
    "no_snapshots": lambda e: f"no room for a rewind point: one takes {size(e.get('bytes'))}",
    "snapshot_rejected": lambda e: f"rewind point passed over: it {e.get('reason')}",
    "stability_state_dropped": lambda e: f"what was remembered of stability is lost{_because(e, 'problem')}",
    "fell_back": lambda e: f"goes on without FP8, in {e.get('to')}{_because(e)}",
    "returned": lambda e: f"computes in FP8 again{_because(e)}",
    "rate_cut": lambda e: f"the learning rate is limited{_because(e)}",
    "rate_lifted": lambda e: f"a limit of the learning rate is lifted{_because(e)}",
    "alert": _alert,
    "discarded": _discarded,
    "discard_examined": _examined,
    "samples_examined": _examined,
    "samples_dropped": _examined,
    "located": lambda e: str(e.get("sentence")),
    "warning": lambda e: f"warning: {e.get('text')}",
    "would": lambda e: f"would {e.get('action')}{_because(e)}",
    "incident": _incident,
    "handover": _handover,
    "unstable": lambda e: f"gave up: {e.get('reason') or 'not finite, or refused on and on'}",
    "stopped": lambda e: "stopped as asked",
    "finished": _finished,
    "supervisor": _supervisor,
    "launched": lambda e: f"attempt {e.get('attempt')} started",
    "ended": _ended,
    "hang": _hang,
    "restart": lambda e: f"to be started again in {number(e.get('delay'), '.0f')} s{_because(e)}",
    "hook_failed": lambda e: f"{e.get('kind')} failed{_because(e, 'problem')}",
}
