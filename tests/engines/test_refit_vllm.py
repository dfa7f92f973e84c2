"""A trainer, a store and a live vLLM server: after each refit it says what an engine says that was loaded densely.

``DELTAREFIT_REFITS=20`` makes the long run, with a fresh engine after every refit; the default is short.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deltarefit import Receiver
from deltarefit.events import Event
from deltarefit.targets.engine import EngineTarget
from deltarefit.targets.vllm_control import VllmControl
from tests.engines import scene, trainer
from tests.engines.inspecting import WORKER, vllm_sums
from tests.engines.refitted import Child
from tests.engines.scene import LENGTH, REFITS, Scene
from tests.engines.servers import VllmServer, free_port

pytestmark = pytest.mark.timeout(300 + 100 * REFITS)

SLOW = 3e6
"""Bytes per second of a slow link."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    root = tmp_path_factory.mktemp("v")
    (root / "tmp").mkdir()
    base = trainer.make_base(scene.CACHE, root / "base")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DELTAREFIT_RUN_DIR", str(root / "run"))
        with trainer.Trainer(base, root / "store") as ranks, VllmServer(base, extension=WORKER) as server:
            prompts = scene.prompts_of(base, seeded=True)
            yield Scene(root, base, ranks, server, "--vllm", prompts, free_port())


@pytest.fixture(scope="module")
def fresh() -> Iterator[Child]:
    with Child() as child:
        yield child


def check_fresh(place: Scene, fresh: Child, said: Any) -> Path:
    """The engine holds and says what one does that was loaded from the trainer's gathered weights."""
    dense = place.trainer.export(place.root / "dense")
    found = fresh.ask(checkpoint=str(dense), prompts=place.prompts, max_tokens=LENGTH)
    mine = vllm_sums(place.server)
    assert not [name for name, value in found["sums"][0].items() if mine[0][name] != value]
    assert said == found["tokens"]
    return dense


def test_each_refit_is_a_fresh_load(place: Scene, fresh: Child) -> None:
    kinds = [*scene.KINDS, *["train"] * REFITS][:REFITS]
    with place.following() as following:
        assert json.loads(following.wait_for('"version":1'))["pause_s"] == 0, "adopted as it is"
        before, trained, changed = place.replies(), 0, 0
        for number, kind in enumerate(kinds):
            row = place.refit(kind, following, streamed=kind in scene.TRAINING)
            said = place.replies()
            trained, changed = trained + (kind in scene.TRAINING), changed + (said != before)
            assert said == before or kind in scene.TRAINING
            check_said(place, row)
            if scene.FULL or kind in scene.TRAINING:
                dense = check_fresh(place, fresh, said)
                print(f"refit {number + 1} is a fresh load", flush=True)
            if kind == "plant":
                check_planted(dense)
            before = said
        assert place.verify()["version"] == 1 + REFITS
    # A small step may leave all replies as they were, but not many of them.
    assert 2 * changed > trained
    assert max(row["pause_s"] for row in place.rows) < 30


def check_said(place: Scene, row: dict[str, Any]) -> None:
    """What engine and follower say that is held."""
    published = row["published"]
    assert place.server.get("/weight_info")["weight_version"] == str(published["version"])
    expected = {"status": 200, "version": published["version"], "head": published["version"], "state": "CLEAN"}
    assert place.ready() == {**expected, "digest": published["digest"]}
    if row["kind"] in scene.TRAINING:
        assert published["changed"] > 1_000_000
    if "client" in row:
        assert row["client"]["stall_s"] < row["pause_s"] + 5


def check_planted(dense: Path) -> None:
    """The comparison with this export was one of a NaN with a payload, of a -0.0 and of a counter."""
    tensors = load_file(dense / "model.safetensors")
    bits = tensors["model.embed_tokens.weight"].view(torch.int16)[trainer.UNUSED, :2]
    assert bits.tolist() == [trainer.NAN, trainer.MINUS_ZERO]
    assert tensors[trainer.COUNTER].tolist() == [n + (1 << 40) for n in range(16)]


def test_a_pause_does_not_wait_for_what_is_fetched(place: Scene) -> None:
    events: list[Event] = []
    target = EngineTarget(VllmControl(place.server.url), Path(os.environ["DELTAREFIT_RUN_DIR"]) / "spool")
    receiver = Receiver(scene.slow_store(place.store, SLOW), target, emit=events.append, prove=False)
    place.trainer.advance("train")
    place.trainer.publish()
    client = scene.Client(place.server)
    receiver.follow(once=True)
    receiver.close()
    target.close()
    seconds = {event.phase: event.seconds for event in events if event.seconds}
    print(json.dumps({**seconds, "client": client.gaps(client.times[0] + 1)}))
    assert seconds["stage"] > 1.5, "the link was not slow"
    assert seconds["pause"] < seconds["stage"] / 3
