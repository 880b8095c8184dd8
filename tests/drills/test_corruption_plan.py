"""Which silent faults are planted: the same for a seed, in all layouts that they make sense in."""

from __future__ import annotations

import pytest

from drills.corruption_plan import (
    KINDS,
    LAYOUTS,
    POSITIONS,
    QUICK,
    RESUMED,
    STEPS,
    Planned,
    choose,
    expected,
    fits,
    plan,
    quick,
)
from megastable.base.errors import ConfigError


def every(seed: int = 1) -> list[Planned]:
    return plan(list(LAYOUTS), KINDS, seed)


def test_a_seed_decides_everything_whatever_else_is_planned() -> None:
    assert every() == every() != every(2)
    some = plan(["zero2", "dp3"], ["moment/sign", "gradients/zero"], 1)
    assert len(some) == 4 * POSITIONS and set(some) < set(every())


def test_every_kind_has_three_positions_in_different_steps() -> None:
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


def test_what_makes_no_sense_is_left_out() -> None:
    def names(kind: str) -> set[str]:
        return {fault.layout for fault in every() if fault.kind == kind}

    assert names("norm/scaled") == {"tp2", "tp2-dp2"}
    assert names("replica/misplaced") == {"dp2", "dp3", "zero2", "tp2-dp2"}
    for kind in set(KINDS) - {"norm/scaled", "replica/misplaced"}:
        assert names(kind) == set(LAYOUTS)


def test_layouts_add_up() -> None:
    assert {layout.name: layout.data for layout in LAYOUTS.values()} == {
        "dp2": 2, "dp3": 3, "tp2": 1, "pp2": 1, "zero2": 2, "zero3": 2, "tp2-dp2": 2,
    }  # fmt: skip


def test_quick_has_six_kinds_in_two_layouts_that_must_be_found() -> None:
    for seed in (1, 2, 3):
        faults = quick(seed)
        assert len(faults) == len(QUICK) == len({fault.kind for fault in faults}) == 6
        assert {fault.layout for fault in faults} == {"dp2", "dp3"}
        assert all(expected(fault.kind) for fault in faults)
        assert set(faults) < set(every(seed))


def test_names_choose_layouts_and_kinds() -> None:
    assert choose([]) == (list(LAYOUTS), list(KINDS))
    assert choose(["tp2"]) == (["tp2"], list(KINDS))
    assert choose(["weight/sign", "master", "zero3", "dp2"]) == (
        ["dp2", "zero3"],
        ["weight/sign", "master/sign", "master/exponent", "master/mantissa"],
    )
    with pytest.raises(ConfigError, match=r"^thin: there is no such layout or kind of fault: dp2, dp3, "):
        choose(["dp2", "thin"])
    assert not fits("norm/scaled", LAYOUTS["dp2"])
    with pytest.raises(ConfigError, match="norm/scaled: makes no sense in dp2"):
        choose(["norm", "dp2"])
