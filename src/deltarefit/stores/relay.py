"""One relay as a store: its HTTP interface (docs/relays.md §2) over urllib3, which pools connections and checks TLS.

No redirect is followed, no proxy is taken from the environment, no more is read than was asked for. The token goes out
in one header and stands in no message.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse

from deltarefit.addresses import relay_url
from deltarefit.errors import FormatError, NotFoundError, RefitError, UnavailableError, UsageError
from deltarefit.relay_api import (
    CREATE,
    LIST,
    MOST_ERROR_BYTES,
    MOST_NEWS,
    MOST_PATH,
    MOST_WAIT_S,
    NEWS,
    OBJECTS,
    PATH,
    PROVE,
    SHA256,
    STATUS,
    content_hash,
    error_of,
)
from deltarefit.storekeys import check_key, check_prefix, check_range, flat
from deltarefit.stores.limits import Limits

CONNECTIONS = 64
"""Kept open at once; more are opened when they are needed."""
REMEMBERED = 4096
"""Reads of content-named objects that are remembered: who asks for one again doubts what came."""
MOST_LIST_BYTES = 1 << 30
PIECE_BYTES = 1 << 20
ANSWER_S = 3.0
"""How long a relay that is silent may take to say that it lives."""
LONGEST_SILENCE_S = 120.0
"""After which it is left all the same."""
LEAST_RATE = 64 << 10
"""Bytes a second, once the time of a request is over."""
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class RelayStore:
    """A ``ports.Store`` and ``ports.Watched`` over the relay at ``url``. Thread-safe; nothing is tried twice here.

    ``own_id`` is the id of the relay that this client is a part of: an answer that came through that relay itself shows
    a loop of parents, and counts as ``UnavailableError``. A body that comes slower than ``LEAST_RATE`` is given up.
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        own_id: str = "",
    ) -> None:
        self._url, self.own_id = relay_url(url), own_id
        self._limits = limits or Limits()
        self._token = _header(token)
        self._pool = urllib3.PoolManager(
            maxsize=CONNECTIONS, block=False, retries=False, ssl_context=tls, timeout=self._timeout(0.0)
        )
        self._lock = threading.Lock()
        self._reads: OrderedDict[tuple[str, int, int | None], None] = OrderedDict()
        self._path: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        """Scheme, host and port."""
        return self._url

    @property
    def path(self) -> tuple[str, ...]:
        """Ids of the relays from this one to the root, as it last told."""
        return self._path

    def __repr__(self) -> str:
        return f"RelayStore({self._url!r})"

    def close(self) -> None:
        """Close the connections that are not in use."""
        self._pool.clear()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See ``Store.put``."""
        self._send("write", check_key(key), flat(data), {})

    def create(self, key: str, data: bytes) -> None:
        """See ``Store.create``."""
        self._send("create", check_key(key), flat(data), CREATE)

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
        """See ``Store.get``. The second time that the same bytes of a content-named object are asked for, the relay is
        told to prove its copy."""
        check_key(key)
        check_range(start, length)
        if length == 0:
            self.size(key)
            return b""
        headers = dict(PROVE) if self._asked_before(key, start, length) else {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-{'' if length is None else start + length - 1}"
        return self._patiently(lambda: self._get(key, start, length, headers))

    def _get(self, key: str, start: int, length: int | None, headers: Mapping[str, str]) -> bytes:
        with self._asking("GET", "read", key, headers, good=(200, 206, 416)) as answer:
            if answer.status == 416:
                return b""
            body = self._body(answer, key, length if answer.status == 206 else None)
        return body if answer.status == 206 else body[start : None if length is None else start + length]

    def _patiently(self, read: Callable[[], bytes]) -> bytes:
        """A relay that is silent and lives is waiting itself, for a slow link: asking elsewhere would have the same
        bytes cross it twice. One that does not answer at all is left."""
        deadline = time.monotonic() + LONGEST_SILENCE_S
        while True:
            try:
                return read()
            except _SilentError:
                if time.monotonic() > deadline or not self._lives():
                    raise

    def _lives(self) -> bool:
        try:
            with self._asking("GET", "ask", "", {}, good=(200,), target=STATUS, read_s=ANSWER_S) as answer:
                self._json(answer)
        except RefitError:
            return False
        return True

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        with self._asking("HEAD", "read", check_key(key), {}, good=(200,)) as answer:
            return self._length(answer, key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        below = check_prefix(prefix)
        with self._asking("GET", "list", below, {}, good=(200,), target=f"{LIST}?prefix={quote(below)}") as answer:
            lines = self._read(answer, MOST_LIST_BYTES, f"list of {below!r}").splitlines()
        if not lines or lines[-1] != b"null":
            raise UnavailableError(f"cannot list {below!r} in {self._url}", found="a list without its end")
        return iter([self._entry(json.loads(line)) for line in lines[:-1]])

    def delete(self, key: str) -> None:
        """See ``Store.delete``."""
        with self._asking("DELETE", "delete", check_key(key), {}, good=(200, 204)):
            pass

    def news(self, after: str, seconds: float) -> tuple[str, Sequence[tuple[str, int]]]:
        """See ``Watched.news``."""
        wait = min(seconds, MOST_WAIT_S)
        target = f"{NEWS}?after={quote(after[:80])}&wait={wait:.3f}"
        with self._asking("GET", "hear news", "", {}, good=(200,), target=target, wait=wait) as answer:
            said = self._json(answer)
        cursor, keys = said.get("cursor"), said.get("keys")
        if not isinstance(cursor, str) or not isinstance(keys, list) or len(keys) > MOST_NEWS:
            raise FormatError(f"{self._url}: these are no news")
        return cursor[:80], [self._entry(entry) for entry in keys]

    def wait(self, key: str, seconds: float) -> bool:
        """See ``Watched.wait``."""
        wait = min(seconds, MOST_WAIT_S)
        target = f"{OBJECTS}{check_key(key)}?wait={wait:.3f}"
        try:
            with self._asking("HEAD", "await", key, {}, good=(200,), target=target, wait=wait):
                return True
        except NotFoundError:
            return False

    def status(self) -> dict[str, Any]:
        """What the relay says of itself."""
        with self._asking("GET", "ask", "", {}, good=(200,), target=STATUS) as answer:
            return self._json(answer)

    # ------------------------------------------------------------------------------------ one request

    def _send(self, verb: str, key: str, data: memoryview, headers: Mapping[str, str]) -> None:
        said = {"Content-Length": str(len(data)), SHA256: hashlib.sha256(data).hexdigest(), **headers}
        with self._asking("PUT", verb, key, said, good=(200, 201, 204), body=data):
            pass

    @contextlib.contextmanager
    def _asking(
        self,
        method: str,
        verb: str,
        key: str,
        headers: Mapping[str, str],
        *,
        good: Sequence[int],
        target: str | None = None,
        body: memoryview | None = None,
        wait: float = 0.0,
        read_s: float | None = None,
    ) -> Iterator[BaseHTTPResponse]:
        """The answer, its body not read yet; whatever goes wrong, also in the block, as an error of ours. A connection
        whose body was not read to the end is not used again."""
        what = f"cannot {verb} {key!r} at {self._url}" if key else f"cannot {verb} at {self._url}"
        whole = False
        answer = None
        try:
            answer = self._pool.request(
                method,
                self._url + (target or OBJECTS + key),
                body=body,  # type: ignore[arg-type]  # any buffer will do
                headers={**headers, **self._token},
                redirect=False,
                preload_content=False,
                decode_content=False,
                timeout=self._timeout(wait, read_s),
            )
            self._judge(answer, method, what, good)
            yield answer
            whole = True
        except (HTTPError, OSError, ValueError) as error:
            kind = _SilentError if isinstance(error, ReadTimeoutError) else UnavailableError
            raise kind(what, found=_words(error), next_step="Check network and relay, then run it again.") from None
        finally:
            if answer is not None:
                _let_go(answer, whole=whole)

    def _judge(self, answer: BaseHTTPResponse, method: str, what: str, good: Sequence[int]) -> None:
        self._note_path(answer.headers.get(PATH, ""), what)
        if 300 <= answer.status < 400:
            raise UsageError(
                what, found="a redirect", next_step="Give the relay's own address: redirects are not followed."
            )
        if answer.status not in good:
            body = b"" if method == "HEAD" else answer.read(MOST_ERROR_BYTES)
            raise error_of(answer.status, body, what)

    def _note_path(self, header: str, what: str) -> None:
        path = tuple(one for one in header.split(",")[:MOST_PATH] if _ID.fullmatch(one))
        self._path = path
        if self.own_id and self.own_id in path:
            raise UnavailableError(
                what,
                expected="a parent that leads to a root",
                found=f"a loop of relays: {' -> '.join((self.own_id, *path))}",
                next_step="Give one of them another parent.",
            )

    def _body(self, answer: BaseHTTPResponse, key: str, most: int | None) -> bytes:
        length = self._length(answer, key)
        if most is not None and length > most:
            raise UnavailableError(
                f"cannot read {key!r} at {self._url}", expected=f"at most {most} bytes", found=f"{length}"
            )
        return self._read(answer, length, key, exactly=True)

    def _read(self, answer: BaseHTTPResponse, most: int, key: str, *, exactly: bool = False) -> bytes:
        deadline = time.monotonic() + self._limits.request_s + most / LEAST_RATE
        pieces, left = [], most if exactly else most + 1
        while left and (piece := answer.read(min(left, PIECE_BYTES))):
            pieces.append(piece)
            left -= len(piece)
            if time.monotonic() > deadline:
                raise UnavailableError(f"{self._url} is too slow", expected=f"{LEAST_RATE} bytes a second")
        body = b"".join(pieces)
        if exactly and len(body) != most:
            raise UnavailableError(
                f"cannot read {key!r} at {self._url}",
                expected=f"{most} bytes",
                found=f"{len(body)}: it broke off",
                next_step="Run it again.",
            )
        if len(body) > most:
            raise UnavailableError(f"{self._url} sends too much", expected=f"at most {most} bytes")
        return body

    def _json(self, answer: BaseHTTPResponse) -> dict[str, Any]:
        said = json.loads(self._read(answer, 4 << 20, "answer"))
        if not isinstance(said, dict):
            raise FormatError(f"{self._url}: not an object")
        return said

    def _entry(self, entry: object) -> tuple[str, int]:
        match entry:
            case [str(key), int(size)] if size >= 0:
                return check_key(key), size
        raise FormatError(f"{self._url}: not a key and a size", found=repr(entry)[:80])

    def _length(self, answer: BaseHTTPResponse, key: str) -> int:
        text = answer.headers.get("Content-Length", "")
        if not re.fullmatch(r"\d{1,18}", text, re.ASCII):
            raise UnavailableError(f"cannot read {key!r} at {self._url}", found="an answer without a length")
        return int(text)

    def _asked_before(self, key: str, start: int, length: int | None) -> bool:
        if content_hash(key) is None:
            return False
        with self._lock:
            before = (key, start, length) in self._reads
            self._reads[key, start, length] = None
            if len(self._reads) > REMEMBERED:
                self._reads.popitem(last=False)
        return before

    def _timeout(self, wait: float, read_s: float | None = None) -> urllib3.Timeout:
        seconds = self._limits.request_s if read_s is None else read_s
        return urllib3.Timeout(connect=self._limits.connect_s, read=seconds + wait)


class _SilentError(UnavailableError):
    """Nothing came for as long as a request may take."""


def _header(token: str | None) -> dict[str, str]:
    if token is None:
        return {}
    if not re.fullmatch(r"[\x21-\x7e]{1,512}", token, re.ASCII):
        raise UsageError("bad token", expected="up to 512 printable characters without spaces")
    return {"Authorization": f"Bearer {token}"}


def _let_go(answer: BaseHTTPResponse, *, whole: bool) -> None:
    if whole:
        with contextlib.suppress(HTTPError, OSError):
            answer.drain_conn()
        answer.release_conn()
    else:
        answer.close()


def _words(error: Exception) -> str:
    """What happened, without addresses of objects, headers or bodies."""
    text = str(error).rpartition(": ")[2]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
