"""Any layout to any other without training: every byte of weights and moments stays, and everything else, too."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from megastable.base.errors import CheckpointError, ConfigError
from megastable.checkpoint import store
from megastable.checkpoint.new_run import ADAM, write_run
from megastable.checkpoint.plain import find_checkpoint
from megastable.checkpoint.store import LayoutState
from megastable.checkpoint.whole import WholeState, parameters, run_of
from megastable.config.tree import RunConfig, ScheduleConfig
from megastable.parallel.sharding import shard
from megastable_tools.convert.average import average
from megastable_tools.convert.branching import branch
from megastable_tools.convert.diff import differences
from megastable_tools.convert.reshaping import Sizes, laid_out, reshape
from tests.checkpoint.states import LAYOUTS, make_run, numbers, recipe_of, state_of
from tests.conftest import tiny
from tests.distributed import run_ranks
from tests.full_disk import files_no_larger_than

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same weights and moments in every layout; not to be changed."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: make_run(folder / name, layout) for name, layout in LAYOUTS.items()}


def same_bytes(checkpoint: Path, optimizer: bool = True) -> None:
    whole, expected = WholeState(checkpoint), numbers(recipe_of())
    assert whole.kinds == (("weight", "exp_avg", "exp_avg_sq") if optimizer else ("weight",))
    assert {(name, "weight") for name in whole.names} == {key for key in expected if key[1] == "weight"}
    for (name, kind), tensor in expected.items():
        if kind in whole.kinds:
            assert torch.equal(whole.tensor(name, kind), tensor), (name, kind)


@pytest.mark.quick("one")
@pytest.mark.parametrize("before", LAYOUTS)
def test_each_layout_to_each_with_the_same_bytes(
    sources: dict[str, Path], before: str, tmp_path: Path
) -> None:
    for after, (tensor, pipeline, zero, data) in LAYOUTS.items():
        made = reshape(sources[before], tmp_path / after, Sizes(tensor, pipeline, zero, data))
        assert find_checkpoint(tmp_path / after) == made.checkpoint
        same_bytes(made.checkpoint)
        state, old = store.read_state(made.checkpoint), store.read_state(sources[before])
        layout = old.layout.model_copy(
            update={"tensor": tensor, "pipeline": pipeline, "zero": zero, "data": data}
        )
        assert state == old.model_copy(update={"layout": layout, "versions": state.versions})
        assert made.layout == layout and len(list(made.checkpoint.glob("rank-*.safetensors"))) == layout.world
        run = run_of(made.checkpoint)
        assert (run.parallel.tensor, run.parallel.pipeline, run.parallel.zero) == (tensor, pipeline, zero)
        assert run.model == recipe_of().model and run.schedule == recipe_of().schedule


def test_a_rank_holds_its_shard(sources: dict[str, Path], tmp_path: Path) -> None:
    """Read without our own reader: tensor rank 1 of 2, and half of it on each of two data ranks."""
    name = "blocks.1.attention.qkv.weight"
    of, whole = parameters(recipe_of().model)[name], numbers(recipe_of())[name, "exp_avg"]
    made = reshape(sources["dp2-zero3"], tmp_path / "out", Sizes(tensor=2))
    assert made.layout.data == 2  # what is not said stays
    mine = shard(whole, of.placement, 1, 2).flatten()
    files = [load_file(made.checkpoint / f"rank-0000{rank}.safetensors") for rank in (1, 3)]
    assert torch.equal(torch.cat([file[f"exp_avg/{name}"] for file in files]), mine)


def test_there_and_back_is_the_same_files(sources: dict[str, Path], tmp_path: Path) -> None:
    there = reshape(sources["one"], tmp_path / "there", Sizes(2, 1, 1, 2))
    back = reshape(there.checkpoint, tmp_path / "back", Sizes(1, 1, 1, 1))
    for file in ("rank-00000.safetensors", "rank-00000.json"):
        assert (back.checkpoint / file).read_bytes() == (sources["one"] / file).read_bytes()


@pytest.mark.parametrize(
    ("tensor", "data", "context"), [(1, 4, 2), (1, 1, 1), (1, 3, 1), (2, 2, 2), (4, 2, 1)]
)
def test_context_parallelism_goes_as_far_as_it_can(
    tensor: int, data: int, context: int, tmp_path: Path
) -> None:
    """A rank of a context group holds a data-parallel rank's part; the sizes that are left decide on its size."""
    tree = recipe_of(kv_heads=4).model_dump(mode="json")
    tree["parallel"]["context"], tree["train"] = 2, {"global_batch": 12, "micro_batch": 1}
    run = RunConfig.model_validate(tree)
    held, state = numbers(run), state_of((1, 1, 1, 2))
    before = write_run(tmp_path / "before", run, state, lambda *of: held[of], optimizer=ADAM, origin={})
    assert store.read_state(before).layout.context == 2
    made = reshape(before, tmp_path / "after", Sizes(tensor, data=data))
    assert (made.layout.data, made.layout.context) == (data, context)
    assert run_of(made.checkpoint).parallel.context == context
    whole = WholeState(made.checkpoint)
    assert all(torch.equal(whole.tensor(*of), tensor) for of, tensor in held.items())


def test_without_moments(sources: dict[str, Path], tmp_path: Path) -> None:
    made = reshape(sources["tp2-pp2"], tmp_path / "weights", optimizer=False)
    same_bytes(made.checkpoint, optimizer=False)
    assert not made.optimizer and store.read_state(made.checkpoint).adam_step == 0
    assert store.read_state(made.checkpoint).cursor == 56
    again = reshape(made.checkpoint, tmp_path / "again", Sizes(1, 1, 1, 1))  # there are none to be kept
    same_bytes(again.checkpoint, optimizer=False)


def test_tied_weights_over_stages(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before", LAYOUTS["tp2-pp2"], model={"tied": True})
    made = reshape(before, tmp_path / "after", Sizes(1, 2, 1, 1))
    a, b = WholeState(before), WholeState(made.checkpoint)
    assert a.names == b.names and "head.weight" not in a.names
    assert all(torch.equal(a.tensor(n, k), b.tensor(n, k)) for n in a.names for k in a.kinds)


def test_what_the_run_left_out_goes_along(tmp_path: Path) -> None:
    before = make_run(tmp_path / "before")
    for name in ("skips.jsonl", "blends.jsonl"):
        (tmp_path / "before" / name).write_text(f'{{"of": "{name}"}}\n')
    made = reshape(before, tmp_path / "after", Sizes(tensor=2))
    assert made.ledgers == tmp_path / "before"
    for name in ("skips.jsonl", "blends.jsonl"):
        assert (tmp_path / "after" / name).read_text() == f'{{"of": "{name}"}}\n'
    event = json.loads((tmp_path / "after" / "journal.jsonl").read_text().splitlines()[0])
    assert (event["event"], event["step"], event["how"]) == ("imported", 7, "reshaped")
    assert event["source"] == str(before)
    alone = (tmp_path / "step-7").resolve()
    before.rename(alone)
    assert reshape(alone, tmp_path / "from-alone").ledgers is None


@pytest.mark.parametrize(
    ("sizes", "told"),
    [
        ((3, 1, 1, 1), r"parallel\.tensor=3 does not divide model\.heads=4"),
        ((1, 3, 1, 1), r"parallel\.pipeline=3 needs at least one block a stage"),
        ((1, 2, 3, 1), r"parallel\.zero=3 with parallel\.pipeline=2"),
        ((1, 1, 0, 1), r"parallel\.zero=0"),
        ((1, 1, 1, 3), r"global_batch=8 is not a multiple of train\.micro_batch=2 x 3"),
        ((1, 1, 1, 0), "at least one"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(
    sources: dict[str, Path], tmp_path: Path, sizes: tuple[int, int, int, int], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        reshape(sources["one"], tmp_path / "out", Sizes(*sizes))
    assert list(tmp_path.iterdir()) == []


def test_a_micro_batch_may_go_with_the_ranks(sources: dict[str, Path], tmp_path: Path) -> None:
    made = reshape(sources["one"], tmp_path / "out", Sizes(data=8, micro_batch=1))
    assert made.layout.data == 8 and run_of(made.checkpoint).train.micro_batch == 1
    same_bytes(made.checkpoint)
    with pytest.raises(ConfigError, match=r"micro_batch=3 does not divide"):
        reshape(sources["one"], tmp_path / "other", Sizes(micro_batch=3))


def test_sequence_parallelism_ends_with_its_group() -> None:
    run = recipe_of((2, 1, 1, 1))
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"sequence": True})})
    old = LayoutState(tensor=2, pipeline=1, data=1, zero=1, precision="bf16")
    assert laid_out(run, old, Sizes())[0].parallel.sequence
    assert not laid_out(run, old, Sizes(tensor=1))[0].parallel.sequence


def test_nothing_is_written_over_and_nothing_left(sources: dict[str, Path], tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    with pytest.raises(CheckpointError, match="taken exists already"):
        reshape(sources["one"], taken)
    assert list(taken.iterdir()) == []
    with pytest.raises(CheckpointError, match=r"would lie in .*, which holds checkpoints"):
        reshape(sources["one"], sources["one"].parent / "step-9")
    with files_no_larger_than(1 << 12), pytest.raises(CheckpointError, match="could not be written"):
        reshape(sources["one"], tmp_path / "full")
    assert list(tmp_path.iterdir()) == [taken]


MEASURE = """
import sys, threading
from pathlib import Path
import torch
torch.set_num_threads(1)
import megastable_tools.convert.average, megastable_tools.convert.diff, megastable.checkpoint.pieces
for module in (megastable_tools.convert.average, megastable_tools.convert.diff, megastable.checkpoint.pieces):
    module.CHUNK = 1 << 16  # 16 MiB in fp32, as it is, would be all that one sees of tensors of 4 MiB
from megastable_tools.convert.average import average
from megastable_tools.convert.diff import differences
from megastable_tools.convert.reshaping import Sizes, reshape
from megastable.checkpoint.whole import WholeState

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))

done, highest = threading.Event(), 0
def watch():
    global highest
    while not done.wait(0.001):
        highest = max(highest, anonymous())

checkpoint, small, out = map(Path, sys.argv[1:])
reshape(small, out / "warm", Sizes(tensor=2))  # what a first call allocates for good
for what in ("reshape", "average", "diff"):
    before = highest = anonymous()
    done.clear()
    thread = threading.Thread(target=watch)
    thread.start()
    if what == "reshape":
        reshape(checkpoint, out / what, Sizes(tensor=1, pipeline=1, data=2))
    elif what == "average":
        average([checkpoint, out / "reshape" / "checkpoints" / checkpoint.name], out / what)
    else:
        found = differences(WholeState(checkpoint), WholeState(out / "reshape" / "checkpoints" / checkpoint.name))
        assert {one.outcome for one in found} == {"identical"}
    done.set()
    thread.join()
    print(what, highest - before)
"""


@pytest.mark.slow
def test_memory_is_that_of_a_few_tensors(tmp_path: Path) -> None:
    """A state of dozens of times the largest tensor (4 MiB) passes through a few times that tensor."""
    layout = LAYOUTS["tp2-pp2"]
    model: dict[str, Any] = {"layers": 16, "hidden": 128, "heads": 4, "ffn": 1024, "vocab_size": 8192}
    run = recipe_of(layout, **model)
    held = parameters(run.model)
    largest = max(4 * torch.Size(of.shape).numel() for of in held.values())
    total = 3 * sum(4 * torch.Size(of.shape).numel() for of in held.values())
    assert largest == 4 << 20 and total > 25 * largest
    checkpoint = write_run(
        tmp_path / "big", run, state_of(layout), lambda name, kind: torch.arange(
            torch.Size(held[name].shape).numel(), dtype=torch.float32
        ).view(held[name].shape), optimizer=ADAM, origin={},
    )  # fmt: skip
    small = make_run(tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(checkpoint), str(small), str(tmp_path)], cwd=ROOT, capture_output=True,
        text=True, check=False, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"},  # what is freed is given back
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    peaks = {what: int(peak) / largest for what, peak in (line.split() for line in done.stdout.splitlines())}
    assert set(peaks) == {"reshape", "average", "diff"}
    assert all(peak < 6 for peak in peaks.values()), peaks


def train(config: RunConfig) -> int:
    from megastable.train import train

    return train(config, Path("recipe.yaml"))


@pytest.mark.slow
def test_training_goes_on_from_it_as_from_the_checkpoint_itself(corpus: Path, tmp_path: Path) -> None:
    """Reshaped on the disk, or while the training process loads it: afterwards the same bytes."""
    short = {"train": {"steps": 4}, "checkpoint": {"interval": 2}, "schedule": {"total_steps": 4}}
    assert run_ranks(2, train, tiny(corpus, tmp_path / "one", parallel={"zero": 3}, **short)) == [0, 0]
    shutil.rmtree(tmp_path / "one" / "checkpoints" / "step-4")
    made = reshape(tmp_path / "one" / "checkpoints" / "step-2", tmp_path / "offline", Sizes(2, 1, 1, 1))
    reshape(made.checkpoint, tmp_path / "bare", optimizer=False)
    ends = {}
    for run in ("one", "offline", "bare"):
        assert run_ranks(2, train, tiny(corpus, tmp_path / run, parallel={"tensor": 2}, **short)) == [0, 0]
        ends[run] = find_checkpoint(tmp_path / run / "checkpoints" / "step-4")
    found = differences(WholeState(ends["one"]), WholeState(ends["offline"]))
    assert {one.outcome for one in found} == {"identical"}
    a, b, bare = (store.read_state(end) for end in ends.values())
    assert (a.cursor, a.tokens, a.updates, a.recent_losses) == (
        b.cursor,
        b.tokens,
        b.updates,
        b.recent_losses,
    )
    # Without moments the next loss is the same, and Adam begins anew.
    assert (a.updates, bare.updates, a.adam_step, bare.adam_step) == (4, 4, 4, 2)
    assert a.recent_losses[:3] == bare.recent_losses[:3] and a.recent_losses[3] != bare.recent_losses[3]


GEMMA = {
    "norms": "both", "zero_centered_norms": True, "activation": "gelu", "embedding_scale": "sqrt_hidden",
    "attention_softcap": 3.0, "logit_softcap": 5.0, "window": 5, "full_attention_every": 2,
}  # fmt: skip
POST = "blocks.1.mlp_post_norm.weight"


def at_peak_rate(out: Path, layout: tuple[int, int, int, int], seed: int) -> Path:
    """As `make_run`, where a branch may begin."""
    run = recipe_of(layout, **GEMMA)
    run = run.model_copy(update={"schedule": ScheduleConfig(kind="constant", warmup_steps=0)})
    held = numbers(run, seed)
    return write_run(
        out, run, state_of(layout), lambda name, kind: held[name, kind], optimizer=ADAM, origin={}
    )


def test_checkpoints_of_both_norms_are_reshaped_averaged_compared_and_branched(tmp_path: Path) -> None:
    one = at_peak_rate(tmp_path / "one", LAYOUTS["tp2-pp2"], seed=1)
    other = at_peak_rate(tmp_path / "other", LAYOUTS["dp2-zero3"], seed=2)
    a, b = WholeState(one), WholeState(other)
    made = reshape(one, tmp_path / "reshaped", Sizes(1, 1, 3, 2)).checkpoint
    assert all(d.outcome == "identical" for d in differences(a, WholeState(made)))
    assert run_of(made).model == run_of(one).model
    branched = branch(one, tmp_path / "branched", 10).made.checkpoint
    assert all(d.outcome == "identical" for d in differences(a, WholeState(branched)))
    mean = WholeState(average([one, other], tmp_path / "mean").checkpoint)
    assert POST in mean.names and POST in a.names
    expected = (a.tensor(POST, "weight").double() + b.tensor(POST, "weight").double()) / 2
    assert torch.equal(mean.tensor(POST, "weight"), expected.float())
    assert all(d.outcome == "differs" for d in differences(a, b))
