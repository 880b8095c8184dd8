"""The options that every command which shows a sheet has."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print everything, for machines")]
Csv = Annotated[Path | None, typer.Option("--csv", help="Write all rows as a table")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page: sort, search, read")]
Rows = Annotated[int, typer.Option(min=0, help="Rows that the terminal shows")]
Texts = Annotated[int, typer.Option(min=0, help="Rows whose text the terminal shows")]
