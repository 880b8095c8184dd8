"""The order of the data, against a plain re-implementation in Python integers and against its own promises."""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.base.errors import ConfigError, DataError
from megastable.data.manifest import Manifest, Segment, TokenizerInfo
from megastable.data.order import (
    LAST_POSITION,
    ROUNDS,
    VERSION,
    Exchange,
    Location,
    Order,
    OrderedCorpus,
    Phase,
    blend_quotas,
    permute_values,
    round_keys,
)
from megastable.data.run_ledgers import Deferral, DeferralRoom, plan_deferral
from megastable.data.shards import ShardInfo
from megastable.data.skips import Selection
from tests.tiers import examples

TWO = [OrderedCorpus("books", 50_001, 0.7), OrderedCorpus("web", 7_000, 0.3)]


def bijection(size: int, seed: int, name: str = "a", number: int = 0) -> list[int]:
    keys = np.array(round_keys(seed, name, number), dtype=np.uint64)[:, None].repeat(size, axis=1)
    return permute_values(np.arange(size), np.full(size, size), keys).tolist()


# The reference: no numpy, one position at a time, nothing cached.


def reference_keys(seed: int, name: str, number: int) -> list[int]:
    material = json.dumps([VERSION, seed, name, number]).encode()
    digest = hashlib.blake2b(material, digest_size=8 * ROUNDS).digest()
    return [int.from_bytes(digest[8 * i : 8 * i + 8], "little") for i in range(ROUNDS)]


def reference_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
    return x ^ x >> 31


def reference_permute(value: int, size: int, keys: list[int]) -> int:
    side = math.isqrt(size - 1) + 1
    while True:
        left, right = divmod(value, side)
        for key in keys:
            left, right = right, (left + reference_mix(right ^ key)) % side
        value = left * side + right
        if value < size:
            return value


def reference_locate(order: Order, position: int) -> Location:
    block, slot = divmod(position, order.block)
    by_name = sorted(range(len(order.corpora)), key=lambda i: order.corpora[i].name)
    slots = [index for index in by_name for _ in range(order.quotas[index])]
    first, second, *_ = reference_keys(order.seed, "", block)
    bits = order.block.bit_length()

    def rank(number: int) -> int:
        hashed = reference_mix(reference_mix(number ^ first) ^ second)
        return (hashed << bits) % 2**64 | number

    shuffled = [slots[number] for number in sorted(range(order.block), key=rank)]
    corpus = shuffled[slot]
    sample = block * order.quotas[corpus] + shuffled[:slot].count(corpus)
    epoch, number = divmod(sample, order.sequences[corpus])
    keys = reference_keys(order.seed, order.corpora[corpus].name, epoch)
    sequence = reference_permute(number, order.sequences[corpus], keys)
    return Location(corpus, epoch, sequence, sequence * order.sequence_length)


@settings(deadline=None)
@given(size=st.integers(1, 5000), seed=st.integers(0, 2**63), number=st.integers(0, 2**40))
def test_permute_is_a_bijection(size: int, seed: int, number: int) -> None:
    assert sorted(bijection(size, seed, number=number)) == list(range(size))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 2**40 + 3, 10**12, 2**61])
def test_permute_is_the_reference_at_any_size(size: int) -> None:
    keys = round_keys(5, "x", 1)
    values = sorted({value % size for value in (0, 1, size // 3, size - 2, size - 1)})
    column = np.array(keys, dtype=np.uint64)[:, None].repeat(len(values), axis=1)
    found = permute_values(np.array(values), np.full(len(values), size), column).tolist()
    assert found == [reference_permute(value, size, list(keys)) for value in values]
    assert len(set(found)) == len(values)


@settings(deadline=None, max_examples=examples(30))
@given(
    seed=st.integers(0, 2**40),
    weights=st.lists(st.floats(0.05, 1), min_size=1, max_size=4),
    sizes=st.lists(st.integers(9, 700), min_size=4, max_size=4),
    positions=st.lists(st.integers(0, 2**61), min_size=1, max_size=5),
)
def test_locate_is_the_reference(
    seed: int, weights: list[float], sizes: list[int], positions: list[int]
) -> None:
    corpora = [OrderedCorpus(f"c{i}", sizes[i], weight) for i, weight in enumerate(weights)]
    order = Order(corpora, 8, seed, block=128)
    found = order.locate_samples(positions)
    for index, position in enumerate(positions):
        expected = reference_locate(order, position)
        assert order.locate_sample(position) == expected
        assert Location(*(int(field[index]) for field in found)) == expected


@pytest.mark.parametrize("corpora", [TWO, TWO[:1]])
def test_locate_gives_every_sequence_of_an_epoch_once(corpora: list[OrderedCorpus]) -> None:
    order = Order(corpora, 10, seed=1)
    places = order.locate_samples(np.arange(60_000))
    for index, sequences in enumerate(order.sequences):
        mine = places.corpus == index
        epochs, visited = places.epoch[mine], places.sequence[mine]
        assert np.all(np.diff(epochs) >= 0)  # no epoch begins before the one before it ended
        assert epochs[-1] >= 3
        for epoch in range(epochs[-1]):
            assert np.array_equal(np.sort(visited[epochs == epoch]), np.arange(sequences))
        assert not np.array_equal(visited[epochs == 0], visited[epochs == 1])
    assert np.array_equal(places.first_token, places.sequence * 10)


@settings(deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1e6), min_size=1, max_size=20), seed=st.integers(0, 99), data=st.data()
)
def test_quotas_are_exact_in_every_block(weights: list[float], seed: int, data: st.DataObject) -> None:
    weights = [max(weight, max(weights) / 200) for weight in weights]
    order = Order([OrderedCorpus(f"c{i}", 1000, weight) for i, weight in enumerate(weights)], 8, seed)
    assert sum(order.quotas) == order.block
    for quota, weight in zip(order.quotas, weights, strict=True):
        assert abs(quota - order.block * weight / sum(weights)) < 1 + 1e-6
    block = data.draw(st.integers(0, 2**40))
    corpus = order.locate_samples(np.arange(block * order.block, (block + 1) * order.block)).corpus
    assert np.bincount(corpus, minlength=len(weights)).tolist() == list(order.quotas)


def test_fingerprint_changes_with_all_that_matters() -> None:
    prints = {
        Order(corpora, length, seed, block).fingerprint(manifests)
        for corpora, length, seed, block, manifests in [
            (TWO, 10, 1, 4096, ["x", "y"]),
            (TWO, 11, 1, 4096, ["x", "y"]),
            (TWO, 10, 2, 4096, ["x", "y"]),
            (TWO, 10, 1, 1024, ["x", "y"]),
            (TWO, 10, 1, 4096, ["x", "z"]),
            ([TWO[0], OrderedCorpus("web", 7000, 0.4)], 10, 1, 4096, ["x", "y"]),
            ([TWO[0], OrderedCorpus("wiki", 7000, 0.3)], 10, 1, 4096, ["x", "y"]),
        ]
    }
    assert len(prints) == 7


GOLDEN = [(0, 0, 1207), (0, 0, 3078), (1, 1, 6), (1, 1, 172), (1, 429254403, 69)]
GOLDEN_FINGERPRINT = "2a7faf151ab93278a35375d7c3f6f68d7a42136a71c3b90790765e0513f289dc"


def test_order_is_the_same_tomorrow() -> None:
    """Checkpoints and skips hold positions: change these numbers only together with `VERSION`."""
    order = Order(TWO, 10, seed=1234)
    assert [tuple(order.locate_sample(position)[:3]) for position in (0, 1, 4095, 4096, 10**12)] == GOLDEN
    assert order.fingerprint(["x", "y"]) == GOLDEN_FINGERPRINT


@pytest.mark.parametrize(
    ("corpora", "message"),
    [
        ([], "needs corpora"),
        ([OrderedCorpus("a", 100, 1), OrderedCorpus("a", 100, 1)], "different"),
        ([OrderedCorpus("", 100, 1)], "non-empty"),
        ([OrderedCorpus("a", 100, 0)], "weight 0"),
        ([OrderedCorpus("a", 100, -1)], "weight -1"),
        ([OrderedCorpus("a", 100, math.nan)], "weight nan"),
        ([OrderedCorpus("a", 100, math.inf)], "weight inf"),
        ([OrderedCorpus("a", 100, 1), OrderedCorpus("b", 100, 1e-5)], "'b' .* rounds to none"),
    ],
)
def test_order_refuses_blends(corpora: list[OrderedCorpus], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Order(corpora, 10, seed=0)


def test_order_refuses_other_things() -> None:
    for length, block in [(0, 4096), (10, 0), (10, 2**16 + 1)]:
        with pytest.raises(ConfigError):
            Order(TWO, length, 0, block)
    for phases in (
        [Phase(1, {"books": 1})],
        [Phase(0, {"books": 1}), Phase(0, {"web": 1})],
        [Phase(0, {"x": 1})],
    ):
        with pytest.raises(ConfigError, match=r"0 first, then ascending|'x', which is not there"):
            Order(TWO, 8, 1, phases=phases)
    for tokens in (0, 10):
        with pytest.raises(DataError, match=f"'a' has {tokens} tokens, a sequence needs 11"):
            Order([OrderedCorpus("a", tokens, 1)], 10, seed=0)
    order = Order(TWO, 10, seed=0)
    for positions in ([-1], [3, 2**62]):
        with pytest.raises(DataError, match="between 0 and 2"):
            order.locate_samples(positions)
    for wrong in ([0.5], [[1]], [True]):
        with pytest.raises(TypeError):
            order.locate_samples(wrong)


# 10^12 tokens: 4 shards of 2.5e11 int32 tokens (4 TB, sparse) and a small second corpus.

SHARDS, SEQUENCE, SEQUENCES = 4, 10**9, 250
MARK = 123_456
OPEN_AND_READ = """
import sys, time
from pathlib import Path
import numpy as np
from megastable.data.manifest import Manifest, Stream
from megastable.data.order import Order, OrderedCorpus
def peak_kilobytes():  # not getrusage: its peak includes that of the process this one was forked from
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
directory, positions = Path(sys.argv[1]), np.load(sys.argv[2])
memory, start = peak_kilobytes(), time.perf_counter()
stream = Stream(directory, Manifest.load_manifest(directory), "train")
order = Order([OrderedCorpus("huge", stream.tokens, 0.9), OrderedCorpus("small", 10**9, 0.1)], 4096, seed=7)
places = order.locate_samples(positions)
marks = [stream.read_tokens(first, 4097)[[0, -1]] for first in places.first_token[places.corpus == 0]]
seconds = time.perf_counter() - start
megabytes = (peak_kilobytes() - memory) / 1024
print(stream.tokens, len(marks), np.unique(marks), seconds, megabytes, sep="\\n")
"""


def test_order_of_a_trillion_tokens_takes_little_memory(tmp_path: Path) -> None:
    size = SEQUENCE * SEQUENCES
    order = Order(
        [OrderedCorpus("huge", SHARDS * size, 0.9), OrderedCorpus("small", 10**9, 0.1)], 4096, seed=7
    )
    positions = np.random.default_rng(0).integers(0, SHARDS * size // 4096, 1000)
    places = order.locate_samples(positions)
    np.save(tmp_path / "positions.npy", positions)
    first = places.first_token[places.corpus == 0]
    marked = np.concatenate([first, first + 4096])
    infos = []
    try:
        for number in range(SHARDS):
            infos.append(sparse_shard(tmp_path / f"part-{number}", marked[marked // size == number] % size))
    except OSError as error:
        pytest.skip(f"no sparse files of 1 TB here: {error}")
    Manifest(
        name="huge",
        tokenizer=TokenizerInfo(file="t", kind="sentencepiece", xxh3="", vocab_size=200_000, eod=0),
        dtype="int32",
        shards=infos,
        splits={
            "train": [Segment(shard=i.name, first_token=0, tokens=i.tokens, documents=10) for i in infos]
        },
    ).save_manifest(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", OPEN_AND_READ, str(tmp_path), str(tmp_path / "positions.npy")],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
    )
    assert done.returncode == 0, done.stderr
    tokens, samples, marks, seconds, megabytes = done.stdout.splitlines()
    assert int(tokens) == 10**12
    assert int(samples) == len(first) > 800
    assert marks == f"[{MARK}]"
    print(f"opened and read in {seconds} s, {megabytes} MB")
    assert float(megabytes) < 200


def sparse_shard(prefix: Path, marked: np.ndarray) -> ShardInfo:
    """250 sequences of 10^9 tokens in 10 documents, all of them 0 but for `marked`."""
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(4 * SEQUENCE * SEQUENCES)
        for token in marked.tolist():
            file.seek(4 * token)
            file.write(np.array([MARK], "<i4").tobytes())
    index = b"MMIDIDX\x00\x00" + np.array([1], "<u8").tobytes() + b"\x04"
    index += np.array([SEQUENCES, 11], "<u8").tobytes() + np.full(SEQUENCES, SEQUENCE, "<i4").tobytes()
    index += (np.arange(SEQUENCES) * 4 * SEQUENCE).astype("<i8").tobytes()
    index += np.arange(0, SEQUENCES + 1, 25, dtype="<i8").tobytes()
    prefix.with_suffix(".idx").write_bytes(index)
    return ShardInfo(
        name=prefix.name,
        dtype="int32",
        tokens=SEQUENCE * SEQUENCES,
        documents=10,
        sequences=SEQUENCES,
        bin_bytes=4 * SEQUENCE * SEQUENCES,
        idx_bytes=len(index),
        bin_xxh3="",
        idx_xxh3="",
    )


# Phases: the blend changes

NAMES = ("a", "b", "c")


@st.composite
def blended_orders(draw: st.DrawFn) -> Order:
    """Up to three corpora and four phases of small blocks, each of some of the corpora."""
    corpora = [OrderedCorpus(name, draw(st.integers(9, 200)), 1.0) for name in NAMES]
    starts = [0, *sorted(draw(st.sets(st.integers(1, 12), max_size=3)))]
    weights = st.dictionaries(st.sampled_from(NAMES), st.floats(0.2, 1), min_size=1)
    phases = [Phase(start, draw(weights)) for start in starts]
    return Order(corpora, draw(st.sampled_from([1, 3, 8])), draw(st.integers(0, 99)), block=8, phases=phases)


@settings(deadline=None, max_examples=examples(60))
@given(order=blended_orders())
def test_phases_go_on_with_the_next_sample_of_a_corpus(order: Order) -> None:
    """Its samples, one after the other, are those of a run on it alone; shares are exact in every block."""
    count = 16 * order.block
    found = order.locate_samples(np.arange(count))
    for index, corpus in enumerate(order.corpora):
        alone = Order([corpus], order.sequence_length, order.seed)
        mine = np.flatnonzero(found.corpus == index)
        expected = alone.locate_samples(np.arange(mine.size))
        for field in ("epoch", "sequence", "first_token"):
            assert getattr(found, field)[mine].tolist() == getattr(expected, field).tolist()
        inside = np.zeros(count, dtype=bool)
        for first, end in order.absent_ranges(index):
            inside[first : min(end, count)] = True
        assert not inside[mine].any()
    starts = [phase.block for phase in order.phases]
    for block in range(16):
        phase = order.phases[sum(start <= block for start in starts) - 1]
        quotas = blend_quotas([OrderedCorpus(n, 9, w) for n, w in phase.weights.items()], order.block)
        part = found.corpus[block * order.block : (block + 1) * order.block]
        counted = {name: int((part == index).sum()) for index, name in enumerate(NAMES)}
        assert {n: q for n, q in counted.items() if q} == {
            n: q for n, q in zip(phase.weights, quotas, strict=True) if q
        }


@settings(deadline=None, max_examples=examples(60))
@given(order=blended_orders(), first=st.integers(0, 100), length=st.integers(0, 60))
def test_positions_of_is_the_way_back_of_locate(order: Order, first: int, length: int) -> None:
    found = order.locate_samples(np.arange(first, first + length))
    for index, sequences in enumerate(order.sequences):
        wanted = np.arange(0, sequences, 2)
        expected = first + np.flatnonzero((found.corpus == index) & np.isin(found.sequence, wanted))
        assert order.positions_of(index, wanted, first, first + length).tolist() == expected.tolist()
    counts = np.bincount(found.corpus, minlength=3)
    before, after = order.samples_before(first), order.samples_before(first + length)
    assert (np.array(after) - before).tolist() == counts.tolist()


def test_positions_of_finds_the_way_back_at_any_size() -> None:
    """10^12 tokens: the permutation and its inverse, for a corpus alone and in a blend."""
    for corpora in (
        [OrderedCorpus("a", 10**12, 1.0)],
        [OrderedCorpus("a", 10**12, 0.3), OrderedCorpus("b", 10**11, 0.7)],
    ):
        order = Order(corpora, 4096, 3)
        positions = np.random.default_rng(0).integers(0, 3 * 10**8, 200)
        found = order.locate_samples(positions)
        for index in range(len(corpora)):
            mine = positions[found.corpus == index]
            back = order.positions_of(index, found.sequence[found.corpus == index], 0, 3 * 10**8)
            assert set(mine.tolist()) <= set(back.tolist())


def test_fingerprint_of_one_phase_is_that_of_before() -> None:
    plain = Order(TWO, 8, 1)
    weights = {c.name: c.weight for c in TWO}
    one = Order(TWO, 8, 1, phases=[Phase(0, weights)])
    assert plain.fingerprint(["x", "y"]) == one.fingerprint(["x", "y"])
    more = Order([*TWO, OrderedCorpus("new", 900, 1)], 8, 1, phases=[Phase(0, weights), Phase(2, {"new": 1})])
    assert (
        more.fingerprint(["x", "y", "z"], 1)
        == plain.fingerprint(["x", "y"])
        != more.fingerprint(["x", "y", "z"])
    )
    later = Order(
        [*TWO, OrderedCorpus("new", 900, 1)], 8, 1, phases=[Phase(0, weights), Phase(3, {"new": 1})]
    )
    assert later.fingerprint(["x", "y", "z"]) != more.fingerprint(["x", "y", "z"])


BLOCK = 64


def order(*sequences: int, phases: tuple[Phase, ...] = (), seed: int = 3) -> Order:
    """Corpora "a", "b", ... of so many sequences of 8 tokens, evenly blended in blocks of 64."""
    corpora = [OrderedCorpus(f"{chr(97 + i)}", 8 * n + 1, 1.0, chr(97 + i)) for i, n in enumerate(sequences)]
    return Order(corpora, 8, seed, BLOCK, phases)


def read(of: Order, positions: Any) -> list[tuple[int, int, int]]:
    """Corpus, epoch and sequence of what stands at some positions."""
    return list(zip(*(field.tolist() for field in of.locate_samples(positions)[:3]), strict=True))


swaps = st.tuples(st.integers(0, 120), st.integers(0, 120), st.integers(1, 20)).map(
    lambda t: (t[0], t[0] + t[2] + t[1], t[2])
)
exchanges = st.lists(
    st.builds(Exchange, st.sampled_from(["a", "b"]), st.lists(swaps, min_size=1, max_size=3).map(tuple)),
    max_size=5,
)


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(exchanges=exchanges)
def test_exchanges_are_a_permutation_and_compose(
    exchanges: list[Exchange],
) -> None:
    plain = order(150, 90)
    one_by_one = plain
    for exchange in exchanges:
        before, after = one_by_one, one_by_one.with_exchanges([exchange])
        index = "ab".index(exchange.corpus)
        slots = np.arange(400)
        held = read(before, before.positions_at(index, slots))
        for first, second, count in exchange.swaps:
            for a, b in zip(range(first, first + count), range(second, second + count), strict=True):
                held[a], held[b] = held[b], held[a]
        assert read(after, after.positions_at(index, slots)) == held
        one_by_one = after
    end = 12 * BLOCK
    assert sorted(read(one_by_one, np.arange(end))) == sorted(read(plain, np.arange(end)))
    assert read(plain.with_exchanges(exchanges), np.arange(end)) == read(one_by_one, np.arange(end))


@settings(deadline=None, max_examples=examples(40))
@given(exchanges=exchanges, first=st.integers(0, 300), length=st.integers(0, 400), data=st.data())
def test_positions_of_finds_exchanged_samples(
    exchanges: list[Exchange], first: int, length: int, data: st.DataObject
) -> None:
    of = order(150, 90).with_exchanges(exchanges)
    corpus = data.draw(st.integers(0, 1))
    wanted = data.draw(st.lists(st.integers(0, of.sequences[corpus] - 1), max_size=8, unique=True))
    every = np.arange(first, first + length)
    expected = [
        p for p, (c, _, s) in zip(every.tolist(), read(of, every), strict=True) if c == corpus and s in wanted
    ]
    assert of.positions_of(corpus, wanted, first, first + length).tolist() == expected


def test_fingerprint_before_a_position_knows_its_exchanges() -> None:
    plain, given = order(150, 90), ["x", "y"]
    place = int(plain.positions_at(0, np.array([40]))[0])
    of = plain.with_exchanges([Exchange("a", ((40, 70, 2),))])
    assert (
        of.fingerprint(given, before=place)
        == plain.fingerprint(given)
        == plain.fingerprint(given, before=place + 1)
    )
    assert of.fingerprint(given, before=place + 1) != plain.fingerprint(given)
    # However it came about: swapped and swapped back is no exchange.
    back = of.with_exchanges([Exchange("a", ((40, 70, 2),))])
    assert back.fingerprint(given) == plain.fingerprint(given)
    # Which sample came there matters, also where it had been exchanged itself.
    other = plain.with_exchanges([Exchange("a", ((70, 100, 2),)), Exchange("a", ((40, 70, 2),))])
    assert other.fingerprint(given, before=place + 1) != of.fingerprint(given, before=place + 1)


# Deferring


def deferred(
    of: Order, positions: list[int], begin: int, near: int, far: int, end: int, **left: Any
) -> tuple[Order, Deferral]:
    found = plan_deferral(of, Selection(of, **left), np.array(positions), DeferralRoom(begin, near, far, end))
    return of.with_exchanges(found.exchanges), found


def test_plan_keeps_the_epoch_where_it_has_room() -> None:
    of = order(200)  # ends before `far`
    after, found = deferred(of, [100, 101], 120, 150, 400, 900)
    assert sorted(found.returns.tolist()) == [198, 199]
    assert sorted(read(after, range(200))) == sorted(read(of, range(200)))
    # It ends right behind the trouble: in the next one, and over both all is read as often.
    after, found = deferred(of, [190, 191], 195, 230, 450, 900)
    assert found.returns.tolist() == [450, 451]
    assert sorted(read(after, range(600))) == sorted(read(of, range(600)))
    # A window across its end is of both.
    _, found = deferred(of, [199, 200, 201], 202, 210, 260, 900)
    assert found.returns.tolist() == [260, 261, 262] or found.returns.tolist() == [262, 260, 261]


@pytest.mark.slow
@settings(deadline=None, max_examples=examples(60))
@given(
    sizes=st.lists(st.integers(40, 300), min_size=1, max_size=3),
    windows=st.lists(st.tuples(st.integers(0, 500), st.integers(1, 30)), min_size=1, max_size=5),
    end=st.integers(300, 900),
    skipped=st.lists(st.tuples(st.integers(0, 900), st.integers(1, 40)), max_size=3),
    room=st.tuples(st.integers(0, 50), st.integers(0, 200)),
)
def test_plan_defers_and_the_same_samples_are_read(
    sizes: list[int],
    windows: list[tuple[int, int]],
    end: int,
    skipped: list[tuple[int, int]],
    room: tuple[int, int],
) -> None:
    """Any number of windows in any order: also those in which deferred samples have come back, and those of before."""
    plain = now = order(*sizes)
    more = [(first, first + count) for first, count in skipped]
    lost = set[int]()
    for first, count in windows:
        before = now
        left = Selection(now, more=[*more, *((p, p + 1) for p in lost)])
        window, begin = left.next_kept(first, count)
        if begin > end:
            continue
        found = plan_deferral(
            now, left, window, DeferralRoom(begin, begin + room[0], begin + room[0] + room[1], end)
        )
        now = now.with_exchanges(found.exchanges)
        lost |= set(found.lost.tolist())
        assert sorted([*found.positions.tolist(), *found.lost.tolist()]) == window.tolist()
        assert (
            not left.mask_skipped(found.returns).any()
            and (found.returns >= begin).all()
            and (found.returns < end).all()
        )
        assert read(now, found.returns) == read(before, found.positions)
        assert read(now, range(first)) == read(before, range(first))  # nothing that was read already
        assert set(found.returns.tolist()) <= set(now.deferred_positions(0, end).tolist())
    kept = np.setdiff1d(np.arange(end), [p for a, b in more for p in range(a, b)])
    if not lost:
        assert sorted(read(now, kept)) == sorted(read(plain, kept))
    assert sorted(read(now, range(end))) == sorted(read(plain, range(end)))
    assert read(now, [LAST_POSITION - 1]) == read(plain, [LAST_POSITION - 1])
