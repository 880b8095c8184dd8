"""Defines options shared by several commands, and writes their JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from megastable.base.errors import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def _in_a_folder(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    """Refuse an output file whose folder does not exist, before any work begins."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ConfigError(f"{parameter.opts[0]} {path}: there is no directory {path.parent}")
    return path


def _picture(parameter: typer.CallbackParam, path: Path | None) -> Path | None:
    if path is not None and path.suffix not in PICTURES:
        raise ConfigError(f"{parameter.opts[0]} {path}: a name ending in {', '.join(PICTURES)}")
    return _in_a_folder(parameter, path)


Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", callback=_in_a_folder, help="Write the JSON to a file"),
]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write all rows as a table")]
Html = Annotated[
    Path | None, typer.Option("--html", help="Write a page for a browser, to sort, search and read")
]
Plot = Annotated[
    Path | None, typer.Option("--plot", callback=_picture, help="Write a picture: .png, .svg or .pdf")
]
Picture = Annotated[
    Path | None,
    typer.Option(
        "--picture", callback=_picture, help="Where to draw it. Default: picture.png in the directory"
    ),
]
Drawing = Annotated[
    Path | None, typer.Option("--picture", callback=_picture, help="Draw it to a file: .png, .svg or .pdf")
]
Rows = Annotated[int, typer.Option(min=0, help="Rows to print")]
Texts = Annotated[int, typer.Option(min=0, help="Rows whose text is printed")]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, e.g. runs/quickstart")]
Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A YAML file, e.g. launch/recipes/quickstart.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]", help="Overrides of the recipe's keys, e.g. train.steps=1000"),
]


def put_json(facts: Any, as_json: bool, file: Path | None) -> None:
    """Print `facts`, or write them to a file, or both, as --json and --output say. Raises DataError."""
    from megastable.base import durable
    from megastable.run.directory import as_json as to_json

    text = to_json(facts, indent=1) + "\n"
    if file is not None:
        durable.write_output(file, text)
    if as_json:
        typer.echo(text, nl=False)
