"""An attempt on several hosts, as their agents and ranks report it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from megastable.cluster.local_attempt import Fate
from megastable.run.wire import Message

if TYPE_CHECKING:
    from megastable.cluster.hosts import Hosts

KILLED = 15.0  # seconds for the agents to kill an attempt
SEEN = 3.0  # ... to tell the state of their processes
RETOLD = 2.0  # ... between two orders to start


class RemoteAttempt:
    """wanted: the order to start it, by host; empty if it runs already."""

    def __init__(self, hosts: Hosts, number: int, wanted: Mapping[str, Message]) -> None:
        self.hosts, self.number, self._wanted = hosts, number, wanted
        self.fates: dict[int, Fate] = {}
        self.gone: dict[str, str] = {}
        self._codes: dict[str, int] = {}  # of the launchers that ended, in the order seen
        self._ordered: dict[str, float] = {}
        self._began = time.monotonic()
        self._over = False

    @property
    def code(self) -> int | None:
        bad = [code for code in self._codes.values() if code]
        return bad[0] if bad else (0 if len(self._codes) == len(self.hosts.names) else None)

    def look(self) -> bool:
        running = False
        for name in self.hosts.names:
            agent = self.hosts.agent(name)
            if agent is None:
                self._judge(name)
                running = running or name not in self.gone
                continue
            self.gone.pop(name, None)
            state = agent.state
            if state.get("attempt") != self.number:
                self._order(name)
                running = True
                continue
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
            self.gone.setdefault(name, f"no word from it for {silent:.0f} s; {why}")

    def heard(self, name: str) -> float:
        """When a host last gave a sign of life, by its agent or by a rank; time.monotonic()."""
        agent = self.hosts.store.agents.get(name)
        hostname = name if agent is None else str(agent.hello["hostname"])
        ranks = []
        if self.hosts.called(hostname) == name:  # once, not for each of thousands of ranks
            ranks = [rank.at for rank in list(self.hosts.store.ranks.values()) if rank.host == hostname]
        return max([self._began, *ranks, *([agent.at] if agent is not None else [])])

    def witness(self) -> tuple[str, Path]:
        first = self.hosts.names[0]
        name = next((name for name, code in self._codes.items() if code), first)
        return name, self.hosts.log(self.number, name)

    def end(self) -> None:
        self._over = True
        until = time.monotonic() + KILLED
        for name in self.hosts.names:
            self.hosts.store.send(name, {"end": self.number})
        while time.monotonic() < until:
            agents = [agent for name in self.hosts.names if (agent := self.hosts.agent(name)) is not None]
            if all(agent.state.get("ended", 0) >= self.number for agent in agents):
                return
            time.sleep(0.05)

    def states(self) -> dict[int, str]:
        found: dict[int, str] = {}
        asked = [a for name in self.hosts.names if (a := self.hosts.agent(name)) is not None]
        for agent in asked:
            agent.inbox.clear()
            self.hosts.store.send(agent.name, {"states": True})
        until = time.monotonic() + SEEN
        while time.monotonic() < until and not all(agent.inbox for agent in asked):
            time.sleep(0.05)
        for agent in asked:
            for message in list(agent.inbox):
                found |= {
                    int(rank): f"{agent.name}: {text}" for rank, text in message.get("states", {}).items()
                }
        return found
