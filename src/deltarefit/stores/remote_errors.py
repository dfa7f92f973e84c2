"""What a remote store said, in our words: one place that knows obstore's exceptions and S3's error codes.

The texts of obstore's exceptions hold whole requests and replies. Only status, code and message are taken
from them, known secrets are cut out, and the exception itself is not shown as a cause.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass

from obstore.exceptions import AlreadyExistsError as NativeExists
from obstore.exceptions import BaseError, PreconditionError

from deltarefit.errors import AlreadyExistsError, RefitError, StorageFullError, UnavailableError, UsageError
from deltarefit.storekeys import missing

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([^<]{1,80})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_FULL = frozenset({"InsufficientStorage", "QuotaExceeded", "XMinioStorageFull", "StorageQuotaExceeded"})
_PASSING = frozenset({"RequestTimeout", "RequestTimeTooSkewed", "ExpiredToken", "SlowDown", "OperationAborted"})
"""Codes that come with a 4xx status although a later try, perhaps with the clock set right, may do."""
_PASSING_STATUS = frozenset({408, 409, 425, 429})
_HOPELESS = (
    ("<Code>NoSuchBucket<", "no such bucket", "Make the bucket, or give another URL."),
    ("<Code>NotImplemented<", "a server without this operation", "Use one with conditional writes."),
    ("Received redirect", "a redirect to another region", "Give the region and endpoint of the bucket."),
    ("builder error", "a plain http:// endpoint", "Give it as an argument, which allows plain HTTP."),
)
"""Sign in obstore's text, what it means, what to do."""
_METADATA_SERVICE = "169.254."
_LEAST_SECRET = 6
_NETWORK = {
    "ConnectionRefused": "connection refused",
    "TimedOut": "no answer in time",
    "kind: Timeout": "no answer in time",
    "dns error": "unknown host name",
    "ConnectionReset": "connection reset",
    "BrokenPipe": "connection broken",
}


@dataclass(frozen=True)
class Place:
    """Where a call went: the store's URL, its endpoint, and strings that no message may show."""

    url: str
    endpoint: str | None = None
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"Place({self})"

    def __str__(self) -> str:
        return self.url if self.endpoint is None else f"{self.url} at {self.endpoint}"

    def clean(self, text: str) -> str:
        """``text`` without any known secret. One of a few characters is none, and would only garble it."""
        for secret in self.secrets:
            if len(secret) >= _LEAST_SECRET:
                text = text.replace(secret, "***")
        return text


@dataclass(frozen=True)
class Reply:
    """What can be told from the text of an exception. ``status`` is 0 if no server answered."""

    status: int
    code: str
    message: str

    @classmethod
    def of(cls, err: BaseException) -> Reply:
        """Read it out of the text; works on any text."""
        text = str(err)
        status, code, message = (found.search(text) for found in (_STATUS, _CODE, _MESSAGE))
        if status is None:
            return cls(0, "", next((words for mark, words in _NETWORK.items() if mark in text), "no usable answer"))
        return cls(int(status[1]), code[1] if code else "", message[1] if message else "")

    def __str__(self) -> str:
        parts = (f"HTTP {self.status}" if self.status else "", self.code, self.message)
        return ", ".join(part for part in parts if part)


@contextlib.contextmanager
def guarded(place: Place, verb: str, key: str) -> Iterator[None]:
    """Turn whatever obstore raises inside into an error of this package."""
    try:
        yield
    except (BaseError, OSError, ValueError, FutureTimeout) as err:
        raise _translated(err, place, verb, key) from None


def out_of_range(err: BaseException) -> bool:
    """Whether a read failed only because the object ends before its range starts."""
    return Reply.of(err).status == 416 or "StartTooLarge" in str(err)


def _translated(err: Exception, place: Place, verb: str, key: str) -> RefitError:
    what = f"cannot {verb} {key!r} in {place}"
    reply = Reply.of(err)
    found = place.clean(str(reply))
    if isinstance(err, NativeExists) and verb == "create":
        return AlreadyExistsError(
            what, found="an object", next_step="Read it back: it may be your own earlier success."
        )
    if isinstance(err, FileNotFoundError) and reply.code != "NoSuchBucket":
        return missing(key, str(place))
    if isinstance(err, PreconditionError):
        return UnavailableError(what, found="the object was replaced meanwhile", next_step="Run it again.")
    if reply.status == 507 or reply.code in _FULL:
        return StorageFullError(what, found=found, next_step="Make room in the store, then run it again.")
    return _refused(str(err), reply, what, found) or _unavailable(str(err), what, found)


def _refused(text: str, reply: Reply, what: str, found: str) -> UsageError | None:
    """The error if no later try can succeed, else None."""
    if reply.code in _PASSING or reply.status in _PASSING_STATUS or _METADATA_SERVICE in text:
        return None
    if reply.status in (401, 403):
        return UsageError(
            what,
            expected="credentials that may read and write there",
            found=found,
            next_step="Check access key, secret key, region, and the rights of that user.",
        )
    for sign, cause, next_step in _HOPELESS:
        if sign in text:
            return UsageError(what, found=cause, next_step=next_step)
    if 400 <= reply.status < 500:
        return UsageError(what, found=found, next_step="Check bucket name, endpoint and region.")
    return None


def _unavailable(text: str, what: str, found: str) -> UnavailableError:
    if _METADATA_SERVICE in text:
        return UnavailableError(
            what,
            expected="credentials from arguments, AWS_ACCESS_KEY_ID, or this machine's metadata service",
            found="none",
            next_step="Give access and secret key.",
        )
    return UnavailableError(what, found=found, next_step="Check network and server (and the clock), then run it again.")
