"""Knows the words that megastable itself writes: those of its own source, so that every message of it is readable."""

from __future__ import annotations

import builtins
import re
import signal
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from megastable.config.tree import RunConfig

PACKAGE = Path(__file__).resolve().parents[2]
# What stands between blanks, brackets, quotes and the like: a path, an address or a name with dots is one token.
TOKEN = re.compile(r"[^\s,;()\[\]{}<>\"'`|=!?*^\\…]+")
AROUND = ".:-–—"  # punctuation at the ends of a token that does not belong to it


def core(token: str) -> str:
    """A token without the punctuation around it."""
    return token.strip(AROUND)


@cache
def known_words() -> frozenset[str]:
    """Every token of the package's source, the keys of the recipe, and names of Python's errors and of signals."""
    found = {
        core(token) for path in PACKAGE.rglob("*.py") for token in TOKEN.findall(path.read_text("utf-8"))
    }
    found |= set(_keys(RunConfig().model_dump(mode="json")))
    found |= {name for name in dir(builtins) if name.endswith(("Error", "Exception", "Interrupt"))}
    found |= {one.name for one in signal.Signals}
    return frozenset(found)


def is_known(word: str) -> bool:
    """Whether megastable uses the word: as it is, as the first of a sentence, or as the plural of one that it uses."""
    words = known_words()
    forms = {word, word[:1].lower() + word[1:]}
    forms |= {form[:-1] for form in forms if form.endswith("s")}
    return not forms.isdisjoint(words)


def _keys(tree: Any, before: str = "") -> Iterator[str]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        yield f"{before}{key}"
        yield from _keys(value, f"{before}{key}.")
