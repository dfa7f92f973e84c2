"""Death at every call: of a receiver's target, of a publisher's store, of its baseline; then somebody carries on.

Every run is repeated with the process dying one call later, until it lives to its end. What survives is what would
survive in truth: the target's bits, header and spool, the store, the baseline.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver
from deltarefit.errors import AttemptLostError, RefitError, UnavailableError
from deltarefit.manifest import State
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.stores.wrappers import Fault, Faulty, Kind
from tests import helpers as h
from tests import killing as k


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(1), ("some", "back", "nothing"))


@pytest.fixture
def run(chain: h.Chain) -> str:
    return RunLog.open(chain.store).run


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits between tries add nothing here; deadlines are tested where they belong."""
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.01)


def nth(kind: Kind, at: int, verb: str = "*") -> Fault:
    return Fault(kind, verb, first=at, last=at)


# ------------------------------------------------------------------------------------------ receivers

TearRng = np.random.Generator | None


def die(store: Store, target: h.StrictTarget, fuse: k.Fuse, tear: TearRng, threads: int = 1) -> k.KillingTarget:
    dying = k.KillingTarget(target, fuse, tear)
    with contextlib.suppress(k.Killed):
        h.followed(store, dying, threads=threads)
    return dying


def known(target: h.StrictTarget) -> bool:
    """Whether its header names a version, so that the anchor must not be loaded again."""
    header = target.read_header()
    return header is not None and header.state is not State.UNKNOWN


def check_recovers(chain: h.Chain, target: h.StrictTarget, where: str) -> h.Heard:
    heard, had_version = h.Heard(), known(target)
    assert h.followed(chain.store, target, emit=heard) == chain.head, where
    assert h.bits(target) == chain.history[chain.head], where
    header = target.read_header()
    assert header is not None, where
    assert (header.state, header.version, target.paused) == (State.CLEAN, chain.head, False), where
    assert not (had_version and heard.phases("seed")), f"{where}: loaded the anchor though the memory survived"
    return heard


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_receiver_killed_at_any_call_recovers(chain: h.Chain, run: str, after: bool) -> None:
    for fuse in k.fuses(after):
        target = h.StrictTarget(run)
        die(chain.store, target, fuse, None)
        check_recovers(chain, target, f"call {fuse.at}")
    assert fuse.at > 70


def test_a_receiver_killed_in_any_write_recovers(chain: h.Chain, run: str) -> None:
    rng, torn, tore = np.random.default_rng(2), 0, 0
    for fuse in k.fuses(after=True):
        target = h.StrictTarget(run)
        tore += die(chain.store, target, fuse, rng).tore
        torn += check_recovers(chain, target, f"call {fuse.at}")["torn"]
    assert torn > 2
    assert tore > torn, "tears while seeding are seeded over, not set"


def test_power_loss_at_any_call_loses_no_version(chain: h.Chain, run: str) -> None:
    """As before, and what the target had not flushed is lost in part."""
    rng = np.random.default_rng(3)
    for fuse in k.fuses(after=True):
        target = h.StrictTarget(run)
        die(chain.store, target, fuse, rng)
        target.crash(rng)
        check_recovers(chain, target, f"call {fuse.at}")


@pytest.mark.parametrize("seed", range(40))
def test_a_receiver_killed_again_and_again_recovers(chain: h.Chain, run: str, seed: int) -> None:
    """Recovery dies too, many times, with two threads, each tear and loss at random."""
    rng, target = np.random.default_rng(seed), h.StrictTarget(run)
    for _ in range(int(rng.integers(2, 9))):
        fuse = k.Fuse(int(rng.integers(1, 60)), after=bool(rng.integers(2)))
        die(chain.store, target, fuse, rng if rng.integers(2) else None, threads=2)
        assert target.open_windows == 0, "a write went on after follow had raised"
        if rng.integers(2):
            target.crash(rng)
    check_recovers(chain, target, f"seed {seed}")


@pytest.mark.parametrize("kind", [Kind.BEFORE, Kind.AFTER], ids=lambda k: k.name.lower())
def test_a_store_that_is_away_at_any_call_only_delays(chain: h.Chain, run: str, kind: Kind) -> None:
    """The same receiver goes on after ``UnavailableError``; it never loads the anchor a second time once seeded."""
    for at in range(1, 200):
        faulty, target, heard = Faulty(chain.store, [nth(kind, at)]), h.StrictTarget(run), h.Heard()
        attempts = list(follow_until_done(faulty, target, heard))
        assert attempts[-1] == chain.head
        assert h.bits(target) == chain.history[chain.head], f"call {at}"
        assert heard["clean"] == len(chain.history), f"call {at}: seeded twice"
        if not faulty.fired:
            return
        assert len(attempts) <= 2, f"call {at}"
    raise AssertionError("never done")


def follow_until_done(store: Store, target: h.StrictTarget, heard: h.Heard) -> Iterator[int]:
    receiver = None
    for _ in range(5):
        try:
            receiver = receiver or Receiver(store, target, threads=1, emit=heard)
            yield receiver.follow(once=True)
        except UnavailableError:
            yield -1
        else:
            receiver.close()
            return


@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.TRUNCATE, Kind.MISSING], ids=lambda k: k.name.lower())
def test_one_wrong_answer_from_the_store_is_cured_by_a_second_look(chain: h.Chain, run: str, kind: Kind) -> None:
    """F13 and F15: a damaged, short or late object is fetched again before anybody gives up. A record that nothing
    has promised may be missing in truth."""
    wrong: list[str] = []
    for at in range(1, 200):
        faulty, target = Faulty(chain.store, [nth(kind, at, "get")]), h.StrictTarget(run)
        try:
            version = h.followed(faulty, target)
            assert h.bits(target) == chain.history[version], f"get {at}"
        except RefitError as error:
            key = faulty.fired[0][1]
            if not (kind is Kind.MISSING and NOT_THERE.fullmatch(key)):
                wrong.append(f"{key[:30]} {type(error).__name__}: {error}"[:120])
        if not faulty.fired:
            break
    assert not wrong
    assert at > 25


NOT_THERE = re.compile(r"run|a/[0-9]+/intent|a/[0-9]+/outcome|anchor/[0-9]+/anchor")
"""Records whose absence means something: no run, no attempt, no outcome yet, no anchor."""


# ------------------------------------------------------------------------------------------ publishers


@pytest.fixture(scope="module")
def base() -> h.Chain:
    """Two versions, and a source that has moved on since."""
    rng = np.random.default_rng(5)
    chain = h.publish_chain(rng, ("some",), h.SMALL)
    h.step(rng, chain.source.model, "some")
    return chain


def check_carries_on(chain: h.Chain, store: Store, baseline: MemoryBaseline | None, where: str) -> None:
    """The next publisher succeeds, the history is linear, and receivers hold every committed version's bits."""
    version = h.published(store, chain.source, 99, baseline=baseline)
    assert h.check_linear(store)[-1] == version, where
    target = h.StrictTarget(RunLog.open(store).run)
    assert h.followed(store, target) == version, where
    assert h.bits(target) == h.bytes_of(chain.source.model), where


@pytest.mark.parametrize(
    ("after", "survives"), [(False, True), (True, False)], ids=["before, baseline kept", "after, baseline lost"]
)
def test_a_publisher_killed_at_any_store_call(base: h.Chain, after: bool, survives: bool) -> None:
    for fuse in k.fuses(after):
        store, baseline = h.copy_store(base.store), MemoryBaseline()
        h.followed(store, baseline)
        with contextlib.suppress(k.Killed):
            h.published(k.KillingStore(store, fuse), base.source, baseline=baseline)
        check_carries_on(base, store, baseline if survives else None, f"call {fuse.at}")
    assert fuse.at > 20


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_the_first_publisher_killed_at_any_store_call(after: bool) -> None:
    model = h.random_model(np.random.default_rng(6), h.SMALL)
    for fuse in k.fuses(after):
        chain = h.Chain(h.new_store(), h.ArraySource(model, h.SMALL))
        with contextlib.suppress(k.Killed):
            h.published(k.KillingStore(chain.store, fuse), chain.source)
        check_carries_on(chain, chain.store, None, f"call {fuse.at}")
    assert fuse.at > 15


def test_a_publisher_killed_at_any_baseline_call(base: h.Chain) -> None:
    rng = np.random.default_rng(7)
    for fuse in k.fuses(after=True):
        store, baseline = h.copy_store(base.store), MemoryBaseline()
        dying = k.KillingTarget(baseline, fuse, rng)
        with contextlib.suppress(k.Killed):
            h.published(store, base.source, baseline=dying)
        check_carries_on(base, store, baseline, f"call {fuse.at}")
    assert fuse.at > 40


@pytest.mark.parametrize("kind", [Kind.BEFORE, Kind.AFTER], ids=lambda k: k.name.lower())
def test_a_publisher_whose_store_is_away_at_any_call(base: h.Chain, kind: Kind) -> None:
    """The same publisher is asked again until it says what it committed; nothing is committed behind its back."""
    for at in range(1, 200):
        store = h.copy_store(base.store)
        faulty = Faulty(store, [nth(kind, at)])
        said = publish_until_done(faulty, base.source)
        made = [version for version in h.check_linear(store) if version > base.head]
        assert made == [said], f"call {at}: {faulty.fired} committed {made} and said {said}"
        target = h.StrictTarget(RunLog.open(store).run)
        h.followed(store, target)
        assert h.bits(target) == h.bytes_of(base.source.model), f"call {at}"
        if not faulty.fired:
            return
    raise AssertionError("never done")


def publish_until_done(store: Store, source: h.ArraySource) -> int:
    for _ in range(5):
        with contextlib.suppress(UnavailableError), contextlib.closing(publisher(store, source)) as one:
            for _ in range(5):
                with contextlib.suppress(UnavailableError):
                    return one.publish().version
    raise AssertionError("publish never succeeds")


def publisher(store: Store, source: h.ArraySource) -> Publisher:
    return Publisher(store, source, threads=1, payload_bytes=400)


@pytest.mark.parametrize("arrives", [False, True])
def test_a_store_that_goes_away_during_the_commit_leaves_the_outcome_unknown(base: h.Chain, arrives: bool) -> None:
    store = h.copy_store(base.store)
    one, unknown = publisher(_GoesAway(store, arrives), base.source), "outcome of attempt 3 is unknown"
    with contextlib.closing(one), pytest.raises(UnavailableError, match=unknown):
        one.publish()
    assert (RunLog.open(store).attempt(3).committed) == arrives
    check_carries_on(base, store, None, "afterwards")


class _GoesAway(k.KillingStore):
    """Nothing is answered any more from the creation of an outcome on."""

    def __init__(self, store: Store, arrives: bool) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self._arrives = arrives
        self._away = False

    def create(self, key: str, data: bytes) -> None:
        if key.endswith("outcome") and not self._away:
            self._away = True
            if self._arrives:
                super().create(key, data)
        self._answer()
        super().create(key, data)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self._answer()
        return super().get(key, start, length)

    def size(self, key: str) -> int:
        self._answer()
        return super().size(key)

    def _answer(self) -> None:
        if self._away:
            raise UnavailableError("the store went away")


def test_a_publisher_that_reads_garbage_commits_nothing_wrong(base: h.Chain) -> None:
    for at in range(1, 200):
        store = h.copy_store(base.store)
        faulty = Faulty(store, [nth(Kind.CORRUPT, at, "get")])
        with contextlib.suppress(RefitError):
            h.published(faulty, base.source)
        check_carries_on(base, store, None, f"get {at}")
        if not faulty.fired:
            return
    raise AssertionError("never done")


def test_a_lost_race_is_not_a_committed_version(base: h.Chain) -> None:
    """AttemptLostError means that nothing of ours was committed; it must not be said after our COMMIT."""
    store = h.copy_store(base.store)
    racing = _Overtaken(store, base)
    with contextlib.closing(publisher(racing, base.source)) as one:
        try:
            version = one.publish().version
        except AttemptLostError:
            version = 0
    assert racing.other > racing.ours
    assert version == racing.ours, "our COMMIT stands in the log, but publish said that it was lost"


class _Overtaken(k.KillingStore):
    """Right after our COMMIT and before our baseline moves, another publisher commits a version."""

    def __init__(self, store: Store, chain: h.Chain) -> None:
        super().__init__(store, k.Fuse(1 << 60))
        self._chain = chain
        self.ours = self.other = 0

    def put(self, key: str, data: bytes | memoryview) -> None:
        super().put(key, data)
        if key == "head" and not self.other:
            self.ours = h.check_linear(self._store)[-1]
            model = h.copy_of(self._chain.source.model)
            h.step(np.random.default_rng(8), model, "few")
            self.other = h.published(self._store, h.ArraySource(model, h.SMALL))
