"""`megastable report`: the record of a run as a folder to publish. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from megastable.commands.app import App
from megastable.commands.options import Json, Run, put_json

if TYPE_CHECKING:
    from megastable.report.publish import PublishedRecord

app = App()


@app.add_command(
    examples="""
    megastable report runs/7b --output public/7b
    megastable report runs/7b --output public/7b --keep-names --json
    cd public/7b && sha256sum --check --quiet SHA256SUMS
    """,
    more="The folder works from a disk and from any web server: open index.html. It gets the run page, post-mortems "
    "and the recipe, and is called by its own name. A record that was written before is replaced; files of others in "
    "the folder stay.\n\nWithout the --keep options, hosts, corpora, shards and tasks are numbered. "
    "Commands, paths, addresses, passwords, settings of trackers and logs are never published, and of texts only words "
    "that megastable itself uses. What is private, and why: docs/publishing.md.\n\nExit codes: 0, or 2 if there is no "
    "run, or the folder is not a record or cannot be written.",
)
def report(
    run: Run,
    output: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where to write the record; its name is the record's title")
    ],
    keep_hosts: Annotated[bool, typer.Option("--keep-hosts", help="Publish the names of hosts")] = False,
    keep_names: Annotated[
        bool, typer.Option("--keep-names", help="Publish the names of corpora, shards and tasks")
    ] = False,
    with_text: Annotated[
        bool,
        typer.Option("--with-text", help="Publish texts of the samples that incidents skipped or deferred"),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the record of a run for publication: run page, post-mortems, recipe; nothing private."""
    from megastable.report.publish import publish_run
    from megastable.report.publish.redaction import Keeping

    published_record = publish_run(run, output, Keeping(hosts=keep_hosts, names=keep_names, texts=with_text))
    for problem in published_record.made.problems:
        typer.echo(f"WARNING: {problem}", err=True)
    if as_json:
        put_json(collect_facts(published_record), as_json, None)
        return
    _show(published_record, output)


def collect_facts(done: PublishedRecord) -> dict[str, Any]:
    """What was written, for programs."""
    made = done.made
    return {
        "folder": str(done.folder), "name": done.folder.name, "state": done.state, "step": done.step,
        "incidents": done.incidents, "files": [{"name": name, "bytes": size} for name, size in done.files.items()],
        "bytes": sum(done.files.values()), "recipe_without": made.recipe_without, "words_withheld": made.withheld,
        "problems": made.problems,
    }  # fmt: skip


def _show(done: PublishedRecord, output: Path) -> None:
    from megastable.base.text import count_noun, make_visible, show_size

    typer.echo(
        f"{make_visible(output / 'index.html')}: {count_noun(len(done.files), 'file')}, "
        f"{show_size(sum(done.files.values()))}"
    )
    left_out_keys = ", ".join(done.made.recipe_without) or "nothing"
    typer.echo(f"left out: {count_noun(done.made.withheld, 'word')} of texts; of the recipe {left_out_keys}")
    typer.echo("read it before you publish it")
