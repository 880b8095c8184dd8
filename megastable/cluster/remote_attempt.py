"""An attempt on several hosts, as their agents and ranks report it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megastable.cluster.local_attempt import Fate, KernelView
from megastable.run.wire import Message

if TYPE_CHECKING:
    from megastable.cluster.hosts import Hosts

KILLED = 15.0  # seconds for the agents to kill an attempt
SEEN = 3.0  # ... to tell the state of their processes
FROZEN = 3.0  # ... between two looks, after which this process itself was stopped
RETOLD = 2.0  # ... between two orders to start


class RemoteAttempt:
    """names: the hosts that it runs on, that of rank 0 first. wanted: the order to start it, by host; empty if it runs
    already."""

    def __init__(
        self, hosts: Hosts, number: int, names: Sequence[str], wanted: Mapping[str, Message]
    ) -> None:
        self.hosts, self.number, self._wanted = hosts, number, wanted
        self.names: Sequence[str] = tuple(names)
        self.fates: dict[int, Fate] = {}
        self.gone: dict[str, str] = {}
        self._codes: dict[str, int] = {}  # of the launchers that ended, in the order seen
        self._ordered: dict[str, float] = {}
        # Where it has begun: all of one that ran already.
        self._begun = set[str]() if wanted else set(names)
        self._began = self._looked = time.monotonic()
        self._over = False

    @property
    def code(self) -> int | None:
        bad = [code for code in self._codes.values() if code]
        return bad[0] if bad else (0 if len(self._codes) == len(self.names) else None)

    def look(self) -> bool:
        now = time.monotonic()
        if now - self._looked > FROZEN:
            self._began = now  # what was said meanwhile is yet to be read
        self._looked = now
        running = False
        for name in self.names:
            agent = self.hosts.agent(name)
            if agent is None:
                self._judge(name)
                running = running or name not in self.gone
                continue
            state = agent.state
            if not state:
                running = True  # it has only just connected
                continue
            if state["attempt"] != self.number and name in self._begun:
                # Never begun anew there: the ranks elsewhere have lost these.
                self.gone.setdefault(
                    name,
                    f"has lost all processes of attempt {self.number}: it was restarted, or they were killed",
                )
                continue
            self.gone.pop(name, None)
            if state["attempt"] != self.number:
                self._order(name)
                running = True
                continue
            self._begun.add(name)
            self._take(name, state)
            running = running or bool(state["running"])
        return running

    def _take(self, name: str, state: Message) -> None:
        if self._over:
            return  # from here on we are the ones who kill
        for rank, (code, signal) in state["fates"].items():
            self.fates.setdefault(int(rank), Fate(code, signal, name))
        code = state["code"] if not state["problem"] else 127
        if code is not None and not state["running"]:
            self._codes.setdefault(name, code)

    def _order(self, name: str) -> None:
        now = time.monotonic()
        if name in self._wanted and now - self._ordered.get(name, -RETOLD) >= RETOLD:
            self._ordered[name] = now
            self.hosts.store.send(name, dict(self._wanted[name]))

    def _judge(self, name: str) -> None:
        """A host whose agent is silent: try to reach it, and after a while of both in vain believe that it is gone."""
        why = self.hosts.revive(name)
        silent = time.monotonic() - self.heard(name)
        if silent <= self.hosts.silence:
            return
        if self.hosts.unreachable(name):
            self.gone.setdefault(name, f"is gone: no word from it for {silent:.0f} s; {why}")

    def heard(self, name: str) -> float:
        """When a host last gave a sign of life, by its agent or by a rank; time.monotonic()."""
        agent = self.hosts.store.agents.get(name)
        known = {name}
        if agent is not None and self.hosts.called(hostname := str(agent.hello["hostname"])) == name:
            known.add(hostname)
        ranks = [rank.at for rank in list(self.hosts.store.ranks.values()) if rank.host in known]
        return max([self._began, *ranks, *([agent.at] if agent is not None else [])])

    def witness(self) -> tuple[str, Path]:
        first = self.names[0]
        name = next((name for name, code in self._codes.items() if code), first)
        return name, self.hosts.log(self.number, name, first)

    def end(self) -> None:
        self._over = True
        until = time.monotonic() + KILLED
        for name in self.names:
            self.hosts.store.send(name, {"end": self.number})
        while time.monotonic() < until:
            agents = [agent for name in self.names if (agent := self.hosts.agent(name)) is not None]
            if all(agent.state.get("ended", 0) >= self.number for agent in agents):
                return
            time.sleep(0.05)

    def states(self) -> dict[int, KernelView]:
        found: dict[int, KernelView] = {}
        asked = [a for name in self.names if (a := self.hosts.agent(name)) is not None]
        for agent in asked:
            agent.inbox.clear()
            self.hosts.store.send(agent.name, {"states": True})
        until = time.monotonic() + SEEN
        while time.monotonic() < until and not all(agent.inbox for agent in asked):
            time.sleep(0.05)
        for agent in asked:
            for message in list(agent.inbox):
                found |= {
                    int(rank): KernelView(agent.name, f"{agent.name}: {text}")
                    for rank, text in message.get("states", {}).items()
                }
        return found
