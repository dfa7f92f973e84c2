"""One rank's live weights: payloads staged, written and proven in place through the plan.

Lives in the process that serves. Everything is counted by *class*: parts that the same copies on the same ranks hold,
so that the ranks' sums can be added up, and copies compared, by whoever sees all of them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from deltarefit.targets.placing.attached import Attached, Place, Staged, Sums, last_of, loaded_together, said
from deltarefit.targets.placing.files import CheckpointFiles
from deltarefit.targets.placing.host import Backend, Backends
from deltarefit.targets.placing.plan import Layouts, Mode, Part, Plan, make_plan, table_of
from deltarefit.targets.placing.recorder import Load
from deltarefit.targets.placing.shadows import Shadows

T = TypeVar("T")
NO_CLASS = -1
"""Of a part whose tensor goes through the native loader as a whole."""
MAX_THREADS = 4
MAX_OPAQUE_BYTES = 256 << 20
"""Most bytes of opaque tensors, unless they are less than a quarter of the model."""


class RankWeights:
    """The weights of ``model``, which ``load`` fills natively, as one rank of an engine. One call at a time.

    ``layouts`` knows what became of storages after loading; ``checkpoint`` is the directory that the engine loaded;
    ``after`` refreshes what the engine derives from weights, after each write; ``unfilled`` names tensors that no
    checkpoint fills, and that ``after`` refreshes if they depend on weights.
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
        self._at: Attached | None = None
        self._held: dict[str, Attached] = {}
        """By catalog: what was attached to since the last write. A follower that is refused must not cost another one
        what it needs."""
        self._payloads: dict[str, dict[str, Staged]] = {}
        """By run, then by hash."""
        self._backends = Backends()
        self._unfinished = False
        """Whether something was written that the native loader or ``after`` has not seen yet."""
        self._checked = False
        """Whether the plan was checked since the last look at the live bits."""
        workers = threads or min(MAX_THREADS, os.cpu_count() or 1)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="refit")

    # ------------------------------------------------------------------------------------ attaching

    def ready_for(self, catalog: str) -> bool:
        """Whether attaching to a catalog, by identity, would neither run the loader nor touch the weights."""
        at = self._held.get(catalog)
        return at is not None and at.known and at.plan.holds(self._model)

    def attach(self, run: str, catalog: Catalog) -> dict[str, Any]:
        """Record the placement of ``catalog``, unless that was done already and the weights still lie there; this
        rank's plan (``ranks.RankGroup``). Header and payloads of whoever attached before stay as they are."""
        at = self._held.get(catalog.identity)
        if at is None or not at.plan.holds(self._model):
            at = self._held[catalog.identity] = self._recorded(catalog, at)
        at.run, at.keys = run, catalog_keys(run, catalog)
        self._at = at
        return {
            "parts": [said(part) for part in at.plan.parts],
            "modes": {k: [mode.value, reason] for k, (mode, reason) in enumerate(at.plan.modes)},
        }

    def _recorded(self, catalog: Catalog, before: Attached | None) -> Attached:
        """A new plan. Bits of shadows outlive a move of the weights; what was written where does not."""
        plan = make_plan(self._model, self._load, catalog, self._layouts, self._unfilled)
        self._refuse_leftovers(plan)
        _refuse_bulk(catalog, plan)
        at = Attached(catalog, plan, Shadows(catalog, plan, self._load))
        if before is not None:
            at.shadows.inherit(before.shadows)
            at.known, at.classes = before.known, before.classes
            for staged in (one for payloads in self._payloads.values() for one in payloads.values()):
                staged.done = None
        return at

    def _refuse_leftovers(self, plan: Plan) -> None:
        """Weights that no canonical tensor fills would silently keep the bits of another version."""
        if any(mode is Mode.REFUSED for mode, _ in plan.modes):
            return  # says more, and why
        unknown = [names[0] for names in plan.leftover if not all(self._unfilled(name) for name in names)]
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
        classes = (*assignment["classes"], *at.shadow_classes.items())
        if at.classes != classes:  # sums of payloads that are kept would be of other classes
            self._staged.clear()
        at.classes, at.places = classes, self._placed(at, assignment["classes"])
        new = at.shadows.keep(at.shadow_classes, loaded_together(at.plan, opaque))
        if at.known and not new:
            self._unfinished |= at.shadows.renew()
        else:
            at.known = self._filled(at)

    def _filled(self, at: Attached) -> bool:
        """Take shadow bits from the engine's own checkpoint, proven: the loader makes of them what is live. False if it
        is not there."""
        if not at.shadow_classes:
            return True
        if not self._files.available:
            return False
        for number in at.shadow_classes:
            at.shadows.bits(number)[:] = self._files.read(at.catalog.tensors[number])
        if wrong := at.shadows.prove():
            raise BaseMismatch(
                "the native loader does not make the live bits of the engine's own checkpoint",
                found="; ".join(f"{at.catalog.tensors[k].name}: {why}" for k, why in sorted(wrong.items())[:8]),
                next_step="Start the engine from a checkpoint of the model, without post-load transforms of these.",
            )
        return True

    def _placed(self, at: Attached, classes: Sequence[int]) -> list[list[Place]]:
        groups: dict[tuple[int, int, int, int], list[Part]] = {}
        for part, class_ in zip(at.plan.parts, classes, strict=True):
            if class_ != NO_CLASS:
                groups.setdefault((part.tensor, class_, part.storage, part.shift), []).append(part)
        views: dict[int, tuple[Backend, Any]] = {}
        places: list[list[Place]] = [[] for _ in at.catalog.tensors]
        for (tensor, class_, storage, shift), parts in groups.items():
            if storage not in views:
                views[storage] = self._backends.view(at.plan.storages[storage].integers())
            backend, view = views[storage]
            low = min(part.box.canonical for part in parts)
            high = max(last_of(part) for part in parts) + 1
            places[tensor].append(Place(class_, low, high, table_of(parts), backend, view, shift))
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
        self._staged[ref.sha256] = Staged(deltas, pre, post)
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
        has neither. What overwrites does so whatever is there."""
        staged = self._staged.get(ref.sha256)
        if staged is None:
            raise NotFoundError(f"payload {ref.sha256[:12]} is not staged here", next_step="Stage it again.")
        if op is Op.SKIP or (not ref.overwrites and self._is_written(staged)):
            return
        at = self._attached()
        if not self._checked:  # once for all payloads of a pause; and again when they are read back
            at.plan.check(self._model)
        self._checked = True
        self._begin_writing(at)
        staged.done = None
        self._each(partial(self._apply, at), staged.deltas)
        staged.done = True

    def _is_written(self, staged: Staged) -> bool:
        if staged.done is None:
            for delta in staged.deltas:  # it may have been interrupted before the loader was told
                self._attached().shadows.touched(delta.tensor)
            self._unfinished = True
            live = self._sums(staged)
            if live not in (staged.pre, staged.post):
                raise IntegrityError("a rank was interrupted in the middle of a payload", next_step="Load an anchor.")
            staged.done = live == staged.post
        return staged.done

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        """Set all elements of an anchor's payload that lie here."""
        at = self._attached()
        at.plan.check(self._model)
        self._begin_writing(at)
        at.known = True
        self._each(partial(self._apply, at), open_payload(data, ref, at.catalog))

    def digest(self) -> Sums:
        """Of all live bits, by class, and of the shadows. What the loader made of opaque tensors is checked as well."""
        at = self._attached()
        at.plan.check(self._model)
        if not at.known:
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

    @property
    def _staged(self) -> dict[str, Staged]:
        """Payloads of the run that is attached."""
        return self._payloads.setdefault(self._attached().run, {})

    def _begin_writing(self, at: Attached) -> None:
        """From here on the weights are those of this run, or of none: what others kept is of no use any more."""
        self._held = {at.catalog.identity: at}
        self._payloads = {at.run: self._staged}
        self._unfinished = True

    def _attached(self) -> Attached:
        if self._at is None:
            raise UsageError("a rank is not attached to a run", next_step="Attach it first.")
        return self._at

    def _finish(self, at: Attached) -> None:
        """After writes: opaque tensors through the native loader, then what the engine derives."""
        self._checked = False
        if self._unfinished:
            at.plan.check(self._model)
            at.shadows.load()
            self._after()
            for device in {storage.tensor.device for storage in at.plan.storages} - {torch.device("cpu")}:
                torch.get_device_module(device).synchronize(device)
            self._unfinished = False

    def _sums(self, staged: Staged) -> Sums:
        at, sums = self._attached(), dict.fromkeys(staged.pre, Digest())
        for class_, part in self._each(partial(self._live, at), staged.deltas):
            sums[class_] += part
        return sums

    def _each(self, work: Callable[[Any], list[T]], items: Sequence[Any]) -> Iterator[T]:
        results = map(work, items) if self._backends.one_at_a_time else side_by_side(self._pool, work, items)
        return (one for found in list(results) for one in found)

    def _shadow(self, at: Attached, delta: Delta) -> Elements | None:
        return at.shadows.bits(delta.tensor)[delta.low : delta.high] if delta.tensor in at.shadow_classes else None

    def _hit(self, at: Attached, delta: Delta) -> Iterator[Place]:
        return (place for place in at.places[delta.tensor] if place.low < delta.high and delta.low < place.high)

    def _preview(self, at: Attached, delta: Delta) -> list[tuple[int, tuple[Digest, Digest]]]:
        key = at.keys[delta.tensor]
        found = [(p.class_, p.backend.preview(delta, p.boxes, p.storage, p.shift, key)) for p in self._hit(at, delta)]
        if (bits := self._shadow(at, delta)) is not None:
            pre, post, _ = _kernel.preview(delta.record, delta.slices, bits, key)
            found.append((at.shadow_classes[delta.tensor], (Digest(*pre), Digest(*post))))
        return found

    def _live(self, at: Attached, delta: Delta) -> list[tuple[int, Digest]]:
        key = at.keys[delta.tensor]
        found = [(p.class_, p.backend.sums(delta, p.boxes, p.storage, p.shift, key)) for p in self._hit(at, delta)]
        if (bits := self._shadow(at, delta)) is not None:
            sums = Digest(*_kernel.sums(delta.record, delta.slices, bits, key))
            found.append((at.shadow_classes[delta.tensor], sums))
        return found

    def _apply(self, at: Attached, delta: Delta) -> list[None]:
        for place in self._hit(at, delta):
            place.backend.apply(delta, place.boxes, place.storage, place.shift)
        if (bits := self._shadow(at, delta)) is not None:
            at.shadows.touched(delta.tensor)
            _kernel.apply(delta.record, delta.slices, bits)
        return []

    def _place_digest(self, at: Attached, pair: tuple[int, Place]) -> list[tuple[int, Digest]]:
        tensor, place = pair
        return [(place.class_, place.backend.digest(place.boxes, place.storage, place.shift, at.keys[tensor]))]


def _refuse_bulk(catalog: Catalog, plan: Plan) -> None:
    """Opaque tensors are meant to be few and small: each refit takes them whole, and their bits are kept twice."""
    pairs = list(zip(catalog.tensors, plan.modes, strict=True))
    opaque = [(entry.numel * entry.width, reason) for entry, (mode, reason) in pairs if mode is Mode.OPAQUE]
    size = sum(nbytes for nbytes, _ in opaque)
    if size > MAX_OPAQUE_BYTES and 4 * size > catalog.dense_bytes:
        raise UsageError(
            "the engine keeps too much of the model in a form that changes cannot be written into",
            expected=f"<= {MAX_OPAQUE_BYTES} bytes, or a quarter of the model",
            found=f"{size} bytes: {max(opaque)[1]}",
            next_step="Start it with the dtype of the run (--dtype bfloat16), or refit from a directory (--into).",
        )
