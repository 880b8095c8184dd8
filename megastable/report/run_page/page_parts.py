"""Puts the page together from its parts: styles, scripts, uPlot with its licence, and the data of a file."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from megastable.report.sheet.page import embed

HERE = Path(__file__).parent
STATIC, VENDOR = HERE / "static", HERE / "vendor"
SCRIPTS = (
    "dom.js", "format.js", "source.js", "state.js", "marks.js", "plot.js", "charts.js", "heat.js", "machines.js",
    "strips.js", "headline.js", "incidents.js", "lists.js", "keys.js", "page.js",
)  # fmt: skip
BODY = '<main id="page">%s</main>\n<noscript>This page needs JavaScript.</noscript>\n'


@cache
def style() -> str:
    """uPlot's style and the page's."""
    return f"{_text(VENDOR / 'uPlot.min.css')}\n{_text(STATIC / 'page.css')}"


@cache
def script() -> str:
    """uPlot, with the licence text it requires, and our scripts in one scope."""
    ours = "\n".join(_text(STATIC / name) for name in SCRIPTS)
    licence = _text(VENDOR / "LICENSE")
    return f'/* uPlot\n{licence}\n*/\n{_text(VENDOR / "uPlot.iife.min.js")}\n(() => {{\n"use strict";\n{ours}}})();\n'


def served(told: Sequence[str]) -> str:
    """The page of a server. What it shows it asks for; until that is there, `told` stands in its place."""
    lines = "".join(f"<h1>{html.escape(line)}</h1>" for line in told)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>megastable</title>\n'
        '<link rel="icon" href="data:,">\n<link rel="stylesheet" href="page.css">\n</head>\n<body>\n'
        f'{BODY % lines}<script src="page.js"></script>\n</body>\n</html>\n'
    )


def self_contained(data: dict[str, Any]) -> str:
    """The page as one file that needs no network. data: what a server would answer (source.js)."""
    css, code, given = f"\n{style()}", f"\n{script()}", embed(_finite(data))
    policy = (
        f"default-src 'none'; script-src '{_hash(code)}'; style-src 'unsafe-inline'; img-src data:; frame-src 'self'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>megastable</title>\n'
        f'<link rel="icon" href="data:,">\n<style>{css}</style>\n</head>\n<body>\n{BODY % ""}'
        f'<script type="application/json" id="data">{given}</script>\n<script>{code}</script>\n</body>\n</html>\n'
    )


def as_json(value: Any) -> bytes:
    """For a browser, which knows no nan: numbers that are not finite are null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False).encode()


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(below) for below in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
