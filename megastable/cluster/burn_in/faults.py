"""Defines what a burn-in reports: runs and faults of each test on each device."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

DeviceTest = Literal["memory", "matmul", "attention", "elementwise", "repeat", "all_reduce"]
AGAIN = 3  # times that a wrong result is computed again at once


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class BurnInFault(_Record):
    """A wrong result. round and case: with the seed they give the inputs.

    wrong: elements that differ, `of` all; index: of the first one; expected, got: its bits, "" if only the device saw
    a difference; xor: all bits that are wrong in any element; common: per dimension the index that all wrong elements
    share, None where they differ. again: how many of `AGAIN` runs at once with the same inputs were wrong, too.
    """

    test: DeviceTest
    what: str
    round: NonNegativeInt
    case: NonNegativeInt
    wrong: NonNegativeInt
    of: NonNegativeInt
    index: tuple[int, ...] = ()
    expected: str = ""
    got: str = ""
    xor: str = ""
    common: tuple[int | None, ...] = ()
    again: int = Field(0, ge=0, le=AGAIN)

    @property
    def kind(self) -> Literal["transient", "intermittent", "persistent"]:
        return "transient" if not self.again else "persistent" if self.again == AGAIN else "intermittent"


class DeviceBurnIn(_Record):
    """One device. rounds: completed. runs, failed: of each test. memory: bytes tested at a time. faults: the first
    ones. now: the test that runs, or ran last. ended: why it could not go on, "" if it could. in_use: why it was left
    alone, as others use it, "" if it was not."""

    device: str
    name: str = ""
    rounds: int = 0
    memory: int = 0
    runs: dict[DeviceTest, int] = Field(default_factory=dict)
    failed: dict[DeviceTest, int] = Field(default_factory=dict)
    faults: list[BurnInFault] = Field(default_factory=list)
    now: str = ""
    ended: str = ""
    in_use: str = ""


class HostBurnIn(_Record):
    """All devices of a host. seconds: of work asked for. all_reduce_unknown: why none was tried, "" if one was."""

    seed: int
    seconds: float
    devices: list[DeviceBurnIn]
    all_reduce_unknown: str = ""
