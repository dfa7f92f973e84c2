"""What goes wrong around a live vLLM server: followers and engines killed with signal 9, and engines that are refused.

Two checkpoints of a real model take turns as versions of the run, so that what the engine must hold after any number of
refits is known from two dense loads.
"""

from __future__ import annotations

import contextlib
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltarefit import Publisher, open_store, runtime
from deltarefit.manifest import State
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.engine import read_note
from deltarefit.targets.vllm_control import VllmControl
from tests.desk import Done
from tests.engines import scene, trainer
from tests.engines.inspecting import WORKER, vllm_sums
from tests.engines.refitted import Child
from tests.engines.scene import LENGTH, Scene, until
from tests.engines.servers import VllmServer, free_port
from tests.engines.test_zoo_refit import PROMPTS, change, refit
from tests.fleet import Died
from tests.test_stream import Failing

pytestmark = pytest.mark.timeout(900)

KILLS = 8
PAYLOAD_BYTES = 1 << 17
"""Small, so that a version has about a hundred payloads."""


@dataclass
class Turns:
    """The run: odd versions are ``checkpoints[0]``, even ones ``checkpoints[1]``, which a dense load knows as
    ``known``."""

    publisher: Publisher
    checkpoints: list[Path]
    known: list[dict[str, Any]]
    head: int = 0

    def publish(self) -> int:
        self.publisher.source = CheckpointSource(self.checkpoints[self.head % 2])
        self.head = self.publisher.publish(self.head).version
        return self.head

    @property
    def held(self) -> dict[str, Any]:
        """Sums and replies of the newest version."""
        return self.known[(self.head - 1) % 2]


@dataclass
class Place(Scene):
    """A scene without a trainer."""

    turns: Any = None
    agent: str = ""

    def once(self, *options: str) -> Done:
        return self.desk.run("follow", self.store, "--vllm", self.server.url, "--once", *options)

    def header(self) -> tuple[str, str]:
        """Incarnation of the agent, and the state that its header says; does not disturb a follower."""
        client = AgentClient(self.agent)
        try:
            hello = client.hello()
        finally:
            client.close()
        state = read_note(hello["header"])[1].state.value if hello["header"] else ""
        return hello["incarnation"], state

    def find(self) -> None:
        """The agent of the engine as it runs now."""
        self.agent = VllmControl(self.server.url).agents()[0]

    def await_state(self, state: State) -> None:
        end = time.monotonic() + scene.WAIT_S
        while self.header()[1] != state.value:
            assert time.monotonic() < end, f"never {state.value}"
            time.sleep(0.002)

    def check(self) -> None:
        """The engine holds and says what the newest version does."""
        assert vllm_sums(self.server) == self.turns.held["sums"]
        assert self.replies() == self.turns.held["tokens"]


@contextlib.contextmanager
def streaming(store: str, checkpoint: Path) -> Iterator[Publisher]:
    """A trainer of its own."""
    source = CheckpointSource(checkpoint)
    with contextlib.closing(Publisher(open_store(store), source, payload_bytes=PAYLOAD_BYTES, mode="stream")) as one:
        yield one


@pytest.fixture(scope="module")
def child() -> Iterator[Child]:
    with Child() as one:
        yield one


@pytest.fixture(scope="module")
def place(child: Child, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    root = tmp_path_factory.mktemp("f")
    (root / "tmp").mkdir()
    base = trainer.make_base(scene.CACHE, root / "base")
    checkpoints = [base, change(base, root / "changed")]
    prompts = scene.prompts_of(base, seeded=True)
    known = [child.ask(checkpoint=str(one), prompts=prompts, max_tokens=LENGTH) for one in checkpoints]
    assert known[0]["tokens"] != known[1]["tokens"]
    publisher = Publisher(open_store(str(root / "store")), CheckpointSource(base), payload_bytes=PAYLOAD_BYTES)
    turns = Turns(publisher, checkpoints, known)
    turns.publish()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAREFIT_RUN_DIR", str(root / "run"))
        with VllmServer(base, extension=WORKER) as server:
            yield Place(root, base, None, server, "--vllm", prompts, free_port(), turns=turns)  # type: ignore[arg-type]


def test_a_stream_that_failed_is_overwritten_by_the_next(place: Place) -> None:
    """The trainer dies while an engine is being written on arrival, then the follower does; what was written is
    another version's, and the next version is the base's bits again. No anchor, no restart."""
    place.find()
    (incarnation, _), turns = place.header(), place.turns
    with place.following() as following:
        following.wait_for(rf'"version":{turns.head}\b')
        other, same = turns.checkpoints[turns.head % 2], turns.checkpoints[(turns.head - 1) % 2]
        with runtime.using(Failing(20)), contextlib.suppress(Died), streaming(place.store, other) as publisher:
            publisher.publish()
        place.await_state(State.DIRTY)
        following.process.kill()
        following.process.wait(30)
    with place.following() as following, streaming(place.store, same) as publisher:
        turns.head = publisher.publish().version
        said = following.wait_for(rf'"version":{turns.head}\b')
        assert "seed" not in json.loads(said)["seconds"]
        until(lambda: place.header() == (incarnation, State.CLEAN.value))
        place.check()


def test_followers_killed_in_the_middle_of_a_write_are_succeeded(place: Place) -> None:
    """Without a restart of the engine, and without an anchor."""
    place.turns.publish()
    seconds = json.loads(place.once("--json").last)["seconds"]
    place.check()
    place.find()
    (incarnation, _), torn = place.header(), 0
    for number in range(KILLS):
        with place.following() as following:
            place.await_state(State.CLEAN)
            place.turns.publish()
            place.await_state(State.DIRTY)
            time.sleep(random.Random(number).uniform(0, float(seconds["write"])))
            following.process.kill()
            following.process.wait(30)
        torn += place.header()[1] == State.DIRTY.value
        done = place.once("-v")
        assert (done.code, done.last) == (0, str(place.turns.head)), done.err
        assert not [line for line in done.err.splitlines() if line.startswith(("seed", "warning"))], done.err
        assert place.header() == (incarnation, State.CLEAN.value)
        assert vllm_sums(place.server) == place.turns.held["sums"]
    place.check()
    print(json.dumps({"write_s": seconds["write"], "rounds": KILLS, "left dirty": torn}))
    assert torn >= KILLS // 2, "the kills did not hit the writes"


def test_a_killed_engine_comes_back_and_is_not_ready_before_it_is_current(place: Place) -> None:
    with place.following() as following:
        until(lambda: place.ready()["status"] == 200)
        following.wait_for(f'"version":{place.turns.head}')
        place.server.kill()
        following.wait_for("does not answer|lost it|was stopped")
        until(lambda: place.ready()["status"] == 503)
        place.turns.publish()
        began = time.monotonic()
        place.server.start()
        up = time.monotonic() - began
        stale = place.replies()
        seen = []

        def current() -> bool:
            seen.append(place.ready())
            return seen[-1]["status"] == 200

        until(current)
        assert seen[-1]["version"] == place.turns.head, "ready before it was current"
        place.check()
        line = following.wait_for(f'"version":{place.turns.head}')
    told = {"up_s": up, "current_s": time.monotonic() - began, "line": json.loads(line)}
    served_old = stale != place.turns.held["tokens"]
    print(json.dumps({**told, "served_old": served_old, "states": sorted({body["state"] for body in seen})}))


def test_an_engine_that_sleeps_is_left_alone(place: Place) -> None:
    before = vllm_sums(place.server)
    place.turns.publish()
    place.server.post("/sleep", level=0, mode="keep")
    done = place.once()
    assert done.code == 5
    assert "the engine is asleep" in done.err
    assert vllm_sums(place.server) == before
    place.server.post("/wake_up")
    assert place.once().code == 0
    place.check()


# ------------------------------------------------------------------------------------------ what is refused


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"enable_lora": True}, "LoRA adapters are enabled"),
        ({"load_format": "dummy"}, "dummy weights"),
    ],
)
def test_an_engine_with_options_that_forbid_it(
    child: Child, checkpoint: Callable[..., Path], tmp_path: Path, options: dict[str, Any], says: str
) -> None:
    answer = refit(child, "llama", checkpoint("llama"), tmp_path, options)
    assert says in answer["refused"]
    assert answer["same"], "it was written to"


def test_an_engine_with_another_model(child: Child, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    answer = started_elsewhere(child, checkpoint("qwen3-moe"), checkpoint("llama"), tmp_path)
    assert "tensors cannot be kept bit-exact in this engine" in answer["refused"]
    assert "the loader does not take it" in answer["refused"]
    assert answer["same"], "it was written to"


def test_an_engine_with_other_weights_of_the_model(
    child: Child, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """They prove where each tensor lies, and are replaced by an anchor."""
    answer = started_elsewhere(child, checkpoint("llama", 1), checkpoint("llama"), tmp_path)
    assert answer["version"] == 1
    assert "seed" in [phase for _, phase, _, _ in answer["events"]]
    assert answer["before"]["sums"] != answer["refitted"]["sums"] == answer["fresh"]["sums"]


def started_elsewhere(child: Child, started: Path, published: Path, scratch: Path) -> dict[str, Any]:
    """An engine that was started from one checkpoint, and is told to follow a run of another."""
    publisher = Publisher(open_store(str(scratch / "store")), CheckpointSource(published))
    publisher.publish(0)
    publisher.close()
    return child.ask(
        checkpoint=str(started), changed=str(published), store=str(scratch / "store"), prompts=PROMPTS, max_tokens=8,
        spool=str(scratch / "spool"),
    )  # fmt: skip
