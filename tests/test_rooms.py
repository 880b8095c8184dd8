"""The packages, their rooms, and the arrows between them, read from every import; docs/architecture.md draws them."""

from __future__ import annotations

import ast
import gc
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# The folder of each, and what begins the names of its modules here: the guard is the lowest room, and the rooms of the
# tools are the highest.
PACKAGES = {
    "megastable_guard": ("guard", "guard."),
    "megastable": (".", ""),
    "megastable_tools": ("tools", ""),
}
# From below: what a room may import, beside itself. The loop, train.py, stands on all of them.
TRAINING = {
    "guard": "",
    "base": "guard",
    "config": "base guard",
    "parallel": "base",
    "run": "base config guard",
    "optim": "base config parallel",
    "model": "base config parallel",
    "data": "base config run",
    "fp8": "base config parallel model",
    "engine": "base config run parallel optim model data fp8",
    "checkpoint": "base config run parallel optim model data guard fp8 engine",
    "attribution": "base config run parallel optim model data guard fp8 engine",
    "hardware": "base config run parallel optim model data fp8 engine",
    "warnings": "base config run parallel optim model data guard fp8 engine checkpoint",
    "recovery": "base config run parallel optim model data guard fp8 engine checkpoint attribution hardware warnings",
    "training": "base config run parallel optim model data guard fp8 engine checkpoint attribution hardware warnings "
    "recovery",
}
SUPERVISOR = {"cluster": "base config run", "supervise": "base config run cluster data guard warnings"}
# They read run directories and checkpoints, or start runs of their own; nothing that trains imports one. All but the
# report are the tools.
WINGS = {
    "convert", "downstream", "forensics", "fp8_check", "generate", "plan", "prepare", "repeat", "report", "study"
}  # fmt: skip
# Commands stand above all rooms, in both packages: a module for each, which cli.py starts, and named as people call it.
COMMANDS = "commands"
LOOSE = {"__init__.py", "__main__.py", "train.py", "cli.py"}
LONGEST = 700  # lines of a file
MOST = 5  # names that stand for several files, or for several classes
PARAMETERS = 8  # of a constructor


@cache
def trees() -> dict[str, ast.Module]:
    """Every module, by its name without its package."""
    names = {
        path: first + ".".join(path.relative_to(ROOT / folder / package).with_suffix("").parts)
        for package, (folder, first) in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*.py")
    }
    twice = {name for name, count in Counter(names.values()).items() if count > 1}
    assert twice <= {"__init__", "commands.__init__"}, "modules of one name, of which one would not be read"
    gc.disable()  # it would look at millions of nodes again and again, of which none can go
    try:
        return {
            name.removesuffix(".__init__"): ast.parse(path.read_text(encoding="utf-8"))
            for path, name in names.items()
        }
    finally:
        gc.enable()


@cache
def imports() -> dict[str, set[str]]:
    """What every module imports of the package, in functions too."""
    return {name: set(imported(tree)) for name, tree in trees().items()}


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """All of a module, in functions too, without their expressions: most of a tree."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(tree, name, None)
        for node in inner if isinstance(inner, list) else ():
            if isinstance(node, ast.stmt):
                yield node
            yield from statements(node)


def imported(tree: ast.AST) -> Iterator[str]:
    """What a module imports of the packages, named as in `trees`."""
    for node in statements(tree):
        named = list[str]()
        if isinstance(node, ast.ImportFrom) and node.module:
            named = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        for name in named:
            package, _, below = name.partition(".")
            if package in PACKAGES and below:
                yield PACKAGES[package][1] + below


@cache
def arrows() -> dict[str, set[str]]:
    """Which rooms every room imports. Commands, and every `__main__`, stand above the rooms, as cli.py does."""
    rooms = {name.partition(".")[0] for name in trees() if "." in name} - {COMMANDS}
    found = defaultdict[str, set[str]](set)
    for name, targets in imports().items():
        room = name.partition(".")[0]
        if room in rooms and not name.endswith("__main__"):
            others = {target.partition(".")[0] for target in targets}
            assert not others & {"train", "cli", COMMANDS}, f"{name} imports what stands above the rooms"
            found[room] |= (others & rooms) - {room}
    return dict(found)


def drawn() -> str:
    """The arrows as a picture (Mermaid): those that follow from others are left out."""
    found, reached = arrows(), dict[str, set[str]]()
    lines = ["graph BT"]
    for room in TopologicalSorter(
        {room: sorted(below) for room, below in sorted(found.items())}
    ).static_order():
        below = found.get(room, set())
        beyond = set[str]().union(*(reached[other] for other in below))
        reached[room] = below | beyond
        lines += [f"    {other} --> {room}" for other in sorted(below - beyond)]
    return "\n".join(lines)


@pytest.mark.parametrize("room", sorted(TRAINING | SUPERVISOR))
def test_arrows_point_down(room: str) -> None:
    allowed = set((TRAINING | SUPERVISOR)[room].split())
    wrong = {
        f"{name} -> {target}" for name, targets in imports().items() for target in targets
        if name.partition(".")[0] == room and not name.endswith("__main__") and "." in target
        and target.partition(".")[0] not in allowed | {room}
    }  # fmt: skip
    assert not wrong


def test_every_room_is_known_and_there_is_no_cycle() -> None:
    found = arrows()
    assert set(found) <= set(TRAINING) | set(SUPERVISOR) | WINGS
    assert len(list(TopologicalSorter(found).static_order())) >= len(found)  # raises CycleError


def file_of(target: str) -> str:
    """The file that has an imported name."""
    while target and target not in trees():
        target = target.rpartition(".")[0]
    return target


def test_files_import_each_other_in_one_direction() -> None:
    """Imports in functions count, and those for types only."""
    below = {
        name: {file_of(target) for target in targets} - {"", name} for name, targets in imports().items()
    }
    TopologicalSorter(below).prepare()  # raises CycleError, which names them


def test_constructors_take_few_parameters() -> None:
    counts = {
        f"{name}.{owner.name}": len(method.args.args + method.args.kwonlyargs) - 1
        for name, tree in trees().items() for owner in ast.walk(tree) if isinstance(owner, ast.ClassDef)
        for method in owner.body if isinstance(method, ast.FunctionDef) and method.name == "__init__"
    }  # fmt: skip
    assert not {name for name, count in counts.items() if count > PARAMETERS}


def test_nothing_that_trains_imports_a_wing() -> None:
    names = [name for name in imports() if name == "train" or name.partition(".")[0] in TRAINING]
    wrong = {
        f"{name} -> {target}" for name in names if not name.endswith("__main__")
        for target in imports()[name] if target.partition(".")[0] in WINGS | set(SUPERVISOR)
    }  # fmt: skip
    assert not wrong


def test_only_the_entry_point_imports_commands() -> None:
    above = {name for name in imports() if name.partition(".")[0] == COMMANDS}
    assert len(above) > 12
    others = {name for name in set(imports()) - above if any(t.startswith(COMMANDS) for t in imports()[name])}
    assert others == {"cli"}


def test_the_packages_point_one_way() -> None:
    """guard <- megastable <- megastable_tools, never back: a command of the tools is found by its name."""
    above = {"megastable_guard": ("megastable", "megastable_tools"), "megastable": ("megastable_tools",)}
    for package, others in above.items():
        for path in (ROOT / PACKAGES[package][0] / package).rglob("*.py"):
            named = re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(encoding="utf-8"), re.M)
            assert not set(named) & set(others), path


def test_only_the_engine_imports_deepspeed() -> None:
    for name, tree in trees().items():
        found = {
            alias.name if isinstance(node, ast.Import) else str(node.module)
            for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names
        }  # fmt: skip
        if any(f"{module}.".startswith("deepspeed.") for module in found):
            assert name.startswith("engine."), f"{name} imports deepspeed"


def test_what_lies_loose() -> None:
    assert {path.name for path in (ROOT / "megastable").glob("*.py")} <= LOOSE


def test_no_file_is_long() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines())
        for package, (folder, _) in PACKAGES.items()
        for path in (ROOT / folder / package).rglob("*.py")
    }
    assert lengths.pop("megastable/train.py") < 300
    assert not {name: lines for name, lines in lengths.items() if lines > LONGEST}


def test_names_stand_for_one_thing() -> None:
    files = Counter(
        name.rpartition(".")[2] for name in trees()
        if "." in name and not name.endswith("__main__") and not name.startswith(f"{COMMANDS}.")
    )  # fmt: skip
    rooms = {name for name in files if name in arrows()}
    classes = Counter(
        node.name for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)
    )
    for what, found in (("files", {n: k for n, k in files.items() if n not in rooms}), ("classes", classes)):
        several = sorted(name for name, count in found.items() if count > 1)
        assert len(several) <= MOST, f"{what} of one name: {several}"


def test_the_picture_is_current() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    assert f"```mermaid\n{drawn()}\n```" in page, f"docs/architecture.md should draw:\n{drawn()}"
