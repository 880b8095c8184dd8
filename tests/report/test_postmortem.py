"""The files of an incident: whole, true to the run directory, harmless whatever the texts say, made of what is left."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from markdown_it import MarkdownIt
from typer.testing import CliRunner

from megastable.base.errors import DataError
from megastable.config.recipe import load
from megastable.data.corpora import open_corpora
from megastable.data.documents import Document
from megastable.data.skip_ledger import SkipEntry, append, append_all, read_ledger, sample_entries
from megastable.data.skips import Skips
from megastable.report.postmortem import (
    incidents_of,
    pages,
    passes,
    pictures,
    sample_texts,
    sentences,
    write_incidents,
)
from megastable.report.postmortem.__main__ import app
from megastable.report.postmortem.facts import Evidence, StepRow
from megastable.report.postmortem.logs import Log
from megastable.run.directory import RunDirectory
from megastable_guard.incident import Incident
from tests.conftest import LENGTH, tiny
from tests.full_disk import files_no_larger_than
from tests.report.runs import (
    NASTY,
    SPIKE,
    Make,
    breakdown,
    data_incident,
    make_run,
    note,
    remedies_tried,
    suspects_tried,
    tell,
)
from tests.report.test_safe import HOSTILE
from tests.tiers import examples

# What is there

REGION: dict[str, Any] = {
    "first": 236, "end": 248, "how": "it ends at position 247", "measured": 56, "steps": 2.3,
    "probes": [[240, 8, 8], [232, 8, 4], [256, 8, 0], [248, 8, 0], [400, 8, 1], [800, 8, 0]],
}  # fmt: skip


def with_region(make: Make, corpus: Path, **change: Any) -> Path:
    run = make()
    tell(RunDirectory(run), data_incident(corpus, [(236, 248)]), region=REGION | change)
    return run


def test_how_far_bad_data_goes_is_shown_by_the_probes(make: Make, hostile_corpus: Path) -> None:
    run = with_region(make, hostile_corpus)
    (folder,) = write_incidents(run)
    (evidence,) = incidents_of(run)
    (region,) = evidence.regions
    assert (region.steps, evidence.problems) == (2.3, [])
    told = [(s.first, s.end, s.batches, s.measured, s.bad) for s in region.stretches]
    assert told == [(232, 248, 2, 16, 12), (248, 264, 2, 16, 0), (400, 408, 1, 8, 1), (800, 808, 1, 8, 0)]
    assert (folder / "region.png").read_bytes()[:4] == b"\x89PNG"
    page, text = (folder / "report.html").read_text(), (folder / "postmortem.md").read_text()
    assert page.count("data:image/png") == 3 and "It ends at position 247." in page and "2.3" in page
    assert (
        '<td class="n">232 to 247</td><td class="n">2</td><td class="n">16</td><td class="n">12</td>' in page
    )
    assert "| 232 to 247 | 2 | 16 | 12 |" in text and "](region.png)" in text
    assert "in 2.3 steps of time.\n" in text
    assert Evidence.model_validate_json((folder / "evidence.json").read_bytes()) == evidence


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"probes": []},
        {"probes": [[248 + (8 << n), 8, 0] for n in range(18)]},
        {"first": 247},
    ],
)
def test_any_region_can_be_shown(make: Make, hostile_corpus: Path, change: dict[str, Any]) -> None:
    run = with_region(make, hostile_corpus, **change)
    (folder,) = write_incidents(run)
    assert (folder / "region.png").exists() == (change.get("probes") != [])


@pytest.mark.quick("change1")
@pytest.mark.parametrize("change", [{"first": "x"}, {"end": 236}, {"probes": [["x"]]}])
def test_a_region_that_cannot_be_understood_is_left_out_and_the_rest_told(
    make: Make, hostile_corpus: Path, change: dict[str, Any]
) -> None:
    (folder,) = write_incidents(with_region(make, hostile_corpus, **change))
    (evidence,) = incidents_of(folder.parents[1])
    assert all(region.first < region.end and not region.probes for region in evidence.regions)
    assert (folder / "report.html").exists()


def with_trials(run: Path, *trials: dict[str, Any], cause: str = "data") -> Path:
    """The run, in which trials were held between the opening of an incident and its cause."""
    directory = RunDirectory(run)
    number = {"number": 1, "summary": Incident(number=1, **SPIKE).model_dump(mode="json")}
    note(directory, 1030.5, "incident", what="opened", step=31, onset=30, **number)
    for trial in trials:
        note(directory, 1030.6, "branches_tried", **trial)
        note(directory, 1030.6, "incident", what="attributed", cause=cause, **number)
    note(directory, 1030.7, "incident", what="rewound", to_step=29, **number)
    note(directory, 1040.5, "incident", what="closed", step=39, **number)
    return run


def test_what_was_tried_is_told_with_the_branches(make: Make) -> None:
    (folder,) = write_incidents(with_trials(make(), suspects_tried(), remedies_tried()))
    (evidence,) = incidents_of(folder.parents[1])
    suspects, remedies = evidence.trials
    assert (suspects.chosen, remedies.chosen) == ("without the suspects", "reset_moments")
    assert suspects.control is not None and suspects.control.name == "without the suspects"
    assert (suspects.last, remedies.last, evidence.problems) == (40, 32, [])
    page, text = (folder / "report.html").read_text(), (folder / "postmortem.md").read_text()
    told = "Tried at step 31, on the state after step 24: 16 steps with 16 suspects, and the same steps without: "
    assert f"{told}they do harm." in page and f"{told}they do harm." in text
    assert (
        '<td>with the suspects</td><td class="n">0</td><td class="n">4.510</td><td class="n">+0.310 ± 0.020</td>'
        in page
    )
    assert '<tr class="own"><td>moments reset</td><td class="n">4</td>' in page
    assert "| without the suspects | 1 | 4.200 | 0, the control | 2.50 | chosen |" in text
    assert "| rate cut | 2 | 3.300 | -0.900 ± 0.060 | 3.50 |  |" in text
    assert "](branches.png)" in text and "](branches-2.png)" in text and page.count("data:image/png") == 3
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in ("branches.png", "branches-2.png"))
    assert Evidence.model_validate_json((folder / "evidence.json").read_bytes()) == evidence


@pytest.mark.parametrize(
    ("verdict", "cause", "chosen"),
    [
        ("new", "new_data", "with"),
        ("noise", "new_data", "with"),
        ("noise", "data", "without"),
        ("mixed", "state", "without"),
    ],
)
def test_the_branch_that_the_run_went_on_with_follows_from_verdict_and_cause(
    make: Make, verdict: str, cause: str, chosen: str
) -> None:
    trial = suspects_tried(verdict=verdict)
    run = with_trials(make(), trial, cause=cause)
    (evidence,) = incidents_of(run)
    assert evidence.trials[0].chosen == f"{chosen} the suspects"


def test_a_remedy_that_won_is_named(make: Make) -> None:
    run = make()
    number = {
        "number": 1,
        "summary": Incident(number=1, **SPIKE, actions=["adjust"], cause="state").model_dump(mode="json"),
    }
    note(RunDirectory(run), 1030.5, "incident", what="opened", step=31, onset=30, **number)
    note(RunDirectory(run), 1030.6, "branches_tried", **suspects_tried(verdict="mixed"))
    note(RunDirectory(run), 1030.6, "branches_tried", **remedies_tried())
    note(RunDirectory(run), 1030.7, "incident", what="attributed", cause="state", **number)
    note(RunDirectory(run), 1030.7, "incident", what="rewound", to_step=24, **number)
    (evidence,) = incidents_of(run)
    assert (
        "to step 24 and continued with the remedy whose branch was clearly better: moments reset."
        in sentences.headline(evidence)
    )
    assert "a remedy that was clearly better" in sentences.acted("adjust")
    suspects, remedies = evidence.trials
    assert "step 24: moments reset won: only with" in remedies.summary
    assert not suspects.chosen and "the suspects were read again" in suspects.details
    corpus = remedies.model_copy(update={"chosen": "without the corpus", "corpus": "web"})
    assert not corpus.has_remedy and "The run went on as in the chosen one." in corpus.details
    nothing = remedies.model_copy(update={"chosen": "nothing"})
    assert "No remedy won, so none was taken." in nothing.details


def test_suspects_that_are_examined_while_an_incident_is_open_are_trained_on(make: Make) -> None:
    run = make()
    number = {"number": 1, "summary": Incident(number=1, **SPIKE).model_dump(mode="json")}
    note(RunDirectory(run), 1030.5, "incident", what="opened", step=31, onset=30, **number)
    note(RunDirectory(run), 1030.6, "branches_tried", **suspects_tried(verdict="new"))
    note(RunDirectory(run), 1030.7, "samples_examined", step=31, first=30, last=31, reason="they are new")
    note(RunDirectory(run), 1030.8, "incident", what="attributed", cause="data", **number)
    (evidence,) = incidents_of(run)
    assert evidence.trials[0].chosen == "with the suspects"


def test_trials_of_other_matters_are_not_told_and_one_before_the_opening_is(make: Make) -> None:
    run = make()
    directory = RunDirectory(run)
    note(directory, 1020.0, "branches_tried", **suspects_tried(reason="of samples that were examined"))
    note(
        directory,
        1020.1,
        "samples_examined",
        step=31,
        first=30,
        last=30,
        suspected="higher",
        reason="none is bad",
    )
    note(directory, 1030.0, "branches_tried", **suspects_tried(step=29, reason="too early"))
    note(directory, 1030.1, "branches_tried", **suspects_tried(reason="of a look back"))
    with_trials(
        run,
        suspects_tried(branches=[]),
        suspects_tried(reason=""),
    )
    note(directory, 1050.0, "branches_tried", **suspects_tried(reason="after it was over"))
    (evidence,) = incidents_of(run)
    assert [trial.reason for trial in evidence.trials] == ["of a look back", ""]
    assert [trial.chosen for trial in evidence.trials] == ["without the suspects"] * 2
    assert evidence.trials[1].summary.endswith(": with the suspects, without the suspects.")


@pytest.mark.quick("change0")
@pytest.mark.parametrize(
    "change",
    [
        {"difference": "inf", "error": 0.0, "loss": "inf", "losses": [4.0, "nan", "inf"], "norms": ["nan"]},
        {"losses": [4.0], "norms": [], "name": f"$x^2$ {NASTY}"},
        {"losses": [], "difference": "nan", "error": "nan"},
    ],
)
def test_any_branches_can_be_drawn(make: Make, change: dict[str, Any]) -> None:
    trial = remedies_tried()
    trial["branches"] = [trial["branches"][0], trial["branches"][1] | change, *trial["branches"][2:]] * 2
    (folder,) = write_incidents(with_trials(make(), trial))
    assert (folder / "branches.png").exists() and "<script>" not in (folder / "report.html").read_text()


def test_an_incident_becomes_a_folder_of_files_that_a_person_opens(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    assert folder == spike / "incidents" / "0001"
    assert {p.name for p in folder.iterdir()} == {
        "report.html", "postmortem.md", "plot.png", "tokens.png", "samples.txt", "documents.csv", "layers.csv",
        "evidence.json",
    }  # fmt: skip
    assert all((folder / name).read_bytes()[:4] == b"\x89PNG" for name in ("plot.png", "tokens.png"))
    text = (folder / "postmortem.md").read_text()
    assert "**At step 30 the loss jumped from 4.00 to 9.00.** 12 samples of " in text
    assert (
        "rewound in memory to step 29, skipped them and continued. By step 39 the loss was on its trend again, at 4.10."
        in text
    )
    parts = [
        "Symptoms",
        "Evidence",
        "Classification",
        "Recovery",
        "Outcome",
        "Cost",
        "Follow-ups",
        "Timeline",
        "Files",
    ]
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == parts
    assert "0001/report.html" in (folder.parent / "index.html").read_text()


@pytest.mark.slow
def test_the_evidence_for_machines_is_read_back_as_it_was(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    (evidence,) = incidents_of(spike)
    assert Evidence.model_validate_json((folder / "evidence.json").read_bytes()) == evidence
    assert (evidence.back_to, evidence.healed_at, evidence.problems) == ([29], 39, [])
    first, second = evidence.passes
    assert (first[-1].step, first[-1].applied, second[0].step, second[0].loss) == (31, False, 30, 4.0)
    assert [s.position for s in evidence.samples] == list(range(236, 248))
    assert evidence.suspects[0].loss == 9.5 == evidence.samples[0].loss
    assert evidence.layers is not None and evidence.layers.values[0].ratio == 8.0
    (row,) = csv.DictReader((folder / "layers.csv").open())
    assert row == {
        "name": "blocks.0",
        "statistic": "activation_rms",
        "before (step 20)": "1.0",
        "during (step 31)": "8.0",
        "after (step 60)": "3.0",
        "ratio": "8.0",
    }


def test_the_texts_are_those_of_the_documents_with_their_ends(spike: Path) -> None:
    (evidence,) = incidents_of(spike)
    pieces = [piece for sample in evidence.samples for piece in sample.pieces]
    assert {(p.shard, p.document) for p in pieces} == {
        (d.shard, d.document) for d in evidence.incident.documents
    }
    assert any(piece.ends for piece in pieces)
    text = "".join(piece.text for piece in pieces)
    assert "\x1b[31m" in text and "<script>" in text


def test_the_cost_is_counted_in_steps_tokens_hours_and_money(make: Make, hostile_corpus: Path) -> None:
    run = make(
        data_incident(hostile_corpus, [(236, 248)]), supervise={"gpu_hour_price": 3600.0, "currency": "EUR"}
    )
    (evidence,) = incidents_of(run)
    cost = evidence.cost
    assert (cost.steps, cost.tokens, cost.batches_refused) == (2, 2 * 8 * LENGTH, 2)
    assert cost.seconds == pytest.approx(2 * 0.5 + 1.5)  # two steps done again, and the search
    assert cost.gpu_hours == pytest.approx(2 * 2.5 / 3600) and cost.money == pytest.approx(2 * 2.5)
    assert "3600 EUR" in sentences.cost_explained(evidence)
    assert "5.00 EUR" in pages.index([evidence])


def test_what_is_skipped_is_told_with_how_long_it_holds(make: Make, hostile_corpus: Path) -> None:
    root = make(data_incident(hostile_corpus, [(236, 248)]))
    config = load(root / "recipe.yaml")
    order = open_corpora(config.data.corpora, config.model.sequence_length, config.run.seed).train.order
    append_all(root / "skips.jsonl", sample_entries(order, np.arange(236, 248), "they are bad", (), 1, 30))
    append(root / "skips.jsonl", SkipEntry(first=300, end=310, reason="a window", incident=1))
    append(root / "skips.jsonl", SkipEntry(first=9, end=2**62, reason="again", incident=1, corpus="web"))
    (evidence,) = incidents_of(root)
    samples, window, corpus = sentences.skipped(evidence)
    assert samples[0] == f"samples of corpus {order.corpora[0].name}" and samples[2] == "in every epoch"
    assert window == ("samples", "positions 300-309", "in this epoch", "a window")
    assert corpus == ("corpus web", "from position 9", "for good", "again")
    (folder,) = write_incidents(root)
    text = (folder / "postmortem.md").read_text()
    assert "| samples | positions 300-309 | in this epoch | a window |" in text and "in every epoch" in text
    again = next(f for f in sentences.follow_ups(evidence) if f.command and f.command.startswith("mkdir"))
    ledger = root / "skips.jsonl"
    subprocess.run(again.command, shell=True, check=True, cwd=root)
    (given,) = read_ledger(root / "RUN/skips.jsonl")
    assert given == read_ledger(ledger)[0].model_copy(update={"incident": None, "step": None})
    assert Evidence.model_validate_json((folder / "evidence.json").read_bytes()).skipped == evidence.skipped


# Again and again


@pytest.mark.slow
def test_what_did_not_change_is_not_written_again(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    before = {p: p.stat().st_mtime_ns for p in spike.glob("incidents/**/*")}
    assert write_incidents(spike) == []
    assert {p: p.stat().st_mtime_ns for p in spike.glob("incidents/**/*")} == before
    assert write_incidents(spike, again=1) == [folder]


@pytest.mark.slow
def test_an_event_more_writes_it_again_and_leaves_the_others_alone(make: Make, hostile_corpus: Path) -> None:
    one = data_incident(hostile_corpus, [(236, 248)])
    run = make(one)
    journal = RunDirectory(run)
    note(journal, 1050.0, "evaluated", step=50, loss=3.9)
    tell(journal, one.model_copy(update={"number": 2, "outcome": "open", "loss_after": None}), 1060.0)
    assert [p.name for p in write_incidents(run)] == ["0001", "0002"]
    closed = one.model_copy(update={"number": 2}).model_dump(mode="json")
    note(journal, 1080.0, "incident", what="closed", number=2, summary=closed)
    assert [p.name for p in write_incidents(run)] == ["0002"]


@pytest.mark.slow
def test_a_look_into_the_layers_that_comes_later_writes_it_again(spike: Path) -> None:
    late = next((spike / "layers").glob("00000060-*"))
    content = late.read_bytes()
    late.unlink()
    (folder,) = write_incidents(spike)
    assert "after (step 80)" in (folder / "layers.csv").read_text()
    late.write_bytes(content)
    assert write_incidents(spike) == [folder]
    assert "after (step 60)" in (folder / "layers.csv").read_text()


def test_before_it_is_over_there_is_no_look_after_it(make: Make, hostile_corpus: Path) -> None:
    run = make()
    opened = data_incident(hostile_corpus, [(236, 248)], outcome="open").model_dump(mode="json")
    note(RunDirectory(run), 1030.5, "incident", what="opened", number=1, summary=opened)
    (evidence,) = incidents_of(run)
    layers = evidence.layers
    assert layers is not None and (layers.before_step, layers.during_step, layers.after_step) == (
        20,
        31,
        None,
    )


@pytest.mark.slow
def test_killed_in_between_it_is_written_whole_the_next_time(
    spike: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megastable.report import postmortem

    (folder,) = write_incidents(spike)
    whole = {p.name: p.read_bytes() for p in folder.iterdir()}
    put, left = postmortem._put, [3]

    def killed(path: Path, content: bytes) -> None:
        left[0] -= 1
        if not left[0]:
            raise KeyboardInterrupt
        put(path, content)

    (folder / "samples.txt").write_text("of an older version")
    monkeypatch.setattr(postmortem, "_put", killed)
    with pytest.raises(KeyboardInterrupt):
        write_incidents(spike, again=1)
    monkeypatch.undo()
    assert not (folder / "evidence.json").exists()
    assert write_incidents(spike) == [folder]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == whole


@pytest.mark.slow
def test_a_full_disk_is_said_and_nothing_is_lost(spike: Path) -> None:
    with (
        files_no_larger_than(20_000),
        pytest.raises(DataError, match=r"0001 could not be written: .*make room"),
    ):
        write_incidents(spike)
    assert not list(spike.glob("incidents/**/.*")), "no temporary file stays"
    assert len(write_incidents(spike)) == 1


# Whatever the texts say


class Structure(HTMLParser):
    """The tags of a page with the names of their attributes; escapes set apart are no structure."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, tuple[str, ...]]] = []
        self.addresses: set[str] = set()
        self.text = ""
        self._escape = 0
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if ("class", "esc") in attrs:
            self._escape += 1
            return
        self.tags.append((tag, tuple(name for name, _ in attrs)))
        self.addresses |= {value or "" for name, value in attrs if name in ("href", "src")}

    def handle_endtag(self, tag: str) -> None:
        if self._escape and tag == "span":
            self._escape -= 1
        else:
            self.tags.append((f"/{tag}", ()))

    def handle_data(self, data: str) -> None:
        self.text += data

    def handle_comment(self, data: str) -> None:
        self.tags.append(("comment", ()))


def saying(evidence: Evidence, text: str) -> Evidence:
    """The same incident, with `text` wherever text comes from outside."""
    document = Document(corpus=text, shard=text, document=1, first_token=0, tokens=5)
    incident = evidence.incident.model_copy(
        update={"failure": f"f{text}", "reasons": [text], "documents": [document], "outcome": f"o{text}"}
    )
    sample, tokens, layers = evidence.samples[0], evidence.tokens, evidence.layers
    assert tokens is not None and layers is not None
    pieces = [sample_texts.DocumentText(text=text, ends=True, shard=text, document=3)]
    return evidence.model_copy(update={
        "run": evidence.run.model_copy(update={"name": text, "currency": text}),
        "incident": incident, "problems": [text],
        "samples": [sample.model_copy(update={"corpus": text, "pieces": pieces})],
        "timeline": [entry.model_copy(update={"text": text}) for entry in evidence.timeline],
        "logs": [Log(source=text, ranks=f"r{text}", file="attempt.log", bytes=3, tail=f"log {text}")],
        "layers": layers.model_copy(update={"values": [v.model_copy(update={"name": text}) for v in layers.values]}),
        "tokens": tokens.model_copy(update={"top": [s.model_copy(update={"text": text}) for s in tokens.top]}),
    })  # fmt: skip


@pytest.fixture(scope="module")
def evidence(hostile_corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Evidence:
    incident = data_incident(hostile_corpus, [(236, 248)])
    (evidence,) = incidents_of(
        make_run(hostile_corpus, tmp_path_factory.mktemp("evidence") / "run", incident)
    )
    return evidence


QUICK = settings(max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture])
FILES = ["report.html", "samples.txt", "attempt.log"]


@QUICK
@given(text=HOSTILE)
def test_no_tag_and_no_attribute_of_a_page_comes_from_a_text(evidence: Evidence, text: str) -> None:
    bad, good = saying(evidence, text), saying(evidence, "harmless")
    page = Structure(pages.report(bad, {}, FILES))
    plain = Structure(pages.report(good, {}, FILES))
    assert page.tags == plain.tags and page.addresses == plain.addresses
    assert all(c.isprintable() or c in "\n\t" for c in page.text)
    assert Structure(pages.index([bad])).tags == Structure(pages.index([good])).tags


@QUICK
@given(text=HOSTILE)
def test_no_markup_of_the_post_mortem_comes_from_a_text(evidence: Evidence, text: str) -> None:
    def kinds(evidence: Evidence) -> Iterator[str]:
        markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
        for token in markdown.parse(pages.postmortem(evidence, FILES)):
            yield token.type
            for part in token.children or ():
                if part.type not in ("text", "softbreak") and part.content != "<!-- -->":
                    yield part.type

    # Empty cells and names are as good as any other.
    assert list(kinds(saying(evidence, f"a{text}z"))) == list(kinds(saying(evidence, "harmless")))


@QUICK
@given(text=HOSTILE)
def test_plain_files_hold_nothing_that_does_not_show(evidence: Evidence, text: str) -> None:
    bad = saying(evidence, text)
    assert bad.layers is not None
    for content in (pages.samples(bad), pages.documents(bad), pages.layers(bad.layers)):
        assert all(c.isprintable() or c in "\n\t" for c in content)
    forged = [
        line for line in pages.samples(saying(evidence, f"\n== {text}")).split("\n") if line.startswith("==")
    ]
    assert len(forged) == 1
    assert len(list(csv.reader(pages.documents(bad).splitlines()))) == 2


def test_a_page_needs_nothing_from_elsewhere(spike: Path) -> None:
    (folder,) = write_incidents(spike)
    page = Structure((folder / "report.html").read_text())
    inside = {a for a in page.addresses if a.startswith("data:image/png;base64,")}
    assert len(inside) == 2
    assert all((folder / address).resolve().exists() for address in page.addresses - inside)
    assert not {"script", "link", "iframe"} & {tag for tag, _ in page.tags}
    assert "\\x1b[31m<script>" in page.text.replace("\n", "")


@pytest.mark.parametrize("text", [NASTY, "日本語\U0001f600", "$a_b$ \\frac", "\ud800", " \n"])
def test_labels_of_pictures_are_plain(
    evidence: Evidence, text: str, recwarn: pytest.WarningsRecorder
) -> None:
    assert pictures.label_of(text).isprintable() and len(pictures.label_of(text)) <= pictures.LABEL


def test_what_the_font_has_not_is_escaped(evidence: Evidence, recwarn: pytest.WarningsRecorder) -> None:
    tokens = saying(evidence, f"日\U0001f600$a_b$ \\frac{NASTY}").tokens
    assert tokens is not None and pictures.tokens_picture(tokens).startswith(b"\x89PNG")
    assert not [w for w in recwarn if "Glyph" in str(w.message)]


# Other incidents


def test_of_a_crash_failure_log_and_stacks_are_shown(make: Make) -> None:
    root = make()
    run, crash = (
        RunDirectory(root),
        breakdown(evidence=["logs/a.log", "logs/a/rank-1.stacks", "../../secret", "logs/no"]),
    )
    (root / "logs/a").mkdir(parents=True)
    (root / "logs/a.log").write_bytes(b"early\n" * 400_000 + b"\x1b[31mError: <b>\x07\x1b[0m")
    (root / "logs/a/rank-1.stacks").write_text("rank 1 on node-3: step after step 45\n")
    (root.parent.parent / "secret").write_text("x")
    number = {"number": 1, "summary": crash.model_dump(mode="json")}
    note(run, 1100.0, "ended", attempt=1, failure=crash.failure, step=45)
    note(run, 1100.1, "incident", what="opened", **number)
    note(run, 1101.0, "launched", attempt=2)
    note(run, 1107.0, "resumed", step=40, checkpoint="step-40", cursor=320)
    note(run, 1108.0, "training", step=40, cursor=320, world=2)
    note(run, 1108.5, "incident", what="restarted", step=40, **number)
    (folder,) = write_incidents(root)
    (evidence,) = incidents_of(root)
    text = (folder / "postmortem.md").read_text()
    assert text.splitlines()[2].startswith(
        f"**R{crash.failure[1:]}.** The run resumed from step 40; steps repeated: 5."
    )
    assert "\nError: <b>\\x07\n```" in text
    assert (folder / "log-a.log").stat().st_size < 1.1 * 2**20 and (folder / "log-a-rank-1.stacks").exists()
    assert [p.split()[0] for p in evidence.problems] == ["../../secret:", "logs/no:"]
    assert not evidence.samples and evidence.tokens is None and not (folder / "tokens.png").exists()
    # 8 s without training, and 5 steps of half a second, on 2 ranks.
    assert evidence.cost.seconds == pytest.approx(8 + 2.5)
    assert evidence.cost.gpu_hours == pytest.approx(2 * 10.5 / 3600)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"verdict": "hang", "failure": ""}, "After step 45 the run hung."),
        ({"verdict": "damaged_checkpoint", "cause": "storage", "failure": ""}, "was damaged, and passed over."),
        (SPIKE | {"cause": "learning_rate", "actions": ["rewind", "cut_lr"]}, "the learning rate was. The run"),
        (SPIKE | {"cause": "numerics", "actions": ["fall_back"]}, "step is harmless. The run was rewound in memory "),
        (SPIKE | {"cause": "numerics", "actions": ["fall_back"]}, "and continued without FP8."),
        (SPIKE | {"cause": "numerics", "actions": ["fall_back"], "kernels": ["attention sdpa"]},
         "without attention sdpa the same step is harmless. The run was rewound in memory to step 29 and continued "
         "without attention sdpa."),
        (SPIKE | {"cause": "learning_rate", "actions": ["rewind", "fall_back"]}, "the learning rate was, or FP8. The"),
        (SPIKE | {"cause": "hardware", "actions": ["rewind"]}, "something else: hardware."),
        (SPIKE | {"cause": "state", "actions": ["rewind"], "positions": [(232, 248)]},
         "step 29 and continued. 16 samples skipped in this epoch."),
        (SPIKE | {"cause": "state", "actions": ["rewind"], "deferred": [(232, 248)], "returns": [(312, 328)]},
         "No sample was guilty: the state was. The run was rewound in memory to step 29 and continued. 16 samples "
         "deferred; read again from position 312 (about step 40)."),
        (SPIKE | {"cause": "state", "actions": ["rewind"], "deferred": [(232, 240)], "returns": [(472, 480)],
                  "positions": [(240, 248)], "lost": 8},
         "8 samples deferred; read again from position 472 (about step 60), 8 samples skipped in this epoch: no room "
         "to read them later."),
        (SPIKE | {"cause": "learning_rate", "actions": ["rewind", "cut_lr"], "released": 2},
         "and continued with a smaller learning rate. 2 samples no longer convicted."),
        (SPIKE | {"verdict": "drift", "actions": []}, "the loss drifted away, from 4.00 to 9.00. It is still open"),
        (SPIKE | {"verdict": "non_finite", "loss_peak": None, "actions": []}, "were not finite."),
        (SPIKE | {"loss_peak": 4.0, "actions": ["stop"], "outcome": "stopped"}, "norm jumped to 7.50, the loss"),
        (SPIKE | {"loss_before": None, "actions": []}, "At step 30 the loss or the gradient norm jumped."),
        (SPIKE | {"verdict": "plateau", "loss_peak": 4.05, "actions": []}, "old level: it went from 4.00 to 4.05."),
        (SPIKE | {"verdict": "plateau", "loss_peak": None, "actions": []}, "the loss stayed above its old level."),
        (SPIKE | {"cause": "data", "actions": ["rewind", "swap_corpus"]}, "without their corpus."),
        (SPIKE | {"cause": "code", "actions": ["handover"], "outcome": "handed over"}, "It was handed over"),
    ],
)  # fmt: skip
def test_every_kind_of_incident_has_its_words(make: Make, change: dict[str, Any], said: str) -> None:
    run = make(breakdown(**({"failure": ""} | change)))
    (evidence,) = incidents_of(run)
    assert said in sentences.headline(evidence)
    assert sentences.follow_ups(evidence)
    Structure(pages.report(evidence, {}, FILES))
    MarkdownIt().parse(pages.postmortem(evidence, FILES))


def test_a_peak_that_is_not_finite_is_called_so(make: Make) -> None:
    run = make(
        breakdown(**SPIKE | {"failure": "", "verdict": "non_finite", "loss_peak": None, "norm_peak": None})
    )
    (evidence,) = incidents_of(run)
    assert [value for _, value, _ in sentences.figures(evidence)[:2]] == ["not finite", "not finite"]
    assert "| 4.00 | not finite | – |" in pages.postmortem(evidence, FILES)


@pytest.mark.parametrize(
    ("outcome", "goes_on"), [("healed", "; this run tries 0.00075 for a while"), ("stopped", "")]
)
def test_the_rate_after_two_cuts_is_told_of_a_run_that_goes_on(
    make: Make, outcome: str, goes_on: str
) -> None:
    cuts = {"cause": "learning_rate", "actions": ["cut_lr", "cut_lr"], "outcome": outcome, "failure": ""}
    (evidence,) = incidents_of(make(breakdown(**SPIKE | cuts)))
    assert any(f"(optimizer.lr, now 0.003{goes_on})" in todo.text for todo in sentences.follow_ups(evidence))


@pytest.mark.parametrize(
    ("cause", "actions", "fp8", "rate"),
    [("numerics", ["fall_back"], True, False), ("learning_rate", ["rewind", "fall_back"], True, True),
     ("learning_rate", ["fall_back", "cut_lr"], False, True), ("state", ["rewind"], False, False)],
)  # fmt: skip
def test_where_fp8_was_left_its_layers_are_looked_at(
    make: Make, cause: str, actions: list[str], fp8: bool, rate: bool
) -> None:
    change = {"cause": cause, "actions": actions, "failure": "", "outcome": "healed"}
    (evidence,) = incidents_of(make(breakdown(**SPIKE | change)))
    todo = " ".join(t.text + t.command for t in sentences.follow_ups(evidence))
    assert ("precision.fp8.keep" in todo and "fp8-check" in todo) is fp8 and ("optimizer.lr" in todo) is rate


@pytest.mark.slow
def test_ten_thousand_guilty_samples_stay_readable(make: Make, hostile_corpus: Path) -> None:
    run = make(data_incident(hostile_corpus, [(100, 110), (200, 10_190)]))
    (folder,) = write_incidents(run)
    (evidence,) = incidents_of(run)
    assert len(evidence.samples) == sample_texts.SHOWN and evidence.tokens is not None
    assert evidence.tokens.samples == sample_texts.COUNTED
    assert (folder / "report.html").stat().st_size < 1_000_000
    assert "10,000 samples" in (folder / "postmortem.md").read_text()


# What is left


def test_without_corpus_recipe_or_records_it_says_so_and_goes_on(spike: Path, hostile_corpus: Path) -> None:
    run = RunDirectory(spike)
    sorted(run.steps.iterdir())[1].write_bytes(b"PAR1")
    run.journal.write_bytes(run.journal.read_bytes() + b'{"time": 10')
    (evidence,) = incidents_of(spike)
    assert len(evidence.problems) == 1 and "is damaged" in evidence.problems[0] and evidence.samples
    config = yaml.safe_load(run.recipe.read_text())
    config["config"]["data"]["corpora"][0]["path"] = str(spike / "gone")
    run.recipe.write_text(yaml.safe_dump(config))
    (evidence,) = incidents_of(spike)
    assert any(p.startswith("the texts: ") and "gone" in p for p in evidence.problems)
    run.recipe.unlink()
    (folder,) = write_incidents(spike)
    (evidence,) = incidents_of(spike)
    assert (
        any(p.startswith("the recipe: ") for p in evidence.problems) and evidence.cost.gpu_hours is not None
    )
    assert "What could not be had" in (folder / "report.html").read_text()
    assert not (folder / "samples.txt").exists() and (folder / "plot.png").exists()


def test_what_is_not_on_the_disk_yet_the_journal_has(spike: Path) -> None:
    for path in (spike / "steps").iterdir():
        path.unlink()
    refused = {"verdict": "spike", "reason": "up", "loss": "nan", "grad_norm": 3.0, "loss_scale": 1.0}
    note(RunDirectory(spike), 1029.0, "discarded", step=30, first_position=232, next_position=240, **refused)
    (evidence,) = incidents_of(spike)
    ((row,),) = evidence.passes
    assert (row.step, row.applied, row.grad_norm) == (30, False, 3.0) and row.loss != row.loss
    assert pictures.steps_picture(evidence) is not None


def test_a_summary_of_another_version_is_read_as_far_as_it_goes(make: Make) -> None:
    run = make()
    odd = {
        "number": 7,
        "step": 31,
        "onset": "soon",
        "kind": 5,
        "flavour": "x",
        "loss_peak": "inf",
        "documents": [{"a": 1}],
    }
    note(RunDirectory(run), 1030.0, "incident", what="opened", number=7, summary=odd)
    (folder,) = write_incidents(run)
    (evidence,) = incidents_of(run)
    assert folder.name == "0007" and (evidence.incident.onset, evidence.incident.step) == (31, 31)
    assert {p.split("=")[0] for p in evidence.problems} == {
        f"the incident: {k}" for k in ("onset", "kind", "documents")
    }


def test_of_a_run_without_incidents_nothing_is_written(make: Make, tmp_path: Path) -> None:
    run = make()
    assert write_incidents(run) == [] and not (run / "incidents").exists()
    with pytest.raises(DataError, match=r"journal\.jsonl does not exist: give the directory of a run"):
        write_incidents(tmp_path / "nothing")


# By hand


def test_by_hand(spike: Path) -> None:
    def call(*arguments: object) -> tuple[int, str]:
        done = CliRunner().invoke(app, [str(a) for a in arguments])
        return done.exit_code, done.output

    assert call(spike, "--json")[1].count('"format"') == 1 and not (spike / "incidents").exists()
    assert json.loads(call(spike, 1, "--json")[1])["incident"]["number"] == 1
    code, said = call(spike)
    assert code == 0 and said.replace("\n", "").endswith("incidents/0001/report.html")
    assert "nothing new" in call(spike)[1]
    for arguments in ((spike, 9), (spike, 9, "--json"), (spike / "no",)):
        code, said = call(*arguments)
        assert code == 2 and "Traceback" not in said and "journal.jsonl" in said
    assert "Examples" in call("--help")[1]


@pytest.mark.slow
def test_it_runs_where_no_torch_is() -> None:
    heavy = "{'torch', 'deepspeed', 'matplotlib'}"
    code = f"import sys, megastable.report.postmortem.__main__; print(sorted({heavy} & {{*sys.modules}}))"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )


# Parts


def test_what_was_done_again_is_told_from_what_stood() -> None:
    def row(step: int, time: float) -> StepRow:
        return StepRow(step=step, time=time, loss=1.0, grad_norm=1.0, first_position=0, next_position=8)

    steps = [row(s, t) for t, s in enumerate([1, 2, 3, 4, 3, 4, 5, 2, 3, 4, 5, 6])]
    parts = passes.passes(steps)
    assert [[r.step for r in part] for part in parts] == [[1, 2, 3, 4], [3, 4, 5], [2, 3, 4, 5, 6]]
    stood, undone = pictures.standing(parts)
    assert [r.step for r in stood] == [1, 2, 3, 4, 5, 6]
    assert [[r.step for r in part] for part in undone] == [[2, 3, 4], [1, 2, 3, 4, 5]]


def test_positions_are_spread_evenly_over_ranges() -> None:
    ranges = [(10, 12), (20, 23), (100, 105)]
    every = [10, 11, 20, 21, 22, 100, 101, 102, 103, 104]
    assert sample_texts.take(ranges, 4) == every[:4] and sample_texts.count(ranges) == 10
    assert sample_texts.spread(ranges, 100).tolist() == every
    assert sample_texts.spread(ranges, 5).tolist() == every[::2]


def test_readings_of_token_statistics(evidence: Evidence) -> None:
    tokens = evidence.tokens
    assert tokens is not None
    known = {
        "vocabulary": 1000, "guilty_tokens": 5000, "distance": 0.3, "usual_distance": 0.3, "guilty_entropy": 4.0,
        "repeated": 0.1,
    }  # fmt: skip

    def reading(**change: Any) -> str:
        return tokens.model_copy(update=known | change).reading

    assert "repetition" in reading(repeated=0.9)
    assert "random" in reading(guilty_entropy=6.8)
    assert "order" in reading()
    assert "another kind" in reading(distance=0.8)
    assert "random" not in reading(guilty_entropy=4.7, guilty_tokens=128)  # 110 of them are different
    assert "no ordinary samples" in reading(usual_distance=None)


def test_ordinary_samples_are_none_that_were_skipped(hostile_corpus: Path) -> None:
    library = sample_texts.Library(tiny(hostile_corpus, Path("unused")))
    usual = library.tokens([(200, 210)], Skips.of([])).usual_distance
    # Of the ten before them, none counts: those before these do.
    skipped = library.tokens([(200, 210)], Skips.of([(190, 200)])).usual_distance
    assert skipped == library.tokens([(190, 200)], Skips.of([])).usual_distance != usual
    assert library.tokens([(4, 10)], Skips.of([])).usual_distance is None
