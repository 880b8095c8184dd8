"""Records of runs in every state, by the command."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from megastable.base import durable
from megastable.commands.report import app
from megastable.data.blends import BlendEntry, Share
from megastable.data.manifest import Manifest
from megastable.data.skip_ledger import append_entry
from megastable.report.postmortem import write_incidents
from megastable.report.publish import publish_run
from megastable.report.publish.redaction import Keeping
from megastable_tools.prepare.prepare import prepare_shards
from tests.data.texts import documents, sentencepiece_file
from tests.report.publish.plants import everything
from tests.report.run_page.conftest import driver  # noqa: F401  (a fixture)
from tests.report.run_page.made_runs import BEGIN, made_run, note, progress
from tests.report.runs import data_incident, make_run
from tests.tools.cli import call

NONE = Keeping()


class Addresses(HTMLParser):
    """Every address that a page names."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found = list[str]()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action")]


def check(folder: Path) -> dict[str, Any]:
    """What holds of every record. Returns what its page shows of the run."""
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0
    listed = {line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert listed | {"SHA256SUMS"} == there
    assert {name.split("/")[0] for name in there} <= {"index.html", "recipe.yaml", "incidents", "SHA256SUMS"}
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    for page in folder.rglob("*.html"):
        for address in Addresses(page.read_text()).found:
            if not address.startswith(("#", "data:")):
                assert (page.parent / address).is_file(), f"{page}: {address}"
    for page in folder.rglob("*.md"):
        for address in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / address).is_file(), f"{page}: {address}"
    (told,) = json.loads(text_of(folder).partition('id="data">')[2].partition("</script>")[0])["runs"]
    return dict(told)


def text_of(folder: Path) -> str:
    return (folder / "index.html").read_text()


def test_publish_shows_a_run_with_incidents_that_goes_on(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", supervise={"gpu_hour_price": 2.5, "currency": "EUR"})
    progress(run, 150, time.time(), 3.0)
    with (run.root / ".lock").open("w") as file:
        file.flush()
        held = durable.lock_file(run.root / ".lock")
        done = publish_run(run.root, tmp_path / "public", NONE)
        held.close()
    told = check(tmp_path / "public")
    assert told["head"]["running"] and told["head"]["name"] == "public" and not told["head"]["advice"]
    assert (done.state, done.step, done.incidents) == ("running", 150, 2)
    assert [case["number"] for case in told["panel"]["incidents"]] == [1, 2] and set(told["pages"]) == {
        "0001",
        "0002",
    }
    assert [c["state"] for c in told["panel"]["checkpoints"]] == ["healthy", "healthy", "saved"]
    assert any("EUR" in figure["value"] for figure in told["head"]["figures"])
    recipe = yaml.safe_load((tmp_path / "public" / "recipe.yaml").read_text())["config"]
    assert recipe["train"]["steps"] == 200 and recipe["data"]["corpora"][0]["path"].startswith("corpus-")
    assert not run.incidents.exists()  # the run directory is as it was


@pytest.mark.slow
def test_publish_names_damaged_files(tmp_path: Path) -> None:
    """And markup in a text that is kept."""
    run = made_run(tmp_path / "run", incidents=(60,), last=80)
    lines = run.journal.read_text().splitlines()
    lines[3:3] = ['{"time": 1, "event": "of_long_ago", "text": "x"}', "torn{"]
    run.journal.write_text("\n".join(lines) + "\n")
    note(run, BEGIN + 1000, "warning", step=20, text="the <b>loss</b> is 3")
    sorted(run.steps.iterdir())[1].write_bytes(b"torn")
    run.recipe.write_text("config: 3")
    run.progress.unlink()
    done = publish_run(run.root, tmp_path / "public", NONE)
    check(tmp_path / "public")
    assert done.incidents == 1 and done.made.problems[:3] == [
        "journal.jsonl: 2 lines left out: malformed, or of an unknown kind",
        "recipe.yaml cannot be read, or is no frozen recipe", "steps: 1 file of records cannot be read",
    ]  # fmt: skip
    assert "<b>loss" not in text_of(tmp_path / "public")


@pytest.mark.parametrize(
    ("run", "output", "says"),
    [
        ("nothing", "public", "no such directory"),
        (".", "public", "is not the directory of a run"),
        ("run", "run/public", "not inside or around the run"),
        ("run", ".", "not inside or around the run"),
        ("run", "missing/public", "there is no directory"),
        ("run", "mine", "no record that this command wrote"),
    ],
)
def test_command_refuses_bad_input(run: str, output: str, says: str, tmp_path: Path) -> None:
    made_run(tmp_path / "run", incidents=(), last=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    done = call(app, run, "--output", output, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


# The command, killed when it has made everything, and not searched it yet.
KILLED = """
import os, signal, sys
from pathlib import Path
from megastable.report import publish
from megastable.report.publish.redaction import Keeping
publish.find_leaks = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
publish.publish_run(Path(sys.argv[1]), Path(sys.argv[2]), Keeping())
"""


@pytest.mark.slow
def test_publish_leaves_no_link_into_the_run_where_it_is_killed(spike: Path, tmp_path: Path) -> None:
    (spike / "checkpoints" / "step-10").mkdir(parents=True)
    (tmp_path / "online").mkdir()
    (tmp_path / "private").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", KILLED, spike, tmp_path / "online" / "run"], capture_output=True, text=True,
        env={**os.environ, "TMPDIR": str(tmp_path / "private")},
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list((tmp_path / "online").iterdir()) == []
    (made,) = (tmp_path / "private").iterdir()  # only for this user
    assert made.stat().st_mode & 0o077 == 0
    assert any(path.is_symlink() for path in made.rglob("*"))
    publish_run(spike, tmp_path / "online" / "run", Keeping())
    assert [path.name for path in (tmp_path / "online").iterdir()] == ["run"]


PRIVATE = b"acmemails"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a corpus with a private name, whose recipe and blend name it by a relative path."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in").mkdir()
    for number, text in enumerate(documents(60, 200)):
        (tmp_path / "in" / f"{number:03d}.txt").write_text(text)
    corpus = Path("acmemails")
    prepare_shards([tmp_path / "in"], corpus, sentencepiece_file(tmp_path), progress=False)
    root = make_run(corpus, tmp_path / "run", data_incident(corpus, [(236, 248)]))
    known = Manifest.load_manifest(corpus)
    share = Share(
        name=known.name,
        path=str(corpus),
        weight=1.0,
        tokens=known.count_tokens("train"),
        fingerprint=known.fingerprint(),
    )
    append_entry(root / "blends.jsonl", BlendEntry(position=0, step=0, corpora=[share]))
    return root


def samples(root: Path) -> str:
    return (root / "0001" / "samples.txt").read_text()


@pytest.mark.slow
def test_texts_shown_are_those_of_the_run_without_its_names(run: Path, tmp_path: Path) -> None:
    publish_run(run, tmp_path / "public", Keeping(texts=True))
    publish_run(run, tmp_path / "named", Keeping(texts=True, names=True))
    write_incidents(run)
    ours, public = samples(run / "incidents"), samples(tmp_path / "public" / "incidents")
    assert samples(tmp_path / "named" / "incidents") == ours and ours.count("acmemails") > 12
    assert "corpus-1" in public and "shard-1" in public
    assert public == re.sub(r"acmemails-train-00000", "shard-1", ours).replace("acmemails", "corpus-1")
    assert [name for name, part in everything(tmp_path / "public") if PRIVATE in part] == []
    both = [
        json.loads((root / "incidents/0001/evidence.json").read_text()) for root in (run, tmp_path / "public")
    ]
    assert both[0]["tokens"] and both[0]["tokens"] == both[1]["tokens"] and both[1]["problems"] == []
