"""Gathers the facts of a record from the public copy of a run: the content of record.json and of its pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from megastable import __version__
from megastable.base.errors import DataError
from megastable.data.blends import BlendEntry, read_blends
from megastable.data.manifest import Manifest
from megastable.data.skip_ledger import Ledger
from megastable.report.postmortem.facts import Evidence
from megastable.report.publish.logbook import LogbookDay
from megastable.report.publish.public_run import PublicRun
from megastable.report.publish.record_folder import FORMAT
from megastable.report.publish.redaction import HASH
from megastable.report.run_page.run_reader import RunReader
from megastable.report.skip_lines import SkipLine, skip_lines
from megastable.run.directory import read_object
from megastable.run.goodput.gpu_hours import gpu_hours
from megastable.run.goodput.time_account import TimeAccount
from megastable.run.run_history import StartFacts

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
    skips: list[SkipLine]
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


def software_of(starts: Sequence[StartFacts]) -> dict[str, list[str]]:
    """Versions by name, of all starts."""
    found = dict[str, list[str]]()
    for start in starts:
        for name, version in start.software.items():
            if version not in found.setdefault(name, []):
                found[name].append(version)
    return found


def spending(
    account: TimeAccount | None, starts: Sequence[StartFacts], price: float | None, currency: str
) -> SpendingFacts | None:
    """What the run spent; None if nobody knows its ranks."""
    ranks = [(start.time, start.ranks) for start in starts]
    spent = None if account is None else gpu_hours(account.spans(), ranks)
    if spent is None:
        return None
    return SpendingFacts(
        spent.all, spent.training, price, currency, None if price is None else spent.all * price
    )


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


def skips_of(reader: RunReader, problems: list[str]) -> list[SkipLine]:
    """The skip ledger, in order."""
    odd = list[str]()
    try:
        entries = Ledger.read(reader.run.skips, odd).entries
    except (DataError, OSError) as error:
        problems.append(f"the skip ledger: {error}")
        return []
    problems += odd[:3]
    return skip_lines(entries, reader.length)


def checkpoints_of(reader: RunReader) -> list[dict[str, Any]]:
    """Those that the journal names, and whether they are still there. hash: xxh3 that the checkpoint's manifest is
    sealed with."""
    found = []
    for note in reader.history.checkpoints.values():
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
