"""The drill of silent corruption as a user calls it: real runs with faults, nothing left behind, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from drills.corruption import (
    Clean,
    FaultOutcome,
    count_outcomes,
    judge_fault,
    judge_naming,
)
from drills.corruption_faults import AMONG, BITS, WHOLE, Messages, Operations, flip_bit
from drills.corruption_plan import (
    KINDS,
    LAYOUTS,
    POSITIONS,
    QUICK,
    RESUMED,
    STEPS,
    Change,
    Planned,
    plan_faults,
)
from megastable.engine.engine import Engine
from tests.distributed import run_ranks
from tests.drills.refusals import refusal
from tests.drills.test_drill import shared_memory, start
from tests.patience import PATIENCE


def family(folder: Path) -> list[psutil.Process]:
    """Processes whose files for a while lie in `folder`: the tool, the server of ranks, the ranks."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("TMPDIR") == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE + 60)
def test_drill_sdc_finds_names_and_undoes_faults(tmp_path: Path) -> None:
    shared = shared_memory()
    tool = start(tmp_path, "sdc", "--quick", "--json", "--output", "sdc.json", "--keep", "kept")
    out, errors = tool.communicate(timeout=2 * PATIENCE)
    assert tool.returncode == 0, out + errors
    report = json.loads(out)
    assert report == json.loads((tmp_path / "sdc.json").read_text())
    assert {
        (o["planned"]["layout"], o["planned"]["kind"]): o["planned"]["position"] for o in report["faults"]
    } == QUICK
    for o in report["faults"]:
        told = o["planned"], o["found"], o["naming"], o["ended"], o["reason"], o["error"]
        assert o["changes"] and o["ended"] == "finished" and o["steps"] == 0, told
        assert o["found"] and o["naming"] == "named", told
        assert {*map(tuple, o["ranks"])} == {(o["planned"]["rank"],)}, told  # by one watch or several
        assert o["same"] and not o["early"], told
    assert [(c["layout"], c["findings"], c["incidents"]) for c in report["clean"]] == [
        ("dp2", [], []), ("dp3", [], []),
    ]  # fmt: skip
    assert report["seeds"] == [1] and report["torch"] and report["deepspeed"] and report["cpu"]
    assert report["date"][:2] == "20" and report["total"]["undone"] == len(QUICK)
    assert shared_memory() <= shared and family(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["sdc", "thin"], "thin: there is no such layout or kind of fault: dp2, dp3, tp2"),
        (
            ["sdc", "--control", "--jobs", "2"],
            "--jobs, --control: drill sdc has its own models and layouts",
        ),
        (["sdc", "--text", "file"], "--text: drill sdc has its own models and layouts: leave it out"),
        (["sdc", "norm", "dp2"], "norm/scaled: makes no sense in dp2"),
        (["sdc", "dp2", "--quick"], "--quick has faults of its own: leave out dp2, or --quick"),
        (["sdc", "--seeds", "x"], "--seeds x: give different whole numbers"),
        (["sdc", "--keep", "file"], "--keep file is no directory"),
        (["thin", "sdc"], "sdc: there is no such scenario"),
    ],
)
def test_drill_sdc_refuses_bad_input(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert message in refusal(arguments, tmp_path, monkeypatch)


STRUCK = 1000.0
FAULT = Planned(layout="dp3", kind="master/sign", position=0, seed=1, step=24, rank=1)
CHANGES = (Change(tensor="weight of head.weight", element=7, before=1.0, after=-1.0),)


def event(name: str, step: int, time: float = STRUCK + 1, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": time, "step": step, **fields}


def judged(
    *events: dict[str, Any], planned: Planned = FAULT, errors: tuple[str, ...] = ("", "", ""),
    same: bool | None = False, changes: tuple[Change, ...] = CHANGES, expected: bool = True,
    struck: float | None = STRUCK,
) -> FaultOutcome:  # fmt: skip
    return judge_fault(planned, expected, changes, events, errors, same, 3.25, struck)


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        ([[1]], "named"), ([[0, 1]], "suspected"), ([[]], "unknown"), ([[0]], "wrong"), ([[0, 2]], "wrong"),
        ([[], [1]], "named"), ([[0, 1], [1]], "named"), ([[1], [0]], "wrong"), ([[], [0, 1, 2]], "suspected"),
    ],
)  # fmt: skip
def test_naming_of_ranks(told: list[list[int]], expected: str) -> None:
    assert judge_naming(told, 1) == expected
    outcome = judged(*(event("replay_differs", 25, ranks=ranks) for ranks in told))
    assert outcome.naming == expected and outcome.right == (expected in ("named", "suspected"))


def test_total_meets_its_targets() -> None:
    right = judged(event("state_changed", 24, ranks=[1]), same=True)
    wrong = judged(event("state_changed", 24, ranks=[0]), same=True)
    missed, other = judged(), judged(expected=False)
    clean = [Clean(layout="dp3", seed=1, findings=[], incidents=[], seconds=3.0)]
    assert (
        count_outcomes([right] * 19 + [missed], clean).met
        and not count_outcomes([right] * 18 + [missed], clean).met
    )
    assert (
        count_outcomes([right] * 19 + [wrong], clean).met
        and not count_outcomes([right] * 18 + [wrong], clean).met
    )
    of = count_outcomes([right] * 19 + [missed, other, other], clean)
    assert (of.faults, of.counted, of.found, of.found_at_all, of.right) == (22, 20, 19, 19, 19) and of.met
    assert (of.can_be_undone, of.undone, of.clean, of.false_alarms) == (19, 19, 1, 0)
    alarm = [clean[0].model_copy(update={"findings": ["state_changed"]})]
    assert count_outcomes([right], alarm).false_alarms == 1 and not count_outcomes([right], alarm).met


# As people see it


def every(seed: int = 1) -> list[Planned]:
    return plan_faults(list(LAYOUTS), KINDS, seed)


def test_plan_has_three_positions_of_every_kind() -> None:
    of: dict[tuple[str, str], list[Planned]] = {}
    for fault in every():
        of.setdefault((fault.layout, fault.kind), []).append(fault)
    for (layout, kind), faults in of.items():
        assert [fault.position for fault in faults] == [0, 1, 2]
        ranks = [fault.rank for fault in faults]
        assert len(set(ranks)) == min(POSITIONS, LAYOUTS[layout].ranks)
        assert set(ranks) <= set(range(LAYOUTS[layout].ranks))
        steps = [fault.step for fault in faults]
        if kind.startswith("replica"):
            assert steps == [RESUMED + 1] * 3
        else:
            assert len(set(steps)) == 3 and set(steps) <= set(STEPS)
    assert len({fault.step for fault in every()} - {RESUMED + 1}) == len(STEPS)


NO_ENGINE = cast(Engine, None)


def fault(kind: str, position: int) -> Planned:
    return Planned(layout="dp2", kind=kind, position=position, seed=1, step=24, rank=0)


def struck(operations: Operations, act: Any) -> Any:
    with operations.counting(NO_ENGINE):
        act()
    with operations.striking(NO_ENGINE):
        return act()


def messages(position: int) -> list[Tensor]:
    """What this rank receives in a step, in which rank 0 is struck, and how often it was."""
    rank = dist.get_rank()
    told: list[Change] = []
    one = fault("message/sign", position)

    def act() -> list[Tensor]:
        part, whole = torch.zeros(128), torch.zeros(256, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(part, torch.arange(256.0) + 1)
        agreed = torch.ones(128, dtype=torch.float64)
        dist.all_reduce(agreed)  # what the gate sums
        dist.all_gather_into_tensor(whole, torch.full((128,), rank + 1.0, dtype=torch.bfloat16))
        stage = torch.arange(100.0) + 1
        dist.recv(stage, 1) if rank == 0 else dist.send(stage, 0)
        dist.all_gather_object([None, None], "a")
        return [part, agreed, whole, stage]

    if rank == 0:
        return [*struck(Messages(one, told.append), act), torch.tensor(len(told))]
    act()  # the step before
    return act()


@pytest.mark.quick("1")
@pytest.mark.parametrize("position", [0, 1, 2])
def test_messages_flip_one_bit_on_one_rank(position: int) -> None:
    wrong, other = run_ranks(2, messages, position)
    clean = [2 * (torch.arange(128.0) + 1), torch.full((128,), 2.0), wrong[2].abs(), torch.arange(100.0) + 1]
    hit = [0, 2, 3][position]  # not what the ranks agree on
    for i, (a, b) in enumerate(zip(wrong[:4], clean, strict=True)):
        assert int((a.float() != b.float()).sum()) == (1 if i == hit else 0)
        assert torch.equal(a.float().abs(), b.float())
    assert int(wrong[4]) == 1 and (other[2] > 0).all()


# A bit


def bits(tensor: Tensor) -> Tensor:
    return tensor.flatten().view(WHOLE[tensor.dtype]).long()


@pytest.mark.parametrize("dtype", list(WHOLE))
@pytest.mark.parametrize("what", list(BITS))
@pytest.mark.parametrize("position", [0, 1, 2])
def test_flip_changes_one_bit_of_a_large_element(dtype: torch.dtype, what: str, position: int) -> None:
    tensor = torch.randn(40, 30, generator=torch.Generator().manual_seed(1)).to(dtype)
    before = tensor.clone()
    change = flip_bit(tensor, what, position, "weight of a")
    assert change.tensor == "weight of a" and change.element is not None
    changed = (bits(tensor) ^ bits(before)).nonzero().flatten().tolist()
    assert changed == [change.element]
    number = int((bits(tensor) ^ bits(before))[change.element]) & (2 ** (8 * tensor.element_size()) - 1)
    assert number == 1 << BITS[what][position] - (32 - 8 * tensor.element_size())
    first = int((1200 - AMONG) * (0.125, 0.5, 0.875)[position])
    around = before.flatten()[first : first + AMONG].float().abs()
    assert first + int(around.argmax()) == change.element
    assert change.before == float(before.flatten()[change.element])
    assert change.after == float(tensor.flatten()[change.element]) != change.before
