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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import urllib3
from urllib3.exceptions import HTTPError, ReadTimeoutError
from urllib3.response import BaseHTTPResponse

from deltarefit.addresses import relay_url
from deltarefit.errors import NotFoundError, RefitError, UnavailableError, UsageError
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
from deltarefit.storekeys import check_key, check_prefix, check_range, flat, is_key
from deltarefit.stores.limits import Limits

CONNECTIONS = 64
"""Kept open at once; more are opened when they are needed."""
REMEMBERED = 4096
"""Reads of content-named objects that are remembered: who asks for one again doubts what came."""
MOST_LIST_BYTES = 1 << 30
MOST_JSON_BYTES = 4 << 20
PIECE_BYTES = 256 << 10
"""Most that is sent or received by one call of the socket: a piece that is sent has the time of a connection."""
ANSWER_S = 3.0
"""How long a relay that is silent may take to say that it lives."""
LONGEST_SILENCE_S = 120.0
"""After which it is left all the same."""
LEAST_RATE = 64 << 10
"""Bytes a second, once the time of a request is over."""
_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)
_NUMBER = re.compile(r"\d{1,18}", re.ASCII)
_PART = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", re.ASCII)


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

    @property
    def loops(self) -> bool:
        """Whether that way leads back to the relay that this client is a part of."""
        return self.own_id in self._path

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
        headers = dict(PROVE) if self._came_before(key, start, length) else {}
        if start or length is not None:
            headers["Range"] = f"bytes={start}-{'' if length is None else start + length - 1}"
        data = self._patiently(lambda: self._get(key, start, length, headers))
        self._came(key, start, length)
        return data

    def _get(self, key: str, start: int, length: int | None, headers: Mapping[str, str]) -> bytes:
        good = (200, 206, 416) if "Range" in headers else (200,)
        with self._asking("GET", "read", key, headers, good=good) as answer:
            if answer.status == 416:
                return b""
            if answer.status == 206:
                return self._exactly(answer, self._part(answer, key, start, length), key)
            size = self._length(answer, key)  # the whole: of it no more than what was asked for
            return self._exactly(answer, size if length is None else min(size, start + length), key)[start:]

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
            self._greet()
        except RefitError:
            return False
        return True

    def _greet(self) -> None:
        """Ask who it is, which it can say without its own parents. Raises if it does not answer, or leads back here."""
        with self._asking("GET", "ask", "", {}, good=(200,), target=STATUS, read_s=ANSWER_S):
            pass

    def size(self, key: str) -> int:
        """See ``Store.size``."""
        with self._asking("HEAD", "read", check_key(key), {}, good=(200,)) as answer:
            return self._length(answer, key)

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """See ``Store.list``."""
        below = check_prefix(prefix)
        with self._asking("GET", "list", below, {}, good=(200,), target=f"{LIST}?prefix={quote(below)}") as answer:
            lines = self._all(answer, MOST_LIST_BYTES).splitlines()
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
            raise self._nonsense("news")
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
        pieces = (data[start : start + PIECE_BYTES] for start in range(0, len(data), PIECE_BYTES))
        with self._asking("PUT", verb, key, said, good=(200, 201, 204), body=pieces):
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
        body: Iterable[memoryview] | None = None,
        wait: float = 0.0,
        read_s: float | None = None,
    ) -> Iterator[BaseHTTPResponse]:
        """The answer, its body not read yet; whatever goes wrong, also in the block, as an error of ours. A connection
        whose body was not read to the end is not used again."""
        what = f"cannot {verb} {key!r} at {self._url}" if key else f"cannot {verb} at {self._url}"
        answer = None
        if self.own_id and (self.loops or not self._path) and not (target or "").startswith((STATUS, NEWS)):
            self._greet()  # a parent that leads back here would ask us what we ask it, and nobody would ever answer
        try:
            answer = self._pool.request(
                method,
                self._url + (target or OBJECTS + key),
                body=body,  # type: ignore[arg-type]  # any buffers will do
                headers={**headers, **self._token},
                redirect=False,
                preload_content=False,
                decode_content=False,
                timeout=self._timeout(wait, read_s),
            )
            self._judge(answer, what, good)
            yield answer
        except (HTTPError, OSError, ValueError, RecursionError) as error:
            kind, found = _SilentError if isinstance(error, ReadTimeoutError) else UnavailableError, _words(error)
            step = "Check network and relay, then run it again."
            raise kind(what, found=self._clean(found), next_step=step) from None
        finally:
            if answer is not None:
                _let_go(answer)

    def _judge(self, answer: BaseHTTPResponse, what: str, good: Sequence[int]) -> None:
        self._note_path(answer.headers.get(PATH, ""), what)
        if 300 <= answer.status < 400:
            step = "Give the relay's own address: redirects are not followed."
            raise UsageError(what, found="a redirect", next_step=step)
        if answer.status not in good and (answer.status < 300 or answer.status == 416):
            raise self._nonsense("an answer to what was asked")
        if answer.status not in good:
            body = self._read(answer, MOST_ERROR_BYTES).decode("utf-8", "replace")
            raise error_of(answer.status, self._clean(body).encode(), what)

    def _note_path(self, header: str, what: str) -> None:
        path = tuple(one for part in header.split(",")[:MOST_PATH] if _ID.fullmatch(one := part.strip()))
        self._path = path
        if self.own_id in path:
            raise UnavailableError(
                what,
                expected="a parent that leads to a root",
                found=f"a loop of relays: {' -> '.join((self.own_id, *path[: path.index(self.own_id) + 1]))}",
                next_step="Give one of them another parent.",
            )

    def _part(self, answer: BaseHTTPResponse, key: str, start: int, length: int | None) -> int:
        """How many bytes a 206 has. They must be those that were asked for, and all of them: of a content-named object
        a short chunk says that it ends there. Of what a relay only passes on it may not know the size (``*``)."""
        count, text = self._length(answer, key), answer.headers.get("Content-Range", "")
        if said := _PART.fullmatch(text):
            first, stop = int(said[1]), int(said[2]) + 1
            known = said[3] != "*"
            end = int(said[3]) if known else stop
            whole = stop == (end if length is None else min(start + length, end))
            whole = whole and (known or content_hash(key) is None)
            if first == start and whole and count == stop - start:
                return count
        raise UnavailableError(
            f"cannot read {key!r} at {self._url}",
            expected=f"bytes from {start} on, " + ("all" if length is None else f"{length}"),
            found=self._clean(f"{count} bytes, Content-Range {text[:60]!r}"),
        )

    def _exactly(self, answer: BaseHTTPResponse, count: int, key: str) -> bytes:
        body = self._read(answer, count, due=count)
        if len(body) != count:
            raise UnavailableError(
                f"cannot read {key!r} at {self._url}",
                expected=f"{count} bytes",
                found=f"{len(body)}: it broke off",
                next_step="Run it again.",
            )
        return body

    def _all(self, answer: BaseHTTPResponse, most: int) -> bytes:
        body = self._read(answer, most + 1)
        if len(body) > most:
            raise UnavailableError(f"{self._url} sends too much", expected=f"at most {most} bytes")
        return body

    def _read(self, answer: BaseHTTPResponse, most: int, due: int = 0) -> bytes:
        """The body, and no more than ``most`` bytes of it, each piece as it comes: a relay that sends a byte now and
        then never runs into the time of one read. Time is given for ``due`` bytes, or for those that came."""
        began, pieces, got = time.monotonic(), [], 0
        while got < most and (piece := answer.read1(min(most - got, PIECE_BYTES))):
            pieces.append(piece)
            got += len(piece)
            if time.monotonic() - began > self._limits.request_s + max(due, got) / LEAST_RATE:
                raise UnavailableError(f"{self._url} is too slow", expected=f"{LEAST_RATE} bytes a second")
        return b"".join(pieces)

    def _json(self, answer: BaseHTTPResponse) -> dict[str, Any]:
        said = json.loads(self._all(answer, MOST_JSON_BYTES))
        if not isinstance(said, dict):
            raise self._nonsense("an object")
        return said

    def _entry(self, entry: object) -> tuple[str, int]:
        match entry:
            case [str(key), int(size)] if is_key(key) and size >= 0 and not isinstance(size, bool):
                return key, size
        raise self._nonsense("a key and a size")

    def _nonsense(self, expected: str) -> UnavailableError:
        """Not the caller's fault, nor the log's: another parent may know better."""
        return UnavailableError(
            f"{self._url} does not answer as a relay does", expected=expected, next_step="Check what listens there."
        )

    def _length(self, answer: BaseHTTPResponse, key: str) -> int:
        text = answer.headers.get("Content-Length", "")
        if not _NUMBER.fullmatch(text):
            raise UnavailableError(f"cannot read {key!r} at {self._url}", found="an answer without a length")
        return int(text)

    def _came_before(self, key: str, start: int, length: int | None) -> bool:
        with self._lock:
            return (key, start, length) in self._reads

    def _came(self, key: str, start: int, length: int | None) -> None:
        if content_hash(key) is None:
            return
        with self._lock:
            self._reads[key, start, length] = None
            if len(self._reads) > REMEMBERED:
                self._reads.popitem(last=False)

    def _clean(self, text: str) -> str:
        """``text`` from the other side without the token, which some servers repeat."""
        token = self._token.get("Authorization", "").rpartition(" ")[2]
        return text.replace(token, "***") if token else text

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


def _let_go(answer: BaseHTTPResponse) -> None:
    """An answer that was read to its end has given its connection back; that of any other is closed."""
    if answer.length_remaining == 0:
        with contextlib.suppress(HTTPError, OSError):
            answer.read1(1)  # nothing: there was nothing to read, and now it is known
    answer.close()


def _words(error: Exception) -> str:
    """What happened, without addresses of objects, headers or bodies."""
    text = str(error).rpartition(": ")[2]
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
