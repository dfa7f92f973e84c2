"""A receiver of live weights: real rank processes behind real sockets, followers and ranks that are really killed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, Receiver, open_store
from deltarefit.anchoring import write_anchor
from deltarefit.errors import BaseMismatch, IntegrityError, UnavailableError
from deltarefit.landing import torn
from deltarefit.manifest import State
from deltarefit.ports import LiveTarget, Store
from deltarefit.records import Digest
from deltarefit.runlog import RunLog
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.engine import EngineTarget
from tests import helpers as h
from tests import live_ranks as live
from tests.test_kills import Counters, fork, kill_after, timed

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def chain() -> h.Chain:
    return h.publish_chain(np.random.default_rng(5), ("some", "back", "nothing", "many"), live.SHAPES)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Callable[..., live.Engine]]:
    engines = []

    def start(*arguments: object, **options: object) -> live.Engine:
        engines.append(live.Engine(tmp_path / f"engine-{len(engines)}", *arguments, **options))  # type: ignore[arg-type]
        return engines[-1]

    yield start
    for one in engines:
        one.close()


Start = Callable[..., live.Engine]


# ------------------------------------------------------------------------------------------ following


@pytest.mark.parametrize("size", [2, 4])
def test_holds_every_version_as_it_comes(engine: Start, size: int) -> None:
    rng, store = np.random.default_rng(6), h.new_store()
    source = h.ArraySource(h.random_model(rng, live.SHAPES), live.SHAPES)
    serving, heard = engine(size, h.random_model(rng, live.SHAPES)), h.Heard()
    target = serving.target()
    assert isinstance(target, LiveTarget)
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=400)) as publisher:
        publisher.publish(0)
        receiver = Receiver(store, target, emit=heard, threads=1)
        for number, kind in enumerate(("some", "nothing", "all", "nudge", "one"), 1):
            h.step(rng, source.model, kind)
            version = publisher.publish(number).version
            assert receiver.follow(once=True) == version == receiver.version
            assert not serving.wrong(source.model), kind
            assert not serving.paused
    receiver.close()
    target.close()
    assert heard.phases("seed") == 1, "its checkpoint was none of the run: one anchor, then deltas"


def test_what_the_pause_was_spent_on(engine: Start, chain: h.Chain) -> None:
    heard = h.Heard()
    live.followed(chain.store, engine(2, chain.models[1]).target(), emit=heard)
    resumed = [e for e in heard.events if e.type == "resumed"]
    assert [e.version for e in resumed] == [2, 3, 4, 5]
    for event in resumed:
        assert set(event.fields) == {"quiesce", "write", "verify", "cache", "resume", "pause"}
        spent = sum(float(event.fields[name]) for name in ("quiesce", "write", "verify", "cache", "resume"))
        assert 0 < spent <= float(event.fields["pause"]) == event.seconds


def test_the_cache_is_reset_before_generation_goes_on(engine: Start, chain: h.Chain) -> None:
    control = live.FileControl(engine(2, chain.models[4]).directory)
    target = EngineTarget(control, control._directory / "spool")
    live.followed(chain.store, target)
    assert control.calls[-4:] == ["pause", "reset_cache", "version 5", "resume"]


# ------------------------------------------------------------------------------------------ new engines


def test_a_version_of_the_run_is_adopted(engine: Start, chain: h.Chain) -> None:
    serving, heard = engine(2, chain.models[2], chain.models[1]), h.Heard()
    assert live.followed(chain.store, serving.target(), emit=heard) == 5
    assert [e.version for e in heard.events if e.type == "adopted"] == [2]
    assert heard.phases("seed") == 0
    assert not serving.wrong(chain.models[5])


def test_a_version_older_than_the_anchor_proves_the_placement(engine: Start) -> None:
    rng, store = np.random.default_rng(8), h.new_store()
    chain = h.publish_chain(rng, ("some", "some"), live.SHAPES, store)
    write_anchor(store, MemoryBaseline())
    other = h.random_model(rng, live.SHAPES)
    serving, heard = engine(2, chain.models[2], other), h.Heard()
    assert live.followed(store, serving.target(), emit=heard) == 3
    assert (heard["adopted"], heard.phases("seed")) == (0, 1)
    assert not serving.wrong(chain.models[3])


def test_what_is_neither_a_version_nor_the_checkpoint_is_refused(engine: Start, chain: h.Chain) -> None:
    rng = np.random.default_rng(9)
    bits, checkpoint = h.random_model(rng, live.SHAPES), h.random_model(rng, live.SHAPES)
    serving = engine(2, bits, checkpoint)
    for _ in range(2):
        with pytest.raises(BaseMismatch, match="neither a version of this run nor the checkpoint"):
            live.followed(chain.store, serving.target())
    assert not serving.wrong(bits), "something was written"
    assert serving.header() is None
    assert not serving.paused


def test_another_model_is_refused(engine: Start) -> None:
    store, model = h.new_store(), h.random_model(np.random.default_rng(1))
    h.published(store, h.ArraySource(model))
    with pytest.raises(BaseMismatch, match="another model's catalog"):
        live.followed(store, engine(2, h.random_model(np.random.default_rng(2), live.SHAPES)).target())


# ------------------------------------------------------------------------------------------ damage


def test_copies_that_disagree_are_found_at_the_start_and_repaired(engine: Start, chain: h.Chain) -> None:
    serving = engine(4, chain.models[1])
    live.followed(chain.store, serving.target())
    serving.say(2, "flip 3")  # rank 2's copy of the norm, which rank 0 counts
    heard = h.Heard()
    assert live.followed(chain.store, serving.target(), emit=heard) == 5
    said = [e.text for e in heard.events if e.type == "diverged"]
    assert any("d.norm" in text and "rank 2" in text and "do not agree" in text for text in said)
    assert heard.phases("seed") == 1
    assert not serving.wrong(chain.models[5])


def test_copies_that_disagree_are_found_while_staging(engine: Start) -> None:
    chain = h.publish_chain(np.random.default_rng(3), ("all",), live.SHAPES)
    serving, heard = engine(4, chain.models[1]), h.Heard()
    target = serving.target()
    with contextlib.closing(target), contextlib.closing(Receiver(chain.store, target, emit=heard)) as receiver:
        receiver.follow(once=True)
        serving.say(1, "flip 6")  # copy 0 of the fan on rank 1
        model = chain.source.model
        h.step(np.random.default_rng(4), model, "all")
        h.published(chain.store, chain.source)
        assert receiver.follow(once=True) == 3
    assert heard["diverged"] == 1
    assert not serving.wrong(model)


def test_a_new_engine_whose_copies_disagree_is_refused(engine: Start, chain: h.Chain) -> None:
    serving = engine(4, chain.models[1])
    serving.say(1, "flip 2")
    with pytest.raises(IntegrityError, match=r"copies of c\.kv do not agree"):
        live.followed(chain.store, serving.target())
    assert serving.header() is None


def test_payloads_that_are_not_kept_any_more_are_staged_again(engine: Start, chain: h.Chain) -> None:
    """Between DIRTY and the write: nothing is torn, so nothing but the payloads is missing."""
    serving = engine(2, chain.models[1])
    target = serving.target()
    real, heard = target.write_header, h.Heard()

    def write_header(header: object) -> None:
        real(header)  # type: ignore[arg-type]
        if header.state is State.DIRTY:  # type: ignore[attr-defined]
            raise UnavailableError("the follower is stopped here")

    target.write_header = write_header  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        live.followed(chain.store, target)
    assert serving.paused
    for rank in range(2):
        serving.say(rank, "forget")
    assert live.followed(chain.store, serving.target(), emit=heard) == 5
    assert heard["refetch"] > 0
    assert heard.phases("seed") == 0
    assert not serving.wrong(chain.models[5])


# ------------------------------------------------------------------------------------------ torn payloads


@pytest.fixture
def here(tmp_path: Path, chain: h.Chain) -> Iterator[live.Here]:
    with contextlib.closing(live.Here(tmp_path, 4, chain.models[1])) as engine:
        yield engine


def tear(here: live.Here, store: Store, after: int) -> None:
    """A follower that is gone after ``after`` ranks have carried out a write."""
    real, done = [rank.write for rank in here.ranks], threading.Semaphore(after)

    def unreached(write: Callable[..., None]) -> Callable[..., None]:
        def carry_out(*arguments: object) -> None:
            if not done.acquire(blocking=False):
                raise UnavailableError("it was not reached")
            write(*arguments)

        return carry_out

    for rank in here.ranks:
        rank.write = unreached(rank.write)  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="not reached"):
        h.followed(store, here.target)  # type: ignore[arg-type]
    for rank, write in zip(here.ranks, real, strict=True):
        rank.write = write  # type: ignore[method-assign]


def test_a_payload_that_some_ranks_have_is_brought_to_all(here: live.Here, chain: h.Chain) -> None:
    count = 0
    for after in range(1, 24, 2):
        heard = h.Heard()
        tear(here, chain.store, after)
        header = here.target.read_header()
        assert header is not None
        assert header.state is State.DIRTY
        assert h.followed(chain.store, here.target, emit=heard) == 5  # type: ignore[arg-type]
        assert not here.wrong(chain.models[5])
        assert heard.phases("seed") == 0
        count += heard["torn"]
        for rank in here.ranks:
            rank.load(chain.models[1])
    assert count > 5


def test_a_torn_payload_that_is_not_kept_costs_an_anchor(here: live.Here, chain: h.Chain) -> None:
    """What the ranks were to be set to went with the payload; guessing it from torn bits would be wrong."""
    heard = h.Heard()
    tear(here, chain.store, 2)
    for rank in here.ranks:
        rank.drop()
    assert h.followed(chain.store, here.target, emit=heard) == 5  # type: ignore[arg-type]
    assert heard["torn"] == 0, "set to what torn bits lead to"
    assert heard.phases("seed") == 1
    assert not here.wrong(chain.models[5])


def test_a_payload_that_is_torn_within_a_rank_costs_an_anchor(here: live.Here, chain: h.Chain) -> None:
    """As a rank whose device failed in the middle of a write, though the worker lives on."""
    heard = h.Heard()
    tear(here, chain.store, 2)
    kept = next(one for one in here.ranks[1]._staged.values() if any(at.size for _, at, _ in one.values))
    view, at, _ = next(hit for hit in kept.values if hit[1].size)
    view.bits[at[:1]] ^= view.bits.dtype.type(1)
    assert h.followed(chain.store, here.target, emit=heard) == 5  # type: ignore[arg-type]
    assert heard["torn"] > 0
    assert heard.phases("seed") == 1
    assert not here.wrong(chain.models[5])


def test_one_rank_that_lost_a_payload(here: live.Here, chain: h.Chain) -> None:
    heard = h.Heard()
    tear(here, chain.store, 4)  # one payload is everywhere, the others nowhere
    here.ranks[3].drop()
    assert h.followed(chain.store, here.target, emit=heard) == 5  # type: ignore[arg-type]
    assert heard.phases("seed") == 0
    assert heard["refetch"] > 0
    assert not here.wrong(chain.models[5])


def test_sums_of_torn_bits_are_of_neither_side() -> None:
    ref = RunLog.open(h.publish_chain(np.random.default_rng(1), ("some",)).store).version(2).payloads[0]
    for pre in (ref.pre, *(ref.post + Digest(k) for k in range(4))):
        other = replace(ref, pre=pre)
        assert torn(other) not in (other.pre, other.post)


def test_versions_are_found_by_digest(chain: h.Chain) -> None:
    log = RunLog.open(chain.store)
    for version in (1, 2, 4, 5):
        found = log.find_version(h.digest_of(log.run, log.catalog, chain.models[version]))
        assert found is not None
        assert found.attempt == version
    first = h.digest_of(log.run, log.catalog, chain.models[1])
    assert log.find_version(first, most=4) is None
    assert log.find_version(first, most=5) is not None
    assert log.find_version(first + Digest(1)) is None


# ------------------------------------------------------------------------------------------ death of a rank


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_noticed_and_a_new_engine_is_taken(engine: Start, chain: h.Chain, victim: int) -> None:
    serving = engine(2, chain.models[1])
    target, heard, caught = serving.target(), h.Heard(), list[BaseException]()
    receiver = Receiver(chain.store, target, emit=heard, poll_s=60)

    def follow() -> None:
        try:
            receiver.follow()
        except UnavailableError as error:
            caught.append(error)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    wait_for(lambda: receiver.version == 5 and not serving.paused)
    started = time.monotonic()
    serving.kill(victim)
    thread.join(20)
    assert "during hello" in str(caught[0]), "what led here is said, not what followed from it"
    assert time.monotonic() - started < 10, "noticed only after the poll"
    serving.restart(victim)
    assert target.catalog is not None
    with pytest.raises((BaseMismatch, IntegrityError)):  # one rank is at version 5, the other at 1
        receiver.follow(once=True)
    serving.restart(1 - victim)
    assert receiver.follow(once=True) == 5
    assert heard["adopted"] == 2
    assert heard.phases("seed") == 0
    assert not serving.wrong(chain.models[5])
    receiver.close()
    target.close()


def wait_for(happened: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_replaced_engine_is_noticed(engine: Start, chain: h.Chain) -> None:
    serving = engine(2, chain.models[1])
    target = serving.target()
    log = RunLog.open(chain.store)
    target.attach(log.run, log.catalog)
    target.watch()
    serving.kill(0)
    with pytest.raises(UnavailableError):
        target.watch()
    serving.restart(0)
    with pytest.raises(UnavailableError):
        target.watch()
    target.attach(log.run, log.catalog)
    target.watch()
    target.close()


def test_a_header_counts_only_for_the_ranks_it_was_written_for(engine: Start, chain: h.Chain) -> None:
    serving, heard = engine(2, chain.models[5]), h.Heard()
    live.followed(chain.store, serving.target())
    serving.restart(1)
    target, log = serving.target(), RunLog.open(chain.store)
    target.attach(log.run, log.catalog)
    assert target.read_header() is None
    target.close()
    live.followed(chain.store, serving.target(), emit=heard)
    assert heard["adopted"] == 1


def test_a_second_follower_takes_over(engine: Start, chain: h.Chain) -> None:
    serving, log = engine(2, chain.models[1]), RunLog.open(chain.store)
    first, second = serving.target(), serving.target()
    first.attach(log.run, log.catalog)
    second.attach(log.run, log.catalog)
    for use in (first.watch, first.digest, first.drop, first.read_header):
        with pytest.raises(UnavailableError, match="another follower has attached"):
            use()
    assert second.digest() == h.digest_of(log.run, log.catalog, chain.models[1])
    first.close()
    second.close()


# ------------------------------------------------------------------------------------------ death of a follower


def test_killed_followers_are_finished_by_their_successors() -> None:
    seed = random.SystemRandom().randrange(1 << 32)
    command = [sys.executable, "-m", "tests.test_receiver_live", str(seed)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, f"seed {seed}\n{done.stdout}\n{done.stderr}"
    counts = json.loads(done.stdout)
    print(counts)
    assert counts["kills"] >= 40
    assert counts["rounds"] >= 2
    assert counts["dirty"] > 0, "no kill met a write"
    assert counts["torn"] > 0, "no payload was left half written"
    assert counts["loads"] == 0, "loaded the anchor though the memory survived"


def loop(seed: int) -> dict[str, int]:
    """Followers are killed again and again, until they have reached the head several times."""
    chooser, counters = random.Random(seed), Counters("kills", "dirty", "torn", "loads", "rounds")
    with tempfile.TemporaryDirectory() as directory:
        store = open_store(f"{directory}/store")
        kinds = ("some", "many", "nudge", "nothing", "back", "some")
        chain = h.publish_chain(np.random.default_rng(seed), kinds, live.SHAPES, store, payload_bytes=900)
        serving = live.Engine(Path(directory, "engine"), 4, chain.models[1], nap_s=0.002)
        with contextlib.closing(serving):
            kill_followers(store, serving, chain, chooser, counters)
    return counters.all()


def kill_followers(
    store: Store, serving: live.Engine, chain: h.Chain, chooser: random.Random, counters: Counters
) -> None:
    real = AgentClient.write

    def write(self: AgentClient, *arguments: Any) -> None:
        """Ranks are reached one after the other, as on a busy machine."""
        time.sleep(random.random() * 0.01)
        real(self, *arguments)

    def agent() -> None:
        AgentClient.write = write  # type: ignore[method-assign]  # of this process alone, which is about to die
        live.followed(store, serving.target(), emit=counters, prove=chooser.random() < 0.5)

    typical = timed(agent)
    while counters["kills"] < 40 or counters["rounds"] < 2 or (not counters["torn"] and counters["kills"] < 160):
        header = serving.header()
        if header is not None and (header.state, header.version) == (State.CLEAN, chain.head):
            assert not serving.wrong(chain.models[chain.head])
            counters.add("rounds")
            serving.load()
        if kill_after(fork(agent), chooser.uniform(0, typical * 0.6)):
            counters.add("kills")
            check_survivor(serving, chain, counters)
        chooser.random()
    assert not kill_after(fork(agent), 60)
    assert not serving.wrong(chain.models[chain.head])
    assert not serving.paused
    assert not [path for path in (serving.directory / "spool").iterdir() if "payload" in path.name]


def check_survivor(serving: live.Engine, chain: h.Chain, counters: Counters) -> None:
    """At the very instant of death: CLEAN says what the bits are, anything else that nobody uses them."""
    header = serving.header()
    if header is not None and header.state is State.CLEAN:
        assert not serving.wrong(chain.models[header.version]), f"CLEAN({header.version}) is not its bits"
    elif header is not None:
        assert header.state is State.DIRTY
        assert serving.paused
        counters.add("dirty")


if __name__ == "__main__":
    print(json.dumps(loop(int(sys.argv[1]))))
