"""A trainer whose ranks fail at odd places: publishers made again, broken exchanges and listeners, locks."""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import Published, Publisher
from deltarefit.affine import NotAffineError
from deltarefit.errors import (
    AttemptLostError,
    BaseMismatch,
    DigestMismatch,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.events import Event
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from deltarefit.ports import Exchange, Store
from deltarefit.publishing import meeting
from deltarefit.publishing.driving import lost
from deltarefit.publishing.shards import FileBits
from deltarefit.publishing.trainers import Failure
from tests import helpers as h
from tests import ranks as r

CATALOG = h.catalog_of(h.random_model(np.random.default_rng(0)))


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(6)


class Breaking:
    """``ports.Exchange`` that fails, or waits, where the test says: ``on(what, key)`` before each call."""

    def __init__(self, inner: Exchange) -> None:
        self.rank, self.size, self._inner = inner.rank, inner.size, inner
        self.on: Callable[[str, str], None] = lambda what, key: None

    def put(self, key: str, data: bytes) -> None:
        self.on("put", key)
        self._inner.put(key, data)

    def get(self, key: str) -> bytes | None:
        self.on("get", key)
        return self._inner.get(key)

    def delete(self, key: str) -> None:
        self.on("delete", key)
        self._inner.delete(key)


def failing(what: str, ending: str, times: int = 1 << 30) -> Callable[[str, str], None]:
    """Fails the first ``times`` calls ``what`` of keys with such an ending."""
    left = [times]

    def on(called: str, key: str) -> None:
        if called == what and key.endswith(ending) and left[0]:
            left[0] -= 1
            raise UnavailableError(f"the exchange is gone: {what} {key}")

    return on


def trainer_of(rng: np.random.Generator, store: Store, ranks: int, **options: Any) -> tuple[r.Trainer, list[Breaking]]:
    """After two versions, with exchanges to break."""
    trainer = r.Trainer(store, h.random_model(rng), CATALOG, r.cut(rng, CATALOG, ranks), deadline_s=5.0, **options)
    exchanges = [Breaking(exchange) for exchange in trainer.board.ranks]
    for source, exchange in zip(trainer.sources, exchanges, strict=True):
        source.exchange = exchange
    make_again(trainer, [store] * ranks, **options)
    for kind in ("some", "many"):
        h.step(rng, trainer.sources[0].model, kind)
        trainer.publish()
    return trainer, exchanges


def make_again(trainer: r.Trainer, stores: list[Store], **options: Any) -> None:
    def made(rank: int) -> Publisher:
        return Publisher(stores[rank], trainer.sources[rank], threads=1, deadline_s=5.0, **options)

    trainer.publishers = trainer.each(made)


def publish_well(rng: np.random.Generator, trainer: r.Trainer, store: Store, version: int) -> None:
    h.step(rng, trainer.sources[0].model, "some")
    assert [published.version for published in trainer.publish()] == [version] * len(trainer.sources)
    assert h.received(store) == h.bytes_of(trainer.sources[0].model)


# ------------------------------------------------------------------------------------------ many publishers


def test_publishers_made_again_over_the_same_sources_start_anew(rng: np.random.Generator) -> None:
    """What the first ones said to each other must not be taken for an answer: not their attempt, not their reports."""
    store = h.new_store()
    trainer, _ = trainer_of(rng, store, 3)
    for version in (3, 4, 5):
        make_again(trainer, [store] * 3)
        publish_well(rng, trainer, store, version)


def test_one_source_can_be_published_into_two_runs(rng: np.random.Generator) -> None:
    """A rank that hears late must not be met with what it said at the meeting before."""
    one, two = h.new_store(), h.new_store()
    trainer, exchanges = trainer_of(rng, one, 2)
    exchanges[1].on = lambda what, key: time.sleep(0.2) if (what, key) == ("get", "verdict") else None

    def both(rank: int) -> list[Publisher]:
        return [Publisher(store, trainer.sources[rank], threads=1, deadline_s=5.0) for store in (one, two)]

    pairs = trainer.each(both)
    for version in (1, 2):
        for number, store in enumerate((one, two)):
            trainer.publishers = [pair[number] for pair in pairs]
            publish_well(rng, trainer, store, version if number else version + 2)


def test_a_rank_that_stays_away_from_the_meeting_holds_up_nobody_for_long(rng: np.random.Generator) -> None:
    store = h.new_store()
    trainer, _ = trainer_of(rng, store, 3)

    def made(rank: int) -> Publisher | None:
        return Publisher(store, trainer.sources[rank], deadline_s=1.0) if rank < 2 else None

    outcomes = trainer.outcomes(made)
    assert all(isinstance(outcome, UnavailableError) for outcome in outcomes[:2])
    assert all("waited for what rank 2 owns" in str(outcome) for outcome in outcomes[:2]), outcomes
    make_again(trainer, [store] * 3)
    publish_well(rng, trainer, store, 3)


def test_a_rank_that_sees_another_store_makes_no_run_there(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meeting, "LATE_VISIBILITY_S", 0.3)
    store, other = h.new_store(), h.new_store()
    with pytest.raises(BaseMismatch, match=r"rank 1 sees another store.*no run at"):
        r.Trainer(store, h.random_model(rng), CATALOG, r.cut(rng, CATALOG, 2), stores=[store, other])
    assert not list(other.list())
    h.published(other, h.ArraySource(h.random_model(rng)))
    with pytest.raises(BaseMismatch, match=r"rank 1 sees another store.*found run"):
        r.Trainer(store, h.random_model(rng), CATALOG, r.cut(rng, CATALOG, 2), stores=[store, other])


# ------------------------------------------------------------------------------------------ what breaks in a publish


@pytest.mark.parametrize(("rank", "what", "key"), [(0, "put", "closing"), (1, "get", "closing"), (0, "delete", "")])
def test_an_exchange_that_fails_when_all_is_decided_is_no_error(
    rng: np.random.Generator, rank: int, what: str, key: str
) -> None:
    """The register has said it. Rank 1 meets its failure after the last wait: it has seen the outcome there."""
    store = h.new_store()
    trainer, exchanges = trainer_of(rng, store, 2)
    if rank:
        ours: Any = trainer.publishers[1]._trainers
        heard = ours.wait

        def wait(ready: Any, of: int, what_: str) -> Any:
            found = heard(ready, of, what_)
            if what_.startswith("the outcome"):
                exchanges[1].on = failing(what, key)
            return found

        ours.wait = wait
    else:
        exchanges[0].on = failing(what, key)
    publish_well(rng, trainer, store, 3)
    exchanges[rank].on = lambda what, key: None
    publish_well(rng, trainer, store, 4)


def test_an_attempt_that_could_not_be_told_of_is_closed_and_the_others_hear_it(rng: np.random.Generator) -> None:
    store = h.new_store()
    trainer, exchanges = trainer_of(rng, store, 2)
    exchanges[0].on = failing("put", "opening", times=1)
    began = time.monotonic()
    outcomes = trainer.outcomes(lambda rank: trainer.publishers[rank].publish())
    assert isinstance(outcomes[0], UnavailableError)
    assert isinstance(outcomes[1], AttemptLostError)
    assert time.monotonic() - began < 4, "nobody waited for the deadline"
    publish_well(rng, trainer, store, 4)


@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_while_the_source_is_held_is_told_to_the_others(rng: np.random.Generator, rank: int) -> None:
    store = h.new_store()
    trainer, _ = trainer_of(rng, store, 3)
    trainer.sources[rank].on_hold = interrupted

    def one(number: int) -> Published | str:
        with contextlib.suppress(KeyboardInterrupt):
            return trainer.publishers[number].publish()
        return "interrupted"

    began = time.monotonic()
    outcomes = trainer.outcomes(one)
    assert outcomes.pop(rank) == "interrupted"
    assert all(isinstance(outcome, AttemptLostError) for outcome in outcomes), outcomes
    assert "KeyboardInterrupt" in str(outcomes[0])
    assert time.monotonic() - began < 4, "nobody waited for the deadline"
    trainer.sources[rank].on_hold = contextlib.nullcontext
    publish_well(rng, trainer, store, 3)


@contextmanager
def interrupted() -> Iterator[None]:
    raise KeyboardInterrupt
    yield


@pytest.mark.parametrize("rank", [0, 1])
def test_a_listener_that_raises_once_all_is_committed_is_no_error(rng: np.random.Generator, rank: int) -> None:
    store = h.new_store()
    trainer, _ = trainer_of(rng, store, 2)

    def broken(event: Event) -> None:
        if event.phase in ("hint", "baseline"):
            raise BrokenPipeError("the terminal is gone")

    trainer.publishers[rank]._emit = broken
    publish_well(rng, trainer, store, 3)
    trainer.publishers[rank]._emit = lambda event: None
    publish_well(rng, trainer, store, 4)


# ------------------------------------------------------------------------------------------ what is left behind


def test_a_publisher_can_be_closed_twice_and_says_that_it_is_closed(rng: np.random.Generator, tmp_path: Path) -> None:
    """The second time must not close a file of somebody else that got the number of the lock."""
    store, source = h.new_store(), h.ArraySource(h.random_model(rng))
    publisher = Publisher(store, source, baseline=str(tmp_path))
    publisher.publish()
    publisher.close()
    before = sorted(store.list())
    handle = os.open(os.devnull, os.O_RDONLY)
    publisher.close()
    os.close(handle)
    for call in (publisher.publish, publisher.start):
        with pytest.raises(UsageError, match="closed"):
            call()
    assert sorted(store.list()) == before
    assert h.published(store, source, baseline=str(tmp_path)) == 2


def test_a_publisher_that_could_not_be_made_leaves_no_lock(
    rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, source = h.new_store(), h.ArraySource(h.random_model(rng))
    with monkeypatch.context() as patch:
        patch.setattr(FileBits, "claim", refused)
        with pytest.raises(StorageFullError) as kept:
            Publisher(store, source, baseline=str(tmp_path))
    assert h.published(store, source, baseline=str(tmp_path)) == 1, kept


def refused(bits: FileBits, extents: object) -> None:
    raise StorageFullError("no room")


def test_a_publisher_that_is_forgotten_leaves_no_lock(rng: np.random.Generator, tmp_path: Path) -> None:
    store, source = h.new_store(), h.ArraySource(h.random_model(rng))
    Publisher(store, source, baseline=str(tmp_path)).publish()
    gc.collect()
    assert h.published(store, source, baseline=str(tmp_path)) == 2


@pytest.mark.parametrize("options", [{"deadline_s": 0.0}, {"deadline_s": float("nan")}, {"threads": -1}])
def test_options_without_sense_are_refused(rng: np.random.Generator, options: dict[str, Any]) -> None:
    store = h.new_store()
    with pytest.raises(UsageError, match="above 0"):
        Publisher(store, h.ArraySource(h.random_model(rng)), **options)
    assert not list(store.list())


def test_a_path_is_no_store_and_a_model_is_no_source(rng: np.random.Generator, tmp_path: Path) -> None:
    model: Any = h.random_model(rng)
    for path in (str(tmp_path), tmp_path):
        with pytest.raises(UsageError, match=r"the store is a path.*Pass open_store\("):
            Publisher(path, h.ArraySource(model))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the source is no source; found dict\. Wrap the model: FsdpSource\(model\)"):
        Publisher(h.new_store(), model)


# ------------------------------------------------------------------------------------------ what the others are told


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (
            BaseMismatch("x is split", next_step="Shard it."),
            BaseMismatch,
            "rank 1 cannot publish: x is split. Shard it.",
        ),
        (UsageError("bad step", found=-1), UsageError, "rank 1 cannot publish: bad step; found -1. Look."),
        (DigestMismatch("wrong"), DigestMismatch, "rank 1 cannot publish: wrong. Look."),
        (NotAffineError("no map"), UsageError, "rank 1 cannot publish: no map. Look."),
        (ValueError("odd"), AttemptLostError, "rank 1 cannot publish: ValueError: odd. Look."),
        (KeyboardInterrupt(), AttemptLostError, "rank 1 cannot publish: KeyboardInterrupt: an error. Look."),
        (
            UnavailableError("it is gone", next_step="Restart, then publish again."),
            AttemptLostError,
            "rank 1 cannot publish: UnavailableError: it is gone. Restart, then publish again.",
        ),
        (
            lost("attempt 2 was not committed", "UsageError: no. Do that."),
            AttemptLostError,
            "rank 1 cannot publish: AttemptLostError: attempt 2 was not committed: UsageError: no. Do that.",
        ),
    ],
)
def test_a_failure_arrives_as_what_it_was_with_one_next_step(error: Exception, kind: type, text: str) -> None:
    sent = Failure.from_bytes(Failure.of(error).to_bytes())
    raised = sent.error("rank 1 cannot publish", "Look.")
    assert type(raised) is kind
    assert str(raised) == text


def test_the_end_of_an_attempt_advises_once() -> None:
    assert str(lost("it ended", "opened by another")) == "it ended: opened by another. Publish again."
    assert str(lost("it ended", "UsageError: no. Do that.")) == "it ended: UsageError: no. Do that."


# ------------------------------------------------------------------------------------------ odd pieces


@pytest.mark.parametrize(
    "dealt",
    [
        [[Piece(0, 0, 12, 12, 2, 3)], [Piece(0, 1, 12, 12, 2, 1)]],
        [[Piece(0, 0, 24, 24, 1, 5)], []],
        [[Piece(0, 0, 24, 24)], [Piece(0, 3, 0, 0)]],
        [[Piece(0, 0, 12, 4, 1, 8), Piece(0, 5, 0, 1)], [Piece(0, 4, 12, 4, 1, 8)]],
    ],
)
def test_pieces_of_one_row_or_of_none_are_rebuilt_from_any_other_dealing(
    rng: np.random.Generator, dealt: list[list[Piece]]
) -> None:
    """The pitch of a single row means nothing; a piece without elements is touched by no delta."""
    tensors, model = Catalog((TensorEntry("w", "BF16", (3, 8)),)), {"w": rng.integers(0, 9, (3, 8), dtype="u2")}
    store, halves = h.new_store(), [[Piece(0, 0, 11, 11)], [Piece(0, 11, 13, 13)]]
    for pieces in (halves, dealt, halves, dealt):
        trainer = r.Trainer(store, model, tensors, pieces, deadline_s=5.0)
        for kind in ("all", "some"):
            h.step(rng, model, kind)
            trainer.publish()
            assert h.received(store) == h.bytes_of(model)
        trainer.close()
