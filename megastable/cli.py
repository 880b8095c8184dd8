"""The entry point: `megastable COMMAND ...`, the same as `python -m megastable.cli COMMAND ...`."""

from __future__ import annotations

import os
import signal
import sys

from megastable import SIBLINGS
from megastable.base.process import hold_stops


def main(*first: str) -> None:
    """Run the command line of this process, after the words `first`: those that a script of launch/ stands for."""
    words = [*first, *sys.argv[1:]]
    if words[:1] == ["supervise"]:
        hold_stops()  # until it can stop as it should
    if SIBLINGS:  # for modules of the tools that run as processes of their own
        path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
        os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*filter(None, path), *SIBLINGS]))
    handler_before = signal.getsignal(signal.SIGINT)
    if handler_before is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during the imports ends it without a traceback
    from megastable.commands.root import build_command

    signal.signal(signal.SIGINT, handler_before)
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:  # a locale that lacks a character must not end it
        reconfigure(errors="backslashreplace")
    build_command().main(words, prog_name="megastable")


if __name__ == "__main__":
    main()
