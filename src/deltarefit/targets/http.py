"""A small client for JSON over HTTP, as serving engines speak it: every call has a deadline, every end is an error of
ours. No proxy is asked: an engine whose weights are kept up is on this machine."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from deltarefit.errors import UnavailableError, UsageError

DEADLINE_S = 15.0
"""Of a call that only asks."""
MAX_REPLY_BYTES = 64 << 20
_SHOWN, _SHOWN_OF_STRANGER = 400, 100
"""Most characters of a reply that a message quotes."""
_WHO_S = 2.0
_LATER = (408, 425, 429)
_LOCKED = (401, 403)


@dataclass(frozen=True)
class Reply:
    """What a server answered: its status, and the text of its body."""

    status: int
    text: str

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    @property
    def shown(self) -> str:
        """For messages: the status and the beginning of the text on one line."""
        text = " ".join(self.text.split())
        return f"status {self.status}: {text[:_SHOWN]}" if text else f"status {self.status}"


class HttpClient:
    """Calls to one server at ``url`` (``http://host:port``), which messages call ``name``.

    ``key`` is sent as a bearer token. ``UsageError`` for what is no address of a server, or holds a password.
    """

    def __init__(self, url: str, name: str, *, key: str | None = None) -> None:
        self.url, self.name = _checked(url), name
        self._headers = {"Accept": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def get(self, path: str, *, deadline_s: float = DEADLINE_S) -> Any:
        """The JSON of a GET; see ``call``."""
        return self.call("GET", path, deadline_s=deadline_s)

    def post(
        self,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """The JSON of a POST; see ``call``."""
        return self.call("POST", path, body, query, deadline_s=deadline_s)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Any:
        """What the server answers, as JSON. ``UnavailableError`` if it does not answer in time, or says that it cannot
        do it now; ``UsageError`` if it does not know the call or does not want it."""
        reply = self.request(method, path, body, query, deadline_s=deadline_s)
        self.check(reply, path)
        return self.parsed(reply, path)

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        query: Mapping[str, object] | None = None,
        *,
        deadline_s: float = DEADLINE_S,
    ) -> Reply:
        """Whatever the server answers, to the last byte. ``UnavailableError`` if that is nothing."""
        address = self.url + path + ("?" + urllib.parse.urlencode(query) if query else "")
        data = None if method == "GET" else b"" if body is None else json.dumps(body).encode()
        headers = self._headers | ({"Content-Type": "application/json"} if body is not None else {})
        request = urllib.request.Request(address, data, headers, method=method)  # noqa: S310 - http, as checked
        until = time.monotonic() + deadline_s
        try:
            with self._opener.open(request, timeout=deadline_s) as reply:
                return Reply(reply.status, _body(reply, until))
        except urllib.error.HTTPError as error:
            return self._refused(error, path, until)
        except (OSError, http.client.HTTPException) as error:
            raise self._gone(path, error, deadline_s) from error

    def check(self, reply: Reply, path: str) -> None:
        """Raises what a status other than success means."""
        if reply.ok:
            return
        what = f"{self.name} at {self.url} refuses {path}"
        if reply.status >= 500 or reply.status in _LATER:
            raise UnavailableError(what, found=reply.shown, next_step="Look into the log of the engine.")
        if reply.status in _LOCKED:
            step = "Put its API key into DELTAREFIT_ENGINE_KEY."
            raise UsageError(what, found=f"status {reply.status}", next_step=step)
        if reply.status == 404:
            step = f"Check the address and the version of {self.name}."
            raise UsageError(f"{self.url} does not know {path}", expected=self.name, found=reply.shown, next_step=step)
        raise UsageError(what, found=reply.shown, next_step="Look into the log of the engine.")

    def parsed(self, reply: Reply, path: str) -> Any:
        """The JSON of a reply. ``UsageError`` if it is none: another program listens there."""
        try:
            return json.loads(reply.text) if reply.text else None
        except (ValueError, RecursionError) as error:
            raise self.stranger(path, reply.text) from error

    def who(self) -> str:
        """The engine that answers, "" if it is none that is known."""
        for path, field, who in (("/server_info", "tp_size", "SGLang"), ("/version", "version", "vLLM")):
            try:
                reply = self.request("GET", path, deadline_s=_WHO_S)
                answer = json.loads(reply.text) if reply.ok else None
            except (UnavailableError, ValueError, RecursionError):
                continue
            if isinstance(answer, dict) and field in answer:
                return who
        return ""

    def stranger(self, path: str, found: object) -> UsageError:
        """What answers is not the engine that it should be."""
        text = " ".join(str(found).split())
        text = text if len(text) <= _SHOWN_OF_STRANGER else text[:_SHOWN_OF_STRANGER] + " ..."
        step = f"Give the address that {self.name} listens on."
        if (who := self.who()) not in ("", self.name):
            text, step = who, f"This is {who}: use --{who.lower()} {self.url}."
        return UsageError(f"{self.url} is no {self.name}", expected=f"its answer to {path}", found=text, next_step=step)

    def _refused(self, error: urllib.error.HTTPError, path: str, until: float) -> Reply:
        try:
            with error:
                return Reply(error.code, _body(error, until))
        except (OSError, http.client.HTTPException) as cause:
            raise self._gone(path, cause, 0.0) from cause

    def _gone(self, path: str, error: BaseException, deadline_s: float) -> UnavailableError:
        reason = getattr(error, "reason", error)
        late = isinstance(reason, TimeoutError)
        found = f"no answer to {path} within {deadline_s:g} s" if late else f"{path}: {reason or type(error).__name__}"
        step = "The engine was stopped, or is being started; check its address and its log."
        return UnavailableError(f"{self.name} at {self.url} does not answer", found=found, next_step=step)


def _body(reply: IO[bytes], until: float) -> str:
    """All of a body; ``TimeoutError`` if it trickles in longer than ``until``."""
    parts, size = [], 0
    while part := reply.read1(1 << 20):  # type: ignore[attr-defined]
        parts.append(part)
        size += len(part)
        if size > MAX_REPLY_BYTES:
            raise OSError(f"a reply of more than {MAX_REPLY_BYTES} bytes")
        if time.monotonic() > until:
            raise TimeoutError("timed out")
    return b"".join(parts).decode(errors="replace")


def _checked(url: str) -> str:
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and (parts.port is None or parts.port > 0)
    except ValueError:
        parts, good = urllib.parse.urlsplit(""), False
    if "@" in url:
        step = "Put an API key into DELTAREFIT_ENGINE_KEY."
        raise UsageError("an engine's address holds a password", expected="http://host:port", next_step=step)
    if not good or parts.query or parts.fragment:
        found = repr(url.partition("?")[0].partition("#")[0])[:80]  # a query may hold a key: never echoed
        raise UsageError("bad address of an engine", expected="http://host:port", found=found)
    return url.rstrip("/")
