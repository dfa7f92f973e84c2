"""One catalog on all ranks, where a rank knows only the tensors of its own stage and experts."""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence

from deltarefit.errors import FormatError, UnavailableError, UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.ports import Exchange
from deltarefit.sources.megatron_kinds import Layout

DEADLINE_S = 600.0
"""How long to wait for the other stages: they may still be loading."""
_MAX_BYTES = 1 << 28


def agree(own: Sequence[TensorEntry], layout: Layout, exchange: Exchange, deadline_s: float = DEADLINE_S) -> Catalog:
    """The catalog of the whole model. One rank of each stage and expert-parallel rank says what it has, compressed.

    ``UnavailableError`` if one is silent for ``deadline_s`` seconds; ``UsageError`` names a tensor on which two
    disagree.
    """
    speakers = layout.pp.size * layout.ep.size
    if speakers == 1:
        return Catalog(tuple(own))
    me = layout.pp.rank * layout.ep.size + layout.ep.rank
    if layout.edp.rank == 0 and layout.etp.rank == 0:
        exchange.put(f"catalog/{me}", zlib.compress(Catalog(tuple(own)).to_bytes()))
    deadline = time.monotonic() + deadline_s
    heard = [_hear(exchange, f"catalog/{number}", deadline) for number in range(speakers)]
    return _merged([*heard, Catalog(tuple(own))])


def _hear(exchange: Exchange, key: str, deadline: float) -> Catalog:
    while (said := exchange.get(key)) is None:
        if time.monotonic() > deadline:
            raise UnavailableError(
                "a pipeline stage or expert-parallel rank did not say which tensors it has",
                expected=key,
                next_step="Is that rank alive? All ranks make the source at the same time.",
            )
        time.sleep(0.02)
    unpack = zlib.decompressobj()
    data = unpack.decompress(said, _MAX_BYTES)
    if unpack.unconsumed_tail:
        raise FormatError(f"{key} is too large", expected=f"at most {_MAX_BYTES} bytes")
    return Catalog.from_bytes(data, key)


def _merged(catalogs: Sequence[Catalog]) -> Catalog:
    entries: dict[str, TensorEntry] = {}
    for catalog in catalogs:
        for entry in catalog.tensors:
            if entries.setdefault(entry.name, entry) != entry:
                raise UsageError(f"ranks disagree on {entry.name}", expected=entries[entry.name], found=entry)
    return Catalog(tuple(entries[name] for name in sorted(entries)))
