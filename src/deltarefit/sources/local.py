"""The local tensors of a rank: what is expected of them, fetched anew for each hold, watched for writes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from deltarefit.errors import BaseMismatch, IntegrityError, UsageError
from deltarefit.sources.arguments import listed
from deltarefit.sources.dtypes import DTYPES, carried

SAMPLED = 256
"""Elements of each tensor that are compared before and after a hold, about."""
Fetch = Callable[[], torch.Tensor]
"""Gives a rank's local tensor as it is now."""


@dataclass(frozen=True)
class _Kind:
    """What must not change between publishes."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Kind:
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device.type)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape} on {self.device}"


class Local:
    """One local tensor under the trainer's own name. It may be rebound between holds, not changed in kind.

    ``tensor`` is there only while it is held. Writes meanwhile are seen through torch's version counter; and, since
    DTensors, fused optimizers, ``.data`` and collectives pass it by, through ``SAMPLED`` elements spread over the
    tensor, of which an optimizer step changes some. What changes none of them is not seen.
    """

    def __init__(self, name: str, fetch: Fetch) -> None:
        self.name = name
        self._fetch = fetch
        self._held: torch.Tensor | None = None
        self._before: tuple[int, torch.Tensor] | None = None
        first = self.now()
        self.kind = _Kind.of(first)
        self.objections = tuple(f"{name} {why}" for why in _objections(first))

    def now(self) -> torch.Tensor:
        """The tensor as the trainer has it now."""
        return self._fetch().detach()

    def hold(self) -> str | None:
        """Fetch it for a publish; or say what is wrong."""
        tensor = self.now()
        if (kind := _Kind.of(tensor)) != self.kind:
            return f"{self.name} is {kind}, was {self.kind}"
        if found := next(_objections(tensor), None):
            return f"{self.name} {found}"
        self._held, self._before = tensor, (tensor._version, _sample(tensor).clone())
        return None

    def release(self) -> bool:
        """Let go of it; whether it was written to while it was held."""
        (tensor, before), self._held, self._before = (self._held, self._before), None, None
        if tensor is None or before is None:
            return False
        version, sample = before
        return tensor._version != version or not torch.equal(_sample(tensor), sample)

    @property
    def tensor(self) -> torch.Tensor:
        """As held. ``UsageError`` outside of ``hold``."""
        if self._held is None:
            raise UsageError(f"{self.name} was read outside of hold()", next_step="Read inside `with source.hold():`.")
        return self._held

    @property
    def flat(self) -> torch.Tensor:
        """Its elements in row-major order, as integers of their width; the same memory."""
        return carried(self.tensor.reshape(-1))


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """About ``SAMPLED`` elements, as a view."""
    flat = carried(tensor.reshape(-1))
    return flat[:: max(1, flat.numel() // SAMPLED)]


def hold_all(every: Sequence[Local]) -> None:
    """``BaseMismatch`` names tensors that are not what they were when the source was made."""
    if wrong := [found for local in every if (found := local.hold())]:
        release_all(every)
        raise BaseMismatch(
            "tensors are not those that the source was made of",
            found=listed(wrong),
            next_step="Make a new source, and a new run if the model has changed.",
        )


def release_all(every: Iterable[Local]) -> list[str]:
    """Names of all that were written to while held."""
    return [local.name for local in every if local.release()]


def check_unwritten(written: Sequence[str]) -> None:
    """``IntegrityError`` if any was: what was read is then of no one version."""
    if written:
        raise IntegrityError(
            f"{written[0]} was written to while it was being published",
            expected="no write before publish() returns",
            found=f"{len(written)} tensors written: {listed(written, ', ')}",
            next_step="Run the optimizer and loading before or after publish(), then publish again.",
        )


def _objections(tensor: torch.Tensor) -> Iterator[str]:
    """Why a tensor cannot be read as it lies; at most one reason."""
    if tensor.layout != torch.strided or tensor.is_quantized:
        yield "is not a dense strided tensor: convert it"
    elif tensor.is_meta:
        yield "is on the meta device: load or initialise the weights first"
    elif tensor.dtype not in DTYPES:
        yield f"has dtype {tensor.dtype}, which safetensors cannot hold: convert it"
    elif tensor.is_conj() or tensor.is_neg():
        yield "is a lazy conjugate or negative: resolve it (resolve_conj, resolve_neg)"
    elif tensor.is_inference():
        yield "was made under inference_mode, which hides writes: clone it outside"
    elif not tensor.is_contiguous():
        yield f"is not contiguous (shape {tuple(tensor.shape)}, strides {tensor.stride()}): call contiguous()"


def shared_memory(every: Sequence[Local]) -> list[str]:
    """Pairs of differently named tensors that share memory: each would be sent, and be owned, twice."""
    spans = sorted((str(t.device), t.data_ptr(), t.data_ptr() + t.nbytes, local.name) for local, t in _readable(every))
    found: list[str] = []
    device, reach, owner = "", 0, ""
    for on, begin, end, name in spans:
        if on == device and begin < reach and name != owner:
            found.append(f"{name} shares memory with {owner}: tie them under one name")
        if on != device or end > reach:
            device, reach, owner = on, end, name
    return found


def _readable(every: Sequence[Local]) -> Iterator[tuple[Local, torch.Tensor]]:
    for local in every:
        if not local.objections and (tensor := local.now()).numel():
            yield local, tensor
