"""What a native weight loader does, recorded once and not done: which checkpoint elements it puts where.

The loader is fed tensors without storage under a dispatch mode (``deltarefit.tracing``). Every write into the model's
own memory is noted and suppressed, so the live weights stay as they are, whatever the loader does: fills before a copy,
copies onto itself, buffers in between. What cannot be followed is opaque, with the reason.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from deltarefit.affine import Box
from deltarefit.affine.boxes import ascends
from deltarefit.errors import UsageError
from deltarefit.targets.placing.storages import Storage, box_in, places_of, storages_of, tensors_of
from deltarefit.tracing import (
    Casts,
    Kind,
    Memory,
    Origin,
    Provenance,
    cast_of,
    incomplete,
    tensors_in,
    written_arguments,
)

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""A native loader: takes checkpoint tensors by name and puts them where they belong."""
OWN_THREADS = "refit-"
THREADED_TRIES = 3
"""Recordings in which threads must have come up before they are taken for the loader's."""
MAX_TRIES = 64
"""Names that may make a loader raise, each left out of the next try."""


@dataclass(frozen=True)
class Landing:
    """A write into a live storage. ``name`` is the checkpoint tensor whose elements land, by ``boxes`` that lead from
    its flat positions to the storage's; without a name, something else lands there: ``made`` of tensors ``by``, or a
    constant, when the loader had asked for ``by`` last."""

    storage: int
    boxes: tuple[Box, ...]
    name: str = ""
    casts: Casts = ()
    by: frozenset[str] = frozenset()
    made: bool = False


@dataclass
class Recording:
    """All that a loader did, in order. ``opaque``: why a tensor's elements cannot be followed; ``refused``: why the
    loader does not take a tensor; ``together``: names that an opaque tensor has to be loaded with; ``taken``: names
    that the loader asked for."""

    landings: list[Landing] = field(default_factory=list)
    opaque: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    together: list[frozenset[str]] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)


def record(
    model: torch.nn.Module, load: Load, kinds: Mapping[str, Kind], unfilled: Callable[[str], bool] = lambda name: False
) -> tuple[Recording, list[Storage]]:
    """What ``load`` does with checkpoint tensors of these kinds, given in this order, and the storages it did it to.
    Of what it derives into ``unfilled`` tensors on its way nothing is noted: whoever names them refreshes them.

    Nothing in the model changes. A tensor that makes the loader raise is left out of the next try: it is opaque if the
    loader only missed its elements, else refused. Raises ``UsageError`` if the loader rebinds parameters, starts
    threads, or raises for too many tensors.
    """
    storages, before, bound = storages_of(model), places_of(model), _Bound(model)
    opaque, refused = dict[str, str](), dict[str, str]()
    threaded = 0
    while True:
        recorder = _Recorder(storages, unfilled)
        try:
            error = recorder.run(load, {n: kind for n, kind in kinds.items() if n not in opaque and n not in refused})
            after = places_of(model)
        finally:
            bound.restore()
        _refuse_moved(before, after)
        if recorder.threads and (threaded := threaded + 1) < THREADED_TRIES:  # they may be somebody else's
            continue
        _refuse_threads(recorder.threads)
        if error is None:
            break
        if not recorder.current or len(opaque) + len(refused) == MAX_TRIES:
            raise UsageError(
                f"the native loader cannot be followed: {type(error).__name__}: {error}",
                next_step="Refit this engine from a directory (follow --into), and report the model.",
            ) from error
        reason = f"{type(error).__name__}: {str(error)[:200]}"
        if "meta" in str(error).lower():  # torch's word for tensors without elements, in all that it raises about them
            opaque[recorder.current] = f"the loader looks at values: {reason}"
        else:
            refused[recorder.current] = f"the loader does not take it: {reason}"
    if shapes := recorder.kept_outside():
        raise UsageError(
            "the native loader writes to tensors outside of the model's parameters and buffers",
            found="tensors of " + ", ".join(map(str, shapes[:8])),
            next_step="Refit this engine from a directory (follow --into), and report the model.",
        )
    recorder.found.opaque.update(opaque)
    recorder.found.refused.update(refused)
    return recorder.found, storages


_TABLES = ("_parameters", "_buffers", "_modules")


def _shown(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class _Bound:
    """What the modules of a model are bound to: loaders also set attributes, whatever they make them of."""

    def __init__(self, model: torch.nn.Module) -> None:
        modules = list(model.modules())
        tables = [table for module in modules for table in (vars(module), *map(vars(module).get, _TABLES))]
        self._tables = [(table, dict(table)) for table in tables if table is not None]
        self._tensors = [(found.tensor, found.tensor.data) for found in tensors_of(model)]

    def restore(self) -> None:
        """Have everything as it was, and touch nothing that is: the engine may be running."""
        for table, was in self._tables:
            for key in [key for key in table if key not in was]:
                del table[key]
            table.update({key: value for key, value in was.items() if key not in table or table[key] is not value})
        for tensor, data in self._tensors:
            if _shown(tensor) != _shown(data):
                tensor.data = data


def _refuse_moved(before: Mapping[str, object], after: Mapping[str, object]) -> None:
    if moved := sorted(name for name in {*before, *after} if before.get(name) != after.get(name)):
        raise UsageError(
            "the native loader rebinds or moves parameters instead of writing to them",
            found=", ".join(moved[:8]),
            next_step="Refit this engine from a directory (follow --into). Its weights are as they were.",
        )


def _refuse_threads(threads: Sequence[threading.Thread]) -> None:
    if threads:
        raise UsageError(
            "the native loader starts threads, whose writes cannot be seen",
            found=", ".join(thread.name for thread in threads[:8]),
            next_step="Switch its threads off, or refit from a directory (follow --into).",
        )


class _Recorder(Provenance):  # type: ignore[no-untyped-call]
    def __init__(self, storages: Sequence[Storage], unfilled: Callable[[str], bool]) -> None:
        super().__init__()
        self.found = Recording()
        self._aside = {k for k, one in enumerate(storages) if not one.loaded and all(map(unfilled, one.names))}
        self.current = ""
        """The tensor that the loader asked for last."""
        self.threads: list[threading.Thread] = []
        """Threads that came up while it ran."""
        self._live = {storage.pointer: number for number, storage in enumerate(storages)}
        self._widths = [storage.width for storage in storages]
        self._outside: list[tuple[StorageWeakRef, tuple[int, ...]]] = []

    def run(self, load: Load, kinds: Mapping[str, Kind]) -> Exception | None:
        """Drive the loader once; what it raised. Memory that ran out says nothing about a tensor, and is raised."""
        before = threading.enumerate()
        try:
            with self, torch.no_grad():
                load(self._checkpoint(kinds))
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - whatever a loader raises about one tensor is that tensor's reason
            return error
        self.threads = [t for t in threading.enumerate() if t not in before and not t.name.startswith(OWN_THREADS)]
        return None

    def _checkpoint(self, kinds: Mapping[str, Kind]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, kind in kinds.items():
            self.current = name
            self.found.taken.add(name)
            yield name, self.source(name, kind)
        self.current = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func._schema.is_mutable:
            return self._write(func, args, kwargs)
        followed = any(t.is_meta or self.followed(t) for t in tensors_in([*args, *kwargs.values()]))
        if followed and (given := self.decomposed(func, args, kwargs)) is not NotImplemented:
            return given
        if followed and func.overloadpacket in _LOOKS:
            self._note_opaque("the loader looks at values", list(tensors_in(args)))
            if any(t.is_meta for t in tensors_in(args)):
                return False if func.overloadpacket is torch.ops.aten.equal else _zero(args[0])
        if kwargs.get("device") is not None and any(t.is_meta for t in tensors_in([*args, *kwargs.values()])):
            kwargs["device"] = torch.device("meta")
        given = func(*args, **kwargs)
        if followed:
            for out in tensors_in([given]):
                self.made(func, args, kwargs, out)
        return given

    # ------------------------------------------------------------------------------------ writes

    def _write(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        written = list(tensors_in(written_arguments(func._schema, args, kwargs)))
        packet = func.overloadpacket
        if packet is torch.ops.aten.copy_:
            pairs = [(args[0], args[1])]
        elif packet is torch.ops.aten._foreach_copy_:
            pairs = list(zip(args[0], args[1], strict=True))
        elif any(self._concerns(tensor) for tensor in tensors_in([*args, *kwargs.values()])):
            self._changed(func, written, list(tensors_in([*args, *kwargs.values()])))
            return written[0] if written and func._schema.returns else None
        else:
            return func(*args, **kwargs)
        for to, source in pairs:
            self._copy(func, to, source)
        return args[0] if packet is torch.ops.aten.copy_ else None

    def _concerns(self, tensor: torch.Tensor) -> bool:
        return tensor.is_meta or self.followed(tensor) or self._place(tensor) is not None

    def _place(self, tensor: torch.Tensor) -> int | None:
        """The live storage that a tensor lies in."""
        return None if tensor.is_meta else self._live.get(tensor.untyped_storage().data_ptr())

    def _copy(self, func: Any, to: torch.Tensor, source: torch.Tensor) -> None:
        place = self._place(to)
        if place is not None:
            self._land(place, to, source.expand(to.shape))
        elif self.followed(source):
            memory = self.memory(to)
            if memory.given:
                self.spoil(f"written to by {func}", [to], [to, source])
            memory.patched = True
            self._note_outside(to)
            self.carry(source.expand(to.shape), to, memory, cast_of(source, to))
        elif to.is_meta or self.followed(to):
            self._changed(func, [to], [to])
        else:
            func(to, source)

    def _changed(self, func: Any, written: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """A write that is no copy: of a constant, or of something computed."""
        fill = func.overloadpacket in _FILLS  # does not look at what was there
        made_of = [t for t in given if self.followed(t) and not (fill and any(t is w for w in written))]
        for tensor in written:
            place = self._place(tensor)
            if place is not None and func.overloadpacket.__name__ in _REBINDS:
                raise UsageError("weights would get other memory", found=func)
            if place is not None:
                self._land_other(place, tensor, f"written by {func}", made_of)
            elif func.overloadpacket in _FILLS and tensor.numel() == self.memory(tensor).numel:
                self._forget(tensor)
            else:
                self._note_outside(tensor)
                self.spoil(f"written by {func}", [tensor], made_of)

    def _note_outside(self, tensor: torch.Tensor) -> None:
        """Memory that is none of the model's was to be written to: a buffer in between, or weights kept elsewhere."""
        if not tensor.is_meta and tensor.numel():
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._outside.append((storage, tuple(tensor.shape)))

    def kept_outside(self) -> list[tuple[int, ...]]:
        """Shapes of such tensors that are still there after the loader. Forgets all that was followed."""
        self._memories.clear()
        self._alive.clear()
        if self._outside:
            gc.collect()
        return [shape for storage, shape in self._outside if not storage.expired()]  # type: ignore[no-untyped-call]

    def _forget(self, tensor: torch.Tensor) -> None:
        """All of it is a constant now."""
        memory = self.memory(tensor)
        memory.origins, memory.reason, memory.given = [], None, None
        memory.names.clear()

    def _land(self, place: int, to: torch.Tensor, source: torch.Tensor) -> None:
        if not to.numel() or place in self._aside:
            return
        if not self.followed(source):
            self._land_other(place, to, "", [])
            return
        origins, reason = self._landed(place, to, source)
        if reason is not None or not origins:
            self._land_other(place, to, reason or "", [source])
        else:
            self.found.landings += [Landing(place, origin.boxes, origin.source, origin.casts) for origin in origins]
            self._loaded(to, {origin.source for origin in origins})

    def _landed(self, place: int, to: torch.Tensor, source: torch.Tensor) -> tuple[list[Origin], str | None]:
        """The elements that land, none if all are constants; or why they cannot be followed."""
        memory = self.memory(source)
        if memory.reason or not self._names([source]):
            return [], memory.reason
        if to.element_size() != self._widths[place]:
            return [], "bits seen as another dtype"
        if _folded(to):
            return [], "elements land on each other"
        flat = Memory(to.numel(), patched=memory.patched)
        self.carry(source, torch.empty(to.shape, device="meta"), flat, ())
        if (reason := incomplete(flat)) is not None:
            return [], reason
        return self.carried(source, to, cast_of(source, to)), None

    def _land_other(self, place: int, to: torch.Tensor, reason: str, made_of: Sequence[torch.Tensor]) -> None:
        """Something lands that is no copy of tensors, but may be made of some."""
        if place in self._aside:
            return
        self._note_opaque(reason, made_of)
        names = self._names(made_of)
        by = names or frozenset([self.current] if self.current else [])
        self.found.landings.append(Landing(place, (box_in(to, self._widths[place]),), by=by, made=bool(names)))
        self._loaded(to, names)

    def _loaded(self, to: torch.Tensor, names: Iterable[str]) -> None:
        """Whatever is made of these weights from now on comes from what landed here."""
        if found := set(names):
            memory = self.memory(to)
            memory.reason = "made of weights that were loaded before"
            memory.names |= found | {_LIVE}

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        """The checkpoint tensors that had a part in these. Where live weights were looked at, that is also the one that
        the loader had asked for last: only given that will it do the same again."""
        names = {name for tensor in tensors if self.followed(tensor) for name in self.names_in(tensor)}
        if _LIVE in names:
            names.add(self.current)
        return frozenset(names - {_LIVE})

    def _note_opaque(self, reason: str, made_of: Sequence[torch.Tensor]) -> None:
        names = self._names(made_of)
        for name in names:
            self.found.opaque.setdefault(name, reason)
        if len(names) > 1:
            self.found.together.append(names)


_LIVE = ""
"""Stands among names for weights that were loaded before."""
_FILLS = (torch.ops.aten.fill_, torch.ops.aten.zero_)
_LOOKS = (torch.ops.aten._local_scalar_dense, torch.ops.aten.equal)
"""Operations that give values of tensors to Python."""
_REBINDS = ("set_", "resize_", "resize_as_", "set_data")
"""Operations that give a tensor other memory."""


def _zero(tensor: torch.Tensor) -> Any:
    """A value where there is none: the loader goes on, and what it makes of the tensor is not relied on."""
    return torch.zeros((), dtype=tensor.dtype, device="cpu").item()


def _folded(tensor: torch.Tensor) -> bool:
    """Whether elements of a view may lie on each other."""
    dims = sorted(zip(tensor.stride(), tensor.shape, strict=True), reverse=True)
    return not ascends(tuple(n for _, n in dims), tuple(int(s) for s, _ in dims))
