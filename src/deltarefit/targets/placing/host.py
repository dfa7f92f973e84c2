"""Operations of deltas on storages that the CPU reaches, by the native kernel; and the back end of each device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from deltarefit import _kernel
from deltarefit.codec import Delta
from deltarefit.elements import Elements
from deltarefit.records import Digest
from deltarefit.targets.placing.device import DeviceBackend
from deltarefit.targets.placing.plan import Table
from deltarefit.targets.placing.scatter import low_bits

LOWER_HALF = "lower half of a widened element is not zero"
"""What the kernel says of low bits."""


class Backend(Protocol):
    """Operations of one delta, or of all elements, on one storage through a table of boxes."""

    def apply(self, delta: Delta, boxes: Table, storage: Any, shift: int) -> int: ...
    def sums(self, delta: Delta, boxes: Table, storage: Any, shift: int, key: int) -> Digest: ...
    def preview(self, delta: Delta, boxes: Table, storage: Any, shift: int, key: int) -> tuple[Digest, Digest]: ...
    def digest(self, boxes: Table, storage: Any, shift: int, key: int) -> Digest: ...


class HostBackend:
    """The native kernel, on storages that the CPU reaches.

    ``DigestMismatch`` if shifted elements that are read have low bits; nothing is written then.
    """

    def apply(self, delta: Delta, boxes: Table, storage: Elements, shift: int) -> int:
        with _low_bits_told(shift):
            hits: int = _kernel.place_apply(delta.record, delta.slices, storage, boxes, shift)
        return hits

    def sums(self, delta: Delta, boxes: Table, storage: Elements, shift: int, key: int) -> Digest:
        with _low_bits_told(shift):
            return Digest(*_kernel.place_sums(delta.record, delta.slices, storage, boxes, key, shift))

    def preview(self, delta: Delta, boxes: Table, storage: Elements, shift: int, key: int) -> tuple[Digest, Digest]:
        with _low_bits_told(shift):
            pre, post = _kernel.place_preview(delta.record, delta.slices, storage, boxes, key, shift)
        return Digest(*pre), Digest(*post)

    def digest(self, boxes: Table, storage: Elements, shift: int, key: int) -> Digest:
        with _low_bits_told(shift):
            return Digest(*_kernel.place_digest(storage, boxes, key, shift))


@contextmanager
def _low_bits_told(shift: int) -> Iterator[None]:
    """The kernel has one error for all that it refuses; this one of them is not the caller's fault."""
    try:
        yield
    except ValueError as error:
        if LOWER_HALF in str(error):
            raise low_bits(shift) from error
        raise


class Backends:
    """The back end of each device, made once: those of accelerators keep buffers, and take one call at a time."""

    def __init__(self) -> None:
        self._host = HostBackend()
        self._devices: dict[torch.device, DeviceBackend] = {}

    def view(self, integers: torch.Tensor) -> tuple[Backend, Any]:
        """The back end for a storage, given as one row of integers, and what it wants to be given of it."""
        if integers.device.type == "cpu":
            return self._host, integers.numpy().view(f"u{integers.element_size()}")
        if integers.device not in self._devices:
            self._devices[integers.device] = DeviceBackend(integers.device)
        return self._devices[integers.device], integers

    @property
    def one_at_a_time(self) -> bool:
        """Whether calls must not come side by side."""
        return bool(self._devices)
