"""Prints the summary of a finished run: its incidents in a few lines each, its losses, its files.

python -m megastable.report.story runs/quickstart
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megastable.base.errors import DataError, user_errors
from megastable.base.text import duration, number, put_off, ranges, visible
from megastable.config.recipe import find, load
from megastable.config.tree import RunConfig
from megastable.data.corpora import open_corpora
from megastable.data.plant import read_planted
from megastable.data.tokenizer import load_tokenizer
from megastable.report.postmortem import costs_of, sentences
from megastable.report.postmortem.facts import Cost, IncidentFacts
from megastable.run.directory import RunDirectory
from megastable.run.events.data_events import LookedAhead
from megastable.run.events.stability_events import Would

CLEAN = Path("data/stdlib")
NAMED = 5  # documents


def text_at(path: Path, position: int, config: RunConfig) -> str:
    """The start of the text at a position of a corpus, on one line."""
    corpus = config.data.corpora[0].model_copy(update={"path": path})
    corpora = open_corpora([corpus], config.model.sequence_length, config.run.seed)
    info = corpora.manifests[0].tokenizer
    tokens = corpora.train.sample(position)[1:25]
    text = " ".join(load_tokenizer(find(path) / info.file, info.eod).decode(tokens).split())
    return visible(text)[:36]


def story(incident: dict[str, Any], config: RunConfig, cost: Cost | None = None) -> Iterator[str]:
    """An incident of summary.json in a few lines: seen, guilty, an example, done, cost."""
    i = IncidentFacts.model_validate({"number": 0, "kind": incident["class"], **incident})
    yield f"step {i.onset:<7} {visible(sentences.symptom(i), 300)}; {visible(i.kind)}, cause: {visible(i.cause)}"
    if i.guilty:
        found, planted = (
            {(d["corpus"], d["shard"], d["document"]) for d in incident[key] or ()}
            for key in ("documents", "planted_documents")
        )
        named = sorted(d[2] for d in found)
        more = f" and {len(named) - NAMED} more" if len(named) > NAMED else ""
        line = f"guilty       samples {ranges(i.guilty, 4)}: documents {', '.join(map(str, named[:NAMED]))}{more}"
        if planted:
            same, others = len(found & planted), len(found - planted)
            line += (
                ", exactly the planted ones"
                if found == planted
                else f"; {same} of the {len(planted)} planted ones, {others} others"
            )
        yield line
        path, position = config.data.corpora[0].path, i.guilty[0][0]
        if read_planted(find(path)) and CLEAN.exists():
            yield f"for example  {text_at(path, position, config)!r} instead of {text_at(CLEAN, position, config)!r}"
    action = str(incident["action"])
    skipped = (
        "; skipped those samples"
        if i.guilty
        else f"; skipped {ranges(i.positions, 4)}"
        if i.positions
        else ""
    )
    if left := put_off(i.deferred, i.returns, i.lost):
        skipped += f"; {left}"
    done = f"{sentences.ACTIONS.get(action, visible(action))}{skipped}" if incident["action"] else "nothing"
    yield f"done         {done}: {visible(i.outcome)}"
    time = f", time lost: {duration(cost.seconds)}" if cost is not None else ""
    yield f"cost         steps lost: {i.steps_lost}, updates refused: {i.batches_discarded}{time}"


def _instead(run: Path, config: RunConfig) -> Iterator[str]:
    """The text if there was no incident: nothing happened, or detection was off."""
    if not config.stability.enabled:
        yield "stability.enabled=false: spike detection was off."
    elif config.stability.dry_run:
        for would in RunDirectory(run).events(Would):
            yield f"step {would['step']:<7} would {would['action']}: {would['reason']}"
        yield "stability.dry_run=true: nothing was done."
    else:
        told = list(RunDirectory(run).events(LookedAhead))
        for event in told:
            yield f"ahead        {event.sentence()}"
        yield "No incident."


def tell(run: Path) -> None:
    """Print the story of the finished run `run`."""
    try:
        s = json.loads((run / "summary.json").read_text())
    except (OSError, ValueError) as error:
        raise DataError(
            f"{run / 'summary.json'}: {error}: it is written when a run is complete; {run / 'journal.jsonl'} tells "
            "what happened so far"
        ) from None
    config = load(run / "recipe.yaml")
    corpus = config.data.corpora[0].path
    validation = "none (train.eval_samples=0, or no validation split)"
    if s["val_loss"] is not None:
        validation = f"{s['val_loss']:.3f}"
        if s["val_unigram_entropy"] is not None:
            validation += f"; unigram entropy {s['val_unigram_entropy']:.3f}"
    print(
        f"\n{s['parameters'] / 1e6:.1f}M parameters, {s['steps']} steps, {s['tokens'] / 1e6:.2f}M tokens at "
        f"{s['tokens_per_second']:,.0f} a second on average, on {s['world_size']} processes with ZeRO "
        f"{s['zero_stage']}\n"
    )
    if planted := read_planted(find(corpus)):
        met = "" if s["cursor"] > planted.first else "; the run ended before them"
        print(f"{corpus} has {planted}{met}.")
    costs = costs_of(run) if s["incidents"] and RunDirectory(run).journal.exists() else {}
    for incident in s["incidents"]:
        print(*story(incident, config, costs.get(incident.get("number"))), sep="\n")
    if not s["incidents"]:
        print("\n".join(_instead(run, config)))
    reports = sorted(RunDirectory(run).incidents.glob("*/report.html"))
    files = {str(report): "an incident, on one page for a browser" for report in reports[-3:]} | {
        f"{run}/summary.json": "these figures and more",
        f"{run}/journal.jsonl": "every event, in order, with its reason",
        f"{run}/steps/": "every step's measurements (Parquet)",
        f"{run}/checkpoints/": "what a run resumes from",
        f"{run}/recipe.yaml": "the configuration, resolved",
        f"{corpus}/": "the corpus and its tokenizer",
    }
    width = max(map(len, files))
    print(
        f"\ntraining loss    {number(s['first_loss'])} -> {number(s['final_loss'])} nats per token (mean of the last "
        "20 steps)\n"
        f"validation loss  {validation}\n"
    )
    print(*(f"{name:<{width}}  {what}" for name, what in files.items()), sep="\n")
    programs = os.path.relpath(Path(sys.executable).parent)  # where this environment has its commands
    print(
        f"\nThe run:   {programs}/megastable watch {run}   then open http://localhost:8765\n"
        f"Curves:    {programs}/tensorboard --logdir {run}/tensorboard   then open http://localhost:6006\n"
        f"Decisions: {programs}/megastable backtest {run} --plot {run}/decisions.png"
    )
    if any(i.get("cause") == "data" for i in s["incidents"]):
        print(f"The data:  {programs}/megastable inspect incident {run} 1 --html incident.html")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m megastable.report.story", description=__doc__)
    parser.add_argument("run", type=Path, help="the directory of a finished run")
    with user_errors():
        tell(parser.parse_args().run)
