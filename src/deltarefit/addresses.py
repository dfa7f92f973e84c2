"""Addresses of relays: where one listens, and the URL by which others know it (docs/relays.md §1). Pure; no name is
looked up."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from deltarefit.errors import UsageError

DEFAULT_PORT = 8470
_MOST_HOST = 253
_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9_-]*[A-Za-z0-9])?)*\.?")
_EXPECTED_URL = "http://HOST:PORT or https://HOST:PORT, IPv6 as [::1], and nothing else"
_EXPECTED_LISTEN = "HOST:PORT, IPv6 as [::1]:8470"


def relay_url(text: str) -> str:
    """The one form of a relay's URL: ``http`` or ``https``, host in lower case, port. Raises ``UsageError``, which
    repeats nothing that may hold a password."""
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise _bad_url("a host or port that is none") from None
    if parts.scheme not in ("http", "https"):
        raise _bad_url(f"scheme {parts.scheme[:20]!r}")
    if "@" in text or parts.path not in ("", "/") or {"?", "#"} & set(text):
        raise _bad_url("a user, path, query or fragment")
    if port == 0 or not parts.hostname or text != text.strip() or not text.isprintable():
        raise _bad_url("no host, port 0, or white space")
    return f"{parts.scheme}://{shown(_host(parts))}:{DEFAULT_PORT if port is None else port}"


def parse_listen(text: str) -> tuple[str, int]:
    """(host, port) to listen on, of ``HOST:PORT``, ``HOST``, ``[::1]:8470`` or ``[::1]``; port 8470 if none is given,
    0: any that is free. Raises ``UsageError``."""
    found = re.fullmatch(r"(?:\[([^\[\]]*)\]|([^\[\]:]*))(?::([0-9]{1,5}))?", text, re.ASCII)
    if found is None:
        raise _bad_listen(text, "an IPv6 address needs brackets" if text.count(":") > 1 else None)
    inside, plain, digits = found.groups()
    host, port = inside if inside is not None else plain, int(digits or DEFAULT_PORT)
    if not host:
        step = "Say where: 127.0.0.1 for this machine only, 0.0.0.0 or [::] for all its addresses."
        raise UsageError("an address to listen on without a host", expected=_EXPECTED_LISTEN, next_step=step)
    if port > 65535 or not is_host(host) or (":" in host) != (inside is not None):
        raise _bad_listen(text)
    return host, port


def is_host(host: str) -> bool:
    """Whether it is an IP address (IPv6 without brackets) or may be a host's name."""
    if ":" in host or re.fullmatch(r"[0-9.]+", host):
        return _ip(host) is not None
    return len(host) <= _MOST_HOST and _NAME.fullmatch(host) is not None


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it: 127.0.0.0/8, ::1 or ``localhost``. Other names are not looked up."""
    ip = _ip(host)
    return host.lower() == "localhost" or (ip is not None and ip.is_loopback)


def shown(host: str) -> str:
    """A host as it stands in a URL or before a port."""
    return f"[{host}]" if ":" in host else host


def _host(parts: SplitResult) -> str:
    host = (parts.hostname or "").lower()
    if not is_host(host) or (":" in host) != ("[" in parts.netloc):
        raise _bad_url("a host that is none")
    ip = _ip(host)
    return host if ip is None else str(ip)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _bad_url(found: str) -> UsageError:
    step = "Give tokens by file, never in the URL."
    return UsageError("bad URL of a relay", expected=_EXPECTED_URL, found=found, next_step=step)


def _bad_listen(text: str, why: str | None = None) -> UsageError:
    found = "a user" if "@" in text else f"{text[:80]!r}" + (f": {why}" if why else "")
    return UsageError("bad address to listen on", expected=_EXPECTED_LISTEN, found=found)
