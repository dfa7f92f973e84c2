"""The publisher's behaviour on real stores: its report, refusals, failures, restarts with every kind of baseline."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Published, Publisher, open_store
from deltarefit.elements import Elements
from deltarefit.errors import (
    AlreadyExistsError,
    BaseMismatch,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.manifest import Anchor, Decision
from deltarefit.ports import Store
from deltarefit.runlog import RunLog, attempt_key
from deltarefit.stores.wrappers import Faulty
from tests import helpers as h
from tests import killing as k


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return h.new_store() if request.param == "memory" else open_store(str(tmp_path / "store"))


# ------------------------------------------------------------------------------------------ one publisher


def test_reports_what_it_did(store: Store, rng: np.random.Generator) -> None:
    source = h.ArraySource(h.random_model(rng))
    numel, dense = source.catalog.numel, source.catalog.dense_bytes
    with contextlib.closing(Publisher(store, source, threads=2, payload_bytes=500)) as publisher:
        first = publisher.publish(step=40)
        before = h.copy_of(source.model)
        h.step(rng, source.model, "some")
        changed = sum(int((source.model[name] != before[name]).sum()) for name in before)
        second = publisher.publish(step=41)
        third = publisher.publish(step=41)
    assert (first.version, first.base, first.step, first.changed, first.anchor) == (1, 0, 40, numel, 1)
    assert (second.version, second.base, second.step, second.changed, second.anchor) == (2, 1, 41, changed, 1)
    assert (third.version, third.base, third.changed, third.density) == (3, 2, 0, 0.0)
    assert second.digest == third.digest != first.digest
    assert [p.numel for p in (first, second, third)] == [numel] * 3
    assert first.wire_bytes > dense > second.wire_bytes > third.wire_bytes > 0
    assert second.wire_bytes == stored_bytes(store, 2)
    assert second.density == changed / numel
    assert {"encode", "hint", "baseline", "total"} <= set(second.seconds)


@pytest.mark.parametrize("kind", h.STEPS)
def test_changed_counts_the_elements_that_differ(kind: str) -> None:
    """Not those that a delta lists: one that lists everything holds some that did not change."""
    rng = np.random.default_rng(22)
    source = h.ArraySource(h.random_model(rng))
    with contextlib.closing(Publisher(h.new_store(), source, threads=1)) as publisher:
        publisher.publish()
        before = h.copy_of(source.model)
        h.step(rng, source.model, kind, h.random_model(rng))
        changed = sum(int((source.model[name] != before[name]).sum()) for name in before)
        assert publisher.publish().changed == changed


def stored_bytes(store: Store, attempt: int) -> int:
    """What an attempt takes in the store."""
    return sum(size for _, size in store.list(attempt_key(attempt, "")))


def test_a_numpy_step_is_a_number_and_others_are_refused(rng: np.random.Generator) -> None:
    source = h.ArraySource(h.random_model(rng, h.SMALL), h.SMALL)
    store = h.new_store()
    with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
        for number, good in enumerate((0, np.int64(7), 2**64 - 1), 1):
            assert publisher.publish(good).version == number
        bad_steps: tuple[Any, ...] = (-1, 1.5, 2**64, "4")
        for bad in bad_steps:
            with pytest.raises(UsageError, match="step"):
                publisher.publish(bad)
        assert publisher.publish(8).version == 4, "a refused step left something in the log"
    assert h.received(store) == h.bytes_of(source.model)


def test_back_to_older_weights(store: Store, rng: np.random.Generator) -> None:
    """F3: a trainer that restarts from an old checkpoint publishes forward, to a new version with older content."""
    source = h.ArraySource(h.random_model(rng))
    old = h.copy_of(source.model)
    with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
        publisher.publish()
        h.step(rng, source.model, "many")
        publisher.publish()
        for name, array in old.items():
            source.model[name][...] = array
        assert publisher.publish().version == 3
    assert h.received(store) == h.bytes_of(old)
    log = RunLog.open(store)
    outcomes = [log.version(number).outcome for number in (1, 3)]
    assert len({outcome.digest for outcome in outcomes if outcome}) == 1


def test_all_bit_patterns_survive(rng: np.random.Generator) -> None:
    """F43: every 16-bit and 8-bit pattern, NaN payloads, -0.0 and infinities of float32 and float64 included."""
    shapes = {"a": ("BF16", (65536,)), "b": ("F8_E5M2", (256,)), "c": ("F32", (8,)), "d": ("F64", (8,))}
    odd = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-45, 3e38])
    nan32 = odd.astype("f4").view("u4") | np.uint32(1)
    model: h.Model = {
        "a": np.arange(65536, dtype="u2"), "b": np.arange(256).astype("u1"), "c": nan32, "d": odd.view("u8").copy(),
    }  # fmt: skip
    source, store = h.ArraySource(model, shapes), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=2)) as publisher:
        publisher.publish()
        for shift in (1, 32768, 65535):
            for array in model.values():
                array[:] = np.roll(array, shift)
            publisher.publish()
            assert h.received(store) == h.bytes_of(model)


def test_the_same_model_in_a_new_store_is_another_run(rng: np.random.Generator) -> None:
    source = h.ArraySource(h.random_model(rng, h.SMALL), h.SMALL)
    stores = [h.new_store() for _ in range(2)]
    digests = {published(store, source).digest for store in stores}
    assert len({RunLog.open(store).run for store in stores}) == len(digests) == 2


def published(store: Store, source: h.ArraySource, **options: Any) -> Published:
    with contextlib.closing(Publisher(store, source, threads=1, **options)) as publisher:
        return publisher.publish()


@pytest.mark.parametrize(
    ("name", "entry", "says"),
    [
        ("a.weight", ("BF16", (33, 40)), r"BF16 \[33, 40\]"),
        ("a.weight", ("F16", (40, 33)), r"F16 \[40, 33\]"),
        ("i.weight", None, "no such tensor"),
        ("z.more", ("U8", (1,)), r"U8 \[1\]"),
    ],
    ids=["shape", "dtype", "missing", "more"],
)
def test_another_model_is_refused_by_the_tensor(
    rng: np.random.Generator, name: str, entry: tuple[str, tuple[int, ...]] | None, says: str
) -> None:
    chain = h.publish_chain(rng, ())
    shapes = {**h.MIXED, name: entry} if entry else {n: s for n, s in h.MIXED.items() if n != name}
    with pytest.raises(BaseMismatch, match=f"{name} .*{says}"):
        Publisher(chain.store, h.ArraySource(h.random_model(rng, shapes), shapes))
    assert h.check_linear(chain.store) == [1]


# ------------------------------------------------------------------------------------------ failures in the middle


class _FailingSource(h.ArraySource):
    error: Exception | None = None

    @contextmanager
    def read(self, tensor: int, start: int, stop: int) -> Iterator[Elements]:
        if self.error and tensor == 2:
            raise self.error
        with super().read(tensor, start, stop) as elements:
            yield elements


@pytest.mark.parametrize("error", [ValueError("boom"), StorageFullError("disk full"), MemoryError()], ids=repr)
@pytest.mark.parametrize("at", [1, 2])
def test_a_source_that_fails_aborts_the_attempt(rng: np.random.Generator, error: Exception, at: int) -> None:
    source, store = _FailingSource(h.random_model(rng)), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=2)) as publisher:
        for number in range(1, at):
            assert publisher.publish().version == number
        h.step(rng, source.model, "some")
        source.error = error
        with pytest.raises(type(error)):
            publisher.publish()
        outcome = RunLog.open(store).attempt(at).outcome
        assert outcome is not None
        assert outcome.decision is Decision.ABORT
        assert type(error).__name__ in outcome.reason
        source.error = None
        assert publisher.publish().version == at + 1
    assert h.received(store) == h.bytes_of(source.model)


def test_an_interrupt_leaves_an_attempt_that_the_next_publish_closes(rng: np.random.Generator) -> None:
    """F10: Ctrl-C in the middle does no best effort; the next opener writes ABORT."""
    source, store = _FailingSource(h.random_model(rng)), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
        publisher.publish()
        source.error = k.Killed()  # type: ignore[assignment]
        with pytest.raises(k.Killed):
            publisher.publish()
        assert RunLog.open(store).attempt(2).open
        source.error = None
        assert publisher.publish().version == 3
    assert h.check_linear(store) == [1, 3]
    assert h.received(store) == h.bytes_of(source.model)


def test_side_file_names_that_cannot_be_are_an_error_of_ours(rng: np.random.Generator) -> None:
    source = h.ArraySource(h.random_model(rng, h.SMALL), h.SMALL, {"../evil": b""})
    with pytest.raises(UsageError, match="evil"):
        published(h.new_store(), source)


class _ForgetsPayloads(k.KillingStore):
    """Says that payloads are stored, and keeps none (or half) of them."""

    def __init__(self, store: Store, keep: float) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self._keep = keep

    def put(self, key: str, data: bytes | memoryview) -> None:
        if "/pl/" not in key:
            super().put(key, data)
        elif self._keep:
            super().put(key, bytes(data)[: int(len(data) * self._keep)])


@pytest.mark.parametrize("keep", [0.0, 0.5], ids=["gone", "short"])
@pytest.mark.parametrize("versions", [0, 1])
def test_a_store_that_loses_payloads_gets_no_commit(rng: np.random.Generator, keep: float, versions: int) -> None:
    """Rule (4): COMMIT only after every payload was seen at its full length."""
    store, source = h.new_store(), h.ArraySource(h.random_model(rng))
    for _ in range(versions):
        h.published(store, source)
    h.step(rng, source.model, "some")
    with pytest.raises(RefitError):
        h.published(_ForgetsPayloads(store, keep), source)
    assert h.check_linear(store) == [*range(1, versions + 1)]
    outcome = RunLog.open(store).attempt(versions + 1).outcome
    assert outcome is not None
    assert outcome.decision is Decision.ABORT


class _NeverShows(k.KillingStore):
    """Says that a record exists and never finds it."""

    def __init__(self, store: Store, name: str) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self._name = name

    def create(self, key: str, data: bytes) -> None:
        if key.endswith(self._name):
            raise AlreadyExistsError("taken")
        super().create(key, data)


@pytest.mark.parametrize("name", ["intent", "p/0", "outcome"])
def test_a_record_that_exists_and_is_not_found_has_a_deadline(
    rng: np.random.Generator, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.1)
    chain = h.publish_chain(rng, (), h.SMALL)
    with pytest.raises(UnavailableError, match="is unknown" if name == "outcome" else "exists"):
        h.published(_NeverShows(chain.store, name), chain.source)
    h.published(chain.store, chain.source)
    assert h.received(chain.store) == h.bytes_of(chain.source.model)


class _SaysTaken(k.KillingStore):
    """Creates an anchor record and, as after a retry within, says that it was there."""

    def create(self, key: str, data: bytes) -> None:
        super().create(key, data)
        if key.endswith("/anchor"):
            raise AlreadyExistsError("taken")


def test_our_own_anchor_record_seen_again_counts(rng: np.random.Generator) -> None:
    source, store = h.ArraySource(h.random_model(rng)), h.new_store()
    assert h.published(_SaysTaken(store, k.Fuse(1 << 60)), source) == 1
    assert h.received(store) == h.bytes_of(source.model)


def test_the_anchor_record_of_another_does_not_count(rng: np.random.Generator) -> None:
    """Its payloads may not be there, even if its digest is ours; the next attempt has a place of its own."""
    source, store = h.ArraySource(h.random_model(rng)), h.new_store()
    log = RunLog.open_or_create(store, source.catalog)
    anchor = Anchor(log.run, 1, h.digest_of(log.run, log.catalog, source.model), (), ())
    store.create("anchor/0000000001/anchor", anchor.to_bytes())
    with pytest.raises(AlreadyExistsError):
        h.published(store, source)
    assert h.published(store, source) == 2
    assert h.received(store) == h.bytes_of(source.model)


# ------------------------------------------------------------------------------------------ baselines


def seeds(heard: h.Heard) -> int:
    return sum(event.type == "baseline" and event.phase == "seed" for event in heard.events)


def restart(chain: h.Chain, baseline: MemoryBaseline | None, rng: np.random.Generator) -> int:
    """Publish with a new publisher; how often it loaded an anchor for its baseline."""
    h.step(rng, chain.source.model, "some")
    heard = h.Heard()
    h.published(chain.store, chain.source, baseline=baseline, emit=heard)
    assert h.received(chain.store) == h.bytes_of(chain.source.model)
    return seeds(heard)


def baseline_at(chain: h.Chain) -> MemoryBaseline:
    baseline = MemoryBaseline()
    h.followed(chain.store, baseline)
    return baseline


def test_a_kept_baseline_is_used_as_it_is(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng)
    assert restart(chain, baseline_at(chain), rng) == 0


def test_a_stale_baseline_catches_up_by_deltas(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ())
    stale = baseline_at(chain)
    for kind in ("some", "nothing", "back"):
        h.step(rng, chain.source.model, kind)
        h.published(chain.store, chain.source)
    assert restart(chain, stale, rng) == 0


def test_a_missing_baseline_is_rebuilt(rng: np.random.Generator) -> None:
    assert restart(h.publish_chain(rng), None, rng) == 1


def test_a_corrupted_baseline_is_found_and_rebuilt(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng)
    baseline = baseline_at(chain)
    baseline._arrays[2][7] ^= 128
    assert restart(chain, baseline, rng) == 1


def test_a_baseline_of_another_run_is_rebuilt(rng: np.random.Generator) -> None:
    chain, other = h.publish_chain(rng), h.publish_chain(rng)
    assert restart(chain, baseline_at(other), rng) == 1


def test_a_baseline_of_another_model_is_refused(rng: np.random.Generator) -> None:
    chain, other = h.publish_chain(rng, ()), h.publish_chain(rng, (), h.SMALL)
    with pytest.raises(BaseMismatch):
        h.published(chain.store, chain.source, baseline=baseline_at(other))
    assert h.check_linear(chain.store) == [1]


def test_the_baseline_holds_the_head_after_every_publish(rng: np.random.Generator) -> None:
    source, baseline = h.ArraySource(h.random_model(rng)), MemoryBaseline()
    with contextlib.closing(Publisher(h.new_store(), source, threads=1, baseline=baseline)) as publisher:
        for kind in ("nothing", "some", "nothing", "all"):
            h.step(rng, source.model, kind)
            publisher.publish()
            assert h.bits(baseline) == h.bytes_of(source.model)


def test_an_aborted_attempt_does_not_move_the_baseline(rng: np.random.Generator) -> None:
    source, baseline = _FailingSource(h.random_model(rng)), MemoryBaseline()
    with contextlib.closing(Publisher(h.new_store(), source, threads=1, baseline=baseline)) as publisher:
        publisher.publish()
        before = h.bits(baseline)
        h.step(rng, source.model, "all")
        source.error = ValueError()
        with pytest.raises(ValueError, match=r"^$"):
            publisher.publish()
        assert h.bits(baseline) == before


def test_a_bit_flipped_in_the_baseline_gets_no_commit(rng: np.random.Generator) -> None:
    """F4 and F47: a delta against anything but the head's bits would be refused by every receiver, for ever."""
    source, baseline, store = h.ArraySource(h.random_model(rng)), MemoryBaseline(), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=1, baseline=baseline)) as publisher:
        publisher.publish()
        baseline._arrays[0][5] ^= 1
        h.step(rng, source.model, "some")
        with contextlib.suppress(RefitError):
            publisher.publish()
        publisher.publish()
    assert h.received(store) == h.bytes_of(source.model)


class _Replacing(Faulty):
    """A store that takes a second create for a put."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


def test_a_store_without_create_once_is_refused_before_anything_is_written() -> None:
    store, source = h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(0)))
    with pytest.raises(UsageError, match="does not keep create-once"):
        h.published(_Replacing(store, []), source)
    assert not list(store.list())
    assert h.published(store, source) == 1
    assert not list(store.list("probe"))
