"""The simulator: seeds that hold, replay, what its parts do, and that the dead have no effect."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from deltarefit import runtime
from deltarefit.cli import main
from deltarefit.errors import AlreadyExistsError, NotFoundError, UnavailableError
from deltarefit.manifest import Decision, Header, Intent, Mode, Outcome, State
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.publishing import trainers as meetings
from deltarefit.records import Digest, Record
from deltarefit.retention import Doomed, tomb_key
from deltarefit.runlog import attempt_key
from deltarefit.simulation import HEALING, MODES, UNLIMITED, run_seed, run_seeds
from deltarefit.simulation.model import CATALOG, new_model, part_of, shared_out, trained
from deltarefit.simulation.oracle import Oracle
from deltarefit.simulation.store import Client, Shelf, StoreFaults
from deltarefit.simulation.weights import Access, WeightFaults, Weights
from deltarefit.simulation.world import Killed, Process, World

SEEDS = 150
HAPPENS = (
    "crash",
    "power loss",
    "engine died",
    "fault: hangs until",
    "goes on",
    "fault: its clock jumps",
    "fault: cannot be reached by anybody",
    "fault: cannot be reached by receiver",
    "arrived late",
    "came too late",
    "the answer was lost",
    "the request was lost",
    "fault: what was read is damaged",
    "is stored short",
    "fault: a write does not stick",
    "fault: a bit flips",
    "fault: a bit of the baseline flips",
    "no room in the spool",
    "says torn",
    "says diverged",
    "says refetch",
    "header DIRTY",
    "AttemptLostError",
    "DigestMismatch",
    "has been silent",
    "baseline UNKNOWN",
    "rival-1.0    publishes",
    "trainer-3.1  publishes",
    "pruned below",
    "anchor seal",
)
"""What must be found in the traces of some seeds: each is a fault, or what the product does about one."""


@pytest.mark.slow
def test_all_seeds_hold() -> None:
    failed = [f"{run.command}: {run.failures}" for run in run_seeds(0, SEEDS, 1) if run.failures]
    assert not failed, "\n".join(failed)


def test_seeds_are_worth_playing() -> None:
    """Versions are committed, weights are loaded once, and faults take their toll."""
    runs = list(run_seeds(0, 60, 1))
    assert sum(run.versions for run in runs) > 2 * len(runs)
    assert all(run.versions for run in runs if run.mode == HEALING)
    assert any(run.healed_s > 5 for run in runs)
    assert len({run.trace for run in runs}) == len(runs)


def test_everything_happens() -> None:
    missing = set(HAPPENS)
    for seed in range(150):
        for mode in MODES:
            text = "\n".join(run_seed(seed, mode, None).tail)
            missing -= {what for what in missing if what in text}
        if not missing:
            return
    pytest.fail(f"never seen: {sorted(missing)}")


# ------------------------------------------------------------------------------------------ replay


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_replays(mode: str) -> None:
    for seed in range(8):
        first = run_seed(seed, mode)
        run_seed(seed + 100, mode)
        assert run_seed(seed, mode) == first


@pytest.mark.parametrize("hash_seed", ["0", "1", "12345"])
def test_a_seed_replays_in_another_process(hash_seed: str) -> None:
    code = "from deltarefit.simulation import *; print([run_seed(s, m).trace for s in range(6) for m in MODES])"
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == str([run_seed(seed, mode).trace for seed in range(6) for mode in MODES])


def test_a_run_leaves_nothing_behind() -> None:
    parse = Record.__dict__["from_bytes"]
    meetings._answered.add(b"somebody's")
    answered = set(meetings._answered)
    run_seed(0, HEALING)
    assert meetings._answered == answered
    meetings._answered.remove(b"somebody's")
    assert Record.__dict__["from_bytes"] is parse
    assert isinstance(runtime._current.get(), runtime.SystemRuntime)


def test_processes_of_a_pool_play_the_same() -> None:
    assert list(run_seeds(3, 30, 2)) == list(run_seeds(3, 30, 1))


# ------------------------------------------------------------------------------------------ the command


def test_simulate_says_ok(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "2", "--jobs", "1", "--json"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["result"], last["runs"], last["failed"]) == ("ok", 4, [])


def test_simulate_shows_how_a_failure_is_replayed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deltarefit.receiver.Receiver._do_Pause", lambda self, action: None)
    assert main(["simulate", "--seeds", "1", "--first", "7", "--mode", UNLIMITED]) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "failed"
    assert lines[-2] == "replay: deltarefit simulate --first 7 --seeds 1 --mode unlimited --trace"
    assert any("VIOLATION" in line for line in lines)


def test_simulate_shows_a_whole_trace(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seeds", "1", "--mode", HEALING, "--trace"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(run_seed(0, HEALING, None).tail) + 1


def test_simulate_refuses_an_unknown_mode(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--mode", "gentle"]) == 2
    assert "unlimited" in capsys.readouterr().err


def test_simulate_without_greenlet(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("deltarefit.simulation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "greenlet", None)
    assert main(["simulate"]) == 2
    assert "deltarefit[simulate]" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------ the parts


def played(main_: Callable[[Process], None], seed: str = "0") -> World:
    """One process alone in a world; what it raises is raised here."""
    world, raised = World(seed), []

    def caught(process: Process) -> None:
        try:
            main_(process)
        except Exception as error:
            raised.append(error)

    Process(world, "p", caught, lambda how: None)
    world.run()
    for error in raised:
        raise error
    return world


def test_time_passes_only_in_sleep() -> None:
    times: list[float] = []

    def main_(process: Process) -> None:
        process.rate, process.offset = 2.0, 100.0
        for _ in range(3):
            times.append(runtime.now())
            runtime.sleep(10.0)

    assert played(main_).now == pytest.approx(15.0)
    assert times == pytest.approx([100.0, 110.0, 120.0])


def test_tokens_are_replayed() -> None:
    def tokens(seed: str) -> list[str]:
        found: list[str] = []
        played(lambda process: found.extend(runtime.token() for _ in range(3)), seed=seed)
        return found

    assert tokens("1") == tokens("1") != tokens("2")
    assert all(len(token) == 32 for token in tokens("1"))


@pytest.mark.parametrize("condemned", [True, False])
def test_deleting_what_is_needed_is_a_failure(condemned: bool) -> None:
    for key in ("a/0000000001/p/0", "anchor/0000000001/anchor", "a/0000000001/intent"):
        world = World("0")
        oracle = Oracle(world)
        oracle.shelf = shelf = Shelf(world, StoreFaults(), removed=oracle.removed)
        shelf.objects |= {key: b"", "member/somebody": b""}
        if condemned:
            shelf.objects |= {tomb_key(what, 1): b"" for what in Doomed}
        shelf.delete("member/somebody")
        assert not world.failures
        shelf.delete(key)
        assert any("nobody was told" in failure for failure in world.failures) is not condemned
        assert "no way around" in world.failures[-1]


def test_one_create_wins_also_one_that_arrives_late() -> None:
    won: list[str] = []
    for seed in range(30):
        world = World(str(seed))
        shelf = Shelf(world, StoreFaults(late=0.5, lost=0.2, unanswered=0.2))

        def racer(process: Process, shelf: Shelf = shelf) -> None:
            for _ in range(5):
                try:
                    Client(shelf, process, process.name).create("k", process.name.encode())
                except UnavailableError:
                    continue
                except AlreadyExistsError:
                    return
                won.append(process.name)
                return

        for name in ("a", "b", "c"):
            Process(world, name, racer, lambda how: None)
        world.run()
        assert len(won) <= 1
        assert not won or shelf.objects["k"] == won.pop().encode()
        won.clear()


def test_hidden_objects_are_found_in_the_end() -> None:
    missed: list[int] = []

    def main_(process: Process) -> None:
        client = Client(Shelf(process.world, StoreFaults(hidden=1.0, hidden_s=30.0)), process, "p")
        client.put("k", b"x")
        for number in range(700):
            try:
                client.get("k")
            except NotFoundError:
                missed.append(number)
            process.rest(0.05)

    played(main_)
    assert 0 < len(missed) < max(missed) < 600


def test_a_replaced_create_once_object_is_a_failure() -> None:
    def main_(process: Process) -> None:
        client = Client(Shelf(process.world, StoreFaults()), process, "p")
        client.create("k", b"one")
        client.put("k", b"two")

    assert "replaced" in played(main_).failures[0]


@pytest.mark.parametrize("whole", [True, False])
def test_a_payload_that_becomes_less_is_a_failure(whole: bool) -> None:
    """Half of one may be replaced by all of it, and not the other way round."""
    data = b"all of it"
    key = f"anchor/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
    first, then = (data, data[:4]) if whole else (data[:4], data)

    def main_(process: Process) -> None:
        client = Client(Shelf(process.world, StoreFaults()), process, "p")
        client.create(key, first)
        client.put(key, then)

    assert ["was whole" in failure for failure in played(main_).failures] == [True] * whole


@pytest.mark.parametrize("verb", ["put", "create"])
def test_half_of_a_payload_is_stored_whichever_way(verb: str) -> None:
    def main_(process: Process) -> None:
        shelf = Shelf(process.world, StoreFaults(short=1.0))
        getattr(Client(shelf, process, "p"), verb)("a/0000000001/pl/0", b"1234")
        getattr(Client(shelf, process, "p"), verb)("other", b"1234")
        assert shelf.objects == {"a/0000000001/pl/0": b"12", "other": b"1234"}

    played(main_)


@pytest.mark.parametrize(("mode", "adrift"), [(Mode.STREAM, 3), (Mode.STAGE, 0)])
def test_the_oracle_knows_who_waits_for_another_attempt(mode: Mode, adrift: int) -> None:
    world = World("0")
    oracle = Oracle(world)
    oracle.shelf = shelf = Shelf(world, StoreFaults(), landed=oracle.landed)
    intent = Intent("0" * 32, 3, 0, Digest(), mode, "i")
    shelf.create(attempt_key(3, "intent"), intent.to_bytes())
    shelf.create(attempt_key(3, "outcome"), Outcome("0" * 32, 3, Decision.ABORT, 0, Digest(), (), 0, "o").to_bytes())
    assert oracle.adrift == adrift
    assert not world.failures


def test_reads_are_damaged_and_the_object_is_not() -> None:
    found: list[bytes] = []

    def main_(process: Process) -> None:
        shelf = Shelf(process.world, StoreFaults(garbled=0.5))
        client = Client(shelf, process, "p")
        client.put("k", bytes(20))
        found.extend(client.get("k") for _ in range(50))
        assert shelf.objects["k"] == bytes(20)

    played(main_)
    assert 10 < sum(data == bytes(20) for data in found) < 40


def test_the_dead_have_no_effect() -> None:
    """Handlers of the product run while a killed process unwinds; nothing they do may count."""
    done: list[str] = []
    world = World("0")
    shelf = Shelf(world, StoreFaults())
    weights = Weights(world, "w", False, WeightFaults(), lambda weights, when: None)
    header = Header("0" * 32, "c", State.UNKNOWN, 0, 0, Digest(), 0, "i")

    def main_(process: Process) -> None:
        client, access = Client(shelf, process, "p"), Access(weights, process)
        access.write_header(header)
        access.seed(CATALOG, {})
        try:
            with access.window(0, 0, 3):
                process.die("crash")
        except BaseException:
            for act in (
                lambda: client.put("k", b""),
                lambda: client.create("k", b""),
                lambda: client.get("k"),
                lambda: client.delete("k"),
                lambda: access.resume(),
                lambda: access.pause(),
                lambda: access.write_header(header),
                lambda: access.spool.put("s", b""),
                lambda: access.spool.clear(),
                lambda: access.flush(),
                lambda: access.window(0, 0, 3).__enter__(),
                lambda: runtime.sleep(1.0),
                lambda: runtime.point("x"),
            ):
                with pytest.raises(Killed):
                    act()
            done.append("unwound")
            raise

    Process(world, "p", main_, lambda how: done.append(str(how)))
    world.run()
    assert done == ["unwound", "crash"]
    assert shelf.objects == {}
    assert not weights.paused


def seeded(process: Process, disk: bool) -> tuple[Weights, Access]:
    """Paused weights under a header that says UNKNOWN, all sevens and flushed."""
    weights = Weights(process.world, "w", disk, WeightFaults(), lambda weights, when: None)
    access = Access(weights, process)
    access.pause()
    access.write_header(Header("0" * 32, "c", State.UNKNOWN, 0, 0, Digest(), 0, "i"))
    access.seed(CATALOG, {})
    return weights, access


def test_power_loss_takes_what_was_not_flushed() -> None:
    def main_(process: Process) -> None:
        weights, access = seeded(process, disk=True)
        for value in (1, 2):
            with access.window(0, 0, 42) as (array, _):
                array[:] = value
            if value == 1:
                access.flush()
        weights.lose_power()
        assert set(weights.arrays[0].tolist()) == {1, 2}
        assert np.array_equal(weights.arrays[0], weights.durable[0])

    played(main_)


def test_whoever_dies_in_a_write_leaves_it_torn() -> None:
    found: list[set[int]] = []

    def main_(process: Process) -> None:
        weights, access = seeded(process, disk=False)
        process.mark, process.fuse = "wrote", 1
        try:
            with access.window(0, 0, 42) as (array, _):
                array[:] = 1
        finally:
            found.append(set(weights.arrays[0].tolist()))

    played(main_)
    assert found == [{1, 7}]


@pytest.mark.parametrize("paused", [True, False])
def test_a_write_under_users_is_a_failure(paused: bool) -> None:
    def main_(process: Process) -> None:
        weights, access = seeded(process, disk=False)
        weights.paused = paused
        with access.window(0, 0, 1) as (array, _):
            array[:] = 1

    assert bool(played(main_).failures) is not paused


def test_the_oracle_knows_wrong_bits() -> None:
    world = World("0")
    oracle = Oracle(world)
    model = new_model(world.random)
    oracle.models[5], oracle.versions[2] = model, 5
    weights = Weights(world, "w", False, WeightFaults(), oracle.judge)
    weights.arrays = [array.copy() for array in model]
    weights.header = Header("0" * 32, "c", State.CLEAN, 2, 0, Digest(), 0, "i")
    oracle.judge(weights, "now")
    assert not world.failures
    weights.arrays[2][3] ^= 1
    oracle.judge(weights, "now")
    assert "other bits" in world.failures[0]


def test_ranks_own_every_element_once() -> None:
    random = World("0").random
    for ranks in (1, 2):
        for _ in range(50):
            model = new_model(random)
            owned = [piece for pieces in shared_out(random, ranks) for piece in pieces]
            found = [(piece.tensor, piece.position(p)) for piece in owned for p in range(piece.length)]
            expected = [(number, at) for number, entry in enumerate(CATALOG.tensors) for at in range(entry.numel)]
            assert sorted(found) == expected
            assert all(part_of(model, piece).size == piece.length for piece in owned)


def test_training_never_changes_what_was_published() -> None:
    random = World("0").random
    model = new_model(random)
    before = [array.copy() for array in model]
    models = [model]
    for _ in range(40):
        models.append(trained(random, models[-1], random.choice(models)))
    assert all(np.array_equal(one, other) for one, other in zip(model, before, strict=True))
    assert any(not np.array_equal(one, other) for one, other in zip(models[-1], model, strict=True))


def test_a_mutant_is_replayed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing seed fails again, in the same way."""

    def written(self: f.Follower, event: m.Written) -> Any:
        return f.Follower._written(self, m.Written(tuple(ref.post for ref in self.refs)))

    monkeypatch.setitem(f._HANDLERS, (f.Phase.WRITING, m.Written), written)
    failing = next(run for run in run_seeds(0, 150, 1) if run.failures)
    assert run_seed(failing.seed, failing.mode) == failing
