"""Settings that people change while a run trains: which, how they ask for it, and what holds at a step.

`changes.jsonl` has the requests, one a line, which `megastable change` appends. Rank 0 answers each in the journal,
once, with the first step that it holds at (`change_made`), or why not (`change_refused`). From then on the journal
alone says what holds: at every step the newest change of a key that has begun and has not ended. So a rewind, a restart
and an older checkpoint lead to the same values at the same step.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megastable.base import durable
from megastable.base.errors import ConfigError
from megastable.config.recipe import override_key, validate_tree
from megastable.config.tree import RunConfig
from megastable.run.directory import FREE, IDENTITY
from megastable.run.events.people_events import ChangeMade, ChangeRefused
from megastable.run.events.reading import read_events

# Read again at every step, and without a memory of what was before.
LIVE = (
    "optimizer.lr", "optimizer.weight_decay", "optimizer.betas", "optimizer.clip", "model.z_loss", "schedule.*",
)  # fmt: skip


class ChangeRequest(BaseModel):
    """A line of changes.jsonl. values: by key, of the recipe. until: the last step that has them. time: Unix
    seconds."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    time: float
    who: str = ""
    reason: str
    values: dict[str, Any] = Field(min_length=1)
    until: int | None = None


def ask_change(
    path: Path, values: Mapping[str, Any], reason: str, who: str, until: int | None
) -> ChangeRequest:
    """Append a request to `path`. A file that this makes can be read by the run, whoever's it is: its directory says
    who else can. Raises DataError if it cannot be written."""
    now = round(time.time(), 3)
    request = ChangeRequest(id=_new_id(), time=now, who=who, reason=reason, values=dict(values), until=until)
    is_new = not path.exists()
    durable.append_line(path, request.model_dump_json())
    if is_new:
        with suppress(OSError):  # another person has made it just now
            path.chmod(0o644 | path.parent.stat().st_mode & 0o666)
    return request


def read_requests(path: Path) -> tuple[list[ChangeRequest], list[str]]:
    """All requests, oldest first, and what is wrong with the lines that are none. Raises DataError if the file cannot
    be read."""
    found, problems = list[ChangeRequest](), list[str]()
    for number, line in enumerate(durable.read_lines(path)[0], start=1):
        try:
            found += [ChangeRequest.model_validate_json(line)] if line.strip() else []
        except ValidationError as error:
            problems.append(f"{path} line {number} is no request for a change: {error.errors()[0]['msg']}")
    return found, problems


def parse_values(assignments: Sequence[str]) -> dict[str, Any]:
    """Values by key of overrides, KEY=VALUE each. Raises ConfigError."""
    values_by_key: dict[str, Any] = {}
    for key_assignment in assignments:
        value_tree: Any = {}
        override_key(value_tree, key_assignment)
        assigned_key = key_assignment.partition("=")[0]
        if assigned_key in values_by_key:
            raise ConfigError(f"{assigned_key} is given twice")
        for key_part in assigned_key.split("."):
            value_tree = value_tree[key_part]
        values_by_key[assigned_key] = value_tree
    return values_by_key


def check_live(key: str, recipe: RunConfig, value: Any) -> None:
    """Raises ConfigError if a key cannot be changed while a run with this recipe trains: what to do instead."""
    _find(recipe, key)
    o, again = recipe.optimizer, f"stop the run, then start it again with {key}={json.dumps(value)}"
    if key not in LIVE and not key.startswith("schedule."):
        if key == "train.steps":
            again += "; to end the decay elsewhere: schedule.total_steps"
        elif key.startswith(IDENTITY) and key not in FREE:
            again = "it belongs to the run's weights: begin another run"
        raise ConfigError(
            f"{key} cannot be changed while the run trains: {again}. Live are: {', '.join(LIVE)}"
        )
    optimizer_key = key.removeprefix("optimizer.")
    if key.startswith("optimizer.") and not o.reads_key(optimizer_key):
        raise ConfigError(
            f"{key}: optimizer.name={o.name} with optimizer.clipping={o.clipping.kind} does not read it"
        )
    if key == "optimizer.clip" and o.clipping.kind != "norm":
        raise ConfigError(f"{key}: optimizer.clipping={o.clipping.kind} reads it at the start only: {again}")
    if key == "optimizer.weight_decay" and not o.weight_decay:
        raise ConfigError(
            f"{key}: the run was started with {key}=0, for which norms and matrices are one group: {again}"
        )


def with_values(config: RunConfig, values: Mapping[str, Any]) -> RunConfig:
    """The configuration with other values of some keys. Raises ConfigError if that is impossible."""
    if not values:
        return config
    config_tree = config.model_dump(mode="json")
    for key, new_value in values.items():
        override_key(config_tree, f"{key}={json.dumps(new_value)}")
    new_config = validate_tree(config_tree, "with this change")
    sections = {key.partition(".")[0] for key in values}  # not all: a dump has no passwords
    return config.model_copy(update={section: getattr(new_config, section) for section in sections})


def changes_of(journal: Path) -> list[ChangeMade]:
    """All changes of a run, in the order in which they were made. Raises DataError if the journal cannot be read."""
    return [event for event in read_events(journal, b'"change_made"') if isinstance(event, ChangeMade)]


def select_holding(made: Iterable[ChangeMade], step: int) -> list[ChangeMade]:
    """The changes that have begun by a step and have not ended, in the order in which they were made."""
    return [
        change for change in made
        if change.step is not None and change.step <= step and (change.until is None or step <= change.until)
    ]  # fmt: skip


def config_at(recipe: RunConfig, made: Iterable[ChangeMade], step: int) -> RunConfig:
    """What a run trains with at a step. Of a change that this recipe cannot have, the keys that it can have hold."""
    config = recipe
    for change in select_holding(made, step):
        try:
            config = with_values(config, change.new)
        except ConfigError:
            for recipe_key, new_value in change.new.items():
                with suppress(ConfigError):
                    config = with_values(config, {recipe_key: new_value})
    return config


def list_left_out(recipe: RunConfig, made: Iterable[ChangeMade], step: int) -> list[str]:
    """What people have changed and the recipe cannot have at a step, a sentence for each key."""
    held = select_holding(made, step)
    config_now = config_at(recipe, held, step)
    newest_by_key = {key: change for change in held for key in change.new}
    key_problems = list[str]()
    for key, change in newest_by_key.items():
        value = change.new[key]
        try:
            if _find(config_now, key) == value:
                continue
            with_values(config_now, {key: value})
            key_problem = "the other settings of that change do not allow it"
        except ConfigError as error:
            key_problem = " ".join(str(error).split())
        key_problems.append(
            f"{key}={json.dumps(value)}, changed live at step {change.step}, does not hold from step {step} on: "
            f"{key_problem}. Change it again, or the recipe"
        )
    return key_problems


def answer_request(
    request: ChangeRequest,
    recipe: RunConfig,
    made: Sequence[ChangeMade],
    step: int,
    level: tuple[float, float] | None,
) -> ChangeMade | ChangeRefused:
    """What becomes of a request that is read after `step`. level: loss and gradient norm of late."""
    begin = step + 1
    try:
        for key, asked_value in request.values.items():
            check_live(key, recipe, asked_value)
        if request.until is not None and request.until < begin:
            raise ConfigError(
                f"--until {request.until}: the run has done step {step} already: name a later one"
            )
        config_now = config_at(recipe, made, begin)
        changed_config = with_values(config_now, request.values)
        _check_later(request, recipe, made, begin)
        old = {key: _find(config_now, key) for key in request.values}
        new = {key: _find(changed_config, key) for key in request.values}
        if old == new:
            raise ConfigError(f"{', '.join(f'{key} is {value}' for key, value in new.items())} already")
    except ConfigError as error:
        problem = " ".join(str(error).split())
        return ChangeRefused(
            step=step, change=request.id, who=request.who, reason=request.reason, problem=problem
        )
    loss, grad_norm = level or (None, None)
    return ChangeMade(
        step=begin, until=request.until, change=request.id, who=request.who, asked=request.time,
        reason=request.reason, old=old, new=new, loss=loss, grad_norm=grad_norm,
    )  # fmt: skip


def _check_later(request: ChangeRequest, recipe: RunConfig, made: Sequence[ChangeMade], begin: int) -> None:
    """Raises ConfigError if a request becomes impossible while it holds, as other changes end, or begin again after a
    rewind: it would end without a word."""
    edge_steps = {change_made.until + 1 for change_made in made if change_made.until is not None}
    edge_steps |= {change_made.step for change_made in made if change_made.step is not None}
    for step in sorted(edge_steps):
        if begin < step <= (step if request.until is None else request.until):
            try:
                with_values(config_at(recipe, made, step), request.values)
            except ConfigError as error:
                raise ConfigError(
                    f"from step {step} on, where other changes begin or end, it is impossible: {error}. Ask for it "
                    f"then, or with --until {step - 1}"
                ) from None


def follow_recipe(
    recipe: RunConfig, changed: Iterable[str], made: Sequence[ChangeMade], step: int
) -> ChangeMade | None:
    """A run goes on after `step` with a recipe in which some keys have changed: what a person wrote there last holds,
    not what was changed live before. None if nothing was."""
    now = config_at(recipe, made, step + 1)
    old = {key: _find(now, key) for key in changed if key in {name for one in made for name in one.new}}
    new = {key: _find(recipe, key) for key in old}
    if old == new:
        return None
    return ChangeMade(step=step + 1, change=_new_id(), who="", reason="the recipe says so", old=old, new=new)


def _new_id() -> str:
    return str(uuid4().int % 10**11)  # a number, which published records may show


def _find(config: RunConfig, key: str) -> Any:
    """The value of a key, as JSON has it. Raises ConfigError if there is none."""
    config_value: Any = config.model_dump(mode="json")
    for key_part in key.split("."):
        if not isinstance(config_value, dict) or key_part not in config_value:
            config_tree = config.model_dump(mode="json")
            override_key(config_tree, f"{key}=0")
            validate_tree(config_tree, "with this change")  # refuses it, and names the key that was meant
            raise ConfigError(f"{key}: there is no such key")
        config_value = config_value[key_part]
    return config_value
