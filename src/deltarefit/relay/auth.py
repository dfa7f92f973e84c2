"""Who may do what at a relay: bearer tokens with roles, and where a relay may listen without them (docs/relays.md §5).

A tokens file has lines ``role token`` (``read``, ``follow`` or ``publish``); ``#`` begins a comment. Only hashes of the
tokens are kept, and no message shows one.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import ssl
from dataclasses import dataclass, field
from pathlib import Path

from deltarefit.addresses import is_loopback, parse_listen
from deltarefit.errors import UsageError
from deltarefit.keyfiles import read_guarded
from deltarefit.relay_api import Role

__all__ = ["Auth", "check_listen", "parse_listen"]

MOST_TOKENS = 1024
"""Every request is compared with all of them."""
LEAST_TOKEN, MOST_TOKEN = 16, 512
"""Characters of a token."""
MAX_TOKENS_FILE = 1 << 20
_TOKEN = re.compile(rf"[A-Za-z0-9._~+/=-]{{{LEAST_TOKEN},{MOST_TOKEN}}}", re.ASCII)
_BEARER = re.compile(r"[Bb][Ee][Aa][Rr][Ee][Rr] +(\S+) *", re.ASCII)
_ROLES = {role.name.lower(): role for role in Role}
_STEP = "Make tokens with: openssl rand -hex 32. A line is: read|follow|publish TOKEN"


@dataclass(frozen=True)
class Auth:
    """What an ``Authorization`` header is worth. Made by ``of_file``, ``open`` or ``certified``.

    ``digests`` are the SHA-256 of tokens with their roles; ``everybody`` is the role of whoever gets through to the
    relay at all, by ``certificate`` or because only this machine can.
    """

    digests: tuple[tuple[bytes, Role], ...] = field(default=(), repr=False)
    everybody: Role | None = None
    certificate: bool = False

    @classmethod
    def of_file(cls, path: str | os.PathLike[str]) -> Auth:
        """Tokens of a file that only its owner may read. Raises ``UsageError`` that names the line, never a token, and
        ``NotFoundError`` if there is none."""
        path = Path(path)
        text = read_guarded(path, MAX_TOKENS_FILE, 0o077).decode("utf-8", "replace")
        lines = [(n, line.partition("#")[0].split()) for n, line in enumerate(text.splitlines(), 1)]
        digests = [_entry(words, f"{path}, line {n}") for n, words in lines if words]
        if not 0 < len(digests) <= MOST_TOKENS:
            raise UsageError(f"{path}: tokens", expected=f"1 to {MOST_TOKENS}", found=len(digests), next_step=_STEP)
        if len({digest for digest, _ in digests}) < len(digests):
            raise UsageError(f"{path}: a token stands twice", expected="each once", next_step=_STEP)
        return cls(tuple(digests))

    @classmethod
    def of_token(cls, token: str, role: Role) -> Auth:
        """One token, made by this program."""
        return cls(((hashlib.sha256(token.encode()).digest(), role),))

    @classmethod
    def open(cls) -> Auth:
        """Everybody on this machine may publish: for loopback only, see ``check_listen``."""
        return cls(everybody=Role.PUBLISH)

    @classmethod
    def certified(cls, role: Role) -> Auth:
        """Whoever holds a certificate that the listener asks for may do what ``role`` may."""
        return cls(everybody=role, certificate=True)

    def role(self, header: str | None) -> Role | None:
        """What the sender of this ``Authorization`` header may do; None: nothing. Compared with every token, whichever
        fits, so that the time tells nothing."""
        if self.everybody is not None:
            return self.everybody
        found = _BEARER.fullmatch(header) if header is not None else None
        if found is None or not _TOKEN.fullmatch(found[1]):
            return None
        given = hashlib.sha256(found[1].encode()).digest()
        fits = [role for digest, role in self.digests if hmac.compare_digest(digest, given)]
        return fits[0] if fits else None


def check_listen(host: str, auth: Auth, tls: ssl.SSLContext | None, plain: bool = False) -> None:
    """``UsageError`` for a listener that others could use without authentication, or that would have tokens sent in the
    clear over a network, unless that is ``plain``ly wanted: behind a proxy that ends TLS, say."""
    if auth.certificate and (tls is None or tls.verify_mode is not ssl.CERT_REQUIRED):
        step = "Give the roots of the clients' certificates, or a tokens file."
        raise UsageError("clients are known by certificates, but none is asked for", next_step=step)
    if is_loopback(host):
        return
    if not auth.certificate and not auth.digests:
        step = "Give a tokens file, or TLS with client certificates; or listen on 127.0.0.1."
        raise UsageError(f"no authentication for a listener on {host}", next_step=step)
    if tls is None and not plain:
        step = (
            "Give a certificate, or --plain-http if nobody else can listen on the way: tokens go over it as they are."
        )
        raise UsageError(f"a listener on {host} without TLS", expected="https", found="plain http", next_step=step)


def _entry(words: list[str], where: str) -> tuple[bytes, Role]:
    if len(words) != 2 or words[0] not in _ROLES:
        raise UsageError(f"{where}: not a role and a token", expected=" or ".join(_ROLES), next_step=_STEP)
    if not _TOKEN.fullmatch(words[1]):
        expected = f"{LEAST_TOKEN} to {MOST_TOKEN} of A-Z a-z 0-9 . _ ~ + / = -"
        raise UsageError(f"{where}: not a token", expected=expected, next_step=_STEP)
    return hashlib.sha256(words[1].encode()).digest(), _ROLES[words[0]]
