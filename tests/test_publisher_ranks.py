"""Publishers of several ranks: any dealing of pieces, restarts with another one, failures of any rank, late bits."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher
from deltarefit.errors import (
    AttemptLostError,
    BaseMismatch,
    DigestMismatch,
    IntegrityError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.exchange import StoreExchange
from deltarefit.inspection import row
from deltarefit.manifest import Catalog, Decision, Intent, TensorEntry
from deltarefit.pieces import Piece, whole
from deltarefit.ports import Store
from deltarefit.runlog import RunLog, attempt_key
from tests import helpers as h
from tests import ranks as r


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    return np.random.default_rng(getattr(request, "param", 5))


def catalog() -> Catalog:
    return h.catalog_of(h.random_model(np.random.default_rng(0)))


# ------------------------------------------------------------------------------------------ all is well


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("rng", [1, 2, 3], indirect=True)
def test_receivers_get_the_bits_of_all_ranks(rng: np.random.Generator, ranks: int) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), ranks), payload_bytes=400)
    target = h.strict_target(store)
    before = h.copy_of(model)
    for number, kind in enumerate(("nothing", *h.STEPS), 1):
        old = h.copy_of(model)
        h.step(rng, model, kind, before)
        published = trainer.publish(step=number)
        assert {(p.version, p.changed, p.wire_bytes, p.digest) for p in published} == {
            (number, published[0].changed, published[0].wire_bytes, published[0].digest)
        }
        if number > 1:
            assert published[0].changed == sum(int((model[name] != old[name]).sum()) for name in model)
            assert published[0].wire_bytes == sum(size for _, size in store.list(attempt_key(number, "")))
            shown = row(log := RunLog.open(store), log.attempt(number))
            assert (shown.changed, shown.wire_bytes) == (published[0].changed, published[0].wire_bytes)
        h.followed(store, target)
        assert h.bits(target) == h.bytes_of(model), f"version {number} ({kind})"
    assert h.received(store) == h.bytes_of(model)
    trainer.close()


@pytest.mark.parametrize("kept", ["memory", "file"])
def test_another_dealing_goes_on_where_the_last_one_ended(rng: np.random.Generator, kept: str, tmp_path: Path) -> None:
    """F3: rebuilt by canonical position from anchor and chain, whatever owned what before."""
    model, store = h.random_model(rng), h.new_store()
    for ranks in (2, 3, 1, 4):
        dealt = r.cut(rng, catalog(), ranks)
        baselines = [str(tmp_path) if kept == "file" else None] * ranks
        trainer = r.Trainer(store, model, catalog(), dealt, payload_bytes=300, baselines=baselines)
        for kind in ("some", "few", "many"):
            h.step(rng, model, kind)
            trainer.publish()
            assert h.received(store) == h.bytes_of(model)
        trainer.close()


def test_a_file_baseline_that_is_whole_is_used_as_it_is(rng: np.random.Generator, tmp_path: Path) -> None:
    model, store, dealt = h.random_model(rng), h.new_store(), r.cut(rng, catalog(), 2)
    events: list[str] = []
    options: dict[str, Any] = {"baselines": [str(tmp_path)] * 2, "emit": lambda e: events.append(e.phase)}
    for restart in range(3):
        trainer = r.Trainer(store, model, catalog(), dealt, **options)
        h.step(rng, model, "some")
        trainer.publish()
        trainer.close()
        assert h.received(store) == h.bytes_of(model), f"restart {restart}"
    assert "seed" not in events


@pytest.mark.parametrize("damage", ["bit", "header", "short"])
def test_a_damaged_file_baseline_is_rebuilt(rng: np.random.Generator, tmp_path: Path, damage: str) -> None:
    model, store, dealt = h.random_model(rng), h.new_store(), r.cut(rng, catalog(), 2)
    for restart in range(2):
        trainer = r.Trainer(store, model, catalog(), dealt, baselines=[str(tmp_path)] * 2)
        h.step(rng, model, "some")
        trainer.publish()
        trainer.close()
        assert h.received(store) == h.bytes_of(model), f"restart {restart}"
        name = "rank-1-of-2.header" if damage == "header" else "rank-1-of-2.bits"
        data = bytearray((tmp_path / name).read_bytes())
        data[100] ^= 1
        (tmp_path / name).write_bytes(data[:200] if damage == "short" else data)


def test_a_file_baseline_in_use_is_refused(rng: np.random.Generator, tmp_path: Path) -> None:
    model, store = h.random_model(rng), h.new_store()
    dealt = [[whole(n, e.numel) for n, e in enumerate(catalog().tensors)]]
    trainer = r.Trainer(store, model, catalog(), dealt, baselines=[str(tmp_path)])
    with pytest.raises(UnavailableError, match="in use"):
        r.Trainer(store, model, catalog(), dealt, baselines=[str(tmp_path)])
    trainer.close()


def test_ranks_can_talk_through_the_store(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 3))
    other = r.Trainer.__new__(r.Trainer)
    other.board = trainer.board
    other.sources = trainer.sources
    for rank, source in enumerate(other.sources):
        source.exchange = StoreExchange(store, "job-1", rank, 3)
    other.publishers = other.each(lambda rank: Publisher(store, other.sources[rank], threads=1))
    for number in range(1, 5):
        h.step(rng, model, "some")
        assert [p.version for p in other.publish(number)] == [number] * 3
    assert h.received(store) == h.bytes_of(model)


# ------------------------------------------------------------------------------------------ start


def test_started_publishes_take_the_bits_before_they_return(rng: np.random.Generator) -> None:
    """The optimizer may step at once: what leaves is what was there when ``start`` was called."""
    model, slow = h.random_model(rng), SlowStore(h.new_store())
    trainer = r.Trainer(slow, model, catalog(), r.cut(rng, catalog(), 2), payload_bytes=400)
    trainer.publish()
    for _ in range(3):
        h.step(rng, model, "some")
        expected = h.bytes_of(model)
        slow.gate.clear()
        started = trainer.each(lambda rank: trainer.publishers[rank].start())
        assert not any(future.done() for future in started), "the gate holds payloads back"
        h.step(rng, model, "all")
        slow.gate.set()
        assert len({future.result(20).version for future in started}) == 1
        assert h.received(slow) == expected


class SlowStore(r.Forwarding):
    """Payloads wait until the gate opens."""

    def __init__(self, store: Store) -> None:
        super().__init__(store)
        self.gate = threading.Event()
        self.gate.set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        assert self.gate.wait(20)
        self.inner.put(key, data)


def test_the_error_of_a_started_publish_is_in_its_future(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 1))
    trainer.publish()
    trainer.sources[0].on_hold = failing_at_the_end
    with pytest.raises(IntegrityError, match="written to"):
        trainer.publishers[0].start().result(20)
    trainer.sources[0].on_hold = contextlib.nullcontext
    assert trainer.publishers[0].publish().version == 3


@contextmanager
def failing_at_the_end() -> Iterator[None]:
    yield
    raise IntegrityError("the bits were written to")


# ------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("what", ["hold", "written", "put", "read"])
def test_a_rank_that_fails_ends_the_attempt_for_all(rng: np.random.Generator, rank: int, what: str) -> None:
    model, store = h.random_model(rng), h.new_store()
    stores = [FullStore(store) for _ in range(3)]
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 3), stores=stores)
    expected: list[bytes] = []
    attempts = 0
    for _ in range(2):
        source = trainer.sources[rank]
        undo = break_rank(source, stores[rank], what)
        h.step(rng, model, "all")
        outcomes = trainer.outcomes(lambda one: trainer.publishers[one].publish())
        assert all(isinstance(outcome, RefitError) for outcome in outcomes), outcomes
        assert not isinstance(outcomes[rank], AttemptLostError), "the rank that failed says why itself"
        undo()
        if expected:
            assert h.received(store) == expected
        attempts += 1 if what == "hold" else 2
        assert {p.version for p in trainer.publish()} == {attempts}
        expected = h.bytes_of(model)
        assert h.received(store) == expected
    if what == "hold":
        return  # nothing was written
    outcome = RunLog.open(store).attempt(3).outcome
    assert outcome is not None
    assert outcome.decision is Decision.ABORT
    assert outcome.reason


class FullStore(r.Forwarding):
    """A store that has no room for payloads while ``full``."""

    full = False

    def put(self, key: str, data: bytes | memoryview) -> None:
        if self.full and "/pl/" in key:
            raise StorageFullError("no room")
        self.inner.put(key, data)


def break_rank(source: r.PieceSource, store: FullStore, what: str) -> Any:
    read = source.read
    if what == "hold":
        source.on_hold = refused
    elif what == "written":
        source.on_hold = failing_at_the_end
    elif what == "put":
        store.full = True
    else:
        source.read = unreadable  # type: ignore[method-assign]

    def undo() -> None:
        source.on_hold, store.full, source.read = contextlib.nullcontext, False, read  # type: ignore[method-assign]

    return undo


@contextmanager
def refused() -> Iterator[None]:
    raise BaseMismatch("tensor x has another shape")
    yield


def unreadable(piece: int, start: int, stop: int) -> Any:
    raise UnavailableError("the device is gone")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_silent_rank_is_given_up_at_the_deadline(rng: np.random.Generator, rank: int) -> None:
    """It never came to ``publish``: the others end with an error, and the next publish of all succeeds."""
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2), deadline_s=1.0)
    trainer.publish()
    with pytest.raises(UnavailableError, match=f"rank {rank} has been silent"):
        trainer.publishers[1 - rank].publish()
    h.step(rng, model, "some")
    fresh = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2))
    fresh.publish()
    assert h.received(store) == h.bytes_of(model)


def test_ranks_that_publish_different_steps_are_told(rng: np.random.Generator) -> None:
    trainer = r.Trainer(h.new_store(), h.random_model(rng), catalog(), r.cut(rng, catalog(), 2), deadline_s=1.0)
    outcomes = trainer.outcomes(lambda rank: trainer.publishers[rank].publish(step=rank))
    assert all(isinstance(outcome, BaseMismatch) for outcome in outcomes), "publishing again does not help"
    told = r"ranks publish different steps; .*\(rank 1\)\. Call publish with one step, equally often, on all ranks\.$"
    assert all(re.search(told, str(outcome)) for outcome in outcomes), outcomes


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_wrong_baseline_is_never_committed_and_rebuilt(rng: np.random.Generator, rank: int) -> None:
    """F4, F47: a bit of one rank's baseline flips in memory."""
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 3))
    trainer.publish()
    bits = trainer.publishers[rank]._baseline._bits  # type: ignore[attr-defined]
    flip(bits.array(int(rng.integers(len(trainer.sources[rank].pieces)))))
    h.step(rng, model, "few")
    outcomes = trainer.outcomes(lambda one: trainer.publishers[one].publish())
    assert isinstance(outcomes[rank], DigestMismatch)
    assert h.received(store) != h.bytes_of(model)
    trainer.publish()
    assert h.received(store) == h.bytes_of(model)


def test_a_baseline_that_proves_itself_but_is_wrong_is_found_by_the_sum(rng: np.random.Generator) -> None:
    """Its own digest fits its own bits: only over all ranks it shows. All rebuild then."""
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 3))
    trainer.publish()
    baseline: Any = trainer.publishers[1]._baseline
    flip(baseline._bits.array(0))
    baseline.adopt(1, baseline._digest())
    outcomes = trainer.outcomes(lambda one: trainer.publishers[one].publish())
    assert all(isinstance(outcome, AttemptLostError) for outcome in outcomes)
    assert "telescope" in str(outcomes[0])
    trainer.publish()
    assert h.received(store) == h.bytes_of(model)


def flip(array: Any) -> None:
    array[-1] ^= array.dtype.type(1)


# ------------------------------------------------------------------------------------------ refusals


def test_overlaps_and_holes_are_refused_before_anything_is_written(rng: np.random.Generator) -> None:
    tensors = Catalog((TensorEntry("w", "BF16", (4, 6)),))
    model = {"w": rng.integers(0, 9, (4, 6), dtype="u2")}
    cases = [
        [[Piece(0, 0, 12, 12)], [Piece(0, 12, 6, 6)]],
        [[Piece(0, 0, 24, 24)], [Piece(0, 12, 12, 12)]],
        [[Piece(0, 0, 12, 3, 1, 6)], [Piece(0, 2, 12, 3, 1, 6)]],
        [[whole(0, 24)], [whole(0, 24)]],
        [[], []],
    ]
    for dealt in cases:
        store = h.new_store()
        with pytest.raises(UsageError, match="w"):
            r.Trainer(store, model, tensors, dealt)
        assert not list(store.list())


def test_ranks_with_other_catalogs_are_refused_on_every_rank(rng: np.random.Generator) -> None:
    store, model = h.new_store(), {"w": rng.integers(0, 9, 6, dtype="u2")}
    catalogs = [Catalog((TensorEntry("w", dtype, (6,)),)) for dtype in ("BF16", "F16")]
    board = r.Board(2)
    dealt = [[Piece(0, 0, 3, 3)], [Piece(0, 3, 3, 3)]]
    maker = r.Trainer.__new__(r.Trainer)
    maker.sources = [r.PieceSource(model, catalogs[n], dealt[n], board.ranks[n]) for n in range(2)]
    outcomes = maker.outcomes(lambda rank: Publisher(store, maker.sources[rank]))
    assert all(isinstance(outcome, BaseMismatch) for outcome in outcomes), outcomes
    says = (
        "rank 1 has another catalog: tensor w differs; expected BF16 [6] (rank 0); found F16 [6] (rank 1). Give every"
    )
    assert all(says in str(outcome) for outcome in outcomes), outcomes
    assert not list(store.list())


def test_a_target_cannot_be_the_baseline_of_parts(rng: np.random.Generator) -> None:
    dealt = [[Piece(0, 0, 3, 3), Piece(0, 3, 3, 3)]]
    tensors = Catalog((TensorEntry("w", "BF16", (6,)),))
    with pytest.raises(UsageError, match="parts of tensors"):
        r.Trainer(h.new_store(), {"w": np.zeros(6, "u2")}, tensors, dealt, baselines=[MemoryBaseline()])


def test_a_source_that_became_another_is_refused_and_nothing_is_written(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2))
    trainer.publish()
    before, source = sorted(store.list()), trainer.sources[1]
    pieces, source.pieces = source.pieces, source.pieces[1:]
    refused_by_all(trainer, "owns other pieces")
    source.pieces = pieces
    tensors = catalog().tensors
    source.catalog = Catalog((replace(tensors[0], dtype="F16"), *tensors[1:]))
    refused_by_all(trainer, r"a\.weight.*BF16.*F16")
    source.catalog = catalog()
    assert sorted(store.list()) == before
    assert trainer.publish()[0].version == 2


def refused_by_all(trainer: r.Trainer, says: str) -> None:
    outcomes = trainer.outcomes(lambda rank: trainer.publishers[rank].publish())
    assert all(isinstance(outcome, BaseMismatch) for outcome in outcomes), "publishing again does not help"
    assert all(re.search(says, str(outcome)) for outcome in outcomes), outcomes
    assert "rank 1 cannot publish" in str(outcomes[0])
    assert not any(re.search(r"\.\.|\. Look|\. Publish again", str(outcome)) for outcome in outcomes), outcomes


def test_another_source_of_the_same_model_may_take_over(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 1))
    trainer.publish()
    other = h.copy_of(model)
    h.step(rng, other, "some")
    (publisher,) = trainer.publishers
    publisher.source = r.PieceSource(other, catalog(), trainer.sources[0].pieces, trainer.board.ranks[0])
    publisher.publish()
    assert h.received(store) == h.bytes_of(other)


def test_a_baseline_that_does_not_fit_on_the_disk_is_an_error_at_the_start(tmp_path: Path) -> None:
    """Not a SIGBUS in the middle of a publish: all of it is claimed when it is opened."""
    code = (
        "import resource, sys\n"
        "from deltarefit.errors import StorageFullError\n"
        "from deltarefit.publishing.shards import FileBits\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "bits = FileBits(sys.argv[1], 'rank-0-of-1')\n"
        "try:\n"
        "    bits.claim([(1 << 20, 2)])\n"
        "except StorageFullError as error:\n"
        "    sys.exit(0 if 'make room' in str(error) else 3)\n"
        "sys.exit(4)\n"
    )
    assert subprocess.run([sys.executable, "-c", code, str(tmp_path)], timeout=60).returncode == 0


def test_a_bad_step_of_one_rank_puts_nobody_out_of_step(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2))
    for start in (False, True):
        outcomes = trainer.outcomes(lambda rank, start=start: publish(trainer.publishers[rank], -rank, start))
        assert all(isinstance(outcome, UsageError) for outcome in outcomes), outcomes
    assert trainer.publish()[0].version == 1


def publish(publisher: Publisher, step: int, start: bool) -> object:
    return publisher.start(step).result(20) if start else publisher.publish(step)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_seal_leaves_nobody_waiting(rng: np.random.Generator, rank: int) -> None:
    """It closes the attempt, or the others see by its sign of life that it has gone on."""
    model, store = h.random_model(rng), h.new_store()
    stores: list[Any] = [store, store]
    stores[rank] = unsealing = UnsealingStore(store, rank)
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2), stores=stores, deadline_s=2.0)
    trainer.publish()
    for closes in (True, False):
        unsealing.fails, unsealing.closes = True, closes
        outcomes = trainer.outcomes(lambda one: trainer.publishers[one].publish())
        assert all(isinstance(outcome, RefitError) for outcome in outcomes), outcomes
        unsealing.fails = False
        h.step(rng, model, "some")
        trainer.publish()
        assert h.received(store) == h.bytes_of(model)


class UnsealingStore(r.Forwarding):
    """Refuses the manifest of one rank while it ``fails``, and its outcome too unless it ``closes``."""

    fails, closes = False, True

    def __init__(self, inner: Store, rank: int) -> None:
        super().__init__(inner)
        self._rank = rank

    def create(self, key: str, data: bytes) -> None:
        if self.fails and (key.endswith(f"/p/{self._rank}") or (key.endswith("outcome") and not self.closes)):
            raise StorageFullError("no room")
        self.inner.create(key, data)


def test_all_ranks_hear_that_another_publisher_opened_the_attempt(rng: np.random.Generator) -> None:
    model, store = h.random_model(rng), h.new_store()
    rival = RivalStore(store)
    trainer = r.Trainer(store, model, catalog(), r.cut(rng, catalog(), 2), stores=[rival, store], deadline_s=40.0)
    trainer.publish()
    rival.comes = True
    outcomes = trainer.outcomes(lambda rank: trainer.publishers[rank].publish())
    assert all(isinstance(outcome, AttemptLostError) for outcome in outcomes), outcomes
    assert all("opened by another publisher" in str(outcome) for outcome in outcomes), outcomes
    assert trainer.publish()[0].version == 3


class RivalStore(r.Forwarding):
    """Somebody else opens the next attempt, just before rank 0 does."""

    comes = False

    def create(self, key: str, data: bytes) -> None:
        if self.comes and key.endswith("/intent"):
            self.comes = False
            theirs = replace(Intent.from_bytes(data), nonce="cd" * 16, producers=1)
            self.inner.create(key, theirs.to_bytes())
        self.inner.create(key, data)
