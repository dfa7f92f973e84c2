"""One rank's live weights: payloads staged, written and proven in place through the plan.

Lives in the process that serves. Everything is counted by *class*: parts that the same copies on the same ranks hold,
so that the ranks' sums can be added up, and copies compared, by whoever sees all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch

from deltarefit import _kernel
from deltarefit.codec import Delta, open_payload
from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.errors import BaseMismatch, IntegrityError, NotFoundError, UsageError
from deltarefit.manifest import Catalog, PayloadRef
from deltarefit.pool import side_by_side
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.placing.files import CheckpointFiles
from deltarefit.targets.placing.host import Backend, Backends
from deltarefit.targets.placing.plan import Layouts, Mode, Part, Plan, Table, make_plan, table_of
from deltarefit.targets.placing.recorder import Load
from deltarefit.targets.placing.shadows import Shadows

T = TypeVar("T")
Sums = dict[int, Digest]
"""Digest sums by class."""
NO_CLASS = -1
"""Of a part whose tensor goes through the native loader as a whole."""
MAX_THREADS = 4


@dataclass(frozen=True)
class _Place:
    """Parts of one tensor and one class in one storage."""

    class_: int
    low: int
    high: int
    boxes: Table
    backend: Backend
    storage: Any
    shift: int


@dataclass
class _Staged:
    """A payload on its way. ``done``: written; None while that is not known."""

    deltas: list[Delta]
    pre: Sums
    post: Sums
    done: bool | None = False


@dataclass
class _Attached:
    run: str
    catalog: Catalog
    keys: tuple[int, ...]
    plan: Plan
    shadows: Shadows
    places: list[list[_Place]] = field(default_factory=list)
    shadow_classes: dict[int, int] = field(default_factory=dict)


class RankWeights:
    """The weights of ``model``, which ``load`` fills natively, as one rank of an engine. One call at a time.

    ``layouts`` knows what became of storages after loading; ``checkpoint`` is the directory that the engine loaded;
    ``after`` refreshes what the engine derives from weights, after each write; ``unfilled`` names tensors that no
    checkpoint fills and no refit needs to.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        load: Load,
        *,
        layouts: Layouts = lambda storages: {},
        checkpoint: str | None = None,
        after: Callable[[], None] = lambda: None,
        unfilled: Callable[[str], bool] = lambda name: False,
        threads: int | None = None,
    ) -> None:
        self.header: bytes | None = None
        self._model, self._load, self._layouts = model, load, layouts
        self._files = CheckpointFiles(checkpoint)
        self._after, self._unfilled = after, unfilled
        self._at: _Attached | None = None
        self._staged: dict[str, _Staged] = {}
        self._backends = Backends()
        self._known = False
        """Whether shadow bits are those of the version that is live."""
        self._unfinished = False
        """Whether something was written that the native loader or ``after`` has not seen yet."""
        self._checked = False
        """Whether the plan was checked since the last look at the live bits."""
        workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="refit")

    # ------------------------------------------------------------------------------------ attaching

    def attach(self, run: str, catalog: Catalog) -> dict[str, Any]:
        """Record the placement of ``catalog``, unless that was done already and the weights still lie there; this
        rank's plan (``ranks.RankGroup``)."""
        at = self._at
        if at is None or (at.run, at.catalog) != (run, catalog) or not at.plan.holds(self._model):
            plan = make_plan(self._model, self._load, catalog, self._layouts)
            self._refuse_leftovers(plan)
            shadows = Shadows(catalog, plan.storages, self._load, plan.names)
            self._at = _Attached(run, catalog, catalog_keys(run, catalog), plan, shadows)
            self.header, self._known = None, False
            self._staged.clear()
        plan = self._attached().plan
        return {
            "parts": [_part(part) for part in plan.parts],
            "modes": {k: [mode.value, reason] for k, (mode, reason) in enumerate(plan.modes)},
        }

    def _refuse_leftovers(self, plan: Plan) -> None:
        """Weights that no canonical tensor fills would silently keep the bits of another version."""
        if any(mode is Mode.REFUSED for mode, _ in plan.modes):
            return  # says more, and why
        names = [plan.storages[k].names for k in plan.leftover]
        unknown = [group[0] for group in names if not all(self._unfilled(name) for name in group)]
        if unknown:
            raise UsageError(
                "the engine keeps tensors that its loader does not fill from the catalog",
                found=", ".join(unknown[:8]) + (f" and {len(unknown) - 8} more" if len(unknown) > 8 else ""),
                next_step="If they do not depend on weights, name them as unfilled; else refit from a directory.",
            )

    def assign(self, assignment: Mapping[str, Any]) -> None:
        """What the group of ranks decided (``ranks.RankGroup.assignment``): the class of each part, the tensors to keep
        as shadows with their classes, and those of them that go through the native loader. Shadow bits come from the
        engine's own checkpoint where there is one."""
        at, opaque = self._attached(), frozenset(assignment["opaque"])
        at.shadow_classes = dict(zip(assignment["shadows"], assignment["shadow_classes"], strict=True))
        at.places = self._placed(at, assignment["classes"])
        new = at.shadows.keep(at.shadow_classes, _groups(at.plan, opaque))
        if not self._known or new:
            self._fill_shadows(at)

    def _fill_shadows(self, at: _Attached) -> None:
        """From the engine's own checkpoint, proven: the loader makes of it what is live."""
        self._known = not at.shadow_classes
        if self._known or not self._files.available:
            return
        for number in at.shadow_classes:
            at.shadows.bits(number)[:] = self._files.read(at.catalog.tensors[number])
        if wrong := at.shadows.prove():
            names = ", ".join(at.catalog.tensors[k].name for k in sorted(wrong)[:8])
            raise BaseMismatch(
                "the native loader does not make the live bits of the engine's own checkpoint",
                found=names,
                next_step="Start the engine from a checkpoint of the model, without post-load transforms of these.",
            )
        self._known = True

    def _placed(self, at: _Attached, classes: Sequence[int]) -> list[list[_Place]]:
        groups: dict[tuple[int, int, int, int], list[Part]] = {}
        for part, class_ in zip(at.plan.parts, classes, strict=True):
            if class_ != NO_CLASS:
                groups.setdefault((part.tensor, class_, part.storage, part.shift), []).append(part)
        views: dict[int, tuple[Backend, Any]] = {}
        places: list[list[_Place]] = [[] for _ in at.catalog.tensors]
        for (tensor, class_, storage, shift), parts in groups.items():
            if storage not in views:
                views[storage] = self._backends.view(at.plan.storages[storage].integers())
            backend, view = views[storage]
            low = min(part.box.canonical for part in parts)
            high = max(_last(part) for part in parts) + 1
            places[tensor].append(_Place(class_, low, high, table_of(parts), backend, view, shift))
        return places

    # ------------------------------------------------------------------------------------ payloads

    def stage(self, ref: PayloadRef, data: bytes) -> dict[int, tuple[Digest, Digest]]:
        """Keep a payload, and give the sums of the live bits at its positions: as they are, and as they will be. One
        that is kept already may be written in part: it stays as it is."""
        at = self._attached()
        if (kept := self._staged.get(ref.sha256)) is not None:
            now = self._sums(kept)
            return {class_: (now[class_], kept.post[class_]) for class_ in now}
        deltas = open_payload(data, ref, at.catalog)
        pre, post = Sums(), Sums()
        for class_, (before, after) in self._each(partial(self._preview, at), deltas):
            pre[class_] = pre.get(class_, Digest()) + before
            post[class_] = post.get(class_, Digest()) + after
        self._staged[ref.sha256] = _Staged(deltas, pre, post)
        return {class_: (pre[class_], post[class_]) for class_ in pre}

    def staged(self, ref: PayloadRef) -> bool:
        """Whether a payload is still kept."""
        return ref.sha256 in self._staged

    def live(self, ref: PayloadRef) -> Sums | None:
        """Sums of the live bits at a staged payload's positions; None if it is not staged."""
        staged = self._staged.get(ref.sha256)
        if staged is None:
            return None
        self._finish(self._attached())
        return self._sums(staged)

    def write(self, ref: PayloadRef, op: Op) -> None:
        """Bring this rank's part of a staged payload to the new bits, if it has the old ones; ``IntegrityError`` if it
        has neither."""
        staged = self._staged.get(ref.sha256)
        if staged is None:
            raise NotFoundError(f"payload {ref.sha256[:12]} is not staged here", next_step="Stage it again.")
        if op is Op.SKIP or self._is_written(staged):
            return
        at = self._attached()
        if not self._checked:  # once for all payloads of a pause
            at.plan.check(self._model)
        self._checked = True
        staged.done, self._unfinished = None, True
        self._each(partial(self._apply, at), staged.deltas)
        staged.done = True

    def _is_written(self, staged: _Staged) -> bool:
        if staged.done is None:
            live = self._sums(staged)
            if live not in (staged.pre, staged.post):
                raise IntegrityError("a rank was interrupted in the middle of a payload", next_step="Load an anchor.")
            staged.done = live == staged.post
        return staged.done

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        """Set all elements of an anchor's payload that lie here."""
        at = self._attached()
        at.plan.check(self._model)
        self._known = self._unfinished = True
        self._each(partial(self._apply, at), open_payload(data, ref, at.catalog))

    def digest(self) -> Sums:
        """Of all live bits, by class, and of the shadows. What the loader made of opaque tensors is checked as well."""
        at = self._attached()
        at.plan.check(self._model)
        if not self._known:
            raise UsageError(
                "tensors that the engine does not store as they are have bits that nobody knows",
                expected="the checkpoint that the engine loaded, in safetensors files",
                found=", ".join(at.catalog.tensors[k].name for k in list(at.shadow_classes)[:4]),
                next_step="Start the engine from a local checkpoint directory of the model.",
            )
        self._finish(at)
        at.shadows.check()
        sums = Sums()
        pairs = [(tensor, place) for tensor, places in enumerate(at.places) for place in places]
        for class_, part in self._each(partial(self._place_digest, at), pairs):
            sums[class_] = sums.get(class_, Digest()) + part
        for number, class_ in at.shadow_classes.items():
            sums[class_] = sums.get(class_, Digest()) + array_digest(at.shadows.bits(number), 0, at.keys[number])
        return sums

    def proof(self) -> Digest | None:
        """Digest of the checkpoint that the engine loaded; None if it is not there."""
        at = self._attached()
        if not self._files.available:
            return None
        parts = (array_digest(self._files.read(e), 0, key) for e, key in zip(at.catalog.tensors, at.keys, strict=True))
        return sum(parts, Digest())

    def drop(self) -> None:
        """Forget staged payloads."""
        self._staged.clear()

    def close(self) -> None:
        """Let go of the threads."""
        self._pool.shutdown()

    # ------------------------------------------------------------------------------------ parts

    def _attached(self) -> _Attached:
        if self._at is None:
            raise UsageError("a rank is not attached to a run", next_step="Attach it first.")
        return self._at

    def _finish(self, at: _Attached) -> None:
        """After writes: opaque tensors through the native loader, then what the engine derives."""
        self._checked = False
        if self._unfinished:
            at.shadows.load()
            self._after()
            for device in {storage.tensor.device for storage in at.plan.storages} - {torch.device("cpu")}:
                torch.get_device_module(device).synchronize(device)
            self._unfinished = False

    def _sums(self, staged: _Staged) -> Sums:
        at, sums = self._attached(), dict.fromkeys(staged.pre, Digest())
        for class_, part in self._each(partial(self._live, at), staged.deltas):
            sums[class_] += part
        return sums

    def _each(self, work: Callable[[Any], list[T]], items: Sequence[Any]) -> Iterator[T]:
        results = map(work, items) if self._backends.one_at_a_time else side_by_side(self._pool, work, items)
        return (one for found in list(results) for one in found)

    def _shadow(self, at: _Attached, delta: Delta) -> Elements | None:
        return at.shadows.bits(delta.tensor)[delta.low : delta.high] if delta.tensor in at.shadow_classes else None

    def _hit(self, at: _Attached, delta: Delta) -> Iterator[_Place]:
        return (place for place in at.places[delta.tensor] if place.low < delta.high and delta.low < place.high)

    def _preview(self, at: _Attached, delta: Delta) -> list[tuple[int, tuple[Digest, Digest]]]:
        key = at.keys[delta.tensor]
        found = [(p.class_, p.backend.preview(delta, p.boxes, p.storage, p.shift, key)) for p in self._hit(at, delta)]
        if (bits := self._shadow(at, delta)) is not None:
            pre, post, _ = _kernel.preview(delta.record, delta.slices, bits, key)
            found.append((at.shadow_classes[delta.tensor], (Digest(*pre), Digest(*post))))
        return found

    def _live(self, at: _Attached, delta: Delta) -> list[tuple[int, Digest]]:
        key = at.keys[delta.tensor]
        found = [(p.class_, p.backend.sums(delta, p.boxes, p.storage, p.shift, key)) for p in self._hit(at, delta)]
        if (bits := self._shadow(at, delta)) is not None:
            sums = Digest(*_kernel.sums(delta.record, delta.slices, bits, key))
            found.append((at.shadow_classes[delta.tensor], sums))
        return found

    def _apply(self, at: _Attached, delta: Delta) -> list[None]:
        for place in self._hit(at, delta):
            place.backend.apply(delta, place.boxes, place.storage, place.shift)
        if (bits := self._shadow(at, delta)) is not None:
            _kernel.apply(delta.record, delta.slices, bits)
            at.shadows.touched(delta.tensor)
        return []

    def _place_digest(self, at: _Attached, pair: tuple[int, _Place]) -> list[tuple[int, Digest]]:
        tensor, place = pair
        return [(place.class_, place.backend.digest(place.boxes, place.storage, place.shift, at.keys[tensor]))]


def _last(part: Part) -> int:
    return part.box.canonical + sum((n - 1) * stride for n, _, stride in part.box.dims)


def _part(part: Part) -> list[Any]:
    return [part.tensor, [[n, stride] for n, _, stride in part.box.dims], part.box.canonical]


def _groups(plan: Plan, opaque: frozenset[int]) -> list[frozenset[int]]:
    """Opaque tensors that the loader needs in one call: what is linked stays together."""
    groups: list[set[int]] = []
    for links in [*({k} for k in sorted(opaque)), *(set(names & opaque) for names in plan.together)]:
        joined = set(links)
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [frozenset(group) for group in groups if group]
