"""Which settings a person may change while a run trains, and what holds at a step. Pure."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError
from megastable.run import changes
from megastable.run.changes import (
    ChangeRequest,
    answer_request,
    check_live,
    config_at,
    follow_recipe,
    list_left_out,
    parse_values,
)
from megastable.run.events.event import Event
from megastable.run.events.people_events import ChangeMade, ChangeRefused
from megastable.run.events.reading import event_of
from tests.conftest import tiny

RECIPE = tiny(Path("corpus"), Path("run"), supervise={"webhook": "https://a.example/secret"})
BY_TOKENS = {"warmup_steps": None, "warmup_tokens": 0, "total_steps": None}
KEYS: dict[str, Any] = {
    "optimizer.lr": lambda c: c.optimizer.lr, "optimizer.clip": lambda c: c.optimizer.clip,
    "model.z_loss": lambda c: c.model.z_loss, "schedule.floor": lambda c: c.schedule.floor,
}  # fmt: skip


def request(number: int = 0, until: int | None = None, **values: Any) -> ChangeRequest:
    given = {key.replace("__", "."): value for key, value in values.items()}
    return ChangeRequest(id=f"c{number}", time=1.0, who="ann", reason="why", values=given, until=until)


def written(event: Event) -> ChangeMade:
    """As the journal gives it back."""
    read = event_of(dict(event.fields))
    assert isinstance(read, ChangeMade)
    return read


@settings(max_examples=15, deadline=None)  # an example validates whole recipes
@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(KEYS)), st.sampled_from([0.01, 0.02, 0.5]),
            st.integers(1, 30), st.none() | st.integers(0, 12),
        ),
        max_size=6,
    )
)  # fmt: skip
def test_config_at_has_the_newest_change_that_has_begun_and_not_ended(
    asked: list[tuple[str, float, int, int | None]],
) -> None:
    """Steps come in any order, as a run is rewound between two requests."""
    made, plain = list[ChangeMade](), list[tuple[str, float, int, float]]()
    for number, (key, value, step, length) in enumerate(asked):
        until = None if length is None else step + length
        event = answer_request(
            request(number, until, **{key.replace(".", "__"): value}), RECIPE, made, step, None
        )
        before = KEYS[key](config_at(RECIPE, made, step + 1))
        if isinstance(event, ChangeRefused):
            assert before == value or length == 0
            continue
        assert (event.old, event.new, event.step) == ({key: before}, {key: value}, step + 1)
        made.append(written(event))
        plain.append((key, value, step + 1, float("inf") if until is None else until))
    edges = {step for _, _, first, last in plain for step in (first - 1, first, last, last + 1) if step < 99}
    for step in sorted(edges):
        config = config_at(RECIPE, made, step)
        for key, find in KEYS.items():
            hold = [value for k, value, first, last in plain if k == key and first <= step <= last]
            assert find(config) == (hold[-1] if hold else find(RECIPE))


@pytest.mark.parametrize(
    ("key", "told", "optimizer"),
    [
        ("train.steps", "with train.steps=5; to end the decay elsewhere: schedule.total_steps", {}),
        ("train.global_batch", "start it again with train.global_batch=5", {}),
        ("model.layers", "begin another run", {}),
        ("model.max_positions", "start it again with model.max_positions=5", {}),
        ("optimizer.lrr", "optimizer.lr", {}),
        ("schedule", "start it again", {}),
        ("optimizer.betas", "does not read it", {"name": "sgd"}),
        ("optimizer.clip", "at the start only", {"clipping": "adagc"}),
        ("optimizer.clip", "does not read it", {"clipping": "zclip"}),
        ("optimizer.weight_decay", "one group", {"weight_decay": 0.0}),
    ],
)
def test_check_live_refuses_and_says_what_to_do(key: str, told: str, optimizer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        check_live(key, tiny(Path("corpus"), Path("run"), optimizer=optimizer), 5)
    assert told in str(error.value) and key in str(error.value)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (request(optimizer__lr=-1), "optimizer.lr=-1"),
        (request(optimizer__lr=3e-3), "optimizer.lr is 0.003 already"),
        (request(until=7, optimizer__lr=1e-3), "step 7 already"),
        (request(schedule__warmup_tokens=5), "schedule"),
    ],
)
def test_answer_refuses_a_request_that_cannot_be_followed(given: ChangeRequest, problem: str) -> None:
    event = answer_request(given, RECIPE, [], 7, None)
    assert isinstance(event, ChangeRefused) and problem in str(event.problem)
    assert (event.step, event.change, event.who) == (7, "c0", "ann")


def test_follow_recipe_ends_a_change_of_what_a_person_wrote_there_last() -> None:
    made = [
        written(answer_request(request(optimizer__lr=1e-3, optimizer__clip=0.5), RECIPE, [], 7, (2.0, 1.0)))
    ]
    assert (made[0].loss, made[0].grad_norm) == (2.0, 1.0)
    newer = tiny(Path("corpus"), Path("run"), optimizer={"lr": 5e-4})
    follows = follow_recipe(newer, ["optimizer.lr", "run.timeout"], made, 20)
    assert follows is not None and (follows.step, follows.new) == (21, {"optimizer.lr": 5e-4})
    made.append(written(follows))
    assert [config_at(newer, made, step).optimizer.lr for step in (7, 8, 20, 21)] == [5e-4, 1e-3, 1e-3, 5e-4]
    assert config_at(newer, made, 21).optimizer.clip == 0.5
    assert follow_recipe(newer, ["optimizer.lr"], made, 20) is None


def test_config_at_holds_the_keys_that_a_later_recipe_can_have() -> None:
    made = [
        written(answer_request(request(schedule__total_steps=50, optimizer__lr=1e-5), RECIPE, [], 7, None))
    ]
    assert list_left_out(RECIPE, made, 8) == []
    by_tokens = tiny(Path("corpus"), Path("run"), schedule=BY_TOKENS | {"warmup_tokens": 100})
    config = config_at(by_tokens, made, 8)
    assert config.optimizer.lr == 1e-5 and config.schedule == by_tokens.schedule
    [told] = list_left_out(by_tokens, made, 8)
    assert told.startswith("schedule.total_steps=50, changed live at step 8, does not hold from step 8 on: ")
    assert list_left_out(by_tokens, made, 7) == []


def test_answer_refuses_a_change_that_outlives_the_one_that_it_needs() -> None:
    first = request(until=20, **{f"schedule__{key}": value for key, value in BY_TOKENS.items()})
    made = [written(answer_request(first, RECIPE, [], 7, None))]
    for until in (None, 21):
        event = answer_request(request(1, until=until, schedule__total_tokens=10**6), RECIPE, made, 9, None)
        assert isinstance(event, ChangeRefused)
        assert "from step 21 on" in str(event.problem) and "--until 20" in str(event.problem)
    made.append(
        written(answer_request(request(1, until=20, schedule__total_tokens=10**6), RECIPE, made, 9, None))
    )
    found = [config_at(RECIPE, made, step).schedule.total_tokens for step in (10, 20, 21)]
    assert found == [10**6, 10**6, None]
    # A rewind to before the first: it begins again, and the other one with it.
    event = answer_request(request(2, schedule__warmup_steps=3), RECIPE, made, 2, None)
    assert isinstance(event, ChangeRefused) and "from step 8 on" in str(event.problem)


def test_read_requests_passes_over_what_else_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "changes.jsonl"
    assert changes.read_requests(path) == ([], [])
    one = changes.ask_change(path, {"optimizer.lr": 1e-4}, "why", "ann", None)
    with path.open("a") as file:
        file.write("{not a line\n\n" + '{"id": "x", "time": 1, "reason": "r", "values": {}}\n{"id": "to')
    two = changes.ask_change(path, {"optimizer.betas": [0.9, 0.99]}, "why", "ann", 9)
    found, problems = changes.read_requests(path)
    assert found == [one, two]
    assert [p.split(" is no")[0] for p in problems] == [f"{path} line 2", f"{path} line 4"]


@pytest.mark.parametrize(("directory", "file"), [(0o755, 0o644), (0o2775, 0o664), (0o700, 0o644)])
def test_ask_writes_a_file_that_the_run_can_read(tmp_path: Path, directory: int, file: int) -> None:
    tmp_path.chmod(directory)
    path, before = tmp_path / "changes.jsonl", os.umask(0o077)
    try:
        changes.ask_change(path, {"optimizer.lr": 1e-4}, "why", "ann", None)
        assert stat.S_IMODE(path.stat().st_mode) == file
        path.chmod(0o600)  # as somebody wanted it
        changes.ask_change(path, {"optimizer.lr": 1e-4}, "why", "ann", None)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_parse_values_reads_assignments_as_overrides() -> None:
    assert parse_values(["optimizer.lr=1e-4", "optimizer.betas=[0.9, 0.99]", "schedule.total_steps=null"]) == {
        "optimizer.lr": "1e-4", "optimizer.betas": [0.9, 0.99], "schedule.total_steps": None,
    }  # fmt: skip
    for wrong in (["optimizer.lr"], ["optimizer.lr=1", "optimizer.lr=2"]):
        with pytest.raises(ConfigError):
            parse_values(wrong)
    event = answer_request(request(optimizer__lr="1e-4"), RECIPE, [], 0, None)
    assert isinstance(event, ChangeMade) and event.new == {"optimizer.lr": 1e-4}
