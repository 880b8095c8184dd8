"""Gathers the facts of a record from the public copy of a run: the content of record.json and of its pages."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megastable import __version__
from megastable.base.errors import DataError
from megastable.data.blends import BlendEntry, read_blends
from megastable.data.manifest import Manifest
from megastable.data.order import LAST_POSITION
from megastable.data.skip_entries import SkipEntry
from megastable.data.skip_ledger import Ledger
from megastable.report.postmortem.facts import Evidence
from megastable.report.publish.logbook import LogbookDay
from megastable.report.publish.public_run import PublicRun
from megastable.report.publish.record_folder import FORMAT
from megastable.report.publish.redaction import HASH, public_version
from megastable.report.run_page.run_reader import RunReader
from megastable.run.directory import read_object
from megastable.run.events.event import Event
from megastable.run.events.supervisor_events import Launched
from megastable.run.events.training_events import Training
from megastable.run.goodput.time_account import TimeAccount, TimeKind

SKIPS = 100  # lines of the ledger that the pages show


@dataclass(frozen=True)
class CorpusFacts:
    """fingerprint: of everything that decides its tokens. The rest is of its manifest, if that is still there: tokens
    and documents by split, and the tokenizer with the hash of its file."""

    name: str
    weight: float | None = None
    fingerprint: str = ""
    tokens: dict[str, int] = field(default_factory=dict)
    documents: dict[str, int] = field(default_factory=dict)
    text_bytes: int | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SkipFacts:
    """A line of the skip ledger. what: is skipped; samples: how many, None if it is not known."""

    time: str
    what: str
    samples: int | None
    reason: str
    incident: int | None
    step: int | None


@dataclass(frozen=True)
class StartFacts:
    """A start of the training processes. time: Unix seconds."""

    time: float
    attempt: int | None
    step: int
    ranks: int | None
    hosts: list[str]
    software: dict[str, str]


@dataclass(frozen=True)
class SpendingFacts:
    """gpu_hours: of all ranks while processes of the run existed; training: of which were goodput. money: at `price` a
    GPU-hour."""

    gpu_hours: float
    training: float
    price: float | None
    currency: str
    money: float | None


@dataclass(frozen=True)
class RecordFacts:
    """See the sections of the pages. made: Unix seconds. software: versions by name, in the order of their use."""

    name: str
    made: float
    head: dict[str, Any]
    model: dict[str, Any]
    starts: list[StartFacts]
    software: dict[str, list[str]]
    corpora: list[CorpusFacts]
    skips: list[SkipFacts]
    goodput: dict[str, Any] | None
    spending: SpendingFacts | None
    checkpoints: list[dict[str, Any]]
    incidents: list[Evidence]
    days: list[LogbookDay]
    made_from: PublicRun
    problems: list[str]

    def as_object(self) -> dict[str, Any]:
        """record.json."""
        h, made = self.head, self.made_from
        return {
            "format": FORMAT, "version": 1, "megastable": __version__, "name": self.name,
            "made_unix_seconds": self.made,
            "state": h["state"], "running": h["running"], "sentence": h["sentence"], "step": h["step"],
            "steps": h["steps"], "figures": h["figures"], "model": self.model,
            "starts": [asdict(start) for start in self.starts], "software": self.software,
            "corpora": [asdict(c) for c in self.corpora],
            "skips": [asdict(skip) for skip in self.skips], "goodput": self.goodput,
            "cost": None if self.spending is None else asdict(self.spending), "checkpoints": self.checkpoints,
            "incidents": [
                {"number": e.incident.number, "step": e.incident.onset, "verdict": e.incident.verdict,
                 "cause": e.incident.cause, "actions": list(e.incident.actions), "outcome": e.incident.outcome,
                 "cost": e.cost.model_dump(), "page": f"incidents/{e.incident.number:04d}/report.html"}
                for e in self.incidents
            ],
            "kept": asdict(made.names.keep), "recipe_without": made.recipe_without, "words_withheld": made.withheld,
            "problems": self.problems,
        }  # fmt: skip


def starts_of(events: Iterable[Event]) -> list[StartFacts]:
    """Every start of training, with the launch before it."""
    found, launched = list[StartFacts](), None
    for event in events:
        if isinstance(event, Launched):
            launched = event
        elif isinstance(event, Training):
            hosts = [str(host) for host in launched.hosts] if launched is not None else []
            software = {str(name): str(value) for name, value in event.software.items()}
            attempt = launched.attempt if launched is not None else None
            found.append(
                StartFacts(event.time or 0.0, attempt, event.step or 0, event.world, hosts, software)
            )
    return found


def software_of(starts: Sequence[StartFacts], reader: RunReader) -> dict[str, list[str]]:
    """Versions by name: of the journal, or, of an older run, those that its newest checkpoint was written by."""
    found = dict[str, list[str]]()
    for start in starts:
        for name, version in start.software.items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    for note in reversed(reader.journal.noted.checkpoints.values()):
        if not found:
            told = read_object(reader.run.checkpoints / note.name / "state.json").get("versions")
            known = told if isinstance(told, dict) else {}
            found = {
                name: [public_version(known[name])]
                for name in ("megastable", "torch", "python")
                if name in known
            }
    return found


def spending(
    account: TimeAccount | None, starts: Sequence[StartFacts], price: float | None, currency: str
) -> SpendingFacts | None:
    """Every second in which processes existed, times the ranks of that time."""
    if account is None or not (known := [(start.time, start.ranks) for start in starts if start.ranks]):
        return None
    hours, training = 0.0, 0.0
    for span in account.spans():
        if span.kind is not TimeKind.NOT_RUNNING:
            # Before the first step of an attempt its ranks are there already.
            ranks = next((n for at, n in reversed(known) if at <= span.end), known[0][1]) or 0
            hours += (span.end - span.begin) * ranks / 3600
            training += span.seconds * ranks / 3600 if span.kind is TimeKind.TRAINING else 0.0
    return SpendingFacts(hours, training, price, currency, None if price is None else hours * price)


def corpora_of(made: PublicRun, reader: RunReader) -> list[CorpusFacts]:
    """In the order of the recipe."""
    shares: dict[str, Any] = {}
    with suppress(DataError, OSError):
        for entry in read_blends(reader.run.blends):
            if isinstance(entry, BlendEntry):
                shares |= {share.name: share for share in entry.corpora}
    found = []
    for name, folder in made.corpora.items():
        share, facts = shares.get(name), dict[str, Any]()
        with suppress(DataError, OSError):
            manifest = Manifest.load(folder)
            facts = {
                "documents": {
                    split: sum(segment.documents for segment in segments)
                    for split, segments in manifest.splits.items() if split in ("train", "validation")
                },
                "tokens": {split: manifest.tokens(split) for split in ("train", "validation")},
                "text_bytes": manifest.text_bytes, "fingerprint": manifest.fingerprint(),
                "tokenizer": manifest.tokenizer.model_dump(include={"kind", "vocab_size", "xxh3"}),
            }  # fmt: skip
        if share is not None:
            # What the run read, whatever the folder holds now.
            if facts.get("fingerprint") != share.fingerprint:
                facts = {"tokens": {"train": share.tokens}}
            facts["fingerprint"] = share.fingerprint
        if not HASH.fullmatch(str(facts.get("fingerprint"))):
            facts["fingerprint"] = ""
        found.append(CorpusFacts(name, None if share is None else share.weight, **facts))
    return found


def skips_of(reader: RunReader, problems: list[str]) -> list[SkipFacts]:
    """The skip ledger, in order."""
    odd = list[str]()
    try:
        entries = Ledger.read(reader.run.skips, odd).entries
    except (DataError, OSError) as error:
        problems.append(f"the skip ledger: {error}")
        return []
    problems += odd[:3]
    found = []
    for entry in entries:
        if isinstance(entry, SkipEntry):
            ahead = entry.end >= LAST_POSITION
            what = (
                f"from position {entry.first:,} on"
                if ahead
                else f"positions {entry.first:,} to {entry.end - 1:,}"
            )
            what = f"{entry.corpus}, {what}" if entry.corpus else what
            samples = None if ahead or entry.corpus else entry.end - entry.first
        else:
            tokens = sum(end - first for first, end in entry.tokens)
            what = f"{entry.corpus}, {tokens:,} tokens"
            what += ", read again" if entry.released else ""
            samples = math.ceil(tokens / reader.length)
        time = "" if entry.time is None else entry.time.strftime("%Y-%m-%d %H:%M")
        found.append(SkipFacts(time, what, samples, entry.reason, entry.incident, entry.step))
    return found


def checkpoints_of(reader: RunReader) -> list[dict[str, Any]]:
    """Those that the journal names, and whether they are still there. hash: xxh3 that the checkpoint's manifest is
    sealed with."""
    found = []
    for note in reader.journal.noted.checkpoints.values():
        manifest = reader.run.checkpoints / note.name / "manifest.json"
        seal = str(read_object(manifest).get("xxh3", ""))
        found.append({
            "name": note.name, "step": note.step, "time_unix_seconds": note.time, "bytes": note.bytes,
            "seconds": note.seconds, "state": note.state, "why": note.why, "there": manifest.is_file(),
            "xxh3": seal if HASH.fullmatch(seal) else "",
        })  # fmt: skip
    return found


def evidence_of(run: Path) -> list[Evidence]:
    """The facts of all post-mortems that were written."""
    found = []
    for path in sorted((run / "incidents").glob("*/evidence.json")):
        with suppress(OSError, ValidationError):
            found.append(Evidence.model_validate_json(path.read_bytes()))
    return found
