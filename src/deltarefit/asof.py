"""A store as it was when an older version was its head: any receiver that follows it ends exactly there."""

from __future__ import annotations

from collections.abc import Iterator

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.manifest import Hint
from deltarefit.retention import PINS
from deltarefit.runlog import HINT, RunLog


class AsOf:
    """``ports.Store`` for reading, and for pins: later attempts are not there, and the hint names ``version`` and an
    anchor below it.

    Raises ``NotFoundError`` if ``version`` is not a version of the run.
    """

    def __init__(self, log: RunLog, version: int) -> None:
        self._store = log.store
        self._version = version
        log.version(version)
        known = (anchor.version for anchor, _ in log.anchors(lambda *_: None))
        self._hint = Hint(version, next((anchor for anchor in known if anchor <= version), 0)).to_bytes()

    @property
    def url(self) -> str:
        return f"{self._store.url} as of version {self._version}"

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        if key == HINT:
            return self._hint[start:][:length]
        self._check_then(key)
        return self._store.get(key, start, length)

    def size(self, key: str) -> int:
        if key == HINT:
            return len(self._hint)
        self._check_then(key)
        return self._store.size(key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        return ((key, size) for key, size in self._store.list(prefix) if not self._is_later(key))

    def put(self, key: str, data: bytes | memoryview) -> None:
        if not key.startswith(PINS):
            raise self._read_only(key)
        self._store.put(key, data)  # whoever reads an old version has to keep it, too

    def create(self, key: str, data: bytes) -> None:
        raise self._read_only(key)

    def delete(self, key: str) -> None:
        if not key.startswith(PINS):
            raise self._read_only(key)
        self._store.delete(key)

    def _check_then(self, key: str) -> None:
        if self._is_later(key):
            raise NotFoundError(f"no {key!r} in {self.url}")

    def _is_later(self, key: str) -> bool:
        kind, _, rest = key.partition("/")
        return kind == "a" and int(rest.partition("/")[0]) > self._version

    def _read_only(self, key: str) -> UsageError:
        return UsageError(f"cannot write {key!r} to {self.url}", next_step="Write to the store itself.")
