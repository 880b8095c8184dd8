"""Publishes the record of a run: a folder with its page, post-mortems and recipe, which can be put online as it is.

Everything in it is made from a public copy of the run directory (public_run.py), which nobody else can read.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import html
import os
import re
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from megastable.base import durable
from megastable.base.errors import DataError
from megastable.base.text import make_visible
from megastable.report import safe
from megastable.report.postmortem import write_incidents
from megastable.report.postmortem.sample_texts import PublicView
from megastable.report.publish.public_run import PublicRun, public_copy, public_view
from megastable.report.publish.redaction import Keeping, is_common
from megastable.report.run_page import page_file
from megastable.report.run_page.page_file import build_content, read_whole
from megastable.run.directory import as_json
from megastable.supervise.status import read_status

SUMS, PAGE = "SHA256SUMS", "index.html"
MARK = '<html lang="en" data-megastable="record">'  # in the page: whose folder it is
# Whose name does not lead out of the folder.
SUM = re.compile(r"[0-9a-f]{64}  (?!/)(?!(?:.*/)?\.\.(?:/|$)).+")
SHORTEST = 5  # characters: shorter names are in every large file by chance
TEXTS = ("samples.txt", "report.html", "evidence.json", "postmortem.md", PAGE)  # that show samples, if asked


@dataclass(frozen=True)
class PublishedRecord:
    """files: sizes in bytes, by name."""

    folder: Path
    made: PublicRun
    state: str
    step: int
    incidents: int
    files: dict[str, int]


def publish_run(run: Path, output: Path, keep: Keeping) -> PublishedRecord:
    """Write the record of a run to the folder `output`, whose name it gets; an older record there is replaced.

    Raises:
        DataError: there is no run, the folder is not a record, or it cannot be written; then it is as it was.
    """
    read_status(run)  # raises if there is no run
    output = output.absolute() if not output.is_symlink() else output.resolve()
    output = output.parent.resolve() / output.name
    own, run_root = output.resolve(), run.resolve()
    if own == run_root or run_root in own.parents or own in run_root.parents:
        raise DataError(
            f"--output {make_visible(output)}: choose a folder that is not inside or around the run {make_visible(run)}"
        )
    if not output.name or not output.parent.is_dir():
        raise DataError(
            f"--output {make_visible(output)}: there is no directory {make_visible(output.parent)}"
        )
    try:
        check_folder(output, set())
        # The copy has links to what is private, and the pages are not searched yet: not beside what is online.
        with TemporaryDirectory(prefix="megastable-record-") as private_folder:
            work = Path(private_folder).resolve()
            made = public_copy(run_root, work / "run" / output.name, keep)
            view, site = public_view(run_root, made), work / "site"
            site.mkdir()
            # Pages name the run by the path that it is read from: by its name alone.
            with contextlib.chdir(work):
                page_facts = _write_pages(made, view, made.root.relative_to(work), site)
            if leaking_files := find_leaks(site, _list_private(made, run_root, work), keep.texts):
                raise DataError(
                    f"nothing was published: a private name would be in {', '.join(leaking_files[:5])}. This is a bug "
                    "of megastable, please report it"
                )
            return PublishedRecord(output, made, *page_facts, put_in_place(site, output))
    except OSError as error:
        raise DataError(
            f"{make_visible(output)} could not be written, or {make_visible(gettempdir())}, where it is made: "
            f"{error.strerror or error}"
        ) from None


def _write_pages(made: PublicRun, view: PublicView, root: Path, site: Path) -> tuple[str, int, int]:
    """Write everything. root: of the copy, from the working directory. Returns state, step and number of incidents."""
    if (root / "journal.jsonl").exists():
        try:
            write_incidents(root, public=view)
        except DataError as error:
            made.problems.append(view.text(str(error)))
    reader = read_whole(root)
    head = reader.read_head()
    page_text = page_file.self_contained(build_content([reader], public=True))
    (site / PAGE).write_text(page_text.replace('<html lang="en">', MARK, 1), encoding="utf-8")
    for name in (reader.run.incidents, reader.run.recipe):
        if name.exists():
            name.rename(site / name.name)
    made.problems = list(dict.fromkeys([*made.problems, *head["problems"]]))
    return head["state"], head["step"], len(list(site.glob("incidents/*/evidence.json")))


def _list_private(made: PublicRun, *paths: Path) -> list[str]:
    """Names that must not be in any file: paths, names that were replaced, and those of this machine."""
    kept_kinds, names = made.names.keep, made.names.of_kind
    found = [*map(str, paths), str(Path.home()), socket.gethostname()]
    with contextlib.suppress(OSError, KeyError):
        found.append(getpass.getuser())
    found += [] if kept_kinds.hosts else [*names.get("host", {}), *made.names.alike]
    found += [] if kept_kinds.names else [*names.get("corpus", {}), *names.get("shard", {})]
    # The folder's name, and names that are kept, were chosen for the public, whatever they are made of.
    public = {public for known_names in names.values() for public in known_names.values()} | {made.root.name}
    return [name for name in found if not any(name in public_name for public_name in public)]


def find_leaks(site: Path, private: Iterable[str], texts: bool = False) -> list[str]:
    """The files that have a private name as a word of its own. texts: samples, which may name anything, are shown."""
    # The page's own script and style name nothing of this machine.
    ours = page_file.join_scripts() + page_file.join_styles()
    names = {name for name in private if len(name) >= SHORTEST and not is_common(name) and name not in ours}
    # As they stand in pages, tables and JSON.
    forms = set[str]()
    for name in names:
        forms |= {
            name,
            make_visible(name),
            html.escape(name),
            safe.escape_markdown(name),
            as_json(name)[1:-1],
        }
    any_form = b"|".join(re.escape(form.encode()) for form in sorted(forms))
    wanted = re.compile(rb"(?<![\w.-])(?:" + any_form + rb")(?![\w-])")
    files = [path for path in sorted(site.rglob("*")) if forms and path.is_file()]
    searched = [file_path for file_path in files if not (texts and file_path.name in TEXTS)]
    return [path.relative_to(site).as_posix() for path in searched if wanted.search(path.read_bytes())]


def put_in_place(site: Path, output: Path) -> dict[str, int]:
    """Make the files of the folder `site` those of the record `output`. Returns their sizes in bytes, by name.

    SHA256SUMS lists the record's files: what is not in it belongs to somebody else, and stays. While files are replaced
    it has the hashes of the old and of the new ones, so that a call that was killed is finished by the next one.

    Raises:
        DataError: the folder is no record, one of its files was changed by hand, or a file of others has the name of a
            new one. Then nothing was changed.
        OSError: it cannot be written.
    """
    site_paths = sorted(site_path for site_path in site.rglob("*") if site_path.is_file())
    files = {site_path.relative_to(site).as_posix(): site_path.read_bytes() for site_path in site_paths}
    new_sums = "".join(_sum_line(file_content, file_name) + "\n" for file_name, file_content in files.items())
    old_sums = check_folder(output, files)
    # First everything is written beside the folder: a full disk leaves the older record as it was.
    with TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as partial_folder:
        for name, file_content in files.items():
            (Path(partial_folder) / name).parent.mkdir(parents=True, exist_ok=True)
            durable.write_file(Path(partial_folder) / name, file_content)
        output.mkdir(exist_ok=True)
        durable.write_file(output / SUMS, (old_sums + new_sums).encode())
        for name in files:
            (output / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(Path(partial_folder) / name, output / name)
        for name in {sum_line[66:] for sum_line in old_sums.splitlines()} - files.keys():
            (output / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # there is something else in it
                (output / name).parent.rmdir()
        durable.write_file(output / SUMS, new_sums.encode())
    return {
        **{file_name: len(file_content) for file_name, file_content in files.items()},
        SUMS: len(new_sums.encode()),
    }


def check_folder(output: Path, new: Iterable[str]) -> str:
    """The lines of SHA256SUMS of the record that is in a folder; none if there is nothing yet. new: names of files that
    are to be written. Raises DataError as `put_in_place` does."""
    if not os.path.lexists(output):
        return ""
    if not output.is_dir():
        raise DataError(f"{make_visible(output)} is no folder: choose another --output")
    lines, page_path = list[str](), output / PAGE
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = list(filter(SUM.fullmatch, (output / SUMS).read_text(encoding="utf-8").splitlines()))
    names = {sum_line[66:] for sum_line in lines}
    is_ours = PAGE in names and (not page_path.is_file() or MARK.encode() in page_path.read_bytes()[:1000])
    if not is_ours and any(output.iterdir()):
        raise DataError(
            f"{make_visible(output)} has files, but no record that this command wrote: choose another --output, "
            "or empty it"
        )
    for name in names.union(new):
        path = output.resolve() / name
        file_exists = os.path.lexists(path) or path.parent.resolve() != path.parent
        if file_exists and (path.resolve() != path or _sum_line(path.read_bytes(), name) not in lines):
            raise DataError(
                f"{make_visible(output / name)} is not the record's, or was changed after it was written: move it away"
            )
    return "".join(f"{sum_line}\n" for sum_line in lines)


def _sum_line(content: bytes, name: str) -> str:
    return f"{hashlib.sha256(content).hexdigest()}  {name}"
