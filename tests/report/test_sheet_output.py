"""Where a sheet goes: files, links, devices and pipes, and the standard output for whoever reads it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from megastable.base.errors import DataError
from megastable.report.sheet import Column, Sheet
from megastable.report.sheet.output import STDOUT, Output

ROOT = Path(__file__).parents[2]
SHEET = Sheet("sheet", columns=[Column("a", "a")], rows=[{"a": 1}])
CHILD = """
from pathlib import Path
from megastable.base.errors import user_errors
from megastable.report.sheet.output import Output
from tests.report.test_sheet_output import SHEET
with user_errors():
    Output({}).put_sheet(SHEET)
"""


def put(options: str, stdout: str) -> subprocess.CompletedProcess[str]:
    with open(stdout, "w") as stream:
        command = [sys.executable, "-c", CHILD.format(options)]
        return subprocess.run(command, cwd=ROOT, stdout=stream, stderr=subprocess.PIPE, text=True)


def test_output_puts_a_table_alone_on_the_standard_output(tmp_path: Path) -> None:
    """Also where the standard output is a regular file, which a rename would put in the device's place."""
    was = Path("/dev/stdout").readlink()
    done = put('csv=Path("/dev/stdout")', str(tmp_path / "out.csv"))
    assert (done.returncode, done.stderr) == (0, "")
    assert list(csv.reader((tmp_path / "out.csv").open())) == [["a"], ["1"]]
    assert Path("/dev/stdout").readlink() == was


@pytest.mark.quick("json=True")
@pytest.mark.parametrize("options", ["", "json=True"])
def test_output_names_a_full_standard_output_without_a_traceback(options: str) -> None:
    done = put(options, "/dev/full")
    assert done.returncode == 2
    assert done.stderr == "error: the standard output could not be written: No space left on device\n"


@pytest.mark.parametrize("path", STDOUT)
def test_output_refuses_two_forms_on_the_standard_output(path: str) -> None:
    with pytest.raises(DataError, match="only one of --json, --csv and --html"):
        Output(json=True, csv=Path(path))
    with pytest.raises(DataError, match="only one of --json, --csv and --html"):
        Output(csv=Path(path), html=Path(path))


def test_output_puts_json_alone_on_the_standard_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Output(json=True, csv=tmp_path / "a.csv", html=tmp_path / "a.html").put_sheet(SHEET)
    assert json.loads(capsys.readouterr().out)["title"] == "sheet"
    assert (tmp_path / "a.csv").exists() and (tmp_path / "a.html").exists()
