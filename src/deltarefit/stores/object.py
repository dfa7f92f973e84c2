"""Stores over obstore: S3 with any endpoint, Google Cloud Storage, Azure, and memory.

obstore signs, retries and pools connections; this module adds the contract: validated keys, deadlines, one
conditional PUT for ``create``, parts in parallel for large objects, sorted lists, and our errors. An obstore
``Bytes`` is turned into ``bytes`` at once: its repr is the whole buffer.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import obstore
from obstore.exceptions import GenericError
from obstore.store import AzureStore, GCSStore, MemoryStore, S3Store

from deltarefit.errors import AlreadyExistsError, NotFoundError, UnavailableError
from deltarefit.storekeys import check_key, check_prefix, check_range, flat, is_key
from deltarefit.stores.limits import Limits
from deltarefit.stores.remote_errors import Place, guarded, out_of_range

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, RetryConfig

Native = S3Store | GCSStore | AzureStore | MemoryStore
_CLASSES: dict[str, Any] = {"s3": S3Store, "gs": GCSStore, "az": AzureStore}
_SECRET = ("secret_access_key", "session_token")


class ObjectStore:
    """A ``Store`` over one of obstore's. Made by ``memory_store`` and ``cloud_store``."""

    def __init__(self, native: Native, place: Place, limits: Limits) -> None:
        self._native = native
        self._place = place
        self._limits = limits

    @property
    def url(self) -> str:
        """Scheme, bucket and prefix."""
        return self._place.url

    def __repr__(self) -> str:
        return f"ObjectStore({str(self._place)!r})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``. Above ``part_bytes`` the parts go up in parallel and appear together."""
        check_key(key)
        view = flat(data)
        if isinstance(self._native, MemoryStore):
            view = memoryview(bytes(view))  # it keeps what it is given, which the caller may overwrite
        with self._doing("write", key):
            obstore.put(
                self._native,
                key,
                view,
                use_multipart=len(view) > self._limits.part_bytes,
                chunk_size=self._limits.part_bytes,
                max_concurrency=self._limits.concurrency,
            )

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``. One conditional PUT, whatever the size."""
        check_key(key)
        try:
            with self._doing("create", key):
                obstore.put(self._native, key, bytes(data), mode="create", use_multipart=False)
        except AlreadyExistsError:
            self._confirm_taken(key)
            raise

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``. Fewer bytes where the object ends before the range does."""
        check_key(key)
        check_range(start, length)
        step = self._limits.part_bytes
        wanted = step if length is None else min(step, length)
        with self._doing("read", key):
            first, size, tag = self._first(key, start, wanted)
            stop = size if length is None else min(size, start + length)
            cuts = [*range(start + len(first), stop, step), stop]
            if len(cuts) == 1:
                return first
            return b"".join([first, *self._rest(key, cuts, tag)])

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        check_key(key)
        with self._doing("read", key):
            return self._first(key, 0, 1)[1]  # not HEAD: an error would come without its code

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``. Sorted here: not every S3 server sorts by key."""
        below = check_prefix(prefix)
        with self._doing("list", below):
            pages = obstore.list(self._native, below or None)
            found = [(entry["path"], entry["size"]) for page in pages for entry in page]
        return iter(sorted(entry for entry in found if is_key(entry[0])))

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        check_key(key)
        with contextlib.suppress(NotFoundError), self._doing("delete", key):
            obstore.delete(self._native, key)

    def _doing(self, verb: str, key: str) -> contextlib.AbstractContextManager[None]:
        return guarded(self._place, verb, key)

    def _confirm_taken(self, key: str) -> None:
        """S3 may also answer "conflict" while no racer has won yet; that must not read as taken."""
        try:
            self.size(key)
        except NotFoundError:
            raise UnavailableError(
                f"cannot create {key!r} in {self._place}",
                found="a conflict with another writer, and no object",
                next_step="Run it again.",
            ) from None

    def _first(self, key: str, start: int, length: int) -> tuple[bytes, int, str | None]:
        """The first part, the object's size, and its tag."""
        if length > 0:
            try:
                got = obstore.get(self._native, key, options={"range": (start, start + length)})
                return bytes(got.bytes()), got.meta["size"], got.meta["e_tag"]
            except GenericError as err:
                if not out_of_range(err):
                    raise
        return b"", obstore.head(self._native, key)["size"], None

    def _rest(self, key: str, cuts: Sequence[int], tag: str | None) -> Sequence[bytes]:
        """The parts between neighbouring cuts, all of the object with this tag."""
        pool = ThreadPoolExecutor(self._limits.concurrency, thread_name_prefix="deltarefit-get")
        jobs = [pool.submit(self._part, key, *cut, tag) for cut in itertools.pairwise(cuts)]
        try:
            return [job.result(self._limits.call_s(len(jobs))) for job in jobs]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _part(self, key: str, start: int, stop: int, tag: str | None) -> bytes:
        options: GetOptions = {"range": (start, stop)}
        if tag is not None:
            options["if_match"] = tag
        data = bytes(obstore.get(self._native, key, options=options).bytes())
        if len(data) != stop - start:
            raise UnavailableError(
                f"short read of {key!r} in {self._place}",
                expected=f"{stop - start} bytes",
                found=f"{len(data)} bytes",
                next_step="Run it again.",
            )
        return data


def memory_store(url: str) -> ObjectStore:
    """A new, empty store in this process."""
    return ObjectStore(MemoryStore(), Place(url), Limits(part_bytes=1 << 40))


def cloud_store(scheme: str, bucket: str, prefix: str, settings: Mapping[str, str], limits: Limits) -> ObjectStore:
    """``s3``, ``gs`` or ``az``. ``settings`` are obstore's for S3; the rest comes from the environment.

    Plain HTTP is allowed if ``settings["endpoint"]`` asks for it. Raises ``UsageError`` for a bad setting.
    """
    secrets = tuple(value for name, value in settings.items() if name in _SECRET)
    place = Place("/".join(filter(None, (f"{scheme}:/", bucket, prefix))), settings.get("endpoint"), secrets)
    client = _client(limits, plain_http=settings.get("endpoint", "").startswith("http://"))
    with guarded(place, "open", prefix):
        native = _CLASSES[scheme](
            bucket,
            prefix=prefix or None,
            client_options=client,
            retry_config=_retry(limits),
            **dict(settings),
        )
    return ObjectStore(native, place, limits)


def _client(limits: Limits, *, plain_http: bool) -> ClientConfig:
    client: ClientConfig = {
        "connect_timeout": timedelta(seconds=limits.connect_s),
        "timeout": timedelta(seconds=limits.request_s),
    }
    if plain_http:
        client["allow_http"] = True
    return client


def _retry(limits: Limits) -> RetryConfig:
    return {
        "max_retries": limits.retries,
        "retry_timeout": timedelta(seconds=limits.retry_s),
        "backoff": {
            "init_backoff": timedelta(milliseconds=100),
            "max_backoff": timedelta(seconds=5),
            "base": 2,
        },
    }
