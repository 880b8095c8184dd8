"""Burn-ins: answers that are exact, faults that are planted and found, and nothing else found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megastable.cluster.burn_in import (
    device_rounds,
    draws,
    exact_cases,
    memory_patterns,
    repeat_cases,
    sum_exchange,
    trials,
)
from megastable.cluster.burn_in.bits import as_bits, mismatch
from megastable.cluster.burn_in.exact_cases import ACCUMULATED, EXACT, LARGEST, AttentionShape, MatmulShape
from megastable.cluster.burn_in.faults import AGAIN, BurnInFault, DeviceBurnIn
from megastable.cluster.burn_in.memory_patterns import NAMES, Memory, Pattern, pattern_of
from tests.distributed import run_ranks
from tests.tiers import examples

CPU = torch.device("cpu")
SMALL = 1 << 12  # words of memory
numbers = st.integers(0, 10**6)
dtypes = st.sampled_from(exact_cases.DTYPES)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(memory_patterns.CHUNK, "cpu", SMALL)
    monkeypatch.setattr(memory_patterns, "OF_CPU", 3 * SMALL * 8)
    monkeypatch.setitem(device_rounds.SLICE, "cpu", 0.0)
    monkeypatch.setitem(device_rounds.CASE, "cpu", 0.0)


def one_round(seed: int = 1, number: int = 0) -> DeviceBurnIn:
    *_, last = device_rounds.rounds(CPU, seed, 0.0, number)
    return last


def flipped(x: torch.Tensor, index: tuple[int, ...], bit: int) -> torch.Tensor:
    bits = as_bits(x).clone()
    bits[index] ^= 1 << bit
    return bits.view(x.dtype).view(x.shape)


def damaged(function: Callable[..., Any], damage: Callable[[Any], Any], calls: set[int] | None) -> Any:
    """`function` with `damage` done to its result, in some calls only, counted from 0."""
    count = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        result = function(*args, **kwargs)
        return damage(result) if calls is None or count - 1 in calls else result

    return wrapped


def only_fault(state: DeviceBurnIn, test: str) -> BurnInFault:
    assert state.failed == {test: 1} and state.rounds == 1 and not state.ended, state
    (fault,) = state.faults
    return fault


# The answers are exact


@given(numbers, numbers, st.sampled_from(["cuda", "cpu"]))
def test_sums_of_products_stay_where_they_are_exact(seed: int, number: int, kind: str) -> None:
    shape = exact_cases.matmul_shape(kind, seed, number % 7, number)
    most = shape.terms * shape.a_most * shape.b_most
    assert most <= (EXACT if shape.terms < shape.k else ACCUMULATED)[shape.dtype]
    assert max(shape.a_most, shape.b_most) <= LARGEST[shape.dtype] and min(shape.a_most, shape.b_most) >= 1
    low, high, step = exact_cases.SIDES[kind]
    assert all(low <= side <= high and side % step == 0 for side in (shape.n, shape.k, shape.m))
    for dtype, largest in LARGEST.items():  # what is drawn is exact
        assert torch.tensor([largest - 1, largest]).to(dtype).tolist() == [largest - 1, largest]


def inputs_of(case: exact_cases.KnownCase, monkeypatch: pytest.MonkeyPatch, name: str) -> tuple[Any, ...]:
    got = list[Any]()
    monkeypatch.setattr(exact_cases, name, lambda *args: got.append(args) or (args[0],))
    case.setup(CPU)()
    monkeypatch.undo()
    return tuple(got[0])


@given(numbers, numbers, st.integers(1, 150), st.integers(1, 150), st.integers(1, 150), dtypes, st.booleans())
@settings(max_examples=examples(60))
def test_matrix_products_are_those_of_integers(
    seed: int, number: int, n: int, k: int, m: int, dtype: torch.dtype, narrow: bool
) -> None:
    drawn = exact_cases.matmul_shape("cpu", seed, number, 0)
    limit = (EXACT if narrow else ACCUMULATED)[dtype]
    terms = min(k, limit) if narrow else k
    most = min(limit // terms, LARGEST[dtype]) if not narrow else 1
    shape = MatmulShape(n, k, m, dtype, terms, most, 1, drawn.a_turned, drawn.b_turned)
    case = exact_cases.matmul_of(shape, seed)
    with pytest.MonkeyPatch.context() as patch:
        a, b, _ = inputs_of(case, patch, "product")
    assert a.shape == (n, k) and b.shape == (k, m) and a.dtype == b.dtype == dtype
    whole = a.double().numpy().astype(np.int64) @ b.double().numpy().astype(np.int64)
    assert torch.equal(as_bits(case.answers[0]), as_bits(torch.from_numpy(whole).double().to(dtype)))
    assert (a.double().abs() @ b.double().abs()).max() <= limit
    if narrow or dtype == torch.float32:  # in any order, in the dtype itself
        total = torch.zeros(n, m, dtype=dtype)
        for at in draws.permutation(seed, k).tolist():
            total += a[:, at, None] * b[None, at]
        assert mismatch(case.answers[0], total) is None
    else:  # in any order in fp32, rounded once
        total = torch.zeros(n, m)
        for at in draws.permutation(seed, k).tolist():
            total += a[:, at, None].float() * b[None, at].float()
        assert mismatch(case.answers[0], total.to(dtype)) is None


@given(numbers, st.integers(1, 3), st.integers(1, 256), st.sampled_from([32, 64, 128]), dtypes, st.booleans())
@settings(max_examples=examples(40))
def test_attention_is_that_of_its_definition(
    seed: int, heads: int, length: int, head: int, dtype: torch.dtype, causal: bool
) -> None:
    case = exact_cases.attention_of(AttentionShape(1, heads, length, head, dtype, causal), seed)
    with pytest.MonkeyPatch.context() as patch:
        q, k, v, slope, _ = (
            x.double() if isinstance(x, torch.Tensor) else x for x in inputs_of(case, patch, "attention")
        )
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    scores = q @ k.transpose(2, 3)
    if causal:
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
    highest = scores.topk(min(2, length), -1).values
    assert (highest[..., 0] == 0).all() and (highest[..., 1:] <= -128).all()
    output = (scores.float().softmax(-1)).double() @ v
    assert output.dtype == torch.float64
    wanted = (output, *torch.autograd.grad(output, (q, k, v), slope))
    for answer, right in zip(case.answers, wanted):
        assert mismatch(answer, right.detach().to(dtype) + 0.0) is None
    assert (case.answers[3].double() == wanted[3]).all()  # not even rounded


@given(numbers, numbers, st.integers(2, 16), st.sampled_from(["cuda", "cpu"]))
@settings(max_examples=examples(20))
def test_sums_over_ranks_are_exact_in_any_order(seed: int, number: int, ranks: int, kind: str) -> None:
    dtype, count, parts = sum_exchange.contributions(kind, seed, number, ranks)
    assert parts.shape[0] == ranks and count > 0 and (parts != 0).all()
    assert parts.abs().sum(0).max() <= EXACT.get(dtype, 2**31 - 1)
    total = torch.zeros(parts.shape[1], dtype=dtype)
    for rank in draws.permutation(seed, ranks).tolist():
        total += parts[rank].to(dtype)
    assert np.array_equal(total.double().numpy(), parts.numpy().astype(np.int64).sum(0).astype(np.float64))


@given(numbers, st.integers(0, 100), st.integers(0, 2**33), st.integers(1, 300))
def test_patterns_are_functions_of_the_address(seed: int, number: int, start: int, count: int) -> None:
    pattern = pattern_of(seed, number)
    words = pattern.words(start, count, CPU)
    assert torch.equal(pattern.words(start + count // 2, count - count // 2, CPU), words[count // 2 :])
    opposite = Pattern(pattern.name, not pattern.inverted, pattern.key)
    assert torch.equal(opposite.words(start, count, CPU), ~words)
    value = [int(word) % 2**64 for word in (~words if pattern.inverted else words)]
    if pattern.name == "walking ones":
        assert all(one.bit_count() == 1 for one in value) and len(set(value)) == min(count, 64)
    elif pattern.name == "addresses":
        assert value == list(range(start, start + count))
    elif pattern.name == "random":
        assert len(set(value)) == count
    else:
        assert set(value) == {0 if pattern.name == "zeros" else 0x5555555555555555}


def test_inputs_depend_on_seed_round_and_case_and_on_nothing_else() -> None:
    for make in (exact_cases.matmul_case, exact_cases.attention_case):
        one, same = (make("cpu", 3, 4, 5).answers[0] for _ in range(2))
        assert mismatch(one, same) is None
        others = [make("cpu", *of).answers[0] for of in ((4, 4, 5), (3, 7, 5), (3, 4, 8))]
        assert all(one.shape != other.shape or not torch.equal(one, other) for other in others)


@given(st.integers(2, 5), st.integers(2, 5), st.data())
def test_mismatches_are_counted_and_placed(n: int, m: int, data: st.DataObject) -> None:
    right = draws.floats(1, (n, m), -1, 1)
    places = data.draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, m - 1)), max_size=4))
    got = right
    for at in places:
        got = flipped(got, at, 3)
    found = mismatch(right, got)
    if not places:
        assert found is None
        return
    assert found is not None and (found.wrong, found.of, found.xor) == (len(places), n * m, "0x00000008")
    assert found.index == min(places)
    assert int(found.expected, 16) ^ int(found.got, 16) == 8
    common = tuple(next(iter(s)) if len(s) == 1 else None for s in map(set, zip(*places)))
    assert found.common == common


# A sound device


@pytest.mark.parametrize("number", range(2 * len(NAMES)))
def test_nothing_is_found_where_nothing_is_wrong(number: int) -> None:
    state = one_round(seed=11, number=number)
    assert state.failed == {} and state.faults == [] and state.rounds == 1 and state.memory == 3 * SMALL * 8
    assert state.runs.keys() == {"memory", *device_rounds.TESTS}


# Planted faults


def test_a_bit_of_a_product_that_flips_once(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = damaged(exact_cases.product, lambda c: flipped(c, (5, 7), 9), {1})
    monkeypatch.setattr(exact_cases, "product", bad)
    # The block multiplies, too, but later.
    fault = only_fault(one_round(seed=5, number=2), "matmul")
    assert (fault.wrong, fault.index, fault.kind) == (1, (5, 7), "transient")
    assert int(fault.xor, 16) == 1 << 9 == int(fault.expected, 16) ^ int(fault.got, 16)
    shape = exact_cases.matmul_shape("cpu", 5, fault.round, fault.case)
    assert (fault.round, fault.case) == (2, 0) and fault.of == shape.n * shape.m and fault.what == shape.what


def test_a_bit_of_a_product_that_is_always_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = damaged(exact_cases.product, lambda c: flipped(c, (3, 4), 0) if c.shape[0] != 3 else c, None)
    monkeypatch.setattr(exact_cases, "product", bad)
    state = one_round(seed=6)
    # What is wrong always is the same always: only known answers tell.
    fault = only_fault(state, "matmul")
    assert (fault.wrong, fault.index, fault.kind, fault.again) == (1, (3, 4), "persistent", AGAIN)
    assert int(fault.xor, 16) == 1 and state.runs["matmul"] == 1


def test_a_column_of_products_that_is_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeroed(c: torch.Tensor) -> torch.Tensor:
        return c.index_fill(1, torch.tensor([6]), 0)

    monkeypatch.setattr(exact_cases, "product", damaged(exact_cases.product, zeroed, None))
    fault = only_fault(one_round(), "matmul")
    assert fault.kind == "persistent" and fault.common == (None, 6) and fault.wrong > 1
    assert int(fault.got, 16) == 0 and int(fault.expected, 16) != 0


def test_a_fault_that_comes_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    bad = damaged(exact_cases.product, lambda c: flipped(c, (0, 0), 1), {0, 2})
    monkeypatch.setattr(exact_cases, "product", bad)
    fault = only_fault(one_round(), "matmul")
    assert (fault.again, fault.kind) == (1, "intermittent")


@pytest.mark.parametrize("part", range(4))
@pytest.mark.parametrize(("calls", "kind"), [({1}, "transient"), (None, "persistent")])
def test_attention_forward_and_backward(
    part: int, calls: set[int] | None, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bad(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return tuple(flipped(x, (0, 1, 8, 2), 11) if n == part else x for n, x in enumerate(results))

    monkeypatch.setattr(exact_cases, "attention", damaged(exact_cases.attention, bad, calls))
    fault = only_fault(one_round(), "attention")
    assert (fault.wrong, fault.index, fault.kind) == (1, (0, 1, 8, 2), kind)
    assert int(fault.xor, 16) == 1 << 11


@pytest.mark.parametrize("call", [0, 1])
def test_a_low_bit_of_a_function_is_found_by_repetition(call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first result, or a later one: of three the one that differs is the wrong one."""
    bad = damaged(repeat_cases.elementwise, lambda x: flipped(x, (100,), 0), {call})
    right = damaged(repeat_cases.elementwise, lambda x: x, None)
    monkeypatch.setattr(repeat_cases, "elementwise", bad)
    fault = only_fault(one_round(), "elementwise")
    assert (fault.wrong, fault.index, fault.kind, int(fault.xor, 16)) == (1, (100,), "transient", 1)
    monkeypatch.setattr(repeat_cases, "elementwise", right)
    (result,) = repeat_cases.elementwise_case("cpu", 1, 0, 0).setup(CPU)()
    assert int(fault.expected, 16) == int(as_bits(result)[100]) % (1 << 8 * result.element_size())


def test_a_function_that_is_always_wrong_is_found_by_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(n for n in range(99) if "float32" in repeat_cases.elementwise_case("cpu", 1, n, 0).what)
    bad = damaged(repeat_cases.elementwise, lambda x: flipped(x, (9,), 22), None)
    monkeypatch.setattr(repeat_cases, "elementwise", bad)
    fault = only_fault(one_round(number=number), "elementwise")
    assert (fault.wrong, fault.index, fault.kind) == (1, (9,), "persistent")
    assert int(fault.xor, 16) >> 22


@pytest.mark.parametrize("part", range(4))
def test_a_block_that_does_not_repeat_itself(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def bad(results: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        at = [0] * results[part].ndim
        return tuple(flipped(x, tuple(at), 0) if n == part else x for n, x in enumerate(results))

    monkeypatch.setattr(repeat_cases, "block", damaged(repeat_cases.block, bad, {1}))
    fault = only_fault(one_round(), "repeat")
    assert (fault.wrong, set(fault.index), fault.kind, int(fault.xor, 16)) == (1, {0}, "transient", 1)


def test_a_comparison_that_is_wrong_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "same_bits", damaged(trials.same_bits, lambda same: False, {0}))
    fault = only_fault(one_round(), "matmul")
    assert (fault.wrong, fault.expected, fault.kind) == (0, "", "transient")


# Memory


@pytest.mark.parametrize("number", range(2 * len(NAMES)))
def test_a_bit_of_memory_that_sticks(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is seen with every pattern that has another bit there."""
    word, chunk, write = 77, 1, memory_patterns.write

    def stuck(to: torch.Tensor, pattern: Pattern, start: int) -> None:
        write(to, pattern, start)
        if start == chunk * SMALL:
            to[word] |= 1 << 7

    monkeypatch.setattr(memory_patterns, "write", stuck)
    address = chunk * SMALL + word
    right = int(pattern_of(1, number).words(address, 1, CPU)[0]) % 2**64
    state = one_round(number=number)
    if right >> 7 & 1:
        assert state.failed == {}
        return
    fault = only_fault(state, "memory")
    assert (fault.wrong, fault.of, fault.index) == (1, 3 * SMALL, (address,))
    assert (fault.kind, int(fault.xor, 16), int(fault.expected, 16)) == ("persistent", 1 << 7, right)


def test_bits_that_flip_while_other_tests_run() -> None:
    memory = Memory.taken(CPU)
    pattern = pattern_of(1, 4)
    memory.fill(pattern)
    memory.chunks[0][3] ^= 1 << 40
    memory.chunks[2][5] ^= 1 << 2
    trial = memory.trial(pattern)
    found = trial.mismatch
    assert found is not None and (found.wrong, found.index, trial.again) == (2, (3,), 0)
    assert int(found.xor, 16) == 1 << 40 | 1 << 2
    assert int(found.got, 16) ^ int(found.expected, 16) == 1 << 40


def test_an_address_line_that_sticks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Word 64 + n is the same cell as word n: constant patterns cannot tell."""
    write = memory_patterns.write

    def folded(to: torch.Tensor, pattern: Pattern, start: int) -> None:
        write(to, pattern, start)
        to[:64] = to[64:128]

    monkeypatch.setattr(memory_patterns, "write", folded)
    fault = only_fault(one_round(number=NAMES.index("addresses")), "memory")
    assert (fault.wrong, int(fault.xor, 16), fault.kind) == (3 * 64, 64, "persistent")
    assert one_round(number=NAMES.index("zeros")).failed == {}


def test_what_the_device_does_not_see_the_cpu_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose integers are wrong makes and compares the same wrong pattern, which it has for whole chunks."""
    monkeypatch.setattr(memory_patterns, "AUDITED", 100)
    real = Pattern.words

    def wrong(self: Pattern, start: int, count: int, device: torch.device) -> torch.Tensor:
        words = real(self, start, count, device)
        return words ^ 1 if count == SMALL else words

    monkeypatch.setattr(Pattern, "words", wrong)
    fault = only_fault(one_round(number=4), "memory")
    assert (fault.wrong, int(fault.xor, 16), fault.kind) == (100, 1, "persistent")


# All-reduces


def _exchange(calls: set[int] | None, bad_rank: int) -> list[tuple[int, DeviceBurnIn]]:
    import torch.distributed as dist

    if dist.get_rank() == bad_rank:
        sum_exchange.all_reduced = damaged(  # type: ignore[assignment]
            sum_exchange.all_reduced, lambda x: flipped(x, (321,), 4), calls
        )
    *_, last = sum_exchange.exchanges(CPU, 9, 0.0)
    return [(dist.get_rank(), last)]


@pytest.mark.parametrize(("calls", "kind", "failed"), [({2}, "transient", 1), (None, "persistent", 4)])
def test_a_message_that_is_changed(calls: set[int] | None, kind: str, failed: int) -> None:
    (_, sound), (_, bad) = (found for (found,) in run_ranks(2, _exchange, calls, 1))
    assert sound.failed == {} and sound.faults == [] and sound.runs == {"all_reduce": 4}
    assert bad.failed == {"all_reduce": failed} and len(bad.faults) == failed
    fault = bad.faults[0]
    assert (fault.wrong, fault.index, fault.kind, int(fault.xor, 16)) == (1, (321,), kind, 1 << 4)
    assert fault.round == (2 if calls else 0)
