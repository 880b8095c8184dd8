"""Where a prompt comes from."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.generate.talk import read_prompt


def test_a_file_or_a_pipe_loses_its_last_newline_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "prompt.txt"
    for content, wanted in (
        (b"a\n", "a"),
        (b"a\n\n", "a\n"),
        (b"a\r\n", "a"),
        (b"", ""),
        ("é\t".encode(), "é\t"),
    ):
        path.write_bytes(content)
        assert read_prompt(None, path) == wanted
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))
        assert read_prompt(None, None) == wanted
    assert read_prompt("as it is\n", None) == "as it is\n"


def test_what_is_no_prompt_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="not both"):
        read_prompt("a", tmp_path)
    with pytest.raises(DataError, match=r"nothing\.txt cannot be read: No such file"):
        read_prompt(None, tmp_path / "nothing.txt")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        read_prompt(None, tmp_path)
    (tmp_path / "broken").write_bytes(b"ab\xff")
    with pytest.raises(DataError, match=r"broken: byte 2 is no UTF-8"):
        read_prompt(None, tmp_path / "broken")
