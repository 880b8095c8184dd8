"""The drill of judgement: places of texts, faults of updates, and what is read of a run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from drills import court_scenarios
from drills.court import CourtDrill, count_untrained, find_sight, judge_noise, leave_start_out
from drills.court_scenarios import (
    CASES,
    FAULTY,
    LENGTH,
    NAMES,
    PLANTED,
    REPEATS,
    REPEATS_STEP,
    STEP,
    CaseOutcome,
    Places,
    choose_cases,
    cut_samples,
    move_tokens,
    reach,
    write_corpus,
)  # fmt: skip
from drills.faults import EDITS, edit_weights
from drills.scenario import GLOBAL_BATCH
from megastable.base.errors import ConfigError, DataError
from megastable.config.tree import CorpusConfig
from megastable.data.corpora import open_corpora
from megastable.run.events.stability_events import Discarded, IncidentEvent
from megastable.run.events.training_events import Training
from megastable_tools.commands.drill import app
from megastable_tools.prepare.train_tokenizer import train_sentencepiece
from tests.drills.refusals import refusal

BY_NAME = {case.name: case for case in CASES}


def lay(name: str) -> Places:
    return BY_NAME[name].lay(np.random.default_rng(1))


def test_every_scenario_is_laid_at_its_steps() -> None:
    begin = reach(STEP)
    switch, visit = lay("switch").kinds, lay("visit").kinds
    assert (switch[begin - 1], switch[begin], switch[-1]) == ("prose", "code", "code")
    assert (visit[begin], visit[reach(STEP + 40) - 1], visit[reach(STEP + 40)]) == ("code", "code", "prose")
    drift = np.array(lay("drift").kinds) == "code"
    assert (
        not drift[: reach(20)].any() and drift[reach(160) :].all() and 0.4 < drift[: reach(160)].mean() < 0.5
    )
    hexes, moved = lay("hex"), lay("shifted")
    assert len(hexes.bad) == PLANTED and {hexes.kinds[p] for p in hexes.bad} == {"hex"}
    assert begin <= min(hexes.bad) and max(hexes.bad) < reach(STEP + 5) and not hexes.moved
    assert moved.moved == moved.bad == hexes.bad and set(moved.kinds) == {"prose"}
    assert len(lay("labels").bad) == FAULTY * GLOBAL_BATCH


def test_repeated_samples_come_as_often_as_is_said_and_never_again() -> None:
    sources, size = lay("repeats").sources, 8 * GLOBAL_BATCH
    begin, end = reach(REPEATS_STEP), reach(REPEATS_STEP) + REPEATS * size
    assert np.bincount(sources[begin:end])[begin : begin + size].tolist() == [REPEATS] * size
    assert (sources[:begin] == np.arange(begin)).all() and (sources[end:] >= end).all()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    text = "".join(f"{n * n} is a number, and {n} is its root.\n" for n in range(3000))
    tokenizer = train_sentencepiece([text], folder / "tokenizer.model", 300)
    samples = cut_samples(text, tokenizer)
    np.save(folder / "prose.npy", samples[::2])
    np.save(folder / "code.npy", samples[1::2])
    return folder


def test_a_run_reads_what_was_laid(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(court_scenarios, "POSITIONS", 100)
    monkeypatch.setattr(court_scenarios, "HELD_OUT", 10)
    sources = np.arange(100)
    sources[60:] = 7
    places = Places(["prose"] * 50 + ["code"] * 50, (3,), (3,), sources)
    write_corpus(texts, tmp_path / "court", 5, places, ("prose", "code"))
    opened = open_corpora([CorpusConfig(path=tmp_path / "court")], LENGTH, 5)
    assert opened.train.order.sequences == (100,)
    read = opened.train.samples(np.arange(100))[:, :-1]
    prose, code = (
        np.random.default_rng(5).permutation(np.load(texts / f"{kind}.npy"))[10:]
        for kind in ("prose", "code")
    )
    tokenizer = court_scenarios.load_tokenizer(texts / "tokenizer.model")
    assert (read[0] == prose[0]).all() and (read[49] == prose[49]).all() and (read[50] == code[50]).all()
    assert (read[60:] == code[7]).all()
    assert (read[3] != prose[3]).sum() == LENGTH - 1
    assert (read[3, :-1] == move_tokens(prose[3, :-1], tokenizer)).all()
    places = Places(["prose"], sources=np.array([10**6]))
    with pytest.raises(DataError, match="samples of prose"):
        write_corpus(texts, tmp_path / "court", 5, places, ("prose",))


def test_spoilt_updates_change_what_they_say() -> None:
    shapes = {"head.weight": (512, 4), "embedding.weight": (512, 4), "blocks.0.mlp.up.weight": (8, 4)}
    shapes |= {"blocks.1.mlp_norm.weight": (4,), "blocks.1.mlp.up.weight": (8, 4)}
    changed = {}
    for kind in EDITS:
        weights = {name: torch.rand(shape) + 1.0 for name, shape in shapes.items()}
        moments = {name: torch.ones(shape) for name, shape in shapes.items()}
        for name, weight in weights.items():
            before = weight.clone()
            edit_weights(kind, name, weight, moments[name], torch.Generator().manual_seed(0))
            rows = int((weight != before).view(len(weight), -1).any(1).sum())
            if rows or not bool((moments[name] == 1).all()):
                changed.setdefault(kind, {})[name] = rows
    assert changed == {
        "permuted_head": {"head.weight": 64},
        "grown_embeddings": {"embedding.weight": 16},
        "cleared_norm": {"blocks.1.mlp_norm.weight": 4},
        "shrunk_moments": {"blocks.1.mlp_norm.weight": 0, "blocks.1.mlp.up.weight": 0},
        "grown_block": {"blocks.1.mlp_norm.weight": 4, "blocks.1.mlp.up.weight": 8},
    }


def _refuse(step: int, first: int) -> Discarded:
    return Discarded(step=step, first_position=first, next_position=first + 16)


def test_refused_samples_are_untrained_until_they_are_read_again() -> None:
    events = [_refuse(101, 1600), _refuse(105, 1664)]
    assert count_untrained(events, set()) == 32
    assert count_untrained(events, set(range(1600, 1610))) == 22
    back = IncidentEvent(what="rewound", number=1, to_step=103)
    assert count_untrained([*events, back], set()) == 16
    assert count_untrained([*events, Training(step=90), _refuse(101, 1632)], set()) == 16
    assert leave_start_out([_refuse(22, 336), *events]) == events
    assert find_sight(events, 100) == 1 and find_sight(events, 106) is None
    assert find_sight([IncidentEvent(what="opened", number=1, step=120)], 100) == 20


def test_wishes() -> None:
    good = CaseOutcome(scenario="shifted", seed=1, planted=40, found=40, loss=4.0, clean=4.01)
    assert not [w.words for w in BY_NAME["shifted"].wishes if not w.grants(good)]
    bad = good.model_copy(update={"found": 3, "lost": 5, "search_batches": 1000, "exit": 78})
    assert [w.grants(bad) for w in BY_NAME["shifted"].wishes] == [False] * 4
    harmless, harmful = (w.model_copy(update={"found": 0, "loss": n}) for w, n in ((good, 4.0), (good, 4.1)))
    assert [BY_NAME["hex"].wishes[1].grants(row) for row in (good, harmless, harmful)] == [True, True, False]
    cells = [column.describe([good]) for column in CourtDrill.columns]
    assert "40/40" in cells and "-0.0100" in cells and cells[-1] == "ok"
    judged = bad.judged_by(BY_NAME["shifted"].wishes)
    assert CourtDrill.columns[-1].describe([judged]).startswith("NOT ok: exit code 0, 36 found")
    drill = CourtDrill(["shifted"], [1], False)
    assert drill.is_met([good]) and not drill.is_met([good, judged])
    assert drill.describe_verdict([good, judged]).startswith("1 of 2 as wanted, 5 good samples skipped")


def test_names() -> None:
    assert len(set(NAMES)) == len(NAMES)
    cases, noises = choose_cases(["weights", "noise-spikes", "hex"])
    assert len(cases) == 6 and noises == ["noise-spikes"]
    assert len(choose_cases([])[0]) == len(CASES)
    with pytest.raises(ConfigError, match="nonsense"):
        choose_cases(["nonsense"])


@pytest.mark.slow
def test_noise_is_judged_alike_every_time() -> None:
    assert judge_noise("noise-bursts", 3) == judge_noise("noise-bursts", 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["court", "--policy", "ours"], "--policy: drill court has its own models and texts: leave it out"),
        (["court", "--quick"], "--quick: drill court has its own models"),
        (["court", "--only", "switch,thin"], "thin: there is no such scenario: clean, switch"),
        (["thin", "--control"], "--only and --control are of drill court"),
    ],
)
def test_bad_input_is_told_before_anything_begins(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(arguments, tmp_path, monkeypatch)


def test_the_list_has_every_scenario() -> None:
    done = CliRunner().invoke(app, ["court", "--list"])
    assert done.exit_code == 0 and all(name in done.output for name in NAMES)
