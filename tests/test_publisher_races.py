"""Several publishers on one log: threads that race, and one that is overtaken at each step."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver, open_store
from deltarefit.errors import (
    AttemptLostError,
    NotFoundError,
)
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from tests import helpers as h
from tests import killing as k


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(21)


@pytest.fixture(params=["memory", "directory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return h.new_store() if request.param == "memory" else open_store(str(tmp_path / "store"))


def test_racing_publishers_make_one_linear_history(store: Store) -> None:
    """Every version has exactly the bits of the one publish that said so; a loser is told, and may try again."""
    model = h.random_model(np.random.default_rng(22), h.SMALL)
    h.published(store, h.ArraySource(model, h.SMALL))
    run, said, lost = RunLog.open(store).run, dict[int, str](), list[int]()

    def work(seed: int) -> None:
        rng, source = np.random.default_rng(seed), h.ArraySource(h.copy_of(model), h.SMALL)
        with contextlib.closing(Publisher(store, source, threads=1)) as publisher:
            for _ in range(6):
                h.step(rng, source.model, "some")
                try:
                    version = publisher.publish(seed).version
                except AttemptLostError:
                    lost.append(seed)
                else:
                    assert version not in said
                    said[version] = str(h.digest_of(run, source.catalog, source.model))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    versions = h.check_linear(store)[1:]
    assert sorted(said) == versions, "committed and told are not the same"
    assert len(versions) + len(lost) == 18
    log = RunLog.open(store)
    for version, digest in said.items():
        outcome = log.version(version).outcome
        assert outcome is not None
        assert str(outcome.digest) == digest, f"version {version}"
    check_every_version(store, versions)


def check_every_version(store: Store, versions: list[int]) -> None:
    """StrictTarget proves each version's bits against its digest on the way."""
    heard = h.Heard()
    h.followed(store, h.StrictTarget(RunLog.open(store).run), emit=heard)
    assert [e.version for e in heard.events if e.type == "clean"][1:] == versions


class _Interposed(k.KillingStore):
    """Another publisher acts right before (or after) our first create of a key."""

    def __init__(self, store: Store, name: str, act: Any, after: bool = False) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self._name, self._act, self._after = name, act, after

    def create(self, key: str, data: bytes) -> None:
        act, mine = self._act, key.endswith(self._name)
        if mine:
            self._act = None
        if mine and act and not self._after:
            act()
        super().create(key, data)
        if mine and act and self._after:
            act()


@pytest.mark.parametrize(
    ("name", "after"), [("intent", False), ("intent", True), ("p/0", False), ("p/0", True), ("outcome", False)]
)
@pytest.mark.parametrize("versions", [0, 1])
def test_overtaken_at_every_step(rng: np.random.Generator, name: str, after: bool, versions: int) -> None:
    """F8 and F9: another publisher closes our attempt, or is first; we are told, and the next publish succeeds."""
    store, model = h.new_store(), h.random_model(rng, h.SMALL)
    mine, other = (h.ArraySource(h.copy_of(model), h.SMALL) for _ in range(2))
    for _ in range(versions):
        h.published(store, mine)
    h.step(rng, mine.model, "some")
    h.step(rng, other.model, "some")
    between = _Interposed(store, name, lambda: h.published(store, other), after)
    with contextlib.closing(Publisher(between, mine, threads=1)) as publisher:
        with pytest.raises(AttemptLostError):
            publisher.publish()
        assert h.received(store) == h.bytes_of(other.model)
        version = publisher.publish().version
    assert h.check_linear(store)[-1] == version
    assert h.received(store) == h.bytes_of(mine.model)


def test_a_publisher_that_was_away_for_versions_publishes_on_top(rng: np.random.Generator) -> None:
    """F9: one that slept through others' versions finds the tail and diffs against the new head."""
    store, model = h.new_store(), h.random_model(rng, h.SMALL)
    mine, other = (h.ArraySource(h.copy_of(model), h.SMALL) for _ in range(2))
    with contextlib.closing(Publisher(store, mine, threads=1)) as publisher:
        publisher.publish()
        for _ in range(3):
            h.step(rng, other.model, "some")
            h.published(store, other)
        assert publisher.publish().version == 5
    assert h.received(store) == h.bytes_of(mine.model)


def test_a_wrong_hint_only_costs_time(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ("some", "some"), h.SMALL)
    log = RunLog.open(chain.store)
    for head, anchor in ((0, 0), (1, 1), (3, 3), (99, 99), (2**63, 2**63)):
        log.put_hint(head, anchor)
        assert h.received(chain.store) == h.bytes_of(chain.source.model)
    for garbage in (b"", b"x" * 200):
        chain.store.put("head", garbage)
        assert h.received(chain.store) == h.bytes_of(chain.source.model)
    chain.store.delete("head")
    assert h.published(chain.store, chain.source) == 4


def test_versions_that_are_not_there_are_named(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, (), h.SMALL)
    log = RunLog.open(chain.store)
    with pytest.raises(NotFoundError, match="attempt 9 is not there"):
        log.version(9)
    receiver = Receiver(chain.store, MemoryBaseline(), threads=1)
    assert receiver.follow(once=True) == 1
    receiver.close()
