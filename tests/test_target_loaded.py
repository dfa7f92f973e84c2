"""A live model with a loader of its own follows a run: fused, transposed and opaque weights, in place, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from deltarefit import MemoryBaseline, Publisher, Receiver  # noqa: E402
from deltarefit.anchoring import write_anchor  # noqa: E402
from deltarefit.errors import BaseMismatch, NotFoundError, UsageError  # noqa: E402
from deltarefit.manifest import State  # noqa: E402
from deltarefit.ports import LiveTarget, Store  # noqa: E402
from deltarefit.protocol.messages import Op  # noqa: E402
from deltarefit.sources.state_dict import StateDictSource  # noqa: E402
from deltarefit.targets.loaded import LoadedModuleTarget  # noqa: E402
from deltarefit.targets.placing.host import HostBackend  # noqa: E402
from deltarefit.targets.placing.shadows import Shadows  # noqa: E402
from tests import helpers as h  # noqa: E402
from tests import mini_ranks as mini  # noqa: E402
from tests.mini_base import Mini, Weights, rubbish  # noqa: E402
from tests.mini_loaders import CASES  # noqa: E402

PARTS = ("Casts", "Experts", "Heads", "Mamba", "Plain")
KINDS = {f"{part}.{name}": kind for part in PARTS for name, kind in CASES[part].kinds.items()}


class Whole(Mini):
    """Several parts as one engine; its loader passes each tensor on."""

    kinds = KINDS
    scratch = ("Plain.cos_cached",)

    def build(self) -> None:
        for part in PARTS:
            self.add_module(part, CASES[part]())

    def take(self, name: str, w: torch.Tensor) -> None:
        part, _, rest = name.partition(".")
        self.get_submodule(part).load_weights([(rest, w)])


class Serving:
    """An engine that was loaded from a checkpoint directory, its users, and its target."""

    def __init__(self, directory: Path, model: h.Model) -> None:
        [self.model] = mini.rank_models(Whole, 1, model)
        self.paused, self.pauses, self.refreshed = False, 0, 0
        self.target = LoadedModuleTarget(
            self.model,
            self.model.load_weights,
            checkpoint=mini.saved(directory, KINDS, model),
            after=self.refresh,
            unfilled=lambda name: name in Whole.scratch,
            on_pause=self.pause,
            on_resume=self.resume,
            threads=2,
        )

    def pause(self) -> None:
        self.pauses += not self.paused
        self.paused = True

    def resume(self) -> None:
        self.paused = False

    def refresh(self) -> None:
        assert self.paused, "derived tensors were refreshed while users run"
        self.refreshed += 1

    def check(self, model: h.Model) -> None:
        """It holds what a native load of the checkpoint gives, CLEAN, in use."""
        assert mini.live_bytes(self.model) == mini.live_bytes(mini.rank_models(Whole, 1, model)[0])
        header = self.target.read_header()
        assert header is not None
        assert header.state is State.CLEAN
        assert not self.paused


@pytest.fixture(autouse=True)
def _writes_only_in_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Serving]]:
    """No weight is written while users run."""
    engines: list[Serving] = []
    make, write = Serving.__init__, HostBackend.apply

    def made(self: Serving, *arguments: Any) -> None:
        make(self, *arguments)
        engines.append(self)

    def apply(*arguments: Any) -> int:
        assert not engines or engines[-1].paused, "wrote while users run"
        return write(*arguments)

    monkeypatch.setattr(Serving, "__init__", made)
    monkeypatch.setattr(HostBackend, "apply", apply)
    yield engines
    for one in engines:
        one.target.close()


def steps(kinds: tuple[str, ...], store: Store | None = None) -> tuple[Store, list[h.Model]]:
    """A run with a version for each of ``kinds`` after the first; the bits of every version."""
    rng, store = np.random.default_rng(11), store or h.new_store()
    source = h.ArraySource(mini.checkpoint_of(KINDS, 5), KINDS)
    models = []
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=300)) as publisher:
        for number, kind in enumerate(("first", *kinds)):
            if number:
                density = {"nothing": 0.0, "some": 0.2, "few": 0.01, "all": 1.0}[kind]
                source.model.update(mini.changed(rng, KINDS, source.model, density))
            publisher.publish(number)
            models.append(h.copy_of(source.model))
    return store, models


@pytest.fixture(scope="module")
def run() -> tuple[Store, list[h.Model]]:
    return steps(("some", "nothing", "all", "few"))


Run = tuple[Store, list[h.Model]]


# ------------------------------------------------------------------------------------------ following


def test_follows_version_by_version(tmp_path: Path) -> None:
    store, rng, heard = h.new_store(), np.random.default_rng(2), h.Heard()
    source = h.ArraySource(mini.checkpoint_of(KINDS, 5), KINDS)
    serving = Serving(tmp_path, source.model)
    assert isinstance(serving.target, LiveTarget)
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=300)) as publisher:
        publisher.publish(0)
        receiver = Receiver(store, serving.target, emit=heard, threads=1)
        for number, density in enumerate((0.2, 0.0, 1.0, 0.01), 1):
            source.model.update(mini.changed(rng, KINDS, source.model, density))
            version = publisher.publish(number).version
            assert receiver.follow(once=True) == version == receiver.version
            serving.check(source.model)
    receiver.close()
    assert heard["adopted"] == 1
    assert heard.phases("seed") == 0, "the checkpoint is a version: nothing is loaded again"
    assert serving.refreshed > 0
    modes = {row.tensor: row.mode for row in serving.target.report if row.mode != "xor"}
    assert modes == {f"{part}.{name}": mode for part in PARTS for name, mode in CASES[part].modes.items()}


def test_a_new_receiver_for_every_version(run: Run, tmp_path: Path) -> None:
    store, models = run
    serving, heard = Serving(tmp_path, models[0]), h.Heard()
    for number in range(len(models)):
        known = h.new_store()
        for key, _ in store.list():
            if not key.startswith("a/") or int(key.split("/")[1]) <= number + 1:
                known.put(key, store.get(key))
        for _ in range(2):
            assert h.followed(known, serving.target, emit=heard) == number + 1
            serving.check(models[number])
    assert (heard["adopted"], heard.phases("seed"), heard["diverged"]) == (1, 0, 0)


@pytest.mark.parametrize("first", range(5))
def test_every_version_is_adopted(run: Run, first: int, tmp_path: Path) -> None:
    store, models = run
    serving, heard = Serving(tmp_path, models[first]), h.Heard()
    assert h.followed(store, serving.target, emit=heard) == len(models)
    serving.check(models[-1])
    assert heard["adopted"] == 1
    assert heard.phases("seed") == 0


def test_a_checkpoint_that_is_no_version_proves_the_placement(run: Run, tmp_path: Path) -> None:
    store, models = run
    serving, heard = Serving(tmp_path, mini.checkpoint_of(KINDS, 77)), h.Heard()
    assert h.followed(store, serving.target, emit=heard) == len(models)
    serving.check(models[-1])
    assert (heard["adopted"], heard.phases("seed")) == (0, 1)


def test_a_version_before_the_anchor(tmp_path: Path) -> None:
    store, models = steps(("some", "some"))
    write_anchor(store, MemoryBaseline())
    serving, heard = Serving(tmp_path, models[1]), h.Heard()
    assert h.followed(store, serving.target, emit=heard) == 3
    serving.check(models[2])
    assert heard.phases("seed") == 1


# ------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize("name", ["Heads.w0", "Mamba.A", "Plain.steps", "Casts.gate"])
def test_foreign_weights_are_refused_untouched(run: Run, name: str, tmp_path: Path) -> None:
    store, models = run
    serving = Serving(tmp_path, models[1])
    tensor = dict(serving.model.state_dict(keep_vars=True))[name].data
    tensor.view(torch.int16).view(-1)[1] ^= 1
    before = mini.all_bytes(serving.model)
    for _ in range(2):
        with pytest.raises((BaseMismatch, UsageError)):
            h.followed(store, serving.target)
        assert mini.all_bytes(serving.model) == before
        assert serving.target.read_header() is None


def test_another_model_is_refused_untouched(tmp_path: Path) -> None:
    store = h.new_store()
    h.published(store, h.ArraySource(h.random_model(np.random.default_rng(1))))
    serving = Serving(tmp_path, mini.checkpoint_of(KINDS))
    before = mini.all_bytes(serving.model)
    with pytest.raises((BaseMismatch, UsageError)):
        h.followed(store, serving.target)
    assert mini.all_bytes(serving.model) == before


# ------------------------------------------------------------------------------------------ sudden failures


class Fault(Exception):
    """Something failed."""


def failing(patch: pytest.MonkeyPatch, where: type, method: str, fails: int, after: bool) -> Callable[[], bool]:
    """Have the n-th call of a method fail, before or after its effect; says whether it did."""
    calls, real, done = itertools.count(1), getattr(where, method), []

    def call(*arguments: Any) -> Any:
        dies = next(calls) == fails
        found = real(*arguments) if after or not dies else None
        if dies:
            done.append(True)
            raise Fault
        return found

    patch.setattr(where, method, call)
    return lambda: bool(done)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("where", "method"),
    [(HostBackend, "apply"), (Shadows, "load"), (Shadows, "_feed"), (HostBackend, "sums"), (HostBackend, "preview")],
)
@pytest.mark.parametrize("fails", [1, 2, 5, 9])
def test_a_failure_is_mended_by_the_next_follow(
    run: Run, where: type, method: str, after: bool, fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, models = run
    serving = Serving(tmp_path, models[0])
    with monkeypatch.context() as patch:
        failed = failing(patch, where, method, fails, after)
        with contextlib.suppress(Fault, BaseMismatch):  # a loader that raises in its proof is refused
            h.followed(store, serving.target)
        assert failed() or method in ("load", "_feed")
    assert h.followed(store, serving.target) == len(models)
    serving.check(models[-1])


def test_ranks_say_what_they_do_not_keep(run: Run, tmp_path: Path) -> None:
    _, models = run
    serving = Serving(tmp_path, models[0])
    catalog = mini.catalog_of(KINDS)
    serving.target.attach(mini.RUN, catalog)
    [(data, ref)] = mini.payloads(catalog, models[0], models[1], 1)
    assert not serving.target.staged(ref)
    with pytest.raises(NotFoundError):
        serving.target.live(ref)
    with pytest.raises(NotFoundError):
        serving.target.write(ref, Op.APPLY)
    assert serving.target.stage(ref, data) == (ref.pre, ref.post)
    assert serving.target.live(ref) == ref.pre


# ------------------------------------------------------------------------------------------ transformers models


class Llama(torch.nn.Module):
    """The weights of a Llama as engines keep them: q, k, v in one parameter, gate and up in another."""

    fused: ClassVar = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        rows: dict[str, int] = {}
        self.places: dict[str, tuple[str, int]] = {}
        for name, tensor in state.items():
            leaf = name.split(".")[-2]
            key = name.replace(leaf, self.fused.get(leaf, leaf)).replace(".", "_")
            self.places[name] = key, rows.get(key, 0)
            rows[key] = rows.get(key, 0) + tensor.shape[0]
        for name, (key, first) in self.places.items():
            if not first:
                full = (rows[key], *state[name].shape[1:])
                self.register_parameter(key, torch.nn.Parameter(rubbish(full, torch.bfloat16), requires_grad=False))

    def load_weights(self, weights: Weights) -> None:
        for name, w in weights:
            key, first = self.places[name]
            self.get_parameter(key).data.narrow(0, first, w.shape[0]).copy_(w)


class Gpt2(torch.nn.Module):
    """The weights of a GPT-2 as engines keep them: inputs last, the head tied and left out."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        super().__init__()
        for name, tensor in state.items():
            if name != "lm_head.weight":
                shape = tensor.t().shape if self.turned(name) else tensor.shape
                room = rubbish(shape, torch.bfloat16)
                self.register_parameter(name.replace(".", "_"), torch.nn.Parameter(room, requires_grad=False))

    def turned(self, name: str) -> bool:
        return name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight"))

    def load_weights(self, weights: Weights) -> None:
        for name, w in weights:
            if name != "lm_head.weight":
                param = self.get_parameter(name.replace(".", "_"))
                param.data.copy_(w.t() if self.turned(name) else w)


@pytest.mark.parametrize(("family", "engine"), [("llama", Llama), ("gpt2", Gpt2)])
def test_a_transformers_model(family: str, engine: type[Any], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from tests.tiny_models import build

    trained, store = build(family), h.new_store()
    state = trained.state_dict()
    serving, bf16 = engine(state), torch.bfloat16

    def checkpoint() -> dict[str, torch.Tensor]:
        return {name: tensor.to(bf16) for name, tensor in trained.state_dict().items()}

    mini.filled(serving, serving.load_weights, checkpoint())
    target = LoadedModuleTarget(serving, serving.load_weights)
    heard = h.Heard()
    with contextlib.closing(Publisher(store, StateDictSource(trained, dtype=bf16), threads=1)) as publisher:
        for step in range(3):
            version = publisher.publish(step).version
            assert h.followed(store, target, emit=heard) == version
            fresh = engine(state)
            mini.filled(fresh, fresh.load_weights, checkpoint())
            assert mini.live_bytes(serving) == mini.live_bytes(fresh)
            with torch.no_grad():
                for parameter in trained.parameters():
                    parameter += torch.randn_like(parameter) * 1e-3
    target.close()
    assert (heard["adopted"], heard.phases("seed")) == (1, 0)
    assert {row.mode for row in target.report} == {"xor"}
