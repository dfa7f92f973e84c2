"""TLS for relays and those who use them: contexts made of PEM files. TLS 1.2 or newer, certificates and host names
always checked (docs/relays.md §5)."""

from __future__ import annotations

import re
import ssl
from pathlib import Path

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.keyfiles import read_guarded

MAX_PEM_FILE = 1 << 20
"""Most bytes of a PEM file; a whole system's roots are a quarter of that."""
_CERTIFICATE = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----")
_KEY = re.compile(rb"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----")
_REASONS = {"KEY_VALUES_MISMATCH": "a key that belongs to another certificate"}


def client_context(ca: Path | None = None, cert: Path | None = None) -> ssl.SSLContext:
    """For connections to a relay. ``ca`` is a PEM file whose certificates replace the system's roots; ``cert`` a PEM
    file with the client's own certificate, its chain and its private key, for relays that ask for one. Raises
    ``UsageError`` that names the file; no error shows content."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT)
    if ca is not None:
        _load_roots(context, ca)
    else:
        context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if cert is not None:
        _load_own(context, cert, None)
    return context


def server_context(cert: Path, key: Path | None = None, client_ca: Path | None = None) -> ssl.SSLContext:
    """For a relay's listener. ``cert`` is a PEM file with its certificate and chain, and with the private key unless
    ``key`` has it. With ``client_ca``, a PEM file, only clients with a certificate of one of its roots come in. Raises
    ``UsageError`` that names the file; no error shows content."""
    context = _context(ssl.PROTOCOL_TLS_SERVER)
    _load_own(context, cert, key)
    if client_ca is not None:
        _load_roots(context, client_ca)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def _context(protocol: int) -> ssl.SSLContext:
    """Not ``ssl.create_default_context``: that would write session keys where ``SSLKEYLOGFILE`` says."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION
    return context


def _load_roots(context: ssl.SSLContext, path: Path) -> None:
    if not _CERTIFICATE.search(_read(path)):
        raise _bad(path, "certificates of the authorities to trust, as PEM", "none")
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise _bad(path, "certificates of the authorities to trust, as PEM", _reason(error)) from None


def _load_own(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    """``key`` None: it lies in ``cert``. The file with the key must not be open to everybody."""
    holder = cert if key is None else key
    if not _CERTIFICATE.search(_read(cert)):
        raise _bad(cert, "a certificate as PEM", "none")
    if not _KEY.search(_read(holder)):
        raise _bad(holder, "a private key as PEM", "none")
    _read(holder, forbidden=0o007)

    def ask() -> str:
        step = f"openssl pkey -in {holder} -out PLAIN.pem; chmod 600 PLAIN.pem"
        raise UsageError(f"the key in {holder} is encrypted", expected="a key without a passphrase", next_step=step)

    try:
        context.load_cert_chain(cert, key, password=ask)
    except (ssl.SSLError, ValueError, OSError) as error:
        expected = "a certificate, its chain and its key, as PEM"
        raise _bad(cert if key is None else f"{cert} and {key}", expected, _reason(error)) from None


def _read(path: Path, forbidden: int = 0) -> bytes:
    try:
        return read_guarded(path, MAX_PEM_FILE, forbidden)
    except NotFoundError as error:
        raise UsageError(error.what, expected="a PEM file", found=error.found, next_step=error.next_step) from None


def _reason(error: Exception) -> str:
    """The library's word for it, which never quotes the file."""
    reason = getattr(error, "reason", None)
    return _REASONS.get(reason or "", reason or "damaged PEM")


def _bad(where: Path | str, expected: str, found: str) -> UsageError:
    return UsageError(
        f"{where} cannot be used for TLS", expected=expected, found=found, next_step="Check the path and the file."
    )
