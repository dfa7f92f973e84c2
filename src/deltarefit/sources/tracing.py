"""What a conversion does to tensors, found by running it once on tensors without storage.

How elements are followed is ``deltarefit.tracing``'s business; here a conversion is run, and may write to nothing that
it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deltarefit.errors import UsageError
from deltarefit.sources.arguments import listed
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

__all__ = ["Casts", "Conversion", "Kind", "Origin", "Output", "trace"]

Conversion = Callable[[dict[str, torch.Tensor]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Output:
    """One tensor that a conversion gives: copies of elements of its ``origins``, which cover it once; or, with a
    ``reason``, something else."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    origins: tuple[Origin, ...] = ()
    reason: str | None = None


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


class _Recorder(Provenance):  # type: ignore[no-untyped-call]
    def output(self, tensor: torch.Tensor) -> Output:
        """Where the elements of a tensor come from, in row-major order."""
        memory, shape = self.memory(tensor), tuple(tensor.shape)
        if memory.reason:
            return Output(shape, tensor.dtype, reason=memory.reason)
        flat = Memory(tensor.numel(), patched=memory.patched)
        dense = torch.empty(shape, device="meta")
        self.carry(tensor, dense, flat, ())
        if (reason := flat.reason or incomplete(flat)) is not None:
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
            written = list(tensors_in(written_arguments(func._schema, args, kwargs)))
            self._refuse_given(written)
            self.spoil(f"made by {func}", written, tensors_in(args))
        else:
            for out in tensors_in([given]):
                self.made(func, args, kwargs, out)
        return given

    def _refuse_given(self, written: Sequence[torch.Tensor]) -> None:
        """The real tensors would be the trainer's own weights."""
        if name := next((given for tensor in written if (given := self.memory(tensor).given)), None):
            raise UsageError(
                f"the conversion writes to {name}, which it was given", next_step="Clone it before, or write elsewhere."
            )

    def _written(self, out: torch.Tensor, source: torch.Tensor) -> None:
        self._refuse_given([out])
        memory = self.memory(out)
        memory.patched = True
        self.carry(source.expand(out.shape), out, memory, cast_of(source, out))
