"""Records of runs in every state, by the command."""

from __future__ import annotations

import json
import re
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver

from megastable.base import durable
from megastable.commands.report import app
from megastable.report.publish import PublishedRecord, publish
from megastable.report.publish.redaction import Keeping
from megastable.run.directory import RunDirectory
from megastable.run.goodput.watching import read_account
from tests.report.run_page.conftest import driver  # noqa: F401  (a fixture)
from tests.report.run_page.made_runs import BEGIN, begin, made_run, note, progress
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
    """What holds of every record. Returns record.json."""
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=folder).returncode == 0
    listed = {line[66:] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert listed | {"SHA256SUMS"} == {
        p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()
    }
    assert not [path for path in folder.rglob("*") if path.is_symlink()]
    for page in folder.rglob("*.html"):
        for address in Addresses(page.read_text()).found:
            if not address.startswith(("#", "data:")):
                assert (page.parent / address).is_file(), f"{page}: {address}"
    for page in folder.rglob("*.md"):
        for address in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            assert (page.parent / address).is_file(), f"{page}: {address}"
    return json.loads((folder / "record.json").read_text())


def texts(folder: Path) -> str:
    return (folder / "index.html").read_text() + (folder / "README.md").read_text()


def headings(done: PublishedRecord) -> list[str]:
    return [entry.heading for day in done.facts.days for entry in day.entries]


def test_a_run_with_incidents_that_goes_on(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", supervise={"gpu_hour_price": 2.5, "currency": "EUR"})
    progress(run, 150, time.time(), 3.0)
    with (run.root / ".lock").open("w") as file:
        file.flush()
        held = durable.hold(run.root / ".lock")
        done = publish(run.root, tmp_path / "public", NONE)
        held.close()
    record = check(tmp_path / "public")
    assert record["running"] and record["state"] == "running" and record["step"] == 150
    assert "still going on" in texts(tmp_path / "public")
    assert headings(done) == ["Training begins", "Incident 1", "Incident 2"]
    assert [i["cost"]["steps"] for i in record["incidents"]] == [2, 2] and record["cost"]["currency"] == "EUR"
    assert record["cost"]["money"] == pytest.approx(2.5 * record["cost"]["gpu_hours"])
    assert [skip["incident"] for skip in record["skips"]] == [1, 2] and record["skips"][0]["samples"] == 5
    assert [c["name"] for c in record["checkpoints"]] == ["step-50", "step-100", "step-150"]
    assert [c["state"] for c in record["checkpoints"]] == ["healthy", "healthy", "saved"]
    # The run directory is as it was, and the published one is a run directory itself.
    assert not run.incidents.exists() and not (tmp_path / "public" / "data" / ".lock").exists()
    there, here = (read_account(root)[0].facts() for root in (run.root, tmp_path / "public" / "data"))
    assert there == here


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    run.journal.unlink()
    done = publish(run.root, tmp_path / "public", NONE)
    record = check(tmp_path / "public")
    assert (
        record["state"] == "not started"
        and not record["incidents"]
        and record["cost"] is None
        and not done.facts.days
    )
    assert "The run has not begun yet." in texts(tmp_path / "public")
    assert not (tmp_path / "public" / "loss.png").exists()


@pytest.mark.slow
def test_a_run_without_incidents_on_other_hosts_after_a_resume(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", incidents=(), last=20)
    software = {"torch": "2.9.0", "megastable": "0.1.0"}
    for event in (
        {"event": "stopped", "step": 20, "cursor": 160},
        {"event": "launched", "attempt": 1, "hosts": ["gpu-a", "gpu-b"]},
        {"event": "resumed", "step": 20, "checkpoint": "step-20", "cursor": 160, "changes": {}},
        {"event": "training", "step": 20, "cursor": 160, "world": 16, "software": software},
        {"event": "host_slow", "what": "begun", "host": "gpu-b", "reason": "gpu-b is slow: 1.3 times as long as gpu-a"},
    ):  # fmt: skip
        note(run, BEGIN + 100_000, str(event.pop("event")), **event)
    done = publish(run.root, tmp_path / "public", NONE)
    record = check(tmp_path / "public")
    assert [start["hosts"] for start in record["starts"]] == [["host-1"], ["host-2", "host-3"]]
    assert [start["ranks"] for start in record["starts"]] == [2, 16] and record["software"] == {
        name: [version] for name, version in software.items()
    }
    assert headings(done) == ["Training begins", "Stopped", "Training goes on", "Hosts"]
    assert [len(day.entries) for day in done.facts.days] == [1, 3]
    assert "host-3 is slow: 1.3 times as long as host-2" in texts(tmp_path / "public")
    assert "gpu-" not in texts(tmp_path / "public") + (tmp_path / "public" / "run.html").read_text()
    publish(run.root, tmp_path / "public", Keeping(hosts=True))
    check(tmp_path / "public")
    assert "gpu-b is slow" in texts(tmp_path / "public")


@pytest.mark.slow
def test_a_journal_with_lines_that_are_no_events(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", incidents=(60,), last=80)
    lines = run.journal.read_text().splitlines()
    lines[3:3] = ['{"time": 1, "event": "unknown", "text": "x"}', "torn{"]
    run.journal.write_text("\n".join(lines) + "\n")
    run.progress.unlink()
    done = publish(run.root, tmp_path / "public", NONE)
    assert len(check(tmp_path / "public")["incidents"]) == 1
    assert "journal.jsonl: 1 malformed line left out" in done.facts.problems
    assert "journal.jsonl: 1 event of an unknown kind left out" in done.facts.problems


@pytest.mark.slow
def test_a_process_that_failed(tmp_path: Path) -> None:
    """Without an incident of the supervisor, and a look-alike of markup in a text that is kept."""
    run = made_run(tmp_path / "run", incidents=(), last=20)
    note(run, BEGIN + 100, "ended", attempt=1, code=1, what="crash", failure="rank 0 failed: <b>the loss</b>")
    note(run, BEGIN + 101, "restart", attempt=1, delay=3.0)
    for number in range(6):
        note(run, BEGIN + 102 + number, "warning", step=20, text=f"the loss is {number}")
    done = publish(run.root, tmp_path / "public", NONE)
    check(tmp_path / "public")
    assert headings(done) == ["Training begins", "Processes ended", "Warning", "Warning", "Warning"]
    entry = done.facts.days[0].entries[1]
    assert "rank 0 failed" in entry.what and entry.done.startswith("To be started again in 3 s")
    assert "4 more in between" in done.facts.days[0].entries[3].what
    assert "<b>the" not in texts(tmp_path / "public")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    made_run(tmp_path / "run", incidents=(60,), last=80)
    (tmp_path / "public").mkdir()
    done = call(app, "run", "--output", "public/7b", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == 0 and told["name"] == "7b" and told["incidents"] == 1
    folder = tmp_path / "public" / "7b"
    assert check(folder)["name"] == "7b" and told["folder"] == str(folder)
    assert {f["name"]: f["bytes"] for f in told["files"]} == {
        p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()
    }
    (folder / "CNAME").write_text("example.org")
    again = call(app, "run", "--output", "public/7b", cwd=tmp_path)
    assert again.returncode == 0 and "public/7b/index.html: " in again.stdout and "kept: 1" in again.stdout
    assert (folder / "CNAME").exists() and [p.name for p in (tmp_path / "public").iterdir()] == ["7b"]


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
def test_bad_input_is_refused(run: str, output: str, says: str, tmp_path: Path) -> None:
    made_run(tmp_path / "run", incidents=(), last=5)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    done = call(app, run, "--output", output, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.slow
def test_it_works_from_a_disk(driver: webdriver.Chrome, tmp_path: Path) -> None:  # noqa: F811
    run = made_run(tmp_path / "run", incidents=(60,), last=80)
    publish(run.root, tmp_path / "public", NONE)
    driver.get_log("browser")
    driver.get((tmp_path / "public" / "index.html").as_uri())
    sizes = driver.execute_script("return [...document.images].map(one => one.naturalWidth)")
    assert len(sizes) == 2 and min(sizes) > 0
    driver.find_element("link text", "Incident 1").click()
    assert driver.title == "Incident 1 of public"
    driver.back()
    driver.find_element("link text", "the run page").click()
    assert "step 80 of 200" in driver.find_element("css selector", ".figures").text
    # Nothing was asked for but files of the folder, and the pages' scripts had no error.
    wanted = driver.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert not [name for name in wanted if not name.startswith(("file:", "data:"))]
    assert driver.get_log("browser") == []


@pytest.mark.slow
def test_texts_need_to_be_asked_for(spike: Path, tmp_path: Path) -> None:
    publish(spike, tmp_path / "public", NONE)
    record = check(tmp_path / "public")
    assert record["incidents"][0]["cause"] == "data" and not list((tmp_path / "public").rglob("samples.txt"))
    assert not list((tmp_path / "public").rglob("tokens.png"))
    corpus = record["corpora"][0]
    assert corpus["name"] == "corpus-1" and corpus["tokens"]["train"] > 0 and corpus["documents"]["train"] > 0
    assert len(corpus["fingerprint"]) == 64 and corpus["tokenizer"]["kind"] == "sentencepiece"
    publish(spike, tmp_path / "public", Keeping(texts=True))
    check(tmp_path / "public")
    assert list((tmp_path / "public").rglob("samples.txt")) and list(
        (tmp_path / "public").rglob("tokens.png")
    )
    assert RunDirectory(spike).incidents.exists() is False
