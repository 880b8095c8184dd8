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
import yaml
from selenium import webdriver

from megastable.base import durable
from megastable.commands.report import app
from megastable.report.publish import publish
from megastable.report.publish.redaction import Keeping
from megastable.run.directory import RunDirectory
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


def test_a_run_with_incidents_that_goes_on(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", supervise={"gpu_hour_price": 2.5, "currency": "EUR"})
    progress(run, 150, time.time(), 3.0)
    with (run.root / ".lock").open("w") as file:
        file.flush()
        held = durable.hold(run.root / ".lock")
        done = publish(run.root, tmp_path / "public", NONE)
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


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = begin(tmp_path / "run")
    run.journal.unlink()
    done = publish(run.root, tmp_path / "public", NONE)
    told = check(tmp_path / "public")
    assert (done.state, done.incidents) == ("not started", 0) and told["panel"]["incidents"] == []


@pytest.mark.slow
def test_hosts_have_no_names_unless_they_are_kept(tmp_path: Path) -> None:
    run = made_run(tmp_path / "run", incidents=(), last=20)
    note(run, BEGIN + 100_000, "launched", attempt=1, hosts=["gpu-a", "gpu-b"])
    reason = "gpu-b is slow: 1.3 times as long as gpu-a"
    note(run, BEGIN + 100_000, "host_slow", what="begun", host="gpu-b", reason=reason)
    publish(run.root, tmp_path / "public", NONE)
    page = text_of(tmp_path / "public")
    check(tmp_path / "public")
    assert "host-3 is slow: 1.3 times as long as host-2" in page and "gpu-" not in page
    publish(run.root, tmp_path / "public", Keeping(hosts=True))
    check(tmp_path / "public")
    assert "gpu-b is slow" in text_of(tmp_path / "public")


@pytest.mark.slow
def test_a_run_with_damaged_files(tmp_path: Path) -> None:
    """And markup in a text that is kept."""
    run = made_run(tmp_path / "run", incidents=(60,), last=80)
    lines = run.journal.read_text().splitlines()
    lines[3:3] = ['{"time": 1, "event": "of_long_ago", "text": "x"}', "torn{"]
    run.journal.write_text("\n".join(lines) + "\n")
    note(run, BEGIN + 1000, "warning", step=20, text="the <b>loss</b> is 3")
    sorted(run.steps.iterdir())[1].write_bytes(b"torn")
    run.recipe.write_text("config: 3")
    run.progress.unlink()
    done = publish(run.root, tmp_path / "public", NONE)
    check(tmp_path / "public")
    assert done.incidents == 1 and done.made.problems[:3] == [
        "journal.jsonl: 2 lines left out: malformed, or of an unknown kind",
        "recipe.yaml cannot be read, or is no frozen recipe", "steps: 1 file of records cannot be read",
    ]  # fmt: skip
    assert "<b>loss" not in text_of(tmp_path / "public")


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    made_run(tmp_path / "run", incidents=(60,), last=80)
    (tmp_path / "public").mkdir()
    done = call(app, "run", "--output", "public/7b", "--json", cwd=tmp_path)
    told, folder = json.loads(done.stdout), tmp_path / "public" / "7b"
    assert done.returncode == 0 and (told["name"], told["incidents"], told["step"]) == ("7b", 1, 80)
    assert check(folder)["head"]["name"] == "7b" and told["folder"] == str(folder)
    assert {f["name"]: f["bytes"] for f in told["files"]} == {
        p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*") if p.is_file()
    }
    (folder / "CNAME").write_text("example.org")
    again = call(app, "run", "--output", "public/7b", cwd=tmp_path)
    assert again.returncode == 0 and "public/7b/index.html: " in again.stdout and "left out: " in again.stdout
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
    assert "step 80 of 200" in driver.find_element("css selector", ".figures").text
    # Nothing was asked for but files of the folder, and the page's script had no error.
    wanted = driver.execute_script("return performance.getEntriesByType('resource').map(one => one.name)")
    assert not [name for name in wanted if not name.startswith(("file:", "data:"))]
    assert driver.get_log("browser") == []
    driver.get((tmp_path / "public" / "incidents" / "index.html").as_uri())
    driver.find_element("partial link text", "1").click()
    assert driver.title == "Incident 1 of public"


@pytest.mark.slow
def test_texts_need_to_be_asked_for(spike: Path, tmp_path: Path) -> None:
    for texts in (False, True):
        publish(spike, tmp_path / "public", Keeping(texts=texts))
        assert check(tmp_path / "public")["panel"]["incidents"][0]["cause_word"] == "data"
        for name in ("samples.txt", "tokens.png"):
            assert bool(list((tmp_path / "public").rglob(name))) == texts
    assert not RunDirectory(spike).incidents.exists()
