"""Nothing private is in a published record, wherever it was planted."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import matplotlib.text
import pytest

from megastable.report.publish import publish_run
from megastable.report.publish.redaction import Keeping
from megastable.report.run_page import page_file
from megastable.run.events.reading import KINDS
from tests.report.publish.plants import Plants, everything, plant

ALL = Keeping(hosts=True, names=True, texts=True)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every text that is drawn: nobody can search a picture for it."""
    found = list[str]()
    set_text = matplotlib.text.Text.set_text

    def recorded(self: matplotlib.text.Text, text: object) -> None:
        found.append(str(text))
        set_text(self, text)

    monkeypatch.setattr(matplotlib.text.Text, "set_text", recorded)
    return found


@pytest.fixture
def planted(
    spike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Plants:
    """Also in the environment, and in the names of all folders above the run."""
    plants = plant(spike, strange=request.param)
    for name in ("WANDB_API_KEY", "USER", "LOGNAME", "HOME", "SLURM_JOB_ACCOUNT"):
        monkeypatch.setenv(name, plants(f"${name}", "/{}" if name == "HOME" else "{}"))
    monkeypatch.setattr(socket, "gethostname", lambda: plants.secrets["this host"])
    plants("this host")
    home = tmp_path / plants("folder of the run")
    home.mkdir()
    spike.rename(home / plants("name of the run"))
    return plants


def run_of(tmp_path: Path, plants: Plants) -> Path:
    return tmp_path / plants.secrets["folder of the run"] / plants.secrets["name of the run"]


def found(plants: Plants, folder: Path, drawn: list[str]) -> set[tuple[str, str]]:
    """Where which secrets are."""
    secrets = {secret.encode(): place for place, secret in plants.secrets.items()}
    parts = [*everything(folder), *(("a picture", text.encode()) for text in drawn)]
    return {(place, name) for name, part in parts for secret, place in secrets.items() if secret in part}


@pytest.mark.slow
@pytest.mark.parametrize("planted", [True, False], ids=["unusable recipe", "usable recipe"], indirect=True)
def test_publish_shows_no_secret(planted: Plants, tmp_path: Path, drawn: list[str]) -> None:
    done = publish_run(run_of(tmp_path, planted), tmp_path / "public", Keeping())
    assert len(planted.secrets) > 2 * len(KINDS) and len(drawn) > 50
    assert found(planted, tmp_path / "public", drawn) == set()
    # It is a record all the same.
    assert done.incidents == 2 and {path.name for path in (tmp_path / "public" / "incidents").iterdir()} == {
        "0001", "0007", "index.html",
    }  # fmt: skip
    page = (tmp_path / "public" / "index.html").read_text()
    assert (
        "[withheld]" in page
        and re.search(r"host-\d", page)
        and "supervise.webhook" in done.made.recipe_without
    )
    everywhere = b"".join(part for _, part in everything(tmp_path / "public"))
    for private in (b"hooks.example", b"77001234", b"/home/", b"alert(1)", str(tmp_path).encode()):
        assert private not in everywhere


@pytest.mark.slow
@pytest.mark.parametrize("planted", [False], ids=["usable recipe"], indirect=True)
def test_publish_keeps_names_and_texts_alone(planted: Plants, tmp_path: Path, drawn: list[str]) -> None:
    publish_run(run_of(tmp_path, planted), tmp_path / "public", ALL)
    places = {place for place, _ in found(planted, tmp_path / "public", drawn)}
    ends = (".host", "json host", ".hosts", ".gone", ".hosts 2")
    hosts = {place for place in planted.secrets if place.endswith(ends)}
    names = {
        "skips corpus",
        "skips shard",
        "corpus",
        "shard",
        "evaluated.corpora key",
        "tasks_evaluated.scores key",
    }
    assert {"corpus", "shard", "launched.hosts", "last.hosts"} <= places
    names |= {f"{event}.{when} key" for event in ("blend_changed", "mix_changed") for when in ("old", "new")}
    assert places <= hosts | names | {place for place in planted.secrets if ".corpus" in place}
    samples = (tmp_path / "public" / "incidents" / "0001" / "samples.txt").read_text()
    assert "alert(1)" in samples


@pytest.mark.slow
def test_publish_searches_before_it_publishes(
    spike: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What this machine is called was not in the run, so it was not replaced: here it is in the journal's words."""
    from megastable.base.errors import DataError

    monkeypatch.setattr(socket, "gethostname", lambda: "reproduced-nowhere")
    publish_run(spike, tmp_path / "public", Keeping())
    before = (tmp_path / "public" / "SHA256SUMS").read_text()
    monkeypatch.setattr(page_file, "BODY", f"{page_file.BODY}<p>on reproduced-nowhere</p>")
    with pytest.raises(DataError, match=r"nothing was published.*index.html"):
        publish_run(spike, tmp_path / "public", Keeping())
    assert (tmp_path / "public" / "SHA256SUMS").read_text() == before
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]
