"""Count what the start of a rank asks of all ranks and of the shared file system, until its first step."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from megastable.config.tree import RunConfig

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
COUNTED = (*OBJECTS, "all_reduce")


def count_start(config: RunConfig) -> tuple[list[str], dict[str, int]]:
    """Train as `config` says, in this process.

    Returns, of the time until the first step: the collectives of Python objects, and "agree" for each sum by which
    ranks agree; and how often every file of the run and of its corpora was opened.
    """
    import torch.distributed as dist

    from megastable.train import Trainer, train

    called, opens, counting = list[str](), Counter[str](), [True]
    folders = [str(config.run.dir), *(str(corpus.path) for corpus in config.data.corpora)]

    def note_open(event: str, arguments: tuple[Any, ...]) -> None:
        for folder in folders if event == "open" and counting[0] else ():
            if str(arguments[0]).startswith(folder + "/"):
                opens[str(arguments[0]).removeprefix(folder + "/").partition(".tmp-")[0]] += 1

    def call(name: str, function: Any, *arguments: Any, **named: Any) -> Any:
        if counting[0] and name in OBJECTS:
            called.append(name)
        elif counting[0] and any(frame.name == "find_least" for frame in traceback.extract_stack()):
            called.append("agree")
        return function(*arguments, **named)

    real_functions = {name: getattr(dist, name) for name in COUNTED}
    real_steps = Trainer._all_steps

    def begin_steps(trainer: Trainer) -> None:
        counting[0] = False
        real_steps(trainer)

    sys.addaudithook(note_open)
    for name, function in real_functions.items():
        setattr(dist, name, partial(call, name, function))
    Trainer._all_steps = begin_steps  # type: ignore[method-assign]
    try:
        train(config, Path("recipe.yaml"))
    finally:
        Trainer._all_steps = real_steps  # type: ignore[method-assign]
        for name, function in real_functions.items():
            setattr(dist, name, function)
    return called, dict(opens)


def count_imports(module: str) -> tuple[int, set[str]]:
    """How many files a fresh process opens to import `module`, and the packages that it has then."""
    opens = []
    sys.addaudithook(lambda event, arguments: opens.append(arguments[0]) if event == "open" else None)
    __import__(module)
    return len(opens), {name.partition(".")[0] for name in sys.modules}


if __name__ == "__main__":
    opened_files, packages = count_imports(sys.argv[1])
    print(opened_files, *sorted(packages))
