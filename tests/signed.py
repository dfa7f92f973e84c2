"""Signed runs for tests: keys, a trusted receiver that is watched, and records that an attacker puts in their place."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from deltarefit import Publisher, codec
from deltarefit.errors import IntegrityError
from deltarefit.manifest import Header, State
from deltarefit.ports import Store
from deltarefit.records import split_signature
from deltarefit.runlog import RunLog
from deltarefit.signing import SECRET_BYTES, Kind, Secret, Signer
from deltarefit.stores.wrappers import Prefixed
from deltarefit.trust import Role, Trust, TrustedKey
from tests import helpers as h

KINDS = list(Kind)
ALL = frozenset(Role)


def new_signer(kind: Kind = Kind.ED25519, name: str = "trainer") -> Signer:
    return Signer(kind, name, Secret(secrets.token_bytes(SECRET_BYTES)))


def trusted(signer: Signer, roles: frozenset[Role] = ALL, **limits: object) -> TrustedKey:
    material = signer.secret if signer.kind is Kind.HMAC else signer.public()
    return TrustedKey(signer.kind, signer.key, material, roles, **limits)  # type: ignore[arg-type]


def trust_in(*keys: Signer | TrustedKey) -> Trust:
    return Trust(tuple(key if isinstance(key, TrustedKey) else trusted(key) for key in keys))


@dataclass
class Scene:
    """A signed run of three versions, and who trusts it. ``upto`` copies it as it was when a version was the head."""

    signer: Signer
    trust: Trust
    chain: h.Chain
    run: str

    @property
    def store(self) -> Store:
        return self.chain.store

    def upto(self, version: int) -> Store:
        new = h.new_store()
        for key, _ in self.store.list():
            kind, _, rest = key.partition("/")
            if kind != "a" or int(rest.split("/")[0]) <= version:
                new.put(key, self.store.get(key))
        RunLog.open(new).put_hint(version, 1)
        return new


def scene(kind: Kind = Kind.ED25519, seed: int = 1, signer: Signer | None = None) -> Scene:
    signer = signer or new_signer(kind)
    chain = h.Chain(h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(seed), h.SMALL), h.SMALL))
    publish(chain, signer, kinds=("", "some", "many"))
    return Scene(signer, trust_in(signer), chain, RunLog.open(chain.store).run)


def publish(chain: h.Chain, signer: Signer, trust: Trust | None = None, kinds: tuple[str, ...] = ("some",)) -> None:
    publisher = Publisher(chain.store, chain.source, threads=1, payload_bytes=400, sign=signer, trust=trust)
    try:
        for kind in kinds:
            if kind:
                h.step(np.random.default_rng(len(chain.history)), chain.source.model, kind)
            chain.history[publisher.publish().version] = h.bytes_of(chain.source.model)
    finally:
        publisher.close()


def plain(store: Store, key: str) -> bytes:
    return bytes(split_signature(store.get(key), key)[0])


def resign(store: Store, key: str, signer: Signer, run: str, place: str | None = None) -> None:
    """Put another's signature (of ``run`` and ``place``) below what stands at ``key``."""
    data = plain(store, key)
    store.put(key, data + signer.sign(run, place or key, data).to_line())


@dataclass
class Spied(Prefixed):
    """A store that remembers which objects were read; ``served`` may give other bytes for a key."""

    inner: Store
    reads: list[str] = field(default_factory=list)
    served: dict[str, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._store = self.inner

    def _at(self, key: str) -> str:
        return key

    @property
    def url(self) -> str:
        return self.inner.url

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        self.reads.append(key)
        if (data := self.served.get(key)) is not None:
            return data[start:][:length]
        return self.inner.get(key, start, length)

    @property
    def payloads(self) -> list[str]:
        return [key for key in self.reads if "/pl/" in key or "/file/" in key]


@contextmanager
def nothing_decompressed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails if a frame is decompressed meanwhile."""

    def refuse(*_: object) -> bytes:
        raise AssertionError("a payload was decompressed")

    with monkeypatch.context() as patched:
        patched.setattr(codec, "_decompress", refuse)
        yield


def refused(
    store: Store,
    trust: Trust,
    target: h.StrictTarget,
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception] | tuple[type[Exception], ...] = IntegrityError,
    match: str | None = None,
    tamper: Callable[[Spied], None] = lambda spied: None,
) -> Spied:
    """A receiver refuses what the store holds: no weight is written, no payload read, nothing decompressed."""
    spied = Spied(store)
    tamper(spied)
    before = _state(target)
    with nothing_decompressed(monkeypatch), pytest.raises(error, match=match):
        h.followed(spied, target, trust=trust)
    assert _state(target) == before
    assert spied.payloads == []
    return spied


def _state(target: h.StrictTarget) -> tuple[list[bytes], Header | None]:
    """Bits and header; a receiver that starts from nothing may say so."""
    header = target.read_header()
    empty = header is not None and header.state is State.UNKNOWN and target.catalog is None
    return h.bits(target) if target.catalog else [], None if empty else header
