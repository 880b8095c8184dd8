"""Count what the start of a rank asks of all ranks and of the shared file system, until its first step: collectives of
Python objects, and opens of files."""

from __future__ import annotations

import sys
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from megastable.config.tree import RunConfig

OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")


def count_start(config: RunConfig) -> dict[str, Any]:
    """Train as `config` says, in this process. Returns, until the first step: "objects", the callers of collectives of
    Python objects in their order, and "opens", how often every file below the run's directory was opened."""
    import torch.distributed as dist

    from megastable.train import Trainer, train

    objects, opens, counting = list[str](), Counter[str](), [True]
    root = str(config.run.dir)

    def name_caller() -> str:
        frames = [
            f
            for f in traceback.extract_stack()[:-2]
            if "/megastable/" in f.filename and "collectives.py" not in f.filename
        ]
        if "/deepspeed/" in traceback.extract_stack()[-3].filename:
            return "deepspeed"
        return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}:{frames[-1].name}" if frames else "?"

    def note_open(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and counting[0] and isinstance(arguments[0], (str, bytes)):
            path = str(arguments[0])
            if path.startswith(root):
                opens[path.removeprefix(root)] += 1

    sys.addaudithook(note_open)
    real = {name: getattr(dist, name) for name in OBJECTS}
    for name, function in real.items():

        def counted(*arguments: Any, _name: str = name, _function: Any = function, **named: Any) -> Any:
            if counting[0]:
                objects.append(f"{_name} {name_caller()}")
            return _function(*arguments, **named)

        setattr(dist, name, counted)
    real_steps = Trainer._all_steps

    def all_steps(trainer: Trainer) -> None:
        counting[0] = False
        real_steps(trainer)

    Trainer._all_steps = all_steps
    try:
        train(config, Path("recipe.yaml"))
    finally:
        Trainer._all_steps = real_steps
        for name, function in real.items():
            setattr(dist, name, function)
    return {"objects": objects, "opens": dict(opens)}
