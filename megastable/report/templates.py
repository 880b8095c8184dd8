"""Opens the templates of pages."""

from __future__ import annotations

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from megastable.base.text import plural


def template_environment(package: str, **options: Any) -> Environment:
    """Of the folder `templates` of a package, with the filters that all pages use."""
    found = Environment(
        loader=PackageLoader(package), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        keep_trailing_newline=True, **options,
    )  # fmt: skip
    found.filters |= {
        "count": lambda number: f"{number:,}", "plural": plural, "words": lambda text: text.replace("_", " "),
    }  # fmt: skip
    return found
