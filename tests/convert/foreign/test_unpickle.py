"""Files that others pickled: their data is read, and nothing in them is run."""

from __future__ import annotations

import argparse
import collections
import contextlib
import http
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import CheckpointError
from megastable_tools.convert.foreign.unpickle import (
    StandIn,
    load_pickle,
    parse_number,
    read_fields,
    read_member_name,
)
from tests.tiers import examples

FORMATS = pytest.mark.parametrize("zipped", [True, False])


def save(content: Any, path: Path, zipped: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=zipped)
    return path


@FORMATS
def test_load_reads_data_and_lets_strange_classes_stand_still(tmp_path: Path, zipped: bool) -> None:
    content: dict[str, Any] = {
        "weight": torch.arange(6.0).view(2, 3),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "args": argparse.Namespace(num_layers=2, nested=[torch.ones(2)]),
        # An IntEnum of 200, as DeepSpeed's stage of ZeRO is one; and as Python 3.11.0 to 3.11.3 pickle it.
        "stage": Calls(http.HTTPStatus, 200),
        "named": Calls(getattr, http.HTTPStatus, "OK"),
        "shape": torch.Size([2, 3]),
        "groups": collections.OrderedDict(a=(1, None, True)),
        "lists": collections.defaultdict(list, {"a": [1]}),
        "queue": collections.deque([1, 2]),
        "rng": np.random.RandomState(0).get_state(),
        "path": Path("x"),
    }
    found = load_pickle(save(content, tmp_path / "a.pt", zipped))
    assert torch.equal(found["weight"], content["weight"]) and torch.equal(found["half"], content["half"])
    assert found["shape"] == (2, 3) and found["groups"] == {"a": (1, None, True)}
    assert found["lists"] == {"a": [1]} and found["queue"] == [1, 2]
    assert read_fields(found["args"])["num_layers"] == 2
    assert torch.equal(read_fields(found["args"])["nested"][0], torch.ones(2))
    assert isinstance(found["args"], StandIn) and found["args"].path == "argparse.Namespace"
    assert parse_number(found["stage"]) == 200 and read_member_name(found["stage"]) is None
    assert parse_number(found["named"]) is None and read_member_name(found["named"]) == "OK"
    assert read_member_name(Calls(getattr)) is None
    assert isinstance(found["path"], StandIn) and read_fields(found["rng"][1]) == {}


class Calls:
    """Pickles as a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


def touched(path: Path) -> str:
    return f"open({str(path)!r}, 'w')"


@FORMATS
@pytest.mark.parametrize("how", ["os", "eval", "exec", "subprocess", "open", "import"])
def test_load_runs_nothing(tmp_path: Path, zipped: bool, how: str) -> None:
    trap = tmp_path / "trap"
    bomb = {
        "os": Calls(os.system, f"touch {trap}"),
        "eval": Calls(eval, touched(trap)),
        "exec": Calls(exec, touched(trap)),
        "subprocess": Calls(subprocess.check_call, ["touch", str(trap)]),
        "open": Calls(open, str(trap), "w"),
        "import": Calls(__import__, "antigravity"),
    }[how]
    if how != "import":
        pickle.loads(pickle.dumps(bomb))
    assert trap.exists() == (how != "import")  # it does go off where it is let
    trap.unlink(missing_ok=True)
    path = save({"bomb": bomb, "weight": torch.ones(1)}, tmp_path / "a.pt", zipped)
    try:
        found = load_pickle(path)
    except CheckpointError as error:
        said = str(error)
    else:
        said = f"a.pt: {found['bomb']}"
        assert isinstance(found["bomb"], StandIn)
    assert "a.pt" in said and "weights_only" not in said
    assert not trap.exists() and "antigravity" not in sys.modules


@FORMATS
def test_load_refuses_files_that_are_cut_off(tmp_path: Path, zipped: bool) -> None:
    whole = save(
        {"weight": torch.arange(500.0), "x": http.HTTPStatus.OK}, tmp_path / "a.pt", zipped
    ).read_bytes()
    for length in [*range(0, len(whole), 97), len(whole) - 1]:
        path = tmp_path / "cut.pt"
        path.write_bytes(whole[:length])
        with pytest.raises(CheckpointError, match=r"cut\.pt"):
            load_pickle(path)


def test_load_sees_a_flipped_bit(tmp_path: Path) -> None:
    weight = torch.arange(500.0)
    path = save({"weight": weight}, tmp_path / "a.pt")
    whole = bytearray(path.read_bytes())
    whole[whole.index(weight.numpy().tobytes()) + 1000] ^= 1
    path.write_bytes(whole)
    assert not torch.equal(torch.load(path, weights_only=True)["weight"], weight)  # torch does not look
    with pytest.raises(CheckpointError, match="CRC-32"):
        load_pickle(path)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> list[bytes]:
    content = {"weight": torch.arange(5.0), "args": argparse.Namespace(a=1)}
    folder = tmp_path_factory.mktemp("saved")
    return [save(content, folder / "a.pt", zipped).read_bytes() for zipped in (True, False)]


@settings(max_examples=examples(150))
@given(data=st.data())
def test_load_of_other_bytes_never_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, saved: list[bytes], data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("bytes") / "a.pt"
    if data.draw(st.booleans()):
        magic = data.draw(st.sampled_from([b"", b"PK\x03\x04", b"\x80\x02"]))
        path.write_bytes(magic + data.draw(st.binary()))
    else:
        whole = bytearray(data.draw(st.sampled_from(saved)))
        for at in data.draw(st.lists(st.integers(0, len(whole) - 1), min_size=1, max_size=3)):
            whole[at] = data.draw(st.integers(0, 255))
        path.write_bytes(whole)
    with contextlib.suppress(CheckpointError):  # nothing else
        load_pickle(path)
