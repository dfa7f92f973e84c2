"""Short checks, each of one rule, which ``test_mutants`` runs on broken code: small cousins of the suites beside it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher
from deltarefit.elements import Elements
from deltarefit.errors import AttemptLostError, IntegrityError
from deltarefit.manifest import State
from deltarefit.runlog import RunLog, payload_prefix
from tests import helpers as h
from tests import killing as k
from tests import test_codec as codecs
from tests import test_codec_damage as damage
from tests import test_faults as faults
from tests import test_publisher as publishers
from tests import test_publisher_races as races
from tests import test_receiver as receivers
from tests import test_receiver_damage as damages
from tests import test_receiver_refuses as refusals


def rng() -> np.random.Generator:
    return np.random.default_rng(31)


def chain_of(*kinds: str) -> h.Chain:
    return h.publish_chain(rng(), kinds or ("some", "nothing", "back"))


def strict(chain: h.Chain) -> h.StrictTarget:
    return h.StrictTarget(RunLog.open(chain.store).run)


def follows() -> None:
    """Bits and versions of a plain chain."""
    chain, heard = chain_of(), h.Heard()
    target = strict(chain)
    assert h.followed(chain.store, target, emit=heard) == chain.head
    assert h.bits(target) == chain.history[chain.head]
    assert [e.version for e in heard.events if e.type == "clean"] == sorted(chain.history)


def recovers_from_tears() -> None:
    """Killed in each write: right bits in the end, and no anchor is loaded again once there is a version."""
    chain, random = chain_of("some", "many"), rng()
    for fuse in k.fuses(after=True):
        target, heard = strict(chain), h.Heard()
        with contextlib.suppress(k.Killed):
            h.followed(chain.store, k.KillingTarget(target, fuse, random))
        header = target.read_header()
        assert h.followed(chain.store, target, emit=heard) == chain.head
        assert h.bits(target) == chain.history[chain.head]
        assert not (header and header.state is not State.UNKNOWN and heard.phases("seed"))


def survives_power_loss() -> None:
    chain = chain_of("many")
    target = strict(chain)
    target.sleeping = True
    h.followed(chain.store, target)
    target.crash(rng())
    assert h.bits(target) == chain.history[chain.head]


class _Forgetful(h.StrictTarget):
    """The first write in each state of the header does not stick, and nobody is told."""

    def __init__(self, run: str, state: State) -> None:
        super().__init__(run)
        self._left = {state}

    @contextmanager
    def window(self, tensor: int, start: int, stop: int) -> Iterator[tuple[Elements, int]]:
        before, header = self._arrays[tensor][start:stop].copy(), self.read_header()
        with super().window(tensor, start, stop) as (array, first):
            yield array, first
            if header and header.state in self._left and (array != before).any():
                self._left.remove(header.state)
                array[:] = before


def notices_a_write_that_did_not_stick() -> None:
    chain = chain_of("some")
    target = _Forgetful(RunLog.open(chain.store).run, State.DIRTY)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def proves_a_seed() -> None:
    chain = chain_of("some")
    target = _Forgetful(RunLog.open(chain.store).run, State.UNKNOWN)
    target.sleeping = True
    with pytest.raises(IntegrityError, match="seeded weights"):
        h.followed(chain.store, target)
    assert h.followed(chain.store, target) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def refuses_flipped_bits() -> None:
    data, ref = codecs.build(*codecs.changes(10, "some"), 600)
    damage.test_every_flipped_bit_is_refused((data[:], ref))


def refuses_what_is_out_of_bounds() -> None:
    damage.test_table_rules(damage.take_apart(*codecs.build(*codecs.changes(10, "some"), 600)))


def refuses_frames_of_another_size() -> None:
    parts = damage.take_apart(*codecs.build(*codecs.changes(10, "some"), 600))
    damage.test_frames_of_another_size(parts)


def a_failed_publish_leaves_no_trace() -> None:
    source, store = publishers._FailingSource(h.random_model(rng())), h.new_store()
    with contextlib.closing(Publisher(store, source, threads=1)) as one:
        one.publish()
        h.step(rng(), source.model, "many")
        source.error = ValueError("boom")
        with pytest.raises(ValueError, match="boom"):
            one.publish()
        source.error = None
        version = one.publish().version
    target = h.StrictTarget(RunLog.open(store).run)
    assert h.followed(store, target) == version
    assert h.bits(target) == h.bytes_of(source.model)


def overtaken(name: str, after: bool = False) -> None:
    """Another publisher acts in the middle of ours: what each says is what the log holds."""
    store, model = h.new_store(), h.random_model(rng(), h.SMALL)
    mine, other = (h.ArraySource(h.copy_of(model), h.SMALL) for _ in range(2))
    h.published(store, mine)
    h.step(np.random.default_rng(1), mine.model, "some")
    h.step(np.random.default_rng(2), other.model, "some")
    said: list[int] = []
    between = races._Interposed(store, name, lambda: said.append(h.published(store, other)), after)
    with contextlib.suppress(AttemptLostError):
        said.append(h.published(between, mine))
    assert sorted(said) == h.check_linear(store)[1:]
    assert said
    last = mine if said[-1] == max(said) and len(said) > 1 else other
    target = h.StrictTarget(RunLog.open(store).run)
    h.followed(store, target)
    assert h.bits(target) == h.bytes_of(last.model)


def overtaken_at_the_intent() -> None:
    overtaken("intent")


def overtaken_at_the_outcome() -> None:
    overtaken("outcome")


def a_publisher_that_was_away_catches_up() -> None:
    races.test_a_publisher_that_was_away_for_versions_publishes_on_top(rng())


def our_commit_is_never_called_lost() -> None:
    chain = h.publish_chain(rng(), ("some",), h.SMALL)
    faults.test_a_lost_race_is_not_a_committed_version(chain)


def gets_no_commit_without_payloads() -> None:
    publishers.test_a_store_that_loses_payloads_gets_no_commit(rng(), 0.0, 1)


def finds_bits_changed_before_the_start() -> None:
    refusals.test_bits_changed_behind_its_back_are_found_at_the_start(chain_of())


def refuses_another_base() -> None:
    refusals.test_a_delta_of_another_base_is_refused_and_not_for_ever_fetched(rng(), refusals.other_base)


def refuses_other_sums() -> None:
    refusals.test_a_delta_of_another_base_is_refused_and_not_for_ever_fetched(rng(), refusals.other_sums)


def waits_for_what_does_not_add_up() -> None:
    damages.test_what_producers_sealed_wrongly_disturbs_nobody(rng(), "baseline")


def passes_what_was_sealed_wrongly() -> None:
    damages.test_what_producers_sealed_wrongly_disturbs_nobody(rng(), "step")


def forgets_another_run() -> None:
    """Both runs have as many versions, so that only the run tells them apart."""
    chain, other = chain_of("some"), h.publish_chain(np.random.default_rng(32), ("some",))
    target = MemoryBaseline()
    h.followed(other.store, target)
    assert h.followed(chain.store, target, switch_run=True) == chain.head
    assert h.bits(target) == chain.history[chain.head]


def drops_what_was_aborted() -> None:
    receivers.test_a_staged_attempt_that_aborts_leaves_nothing(rng())


def waits_for_its_own_writes() -> None:
    refusals.test_no_write_goes_on_after_follow_has_raised(rng())


def walks_past_the_hint() -> None:
    races.test_a_wrong_hint_only_costs_time(rng())


def fetches_damaged_payloads_again() -> None:
    chain = chain_of("some")
    bad = [payload_prefix(2) + ref.sha256 for ref in RunLog.open(chain.store).attempt(2).payloads]

    class Once(k.KillingStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            data = super().get(key, start, length)
            if key in bad:
                bad.remove(key)
                return data[:-1] + bytes([data[-1] ^ 1])
            return data

    target = strict(chain)
    assert h.followed(Once(chain.store, k.Fuse(1 << 60)), target) == 2
    assert not bad


def can_stop_anywhere() -> None:
    receivers.test_stopped_anywhere_users_can_go_on(chain_of("some"))


def an_anchor_without_a_part_is_refused() -> None:
    """The record leaves out its last payload, and claims the digest of the rest."""
    chain = chain_of("some")
    log = RunLog.open(chain.store)
    anchor, first = log.anchor(1), log.attempt(1)
    assert anchor is not None
    assert first.outcome is not None
    short = replace(anchor, payloads=anchor.payloads[:-1])
    chain.store.put("anchor/0000000001/anchor", short.to_bytes())
    with pytest.raises(IntegrityError, match="owned 0 times"):
        h.followed(chain.store, MemoryBaseline())


CHECKS = [
    follows, recovers_from_tears, survives_power_loss, notices_a_write_that_did_not_stick, proves_a_seed,
    refuses_flipped_bits, refuses_what_is_out_of_bounds, refuses_frames_of_another_size,
    a_failed_publish_leaves_no_trace,
    overtaken_at_the_intent, overtaken_at_the_outcome, a_publisher_that_was_away_catches_up,
    our_commit_is_never_called_lost, gets_no_commit_without_payloads, finds_bits_changed_before_the_start,
    refuses_another_base, refuses_other_sums, waits_for_what_does_not_add_up, passes_what_was_sealed_wrongly,
    forgets_another_run,
    drops_what_was_aborted, waits_for_its_own_writes, walks_past_the_hint, fetches_damaged_payloads_again,
    can_stop_anywhere, an_anchor_without_a_part_is_refused,
]  # fmt: skip
