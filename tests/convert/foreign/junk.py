"""Nested content with one thing in it replaced by something that does not belong there."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any

import torch
from hypothesis import strategies as st

JUNK: tuple[Any, ...] = (
    None, -1, 0, 3, 10**30, float("nan"), "x", b"x", True, [], {}, (), [None], {"x": 1}, {1: 2}, torch.ones(2),
    torch.ones(()), torch.ones(2, 2), torch.ones(2, dtype=torch.int64), torch.ones(2, device="meta"),
    torch.ones(2).to_sparse(), torch.tensor([1 + 1j]), argparse.Namespace(x=1), torch.Size([2]), 1j,
)  # fmt: skip


def places(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to everything in dictionaries, lists and namespaces."""
    items: Any = ()
    if isinstance(content, dict):
        items = content.items()
    elif isinstance(content, list):
        items = enumerate(content)
    elif isinstance(content, argparse.Namespace):
        items = vars(content).items()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


def spoilt(content: Any, data: st.DataObject) -> Any:
    """A copy in which one to three things are junk, or gone."""
    content = copy.deepcopy(content)
    for _ in range(data.draw(st.integers(1, 3))):
        *parents, last = data.draw(st.sampled_from(list(places(content)) or [("x",)]))
        node = content
        for key in parents:
            node = vars(node)[key] if isinstance(node, argparse.Namespace) else node[key]
        inner = vars(node) if isinstance(node, argparse.Namespace) else node
        if data.draw(st.booleans()):
            inner[last] = copy.deepcopy(JUNK[data.draw(st.integers(0, len(JUNK) - 1))])
        elif isinstance(inner, list) or last in inner:
            del inner[last]
    return content
