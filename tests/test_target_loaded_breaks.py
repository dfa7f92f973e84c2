"""What once ended in wrong live bits, or in an engine that no follower could mend: found by trying to break it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltarefit import Publisher  # noqa: E402
from deltarefit.errors import BaseMismatch, UnavailableError, UsageError  # noqa: E402
from deltarefit.manifest import State  # noqa: E402
from deltarefit.ports import Store  # noqa: E402
from deltarefit.targets.loaded import LoadedModuleTarget  # noqa: E402
from deltarefit.targets.placing.shadows import Shadows  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_engine import Engine, room  # noqa: E402

F32 = torch.float32
A, B = ("F32", (6, 4)), ("BF16", (6, 4))
Make = Callable[[], Engine]


def negated(engine: Engine, name: str, w: torch.Tensor) -> None:
    """``a`` is opaque."""
    getattr(engine, name).data.copy_(-torch.exp(w.float()) if name == "a" else w)


def make(take: Any = negated, names: str = "ab") -> Make:
    return lambda: Engine(take, **{n: room(6, 4, dtype=F32 if n == "a" else torch.bfloat16) for n in names})


def published(kinds: Any, seed: int = 5) -> tuple[Store, list[h.Model]]:
    """Three versions of a run, several payloads each."""
    store, rng = h.new_store(), np.random.default_rng(seed)
    source = h.ArraySource(mini.checkpoint_of(kinds, seed), kinds)
    models = [h.copy_of(source.model)]
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=100)) as publisher:
        publisher.publish(0)
        for step, density in enumerate((0.3, 1.0), 1):
            source.model.update(mini.changed(rng, kinds, source.model, density))
            publisher.publish(step)
            models.append(h.copy_of(source.model))
    return store, models


def until(store: Store, version: int) -> Store:
    """The store as it was at a version."""
    early = h.new_store()
    for key, _ in store.list():
        if not key.startswith("a/") or int(key.split("/")[1]) <= version:
            early.put(key, store.get(key))
    return early


class Serving:
    """An engine with a loader, loaded from the first version, and its target."""

    def __init__(self, made: Make, kinds: Any, model: h.Model, directory: Path) -> None:
        self.made, self.kinds, self.engine, self.paused = made, kinds, made(), False
        mini.filled(self.engine, self.engine.load_weights, mini.tensors_of(kinds, model))
        checkpoint = mini.saved(directory / "checkpoint", kinds, model)
        self.target = LoadedModuleTarget(
            self.engine, self.engine.load_weights, checkpoint=checkpoint, threads=1,
            on_pause=lambda: self.say(True), on_resume=lambda: self.say(False),
        )  # fmt: skip

    def say(self, paused: bool) -> None:
        self.paused = paused

    def holds(self, model: h.Model) -> bool:
        fresh = self.made()
        mini.filled(fresh, fresh.load_weights, mini.tensors_of(self.kinds, model))
        return mini.live_bytes(self.engine) == mini.live_bytes(fresh)

    @property
    def state(self) -> tuple[State, int] | None:
        header = self.target.read_header()
        return None if header is None else (header.state, header.version)


def waits(engine: Engine, name: str, w: torch.Tensor) -> None:
    """``a`` is written when ``b`` comes."""
    if name == "a":
        engine.kept["a"] = w
        return
    engine.b.data.copy_(w)
    if "a" in engine.kept:
        engine.a.data.copy_(-torch.exp(engine.kept["a"].float()))


def test_an_opaque_tensor_that_is_not_written_alone_is_refused(tmp_path: Path) -> None:
    kinds = {"a": A, "b": B}
    store, models = published(kinds)
    serving = Serving(make(waits), kinds, models[0], tmp_path)
    with pytest.raises(BaseMismatch, match="given alone, the loader does not write all that it leads to"):
        h.followed(store, serving.target)
    assert serving.holds(models[0])
    assert not serving.paused


def test_a_loader_that_raises_in_the_proof_leaves_the_weights_as_they_were(tmp_path: Path) -> None:
    raises = [False]

    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        engine.a.data.zero_()
        if raises[0] and not w.is_meta:
            raise ValueError("boom")
        engine.a.data.copy_(-torch.exp(w.float()))

    kinds = {"a": A}
    store, models = published(kinds)
    serving = Serving(make(take, "a"), kinds, models[0], tmp_path)
    raises[0] = True
    with pytest.raises(BaseMismatch, match="ValueError: boom"):
        h.followed(store, serving.target)
    raises[0] = False
    assert serving.holds(models[0])
    assert h.followed(store, serving.target) == 3
    assert serving.holds(models[2])


def test_the_proof_runs_in_a_pause(tmp_path: Path) -> None:
    seen: list[bool] = []

    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        if not w.is_meta and serving is not None:
            seen.append(serving.paused)
        negated(engine, name, w)

    serving: Serving | None = None
    kinds = {"a": A, "b": B}
    store, models = published(kinds)
    serving = Serving(make(take), kinds, models[0], tmp_path)
    assert h.followed(until(store, 1), serving.target) == 1
    serving.engine.b.data = serving.engine.b.data.clone()
    assert h.followed(store, serving.target) == 3
    assert seen
    assert all(seen)


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("names", ["ab", "b"])
def test_a_follower_of_another_run_costs_the_right_one_nothing(names: str, dirty: bool, tmp_path: Path) -> None:
    kinds = {"a": A, "b": B} if names == "ab" else {"b": B}
    (store, models), (other, others) = published(kinds), published(kinds, seed=99)
    serving = Serving(make(names=names), kinds, models[0], tmp_path)
    assert h.followed(until(store, 2), serving.target) == 2
    if dirty:
        killed(serving, store)
    with pytest.raises(BaseMismatch, match="holds weights of another run"):
        h.followed(other, serving.target)
    assert serving.state == ((State.DIRTY if dirty else State.CLEAN), 2)
    assert serving.paused is dirty
    assert h.followed(store, serving.target) == 3
    assert serving.holds(models[2])
    assert h.followed(other, serving.target, switch_run=True) == 3
    assert serving.holds(others[2])


def killed(serving: Serving, store: Store) -> None:
    """A follower that dies after its first payload."""
    write = serving.target.write

    def once(*arguments: Any) -> None:
        write(*arguments)
        raise UnavailableError("killed here")

    serving.target.write = once  # type: ignore[method-assign]
    with pytest.raises(UnavailableError):
        h.followed(store, serving.target)
    del serving.target.write
    assert serving.state == (State.DIRTY, 2)


@pytest.mark.parametrize("dirty", [False, True])
@pytest.mark.parametrize("names", ["ab", "bs", "b"])
def test_moved_weights_are_found_again_at_any_version(names: str, dirty: bool, tmp_path: Path) -> None:
    kinds = {name: {"a": A, "b": B, "s": ("BF16", (3,))}[name] for name in names}

    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        if name != "s":
            negated(engine, name, w)

    store, models = published(kinds)
    serving = Serving(make(take, names.replace("s", "")), kinds, models[0], tmp_path)
    assert h.followed(until(store, 2), serving.target) == 2
    if dirty:
        killed(serving, store)
    serving.engine.b.data = serving.engine.b.data.clone()
    assert h.followed(store, serving.target) == 3
    assert serving.holds(models[2])
    assert not serving.paused


def test_weights_that_move_between_two_payloads_are_noticed(tmp_path: Path) -> None:
    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        getattr(engine, name).data.copy_(w)

    kinds = {"v": ("BF16", (60, 4)), "w": ("BF16", (60, 4))}
    store, models = published(kinds)
    serving = Serving(lambda: Engine(take, v=room(60, 4), w=room(60, 4)), kinds, models[0], tmp_path)
    assert h.followed(until(store, 2), serving.target) == 2
    write, writes = serving.target.write, [0]

    def moving(*arguments: Any) -> None:
        write(*arguments)
        writes[0] += 1
        if writes[0] == 1:
            for parameter in serving.engine.parameters():
                parameter.data = parameter.data.clone()

    serving.target.write = moving  # type: ignore[method-assign]
    with pytest.raises(UnavailableError, match="moved its weights"):
        h.followed(store, serving.target)
    assert writes[0] > 1
    assert serving.state == (State.DIRTY, 2)
    assert h.followed(store, serving.target) == 3
    assert serving.holds(models[2])


def test_an_interrupt_before_the_loader_is_told_is_no_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"a": A}
    store, models = published(kinds)
    serving = Serving(make(names="a"), kinds, models[0], tmp_path)
    assert h.followed(until(store, 1), serving.target) == 1
    with monkeypatch.context() as patch:
        patch.setattr(Shadows, "touched", interrupted)
        with pytest.raises(KeyboardInterrupt):
            h.followed(until(store, 2), serving.target)
    assert h.followed(until(store, 2), serving.target) == 2
    assert serving.holds(models[1])


def interrupted(*arguments: Any) -> None:
    raise KeyboardInterrupt


def test_a_model_kept_in_another_dtype_is_refused_once_it_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        engine.a.data.copy_(w)

    kinds = {"a": ("BF16", (6, 4))}
    store, models = published(kinds)
    made = lambda: Engine(take, a=room(6, 4, dtype=torch.float16))  # noqa: E731
    monkeypatch.setattr("deltarefit.targets.placing.rank.MAX_OPAQUE_BYTES", 47)
    serving = Serving(made, kinds, models[0], tmp_path)
    with pytest.raises(UsageError, match=r"48 bytes: kept as torch.float16.*--dtype bfloat16"):
        h.followed(store, serving.target)
    assert serving.holds(models[0])
    assert serving.state is None
    monkeypatch.setattr("deltarefit.targets.placing.rank.MAX_OPAQUE_BYTES", 48)
    assert h.followed(store, serving.target) == 3
