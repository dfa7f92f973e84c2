"""Damage beyond a refetch: an anchor leads past it; nobody generates on bits that were proven wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver
from deltarefit.anchoring import write_anchor
from deltarefit.errors import RefitError, UnavailableError, UsageError
from deltarefit.manifest import Header, Intent, Mode, ProducerManifest, State
from deltarefit.publishing.driving import Driver
from deltarefit.records import Digest
from deltarefit.runlog import RunLog, attempt_key, payload_prefix
from tests import helpers as h


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20261129)


def damage(chain: h.Chain, version: int, how: Callable[[bytes], bytes | None]) -> None:
    key = payload_prefix(version) + RunLog.open(chain.store).attempt(version).payloads[0].sha256
    data = how(chain.store.get(key))
    chain.store.delete(key) if data is None else chain.store.put(key, data)


@pytest.mark.parametrize("how", [lambda d: d[:-1] + bytes([d[-1] ^ 1]), lambda d: None], ids=["flipped", "lost"])
def test_an_anchor_leads_a_clean_receiver_past_a_damaged_payload(
    rng: np.random.Generator, how: Callable[[bytes], bytes | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltarefit.runlog.LATE_VISIBILITY_S", 0.2)
    chain = h.publish_chain(rng, ("some", "some"))
    baseline = MemoryBaseline()
    h.followed(chain.store, baseline)
    target = h.strict_target(chain.store)
    damage(chain, 2, how)
    with pytest.raises(RefitError):
        h.followed(chain.store, target)
    assert h.state_of(target) == (State.CLEAN, 1)
    write_anchor(chain.store, baseline)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


class FailsUnknown(MemoryBaseline):
    """Cannot write a header that says UNKNOWN; notes every pause and resume."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.fail = False

    def write_header(self, header: Header) -> None:
        if self.fail and header.state is State.UNKNOWN:
            raise UnavailableError("no header now")
        super().write_header(header)

    def pause(self) -> None:
        self.calls.append("pause")

    def resume(self) -> None:
        self.calls.append("resume")


def test_bits_proven_wrong_are_not_generated_on(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ("some",))
    target = FailsUnknown()
    h.followed(chain.store, target)
    tensor = next(i for i, e in enumerate(chain.source.catalog.tensors) if e.numel > 1)
    with target.window(tensor, 0, 1) as (array, _):
        array[0] ^= 1
    target.calls.clear()
    target.fail = True
    with pytest.raises(UnavailableError):
        h.followed(chain.store, target)
    assert target.calls == ["pause"]


def test_torn_weights_are_paused_before_the_store_is_asked(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ("some",))
    target = FailsUnknown()
    h.followed(chain.store, target)
    header = target.read_header()
    assert header is not None
    target.write_header(Header(header.run, header.catalog, State.DIRTY, 1, 2, header.digest, 0, header.incarnation))
    target.calls.clear()

    def away(*_: object) -> None:
        raise UnavailableError("away")

    with contextlib.closing(Receiver(chain.store, target, threads=1)) as receiver:
        receiver.log.attempt = away  # type: ignore[method-assign, assignment]
        with pytest.raises(UnavailableError):
            receiver.follow(once=True)
    assert target.calls == ["pause"]


def test_a_baseline_without_spool_keeps_nothing_and_still_moves(rng: np.random.Generator) -> None:
    chain = h.publish_chain(rng, ("some", "many", "nothing"))
    target = MemoryBaseline(_NoSpool())
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


@pytest.mark.parametrize("wrong", ["baseline", "step"])
def test_what_producers_sealed_wrongly_disturbs_nobody(rng: np.random.Generator, wrong: str) -> None:
    """It is in the log before anybody has compared it: receivers stay where they are, the next publisher closes it."""
    chain = h.publish_chain(rng, ("some",))
    log, head = RunLog.open(chain.store), chain.head
    last = log.version(head)
    assert last.outcome
    intent = Intent(log.run, head + 1, head, last.outcome.digest, Mode.STAGE, "gone", producers=2)
    log.store.create(attempt_key(head + 1, "intent"), intent.to_bytes())
    refs = last.payloads if wrong == "baseline" else ()  # once more, on top of itself
    for ref in refs:
        log.store.put(payload_prefix(head + 1) + ref.sha256, log.store.get(payload_prefix(head) + ref.sha256))
    for producer in range(2):
        step = producer if wrong == "step" else 0
        part, made = (last.outcome.digest, refs) if producer == 0 else (Digest(), ())
        manifest = ProducerManifest(log.run, head + 1, head, producer, step, part, "5a" * 32, made)
        log.store.create(attempt_key(head + 1, f"p/{producer}"), manifest.to_bytes())
    target, heard = h.strict_target(chain.store), h.Heard()
    with contextlib.closing(Receiver(chain.store, target, threads=1, emit=heard)) as receiver:
        assert receiver.follow(once=True) == receiver.follow(once=True) == head
        assert (h.state_of(target), target.paused) == ((State.CLEAN, head), False)
        assert h.published(chain.store, chain.source) == head + 2
        assert receiver.follow(once=True) == head + 2
    assert (heard["diverged"], heard.phases("seed")) == (0, 1)
    assert h.bits(target) == h.bytes_of(chain.source.model)


def test_a_publish_beside_an_anchor_does_not_hide_it(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = h.publish_chain(rng, ("some",))
    log, real = RunLog.open(chain.store), Driver._newest_anchor

    def meanwhile(driver: Driver) -> int:
        known = real(driver)
        baseline = MemoryBaseline()
        h.followed(chain.store, baseline)
        write_anchor(chain.store, baseline)
        return known

    monkeypatch.setattr(Driver, "_newest_anchor", meanwhile)
    h.published(chain.store, chain.source)
    assert (log.hint().head, log.hint().anchor) == (3, 2)


def test_an_error_after_commit_is_told_not_raised(rng: np.random.Generator) -> None:
    class Full(MemoryBaseline):
        broken = False

        def flush(self) -> None:
            if self.broken:
                raise OSError("the disk is gone")

    chain, baseline, heard = h.publish_chain(rng, ("some",)), Full(), h.Heard()
    with contextlib.closing(
        Publisher(chain.store, chain.source, baseline=baseline, threads=1, emit=heard)
    ) as publisher:
        publisher.publish()
        baseline.broken = True
        h.step(rng, chain.source.model, "some")
        assert publisher.publish().version == 4


def test_payload_bytes_are_checked() -> None:
    store = h.new_store()
    source = h.publish_chain(np.random.default_rng(1), ()).source
    for wrong in (0, -1, 1 << 40):
        with pytest.raises(UsageError, match="payload_bytes"):
            Publisher(store, source, payload_bytes=wrong)


class _NoSpool:
    """``ports.Spool`` that keeps nothing: payloads are fetched again, and a torn write ends at the newest anchor."""

    def put(self, name: str, data: bytes | memoryview) -> None:
        """Let go of it."""

    def get(self, name: str) -> bytes | None:
        return None

    def clear(self) -> None:
        """Nothing is there."""
