"""What a conversion does to tensors, found by running it once on tensors without storage.

Meta tensors keep shapes, strides and dtypes and hold no element, so the size of a model does not matter. Under a
dispatch mode every operation of the conversion is seen below Python: views need no record, since strides say it all;
copies (clone, cat, stack, copy_) are recorded as strided boxes and composed exactly (``affine.compose``); casts are
remembered. Anything else that makes values makes its result opaque, with the operation's name as the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deltarefit.affine import AffineMap, Box, check_coverage, compose, rows_of
from deltarefit.errors import UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.pieces import Piece
from deltarefit.sources.arguments import listed

Casts = tuple[torch.dtype, ...]
Kind = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""
Conversion = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]
_CONSTANTS = (
    "empty", "empty_like", "empty_strided", "new_empty", "zeros", "zeros_like", "new_zeros", "ones", "new_ones", "full",
    "new_full",
)  # fmt: skip
"""Operations that make room."""
_MEMORY = ""
"""The one name that maps into a memory go by."""


@dataclass(frozen=True)
class Origin:
    """Elements of ``source`` that arrive in an output after ``casts``; ``boxes`` lead from the source's flat positions
    to the output's."""

    source: str
    casts: Casts
    boxes: tuple[Box, ...]


@dataclass(frozen=True)
class Output:
    """One tensor that a conversion gives: copies of elements of its ``origins``, which cover it once; or, with a
    ``reason``, something else."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origins: tuple[Origin, ...] = ()
    reason: str | None = None


@dataclass
class _Memory:
    """What is known of the elements of one storage. ``given``: the input that it is. ``patched``: written in several
    goes, which may overlap or leave holes."""

    numel: int
    given: str | None = None
    origins: list[Origin] = field(default_factory=list)
    reason: str | None = None
    patched: bool = False


def trace(conversion: Conversion, inputs: Mapping[str, Kind]) -> dict[str, Output]:
    """Every output of ``conversion`` by name. What the conversion raises (meta tensors have no values to look at, no
    ``numpy`` and no ``item``) is a ``UsageError`` with its text, and so is what is no mapping of names to tensors."""
    recorder = _Recorder()
    tensors = {name: recorder.source(name, kind) for name, kind in inputs.items()}
    try:
        with recorder, torch.no_grad():
            given = conversion(dict(tensors))
    except UsageError:
        raise
    except KeyError as error:
        raise UsageError(
            f"the conversion cannot be followed: KeyError {error}; it is given: {listed(sorted(inputs), ', ')}",
            next_step="Take tensors by the names that they are given under.",
        ) from error
    except Exception as error:
        raise UsageError(
            f"the conversion cannot be followed: {error}",
            next_step="Convert without looking at values, on the tensors' own device, without numpy.",
        ) from error
    _check_given(given)
    return {name: recorder.output(tensor) for name, tensor in given.items()}


def _check_given(given: object) -> None:
    """A conversion that returns nothing, or a list, was meant otherwise."""
    found = type(given).__name__
    if isinstance(given, Mapping):
        wrong = [(name, one) for name, one in given.items() if not isinstance(one, torch.Tensor)]
        if not wrong:
            return
        found = f"{wrong[0][0]}: {type(wrong[0][1]).__name__}"
    raise UsageError(
        "the conversion does not return tensors by name",
        expected="a mapping of canonical names to tensors",
        found=found,
        next_step="Return a dict of canonical tensors.",
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memories: dict[int, _Memory] = {}
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
        memory = self._memory(tensor)
        memory.given = name
        if tensor.numel():
            memory.origins.append(Origin(name, (), (Box((tensor.numel(),), 0, (1,), 0, (1,)),)))
        return tensor

    def output(self, tensor: torch.Tensor) -> Output:
        """Where the elements of a tensor come from, in row-major order."""
        memory, shape = self._memory(tensor), tuple(tensor.shape)
        if memory.reason:
            return Output(shape, tensor.dtype, reason=memory.reason)
        flat = _Memory(tensor.numel(), patched=memory.patched)
        dense = torch.empty(shape, device="meta")
        self._carry(tensor, dense, flat, ())
        if (reason := flat.reason or _incomplete(flat)) is not None:
            return Output(shape, tensor.dtype, reason=reason)
        return Output(shape, tensor.dtype, tuple(flat.origins))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        given = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten.copy_:
            self._written(args[0], args[1])
        elif func._schema.is_mutable:
            written = list(_tensors(_written_arguments(func._schema, args, kwargs)))
            self._refuse_given(written)
            self._spoil(func, written)
        else:
            for out in _tensors([given]):
                self._made(func, args, out)
        return given

    def _made(self, func: Any, args: tuple[Any, ...], out: torch.Tensor) -> None:
        known = next((t for t in _tensors(args) if _same_storage(t, out)), None)
        if known is not None:
            if known.dtype != out.dtype:
                self._memory(known).reason = f"bits seen as another dtype ({func})"
        elif rule := self._rules.get(func.overloadpacket):
            rule(out, *args)
        else:
            self._spoil(func, [out])

    def _memory(self, tensor: torch.Tensor) -> _Memory:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._memories:
            self._memories[storage._cdata] = _Memory(storage.nbytes() // tensor.element_size())
            self._alive.append(storage)
        return self._memories[storage._cdata]

    def _spoil(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            self._memory(tensor).reason = f"made by {func}"

    def _copied(self, out: torch.Tensor, source: torch.Tensor, *rest: Any) -> None:
        self._carry(source, out, self._memory(out), _cast(source, out))

    def _refuse_given(self, written: Sequence[torch.Tensor]) -> None:
        """The real tensors would be the trainer's own weights."""
        if name := next((given for tensor in written if (given := self._memory(tensor).given)), None):
            raise UsageError(
                f"the conversion writes to {name}, which it was given", next_step="Clone it before, or write elsewhere."
            )

    def _written(self, out: torch.Tensor, source: torch.Tensor) -> None:
        self._refuse_given([out])
        memory = self._memory(out)
        memory.patched = True
        self._carry(source.expand(out.shape), out, memory, _cast(source, out))

    def _constant(self, out: torch.Tensor, *rest: Any) -> None:
        """Room that comes from no tensor, until it is written to."""
        self._memory(out)

    def _concatenated(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        parts = [tensor for tensor in tensors if tensor.shape != (0,)]
        places = torch.split(out, [tensor.shape[dim] for tensor in parts], dim)
        for part, place in zip(parts, places, strict=True):
            self._carry(part, place, self._memory(out), _cast(part, out))

    def _stacked(self, out: torch.Tensor, tensors: Sequence[torch.Tensor], dim: int = 0) -> None:
        for tensor, place in zip(tensors, out.unbind(dim), strict=True):
            self._carry(tensor, place, self._memory(out), _cast(tensor, out))

    def _carry(self, source: torch.Tensor, out: torch.Tensor, memory: _Memory, casts: Casts) -> None:
        """Elements of ``source`` were copied to ``out``, a view of ``memory``."""
        if not source.numel():
            return
        behind = self._memory(source)
        memory.reason = memory.reason or behind.reason
        memory.patched |= behind.patched
        starts = int(source.storage_offset()), int(out.storage_offset())
        copy = Box(tuple(source.shape), starts[0], source.stride(), starts[1], out.stride())
        for origin in tuple(behind.origins):
            if boxes := self._through(origin.boxes, behind.numel, copy):
                memory.origins.append(Origin(origin.source, origin.casts + casts, boxes))

    def _through(self, boxes: tuple[Box, ...], numel: int, copy: Box) -> tuple[Box, ...]:
        """``boxes`` into a memory, and then ``copy`` out of it. Layers of a model are alike: each is composed once."""
        key = boxes, copy
        if key not in self._composed:
            inner = AffineMap((), tuple((_MEMORY, box) for box in boxes))
            outer = {_MEMORY: AffineMap((numel,), ((_MEMORY, copy),))}
            self._composed[key] = compose(inner, outer).of(_MEMORY)
        return self._composed[key]


def _same_storage(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(one.untyped_storage()._cdata == other.untyped_storage()._cdata)


def _cast(source: torch.Tensor, out: torch.Tensor) -> Casts:
    return () if source.dtype == out.dtype else (out.dtype,)


def _written_arguments(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            yield args[number] if number < len(args) else kwargs.get(argument.name)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    """Tensors among arguments or results, also in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _incomplete(memory: _Memory) -> str | None:
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
