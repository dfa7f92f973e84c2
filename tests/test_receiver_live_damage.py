"""Live weights that somebody else wrote to, and stages that outlived their follower: one anchor mends them at most."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltarefit import Publisher, Receiver  # noqa: E402
from deltarefit import _kernel as kernel  # noqa: E402
from deltarefit.cli.following import scrub  # noqa: E402
from deltarefit.codec import SET, XOR, Delta  # noqa: E402
from deltarefit.errors import DigestMismatch  # noqa: E402
from deltarefit.manifest import State  # noqa: E402
from deltarefit.ports import Store  # noqa: E402
from deltarefit.targets.loaded import LoadedModuleTarget  # noqa: E402
from deltarefit.targets.placing.host import HostBackend  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_engine import F32, Engine, room  # noqa: E402

KINDS = {"made": ("F32", (6, 4)), "plain": ("BF16", (6, 4)), "wide": ("BF16", (6, 4))}
MODES = {"made": "opaque", "plain": "xor", "wide": "xor-shifted"}


def make() -> Engine:
    """One tensor goes through the loader, one is kept as it is, one is kept in a wider dtype."""

    def take(engine: Engine, name: str, w: torch.Tensor) -> None:
        getattr(engine, name).data.copy_(-torch.exp(w) if name == "made" else w)

    return Engine(take, made=room(6, 4, dtype=F32), plain=room(6, 4), wide=room(6, 4, dtype=F32))


def filled(model: h.Model) -> Engine:
    engine = make()
    mini.filled(engine, engine.load_weights, mini.tensors_of(KINDS, model))
    return engine


class Serving:
    """An engine in this process, its users, and who follows a run for it."""

    def __init__(self, directory: Path, model: h.Model) -> None:
        self.engine, self.paused, self.heard = filled(model), False, h.Heard()
        self.target = LoadedModuleTarget(
            self.engine,
            self.engine.load_weights,
            checkpoint=mini.saved(directory, KINDS, model),
            on_pause=lambda: setattr(self, "paused", True),
            on_resume=lambda: setattr(self, "paused", False),
            threads=1,
        )

    def follow(self, store: Store, **options: object) -> int:
        self.heard = h.Heard()
        return h.followed(store, self.target, emit=self.heard, **options)  # type: ignore[arg-type]

    def flip(self, name: str) -> None:
        """The lowest bit of an element, as no refit does."""
        self.engine.get_parameter(name).data.view(torch.int16).view(-1)[0] ^= 1

    def check(self, model: h.Model, version: int) -> None:
        assert mini.live_bytes(self.engine) == mini.live_bytes(filled(model))
        header = self.target.read_header()
        assert header is not None
        assert (header.state, header.version) == (State.CLEAN, version)
        assert not self.paused


def published(*models: h.Model) -> list[Store]:
    """What the store held after each version."""
    store, source = h.new_store(), h.ArraySource(h.copy_of(models[0]), KINDS)
    stores, publisher = [], Publisher(store, source, threads=1, payload_bytes=300)
    for number, model in enumerate(models):
        source.model.update(h.copy_of(model))
        publisher.publish(number)
        stores.append(h.copy_store(store))
    publisher.close()
    return stores


@pytest.fixture(scope="module")
def models() -> list[h.Model]:
    first, rng = mini.checkpoint_of(KINDS, 5), np.random.default_rng(5)
    second = mini.changed(rng, KINDS, first, 0.5)
    return [first, second, mini.changed(rng, KINDS, second, 1.0)]


@pytest.fixture(scope="module")
def stores(models: list[h.Model]) -> list[Store]:
    return published(*models)


@pytest.fixture
def serving(tmp_path: Path, models: list[h.Model], stores: list[Store]) -> Serving:
    """At version 2."""
    one = Serving(tmp_path / "checkpoint", models[0])
    assert one.follow(stores[1]) == 2
    assert {row.tensor: row.mode for row in one.target.report} == MODES
    return one


# ------------------------------------------------------------------------------------------ written to by others


@pytest.mark.parametrize("name", KINDS)
def test_a_header_is_not_believed(serving: Serving, models: list[h.Model], stores: list[Store], name: str) -> None:
    serving.flip(name)
    assert serving.follow(stores[2]) == 3
    serving.check(models[2], 3)
    assert (serving.heard["diverged"], serving.heard.phases("seed")) == (1, 1)
    assert serving.follow(stores[2]) == 3
    assert serving.heard["diverged"] == 0


@pytest.mark.parametrize("name", KINDS)
def test_a_scrub_has_it_mended(serving: Serving, models: list[h.Model], stores: list[Store], name: str) -> None:
    receiver = Receiver(stores[1], serving.target, threads=1, prove=False)
    assert receiver.follow(once=True) == 2
    serving.flip(name)
    scrub(receiver, serving.target, serving.heard)  # type: ignore[arg-type]
    assert serving.heard["diverged"] == 1
    assert receiver.follow(once=True) == 2
    receiver.close()
    serving.check(models[1], 2)


@pytest.mark.parametrize("name", ["plain", "wide"])
def test_noticed_while_a_payload_is_staged(
    serving: Serving, models: list[h.Model], stores: list[Store], name: str
) -> None:
    serving.flip(name)
    assert serving.follow(stores[2], prove=False) == 3
    serving.check(models[2], 3)
    assert (serving.heard["diverged"], serving.heard.phases("seed")) == (1, 1)


@pytest.mark.parametrize("name", ["plain", "wide"])
@pytest.mark.parametrize("after", [False, True])
def test_written_to_in_the_pause(
    serving: Serving, models: list[h.Model], stores: list[Store], name: str, after: bool
) -> None:
    """Before our write, or between our write and the look at what it made."""
    target = serving.target
    method = "write" if after else "pause"
    real = getattr(target, method)

    def disturbed(*arguments: object) -> None:
        setattr(target, method, real)
        real(*arguments)
        serving.flip(name)

    setattr(target, method, disturbed)
    assert serving.follow(stores[2]) == 3
    serving.check(models[2], 3)
    assert (serving.heard["diverged"], serving.heard.phases("seed")) == (1, 1)


def test_dirty_weights_that_were_written_to(serving: Serving, models: list[h.Model], stores: list[Store]) -> None:
    """The next follower sums what the last one left."""

    class Gone(Exception):
        pass

    def die(*arguments: object) -> None:
        raise Gone

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serving.target, "write", die)
        with pytest.raises(Gone):
            serving.follow(stores[2])
    assert serving.paused
    serving.flip("wide")
    assert serving.follow(stores[2]) == 3
    serving.check(models[2], 3)
    assert serving.heard.phases("seed") == 1


def low_bits() -> list[Callable[[], object]]:
    """Everything that reads a widened storage with a low bit, through the kernel's back end."""
    old, backend = np.arange(40).astype(np.uint16), HostBackend()
    boxes = np.array([[0, 0, 40, 1, 1]])
    storage = old.astype(np.uint32) << 16
    storage[7] |= 1

    def delta(operation: int) -> Delta:
        record, streams, _, _ = kernel.encode(old, old + np.uint16(1), 0, 3, kind=0, operation=operation)  # type: ignore[misc]
        return Delta(0, record, tuple(data for _, data in streams))

    xor, values = delta(XOR), delta(SET)
    return [
        lambda: backend.apply(xor, boxes, storage, 16),
        lambda: backend.sums(xor, boxes, storage, 16, 3),
        lambda: backend.preview(values, boxes, storage, 16, 3),
        lambda: backend.digest(boxes, storage, 16, 3),
    ]


@pytest.mark.parametrize("number", range(4))
def test_low_bits_are_a_mismatch_on_the_host_as_on_devices(number: int) -> None:
    with pytest.raises(DigestMismatch, match="expected 16 zero bits below each element"):
        low_bits()[number]()


def test_other_faults_that_the_kernel_finds_are_not() -> None:
    with pytest.raises(ValueError, match="expected"):
        HostBackend().digest(np.array([[0, 0, 40, 1, 1]]), np.zeros(3, np.uint32), 16, 3)


# ------------------------------------------------------------------------------------------ stages that are left over


def test_the_same_payload_twice_though_a_stage_was_left(tmp_path: Path, models: list[h.Model]) -> None:
    """Back to the version before is the same XOR again. Who was killed between CLEAN and the drop has left it behind,
    as one that is written already."""
    one, two = models[0], h.copy_of(models[0])
    for array in two.values():
        array.reshape(-1)[::3] ^= array.dtype.type(1 << 8 * array.itemsize - 1)  # its own inverse, as a sum as well
    stores = published(one, two, one)
    assert len({key.split("/")[3] for key, _ in stores[2].list() if key.startswith("a/") and "/pl/" in key}) == 1
    serving = Serving(tmp_path / "checkpoint", one)

    class Killed(BaseException):
        pass

    def die() -> None:
        raise Killed

    with pytest.MonkeyPatch.context() as patch:
        receiver = Receiver(stores[1], serving.target, threads=1)
        real, calls = serving.target.write_header, []

        def write_header(header: object) -> None:
            real(header)  # type: ignore[arg-type]
            calls.append(header.state)  # type: ignore[attr-defined]
            if calls[-2:] == [State.DIRTY, State.CLEAN]:
                patch.setattr(serving.target, "drop", die)

        patch.setattr(serving.target, "write_header", write_header)
        with pytest.raises(Killed):
            receiver.follow(once=True)
        receiver.close()
    header = serving.target.read_header()
    assert header is not None
    assert (header.state, header.version) == (State.CLEAN, 2)
    assert serving.follow(stores[2]) == 3
    serving.check(one, 3)
    assert serving.heard.phases("seed") == 0, "healthy weights were loaded again"
