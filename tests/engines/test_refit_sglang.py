"""A trainer, a store and a live SGLang server; and models whose experts or attention SGLang keeps in ways of its own.

Greedy replies only: SGLang's sampling on a CPU is not repeatable. Each comparison is with a server that was started
from a dense export.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from deltarefit import Publisher, Receiver, open_store
from deltarefit.cli.engines import target_at
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.targets.sglang_control import SglangControl
from tests.engines import inspecting, scene, trainer
from tests.engines.scene import Scene
from tests.engines.servers import LOADER, SglangServer, free_port
from tests.engines.test_zoo_refit import change

pytestmark = pytest.mark.timeout(600)

KINDS = ("train", "plant")
SUMS_LOADER = "tests.engines.inspecting.sglang_sums"
PROMPTS = [([5, 6, 7, 8], 0.0, None), ([20, 30, 40], 0.0, None)]


@contextmanager
def started(checkpoint: Path, root: Path, run: Path) -> Iterator[SglangServer]:
    """A server that tells ``sums``; its files are in ``root``, agents' sockets in ``run``."""
    root.mkdir()
    settings = {"DELTAREFIT_RUN_DIR": str(run), inspecting.SUMS: str(root)}
    loaders = ["--custom-weight-loader", LOADER, SUMS_LOADER]
    with SglangServer(checkpoint, loader=None, extra_args=loaders, env=settings) as server:
        yield server


def sums(server: SglangServer, root: Path) -> dict[str, str]:
    """SHA-256 by tensor name of what the server holds."""
    server.post("/begin_weight_update", {"selector": "target"})
    body = {"serialized_named_tensors": [EMPTY], "load_format": SUMS_LOADER, "selector": "target"}
    server.post("/update_weights_from_tensor", {**body, "flush_cache": False})
    server.post("/end_weight_update", {})
    return json.loads((root / "0.json").read_text())  # type: ignore[no-any-return]


EMPTY = "gARdlC4="
"""An empty list as SGLang's serializer writes it."""


def replies(server: SglangServer, prompts: Sequence[scene.Prompt]) -> list[list[int]]:
    return [server.generate([tokens], max_tokens=scene.LENGTH)[0] for tokens, _, _ in prompts]


def compared(server: SglangServer, home: Path, dense: Path, prompts: Sequence[scene.Prompt], run: Path) -> None:
    """Server and one that is started from ``dense`` say and hold the same."""
    said, mine = replies(server, prompts), sums(server, home)
    other = home.with_name(home.name + "-fresh")
    with started(dense, other, run) as fresh:
        assert said == replies(fresh, prompts)
        found = sums(fresh, other)
    assert found.keys() == mine.keys()
    assert not [name for name, value in found.items() if mine[name] != value]


def test_refits_are_a_fresh_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, base = tmp_path / "run", trainer.make_base(scene.CACHE, tmp_path / "base")
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("DELTAREFIT_RUN_DIR", str(run))
    prompts = scene.prompts_of(base, seeded=False)
    with trainer.Trainer(base, tmp_path / "store") as ranks, started(base, tmp_path / "one", run) as server:
        place = Scene(tmp_path, base, ranks, server, "--sglang", prompts, free_port())
        before = place.replies()
        with place.following() as following:
            following.wait_for('"version":1')
            for kind in KINDS:
                row = place.refit(kind, following, streamed=True)
                assert place.server.get("/model_info")["weight_version"] == str(row["published"]["version"])
                assert place.ready()["status"] == 200
                assert before != (before := place.replies())
            assert place.verify()["version"] == 1 + len(KINDS)
        compared(server, tmp_path / "one", ranks.export(tmp_path / "dense"), prompts, run)


@pytest.mark.parametrize(("name", "prompts"), [("qwen3-moe", PROMPTS), ("deepseek-v3", [])])
def test_a_family_of_its_own(
    name: str,
    prompts: list[scene.Prompt],
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's plain attention on a CPU cannot run latent attention: such a model is loaded and says nothing."""
    run, first, store = tmp_path / "run", checkpoint(name), open_store(str(tmp_path / "store"))
    changed = change(first, tmp_path / "changed")
    monkeypatch.setenv("DELTAREFIT_RUN_DIR", str(run))
    publisher = Publisher(store, CheckpointSource(first))
    publisher.publish(0)
    publisher.source = CheckpointSource(changed)
    publisher.publish(1)
    events: list[Any] = []
    with started(first, tmp_path / "one", run) as server:
        before = replies(server, prompts)
        target = target_at(SglangControl(server.url))
        receiver = Receiver(store, target, emit=events.append)
        assert receiver.follow(once=True) == 2
        modes = {(row.mode, row.reason) for row in target.group.report}
        print(name, modes, {event.phase: event.seconds for event in events if event.seconds})
        assert not prompts or replies(server, prompts) != before
        receiver.close()
        target.close()
        compared(server, tmp_path / "one", changed, prompts, run)
    assert "seed" not in {event.phase for event in events}
