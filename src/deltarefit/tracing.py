"""Where the elements of tensors come from, followed below Python: what a conversion or a weight loader does.

Meta tensors keep shapes, strides and dtypes and hold no element, so the size of a model does not matter. Under a
dispatch mode every operation is seen below Python: views need no record, since strides say it all; copies (clone,
cat, stack, copy_) are recorded as strided boxes and composed exactly (``affine.compose``); operations that only move
elements (index, flip, ...) are run once on positions instead; casts are remembered. Anything else that makes values
makes its result opaque, with the operation's name as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltarefit.affine import AffineMap, Box, NotAffineError, check_coverage, compose, fit, rows_of
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece

Casts = tuple[torch.dtype, ...]
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""
_CONSTANTS = (
    "empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like", "new_zeros", "ones", "new_ones", "full",
    "new_full",
)  # fmt: skip
"""Operations that make room."""
_MOVES = ("index", "index_select", "flip", "roll", "repeat", "repeat_interleave")
"""Operations whose result holds just elements of their first argument."""
MAX_MOVED = 1 << 24
"""Most elements of a tensor that is followed through such an operation."""
_MEMORY = ""
"""The one name that maps into a memory go by."""


@dataclass(frozen=True)
class Origin:
    """Elements of ``source`` that arrive in an output after ``casts``; ``boxes`` lead from the source's flat positions
    to the output's."""

    source: str
    casts: Casts
    boxes: tuple[Box, ...]


@dataclass
class Memory:
    """What is known of the elements of one storage. ``given``: the input that it is. ``patched``: written in several
    goes, which may overlap or leave holes. ``names``: the inputs that had a part in it, where ``reason`` says that its
    elements are no copies of theirs."""

    numel: int
    given: str | None = None
    origins: list[Origin] = field(default_factory=list)
    reason: str | None = None
    patched: bool = False
    names: set[str] = field(default_factory=set)


class Provenance(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows what comes from its ``source`` tensors. Subclasses say what a write means."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, Memory] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._composed: dict[tuple[tuple[Box, ...], Box], tuple[Box, ...]] = {}
        self._rules: dict[Any, Callable[..., None]] = {
            torch.ops.aten.clone: self._copied,
            torch.ops.aten._to_copy: self._copied,
            torch.ops.aten.cat: self._concatenated,
            torch.ops.aten.stack: self._stacked,
            **{getattr(torch.ops.aten, name): self._constant for name in _CONSTANTS},
        }

    def source(self, name: str, kind: Kind) -> torch.Tensor:
        """A tensor of this kind whose elements are known as those of ``name``."""
        shape, dtype = kind
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        memory = self.memory(tensor)
        memory.given = name
        memory.names.add(name)
        if tensor.numel():
            memory.origins.append(Origin(name, (), (Box((tensor.numel(),), 0, (1,), 0, (1,)),)))
        return tensor

    def decomposed(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The result of an operation that consists of others, which are followed; NotImplemented for any other. Where
        gradients are off for good (inference mode) torch does not take such operations apart itself."""
        with self:
            return func.decompose(*args, **kwargs)

    def memory(self, tensor: torch.Tensor) -> Memory:
        """What is known of a tensor's storage; from now on something is."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = Memory(storage.nbytes() // tensor.element_size())
            self._alive.append(storage)
        return self._memories[storage._cdata]

    def followed(self, tensor: torch.Tensor) -> bool:
        """Whether anything is known of a tensor's storage."""
        return tensor.untyped_storage()._cdata in self._memories

    def made(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: torch.Tensor) -> None:
        """``out`` is a result of ``func``, which writes to nothing: a view, a copy, or something else."""
        given = list(tensors_in([*args, *kwargs.values()]))
        known = next((t for t in given if _same_storage(t, out)), None)
        if known is not None:
            if known.dtype != out.dtype:
                self.spoil(f"bits seen as another dtype ({func})", [known], [known])
        elif rule := self._rules.get(func.overloadpacket):
            rule(out, *args)
        elif func.overloadpacket.__name__ in _MOVES and _can_move(args, out):
            self._moved(func, args, kwargs, out)
        else:
            self.spoil(f"made by {func}", [out], given)

    def spoil(self, reason: str, tensors: Iterable[torch.Tensor], given: Iterable[torch.Tensor]) -> None:
        """Elements of ``tensors`` are no copies any more: they were made of those ``given``."""
        names = {name for tensor in given if self.followed(tensor) for name in self.names_in(tensor)}
        for tensor in tensors:
            memory = self.memory(tensor)
            memory.reason = memory.reason or reason
            memory.names |= names

    def names_in(self, tensor: torch.Tensor) -> set[str]:
        """The inputs that had a part in a tensor's storage."""
        memory = self.memory(tensor)
        return memory.names | {origin.source for origin in memory.origins}

    def carry(self, source: torch.Tensor, out: torch.Tensor, memory: Memory, casts: Casts) -> None:
        """Elements of ``source`` were copied to ``out``, a view of ``memory``."""
        if not source.numel():
            return
        behind = self.memory(source)
        memory.reason = memory.reason or behind.reason
        memory.patched |= behind.patched
        memory.names |= behind.names
        memory.origins += self.carried(source, out, casts)

    def carried(self, source: torch.Tensor, out: torch.Tensor, casts: Casts) -> list[Origin]:
        """Which elements of which inputs a copy of ``source`` brings to the storage of ``out``, of one shape."""
        behind = self.memory(source)
        starts = int(source.storage_offset()), int(out.storage_offset())
        copy = Box(tuple(source.shape), starts[0], source.stride(), starts[1], out.stride())
        parts = ((origin, self._through(origin.boxes, behind.numel, copy)) for origin in behind.origins)
        return [Origin(origin.source, origin.casts + casts, boxes) for origin, boxes in parts if boxes]

    def _copied(self, out: torch.Tensor, source: torch.Tensor, *rest: Any) -> None:
        self.carry(source, out, self.memory(out), cast_of(source, out))

    def _constant(self, out: torch.Tensor, *rest: Any) -> None:
        """Room that comes from no tensor, until it is written to."""
        self.memory(out)

    def _concatenated(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        parts = [tensor for tensor in tensors if tensor.shape != (0,)]
        places = torch.split(out, [tensor.shape[dim] for tensor in parts], dim)
        for part, place in zip(parts, places, strict=True):
            self.carry(part, place, self.memory(out), cast_of(part, out))

    def _stacked(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        for tensor, place in zip(tensors, out.unbind(dim), strict=True):
            self.carry(tensor, place, self.memory(out), cast_of(tensor, out))

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: torch.Tensor) -> None:
        """``out`` has elements of the first argument elsewhere, or several times: the same done to positions."""
        source = args[0]
        places = torch.arange(source.numel()).reshape(source.shape)
        flat = Memory(source.numel(), patched=self.memory(source).patched)
        try:
            boxes = fit(func(places, *args[1:], **kwargs).numpy())
        except (NotAffineError, RuntimeError) as error:
            self.spoil(f"made by {func}: {error}", [out], [source])
            return
        self.carry(source, torch.empty(source.shape, device="meta"), flat, ())
        rows = torch.empty(out.shape, dtype=out.dtype, device="meta")  # row by row, which ``out`` need not be
        memory = self.memory(rows)
        memory.reason, memory.patched, memory.names = flat.reason, flat.patched, flat.names
        for origin in flat.origins:
            for box in boxes:
                if found := self._through(origin.boxes, source.numel(), box):
                    memory.origins.append(Origin(origin.source, origin.casts, found))
        self.carry(rows, out, self.memory(out), ())

    def _through(self, boxes: tuple[Box, ...], numel: int, copy: Box) -> tuple[Box, ...]:
        """``boxes`` into a memory, and then ``copy`` out of it. Layers of a model are alike: each is composed once."""
        key = boxes, copy
        if key not in self._composed:
            inner = AffineMap((), tuple((_MEMORY, box) for box in boxes))
            outer = {_MEMORY: AffineMap((numel,), ((_MEMORY, copy),))}
            self._composed[key] = compose(inner, outer).of(_MEMORY)
        return self._composed[key]


def _can_move(args: tuple[Any, ...], out: torch.Tensor) -> bool:
    """Indices must have values, and positions must fit into memory."""
    small = max(args[0].numel(), out.numel()) <= MAX_MOVED
    return small and not any(tensor.is_meta for tensor in tensors_in(args[1:]))


def cast_of(source: torch.Tensor, out: torch.Tensor) -> Casts:
    """The cast that a copy from one to the other is."""
    return () if source.dtype == out.dtype else (out.dtype,)


def written_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of a call that it writes to."""
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def tensors_in(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def incomplete(memory: Memory) -> str | None:
    """Why the elements of a memory are not each one copy. Only patches can overlap."""
    boxes = [box for origin in memory.origins for box in origin.boxes]
    if sum(box.numel for box in boxes) != memory.numel:
        return "some elements come from no tensor, or from several"
    if not memory.patched:
        return None
    catalog = Catalog((TensorEntry("t", "U8", (memory.numel,)),))
    try:
        check_coverage(catalog, [[Piece(0, *span) for box in boxes for span, _ in rows_of(box)]])
    except UsageError as error:
        return error.what
    return None
