"""Composition of deltas: the laws of the monoid against a slow oracle, and composites of real versions."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit import MemoryBaseline, _kernel, composition
from deltarefit.anchoring import write_anchor
from deltarefit.asof import AsOf
from deltarefit.codec import ADD, SET, XOR, Delta, open_payload
from deltarefit.composition import Change, compose, compose_versions
from deltarefit.errors import BaseMismatch, DigestMismatch, NotFoundError, UsageError
from deltarefit.pieces import Piece
from deltarefit.pruning import prune
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, attempt_key, payload_prefix
from deltarefit.weights import Weights
from tests import helpers as h
from tests import ranks as r

NUMEL = 6
Slow = dict[int, tuple[int, int]]
"""Operation and value by position."""


def slow_after(operation: int, value: int, old: int, bits: int) -> int:
    if operation == SET:
        return value
    return old ^ value if operation == XOR else (old + value) % (1 << bits)


def slow_compose(first: Slow, second: Slow, base: list[int], bits: int) -> Slow:
    """By the meaning alone: what was set is set, all else is the difference that comes out, in the form of the second
    where both have one form, else as ADD."""
    found: Slow = {}
    for position in sorted(first.keys() | second.keys()):
        steps = [change[position] for change in (first, second) if position in change]
        value = base[position]
        for operation, operand in steps:
            value = slow_after(operation, operand, value, bits)
        kinds = {operation for operation, _ in steps}
        if SET in kinds:
            found[position] = (SET, value)
        elif value != base[position]:
            form = kinds.pop() if len(kinds) == 1 else ADD
            old = base[position]
            found[position] = (form, value ^ old if form == XOR else (value - old) % (1 << bits))
    return found


def fast(slow: Slow, width: int) -> Change:
    items = sorted(slow.items())
    return Change(
        np.array([position for position, _ in items], "u8"),
        np.array([operation for _, (operation, _) in items], "u1"),
        np.array([value for _, (_, value) in items], f"<u{width}"),
    )


def plain(change: Change) -> Slow:
    assert (np.diff(change.positions.astype("i8")) > 0).all()
    return {
        int(position): (int(operation), int(value))
        for position, operation, value in zip(change.positions, change.operations, change.values, strict=True)
    }


@st.composite
def worlds(
    draw: st.DrawFn, changes: int, kinds: tuple[int, ...] = (XOR, ADD, SET)
) -> tuple[int, list[int], list[Slow]]:
    """An element width, base bits, and changes without identities; few values, so that they often meet and cancel."""
    width = draw(st.sampled_from([1, 2, 4, 8]))
    most = (1 << 8 * width) - 1
    values = st.sampled_from([0, 1, 2, 3, most, most - 1, 1 << (8 * width - 1)])
    operations = st.sampled_from(kinds)
    one = st.dictionaries(st.integers(0, NUMEL - 1), st.tuples(operations, values))
    drawn = [
        {at: step for at, step in draw(one).items() if step[0] == SET or step[1]} for _ in range(changes)
    ]  # fmt: skip
    return width, draw(st.lists(values, min_size=NUMEL, max_size=NUMEL)), drawn


@settings(max_examples=400, deadline=None)
@given(worlds(2))
def test_composition_means_one_after_the_other(world: tuple[int, list[int], list[Slow]]) -> None:
    width, base, (first, second) = world
    bits = np.array(base, f"<u{width}")
    found = compose(fast(first, width), fast(second, width), bits)
    assert plain(found) == slow_compose(first, second, base, 8 * width)
    array, once = bits.copy(), bits.copy()
    for change in (first, second):
        fast(change, width).apply(array)
    found.apply(once)
    assert once.tolist() == array.tolist()
    assert found.values.dtype == bits.dtype


@settings(max_examples=300, deadline=None)
@given(worlds(3))
def test_composition_is_associative(world: tuple[int, list[int], list[Slow]]) -> None:
    width, base, slow = world
    first, second, third = (fast(change, width) for change in slow)
    bits = np.array(base, f"<u{width}")
    middle = bits.copy()
    first.apply(middle)
    left = compose(compose(first, second, bits), third, bits)
    right = compose(first, compose(second, third, middle), bits)
    mine, other = bits.copy(), bits.copy()
    left.apply(mine)
    right.apply(other)
    assert mine.tolist() == other.tolist()
    assert plain(left).keys() == plain(right).keys()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([(XOR,), (ADD,), (SET,), (XOR, SET), (ADD, SET)]).flatmap(lambda kinds: worlds(3, kinds)))
def test_without_a_mix_no_base_is_needed_and_the_law_is_exact(world: tuple[int, list[int], list[Slow]]) -> None:
    width, _, slow = world
    first, second, third = (fast(change, width) for change in slow)
    left, right = compose(compose(first, second), third), compose(first, compose(second, third))
    assert plain(left) == plain(right)
    nothing = Change.nothing(width)
    assert plain(compose(nothing, first)) == plain(compose(first, nothing)) == plain(first)


@settings(max_examples=200, deadline=None)
@given(worlds(1, (XOR, ADD)))
def test_what_undoes_itself_is_nothing(world: tuple[int, list[int], list[Slow]]) -> None:
    width, _, (slow,) = world
    bits = 8 * width
    back = {at: (op, value if op == XOR else -value % (1 << bits)) for at, (op, value) in slow.items()}
    assert plain(compose(fast(slow, width), fast(back, width))) == {}


@pytest.mark.parametrize(("first", "second"), [(XOR, ADD), (ADD, XOR)])
def test_differences_of_two_kinds_need_the_base(first: int, second: int) -> None:
    one, two = fast({3: (first, 5)}, 2), fast({3: (second, 9)}, 2)
    with pytest.raises(UsageError, match="known bits"):
        compose(one, two)
    with pytest.raises(UsageError, match="different tensors"):
        compose(one, fast({3: (first, 5)}, 4))
    assert plain(compose(one, fast({2: (second, 9)}, 2))) == {2: (second, 9), 3: (first, 5)}
    assert plain(compose(fast({3: (SET, 1)}, 2), compose(one, fast({3: (SET, 2)}, 2)))) == {3: (SET, 2)}


@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize("operation", [XOR, ADD, SET])
@pytest.mark.parametrize("rows", [(0, 0, 0, 0), (3, 4, 2, 17)], ids=["flat", "rows"])
def test_deltas_decode_to_their_meaning(width: int, operation: int, rows: tuple[int, int, int, int]) -> None:
    rng = np.random.default_rng(width)
    piece = Piece(0, 3, 40, 4, 2, 17) if rows[1] else Piece(0, 5, 40, 40)
    where = np.array([piece.position(p) for p in range(40)])
    old = (
        rng.integers(0, 1 << 8 * width, 200, f"u{width}", endpoint=False)
        if width < 8
        else rng.integers(0, 1 << 63, 200, "u8")
    )
    new = old.copy()
    new[where[::3]] += np.array(7, old.dtype)
    made = _kernel.encode(old[where], new[where], piece.origin, 9, operation=operation, rows=rows)
    assert made is not None
    delta = Delta(0, made[0], tuple(data for _, data in made[1]))
    change = Change.of([delta])
    assert sorted(plain(change)) == sorted(where[::3].tolist())
    assert set(change.operations.tolist()) == {operation}
    change.apply(old)
    assert old.tolist() == new.tolist()


# ------------------------------------------------------------------------------------------ versions


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    kinds = ("some", "nudge", "back", "nothing", "block", "nudge", "few", "all", "back", "nudge")
    return h.publish_chain(np.random.default_rng(20261203), kinds)


def led(chain: h.Chain, base: int, payloads: object) -> list[bytes]:
    """The bits of ``base`` with composed payloads written over them, each guarded as a receiver would."""
    log, target = RunLog.open(chain.store), MemoryBaseline()
    assert h.followed(AsOf(log, base), target) == base
    with ThreadPoolExecutor(1) as pool:
        weights = Weights(target, log.run, log.catalog, pool)
        for data, ref in payloads:  # type: ignore[attr-defined]
            deltas = open_payload(data, ref, log.catalog)
            assert weights.sums(deltas) == ref.pre
            weights.apply(deltas)
            assert weights.sums(deltas) == ref.post
    return h.bits(target)


@pytest.mark.parametrize(("base", "version"), [(1, 2), (1, 3), (3, 8), (7, 11), (1, 11), (4, 5)])
def test_a_composite_leads_where_its_parts_lead(chain: h.Chain, base: int, version: int) -> None:
    log = RunLog.open(chain.store)
    made = compose_versions(log, base, version, threads=1, payload_bytes=700)
    assert led(chain, base, made.payloads) == chain.history[version]
    assert (made.base, made.version, made.parts) == (base, version, version - base)
    assert made.nbytes == sum(len(data) for data, _ in made.payloads)
    assert made.parts_bytes == sum(ref.size for n in range(base + 1, version + 1) for ref in log.attempt(n).payloads)


def test_what_came_back_is_not_in_a_composite() -> None:
    rng = np.random.default_rng(3)
    model = h.random_model(rng, h.SMALL)
    source, store = h.ArraySource(model, h.SMALL), h.new_store()
    for flips in (0, 1, 1):
        model["a.weight"][7] ^= np.uint16(0x0101 * flips)
        h.published(store, source)
    assert compose_versions(RunLog.open(store), 1, 3).payloads == ()
    assert len(compose_versions(RunLog.open(store), 1, 2).payloads) == 1


@pytest.mark.parametrize("seed", range(4))
def test_pieces_of_several_producers_compose(seed: int) -> None:
    """Columns and interleaved halves on the wire, overwrites among them; flat in the composite."""
    rng = np.random.default_rng(seed)
    model, store = h.random_model(rng), h.new_store()
    catalog = h.catalog_of(model)
    chain = h.Chain(store, h.ArraySource(model))
    for number in range(1, 5):
        if number > 1:
            h.step(rng, model, str(rng.choice(h.STEPS)))
        dealt = r.cut(rng, catalog, int(rng.integers(1, 4)))
        trainer = r.Trainer(store, model, catalog, dealt, payload_bytes=400)
        trainer.publish(step=number)
        trainer.close()
        chain.history[number] = h.bytes_of(model)
    made = compose_versions(RunLog.open(store), 1, 4, threads=1, payload_bytes=900)
    assert led(chain, 1, made.payloads) == chain.history[4]


def overwriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on every other tensor is published as absolute values, as residual ones are."""
    from deltarefit import codec

    real: Callable[..., object] = codec._kernel.encode

    def encode(old: object, new: object, start: int, key: int, **options: object) -> object:
        if options.get("operation") == -1 and key % 2:
            options["operation"] = SET
        return real(old, new, start, key, **options)

    monkeypatch.setattr(codec._kernel, "encode", encode)


@pytest.mark.parametrize("seed", range(3))
def test_absolute_values_stay_absolute(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(seed)
    with monkeypatch.context() as patch:
        overwriting(patch)
        chain = h.publish_chain(rng, ("some", "nudge", "back"))
    h.step(rng, chain.source.model, "nudge")
    version = h.published(chain.store, chain.source)
    chain.history[version] = h.bytes_of(chain.source.model)
    made = compose_versions(RunLog.open(chain.store), 1, version, threads=1, payload_bytes=700)
    assert led(chain, 1, made.payloads) == chain.history[version]
    assert {ref.overwrites for _, ref in made.payloads} == {True, False}
    log = RunLog.open(chain.store)
    sets = [delta for data, ref in made.payloads if ref.overwrites for delta in open_payload(data, ref, log.catalog)]
    assert {delta.operation for delta in sets} == {SET}


def test_what_is_no_chain_is_not_composed(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    for base, version in ((3, 3), (5, 3), (0, 3)):
        with pytest.raises(BaseMismatch, match="does not follow"):
            compose_versions(log, base, version)
    with pytest.raises(NotFoundError):
        compose_versions(log, 3, 40)
    store = h.copy_store(chain.store)
    for _ in range(2):
        write_anchor(store, MemoryBaseline())
        h.published(store, chain.source)
    assert prune(store, keep_anchors=1, grace_s=0).floor
    with pytest.raises(NotFoundError, match="pruned"):
        compose_versions(RunLog.open(store), 3, 6)


def test_a_composite_that_does_not_lead_there_is_not_given_out(chain: h.Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RunLog.open(chain.store)
    real = compose
    with monkeypatch.context() as patch:
        patch.setattr("deltarefit.composition.compose", lambda first, second, base: second)
        with pytest.raises(DigestMismatch):
            compose_versions(log, 1, 4)
    with monkeypatch.context() as patch:
        swapped = lambda first, second, base: real(second, first, base) if first.positions.size else second  # noqa: E731
        patch.setattr("deltarefit.composition.compose", swapped)
        patch.setattr("deltarefit.composition.Change.apply", lambda self, array: None)
        with pytest.raises(DigestMismatch):
            compose_versions(log, 1, 4)


def test_a_composite_is_proven_from_its_base_to_its_end(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    made = compose_versions(log, 2, 4, threads=1)
    commits = [log.version(3), log.version(4)]
    last = commits[1].outcome
    assert last is not None
    elsewhere = replace(commits[1], outcome=replace(last, digest=Digest(1, 1)))
    cases = [(3, commits, "start from its base"), (2, [commits[0], elsewhere], "lead to version 4")]
    cases += [(2, commits[1:], "telescope")]
    with ThreadPoolExecutor(1) as pool:
        for base, parts, says in cases:
            bits = MemoryBaseline()
            h.followed(AsOf(log, base), bits)
            with pytest.raises(DigestMismatch, match=says):
                composition._prove(log, bits, parts, made.payloads, pool)


def test_a_change_is_in_order_whatever_the_order_of_its_deltas() -> None:
    """Pieces that interleave."""
    old = np.arange(40, dtype="u2")
    deltas = []
    for offset in (1, 0):
        piece = Piece(0, offset, 20, 1, 1, 2)
        made = _kernel.encode(old[offset::2], old[offset::2] + np.uint16(1), piece.origin, 9, rows=piece.rows)
        assert made is not None
        deltas.append(Delta(0, made[0], tuple(data for _, data in made[1])))
    change = Change.of(deltas)
    assert change.positions.tolist() == list(range(40))
    change.apply(old)
    assert old.tolist() == list(range(1, 41))


def test_a_part_that_is_lost_is_told(chain: h.Chain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.0)
    store = h.copy_store(chain.store)
    ref = RunLog.open(store).attempt(3).payloads[0]
    store.delete(payload_prefix(3) + ref.sha256)
    with pytest.raises(NotFoundError):
        compose_versions(RunLog.open(store), 1, 4)
    assert attempt_key(3, "pl/") == payload_prefix(3)
