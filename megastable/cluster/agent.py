"""The agent: one process per host of a supervised run, which starts, watches and ends the ranks of that host.

    python -m megastable.cluster.agent RUN_DIR --name NAME

It does what the supervisor's store tells it, and reports how every local rank ended: only on its own host can that be
seen. The launcher runs in a session of its own, so an agent that dies takes nothing with it; the next one finds the
processes by their mark. Without a connection it goes on watching, and looks for the supervisor, which may be another
process by then. It imports no torch.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megastable import __version__
from megastable.base.errors import FAILED, OK, STOPPED, ConfigError, MegastableError
from megastable.base.process import STOPS, hold_stops, release_stops, spare_output
from megastable.cluster import slurm
from megastable.cluster.launcher import find_free_port
from megastable.cluster.this_host import HostWatch, LocalAttempt, list_attempts_here
from megastable.run.directory import RunDirectory
from megastable.run.events.supervisor_events import SupervisorEvent
from megastable.run.machine_state import HostReading
from megastable.run.rank_ipc import HOST
from megastable.run.wire import Address, Message, StoreClient

LOOK = 0.2  # seconds between two looks at the processes
REPORT = 1.0  # ... between two reports that say nothing new
AGAIN = 1.0  # ... between two tries to connect
PATIENT = 2.0  # ... for one try
ORPHANED = 600.0  # seconds without a supervisor and without ranks, after which an agent ends


class AgentIsHere(ConfigError):
    """Another agent of this run is on this host."""


class Agent:
    """Of one run, on this host. name: of the host, as the supervisor knows it."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self.run, self.name = run, name
        self.stop = False  # asked by SIGTERM, as from a scheduler that needs the host
        for signal_number in STOPS:  # first: looking for processes takes a while
            signal.signal(signal_number, self._asked)
        release_stops()
        self.attempt = LocalAttempt.find_running(run)
        self.running = self.attempt is not None
        self.problem = ""  # why the newest attempt could not be started
        self.port = find_free_port()  # for the ranks to meet at, if this host is the first
        self.ended = 0  # attempts up to this one are gone from here
        self.code: int | None = None  # to end with, once the supervisor said so
        self.watch = HostWatch()

    def serve_until_told(self) -> int:
        """Until the supervisor says that the run is over, or there is none. The exit code."""
        alone_since = time.monotonic()
        while self.code is None:
            try:
                store_link = self._connect()
            except OSError:
                self._look()
                if self.running:
                    alone_since = time.monotonic()
                elif self.stop:
                    return STOPPED  # nobody is there to be told, and nothing to be saved
                elif time.monotonic() - alone_since > ORPHANED:
                    return self._after_all()
                time.sleep(AGAIN)
                continue
            try:
                self._serve(store_link)
            except OSError:
                pass  # the supervisor is gone, or the way to it
            finally:
                store_link.close()
            alone_since = time.monotonic()
        return self.code

    def _after_all(self) -> int:
        """OK if the run is complete, of which nobody told us: a pod that ended otherwise would be started again, though
        there is nothing to do."""
        exit_code = FAILED
        with suppress(OSError, MegastableError):
            for event in self.run.iterate_events(SupervisorEvent):
                is_complete = event.get("what") == "ended" and event.get("code") == OK
                exit_code = OK if is_complete else FAILED
        return exit_code

    def _asked(self, number: int, frame: FrameType | None) -> None:
        """The supervisor stops the whole run, and this agent goes on until then; without a supervisor and ranks, it
        ends."""
        self.stop = True

    def _connect(self) -> StoreClient:
        address = Address.read_file(self.run.store)
        if address is None:
            raise FileNotFoundError(self.run.store)
        hello = {
            "role": "agent", "name": self.name, "hostname": socket.gethostname(), "pid": os.getpid(),
            "version": __version__, "time": time.time(),
        }  # fmt: skip
        return StoreClient(address, hello, PATIENT)

    def _serve(self, link: StoreClient) -> None:
        sent_state: Message = {}
        sent_reading: HostReading | None = None
        next_report = 0.0
        while self.code is None:
            self._look()
            agent_state = self._state()
            if agent_state != sent_state or time.monotonic() >= next_report:
                link.send_message({"state": agent_state, "time": time.time()})
                sent_state, next_report = agent_state, time.monotonic() + REPORT
            if (host_reading := self.watch.latest_reading()) is not None and host_reading is not sent_reading:
                link.send_message({"machine": host_reading.model_dump(mode="json")})
                sent_reading = host_reading
            for store_message in link.receive_messages(LOOK):
                self._obey(store_message, link)

    def _look(self) -> None:
        if self.attempt is not None:
            self.running = self.attempt.poll_processes()

    def _state(self) -> Message:
        """What the supervisor hears; see `Hosts` and `RemoteAttempt`."""
        a = self.attempt
        return {
            "attempt": None if a is None else a.number, "code": None if a is None else a.code,
            "fates": {} if a is None else {fate_rank: [f.code, f.signal] for fate_rank, f in a.fates.items()},
            "running": self.running, "problem": self.problem, "ended": self.ended, "port": self.port,
            "stop": self.stop or (a is not None and a.asked),
        }  # fmt: skip

    def _obey(self, message: Message, link: StoreClient) -> None:
        if "launch" in message:
            self._launch(message["launch"])
        elif "end" in message:
            self._end(int(message["end"]))
        elif "states" in message:
            kernel_views = self.attempt.read_kernel_views() if self.attempt is not None else {}
            link.send_message({"states": {str(rank): view.text for rank, view in kernel_views.items()}})
        elif "quit" in message:
            self.code = int(message["quit"])

    def _launch(self, wanted: Message) -> None:
        attempt_number = int(wanted["attempt"])
        if self.attempt is not None and self.attempt.number >= attempt_number:
            return  # told twice
        self._end(attempt_number - 1)
        words, log = [sys.executable, *map(str, wanted["words"])], self.run.root / wanted["log"]
        environment = slurm.strip_step_variables(os.environ)
        environment |= {name: str(value) for name, value in wanted["environment"].items()}
        environment[HOST] = self.name
        self.problem, self.running = "", True
        try:
            self.attempt = LocalAttempt.start_launcher(self.run, attempt_number, words, log, environment)
        except ConfigError as error:
            self.attempt, self.problem = LocalAttempt(self.run, attempt_number), str(error)
            self.running = False

    def _end(self, number: int) -> None:
        """Kill what is left of all attempts up to `number`, whoever started them, stopped processes too."""
        for alive in list_attempts_here(self.run):
            if alive <= number:
                mine = self.attempt if self.attempt is not None and self.attempt.number == alive else None
                (mine or LocalAttempt(self.run, alive)).kill_all()
        if self.attempt is not None and self.attempt.number <= number:
            self.attempt.kill_all()
            self.running = False
        self.port = find_free_port()
        # Some cannot be killed, as in a stalled driver.
        if not any(alive <= number for alive in list_attempts_here(self.run)):
            self.ended = max(self.ended, number)


def only_agent(run: RunDirectory) -> socket.socket | None:
    """What keeps other agents of this run off this host as long as it is open; None if there is one already. A name
    in the network namespace: a file would be shared with other hosts, or be left behind."""
    socket_name = blake2b(f"{os.getuid()} {run.root.resolve()}".encode(), digest_size=16).hexdigest()
    unix_socket = socket.socket(socket.AF_UNIX)
    try:
        unix_socket.bind(f"\0megastable-agent-{socket_name}")
    except OSError:
        unix_socket.close()
        return None
    return unix_socket


def main() -> NoReturn:
    parser = argparse.ArgumentParser(prog="python -m megastable.cluster.agent", description=__doc__)
    parser.add_argument("run", type=Path, help="the run directory, on a file system that all hosts share")
    parser.add_argument("--name", required=True, help="of this host, as in the host file")
    args = parser.parse_args()
    spare_output()
    hold_stops()
    try:
        exit_code = attend_host(args.run, args.name)
    except AgentIsHere as error:  # whoever starts agents may do so twice: it wants one to be there
        print(error, flush=True)
        exit_code = OK
    sys.exit(exit_code)


def attend_host(root: Path | None, name: str) -> int:
    """Be the agent of this host, until the supervisor says that the run is over. The exit code, which is the run's.
    Raises ConfigError without a run directory: its address is in there; AgentIsHere."""
    if root is None:
        raise ConfigError("run.dir: say it, the same on all hosts: the supervisor's address is in there")
    run = RunDirectory(root)
    held_socket = only_agent(run)
    if held_socket is None:
        raise AgentIsHere(f"an agent of {run.root} is on this host already")
    with held_socket:
        return Agent(run, name).serve_until_told()


if __name__ == "__main__":
    main()
