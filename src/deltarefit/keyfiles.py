"""Keys in files: a key file holds one secret and belongs to one user, a trust file says whom to believe
(docs/security.md)."""

from __future__ import annotations

import json
import os
import secrets
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from deltarefit.errors import UsageError
from deltarefit.localfiles import disk_errors
from deltarefit.signing import SECRET_BYTES, Kind, Secret, Signer
from deltarefit.trust import FORMAT as TRUST_FORMAT
from deltarefit.trust import Role, Trust, merged, parse_trust

FORMAT = "deltarefit-key/1"
MAX_KEY_FILE = 64 << 10
MAX_TRUST_FILE = 16 << 20
_MODES = {0o077: ("600", "read"), 0o007: ("640", "read"), 0o002: ("644", "change")}
"""For bits that a file's mode must not have: the mode to give it, and what others may do with it now."""


def read_signer(path: str | os.PathLike[str]) -> Signer:
    """The key in a key file. ``UsageError`` if others may read the file, or if it is none; no error shows content."""
    path = Path(path)
    body = _parsed(read_guarded(path, MAX_KEY_FILE, 0o077), path)
    if set(body) != {"format", "id", "kind", "secret"} or body["format"] != FORMAT:
        raise UsageError(f"{path} is not a key file", expected=f"format {FORMAT}", next_step="deltarefit keygen DIR")
    kind = next((kind for kind in Kind if kind.value == body["kind"]), None)
    try:
        value = bytes.fromhex(body["secret"])
    except (TypeError, ValueError):
        value = b""
    if kind is None or not value or not isinstance(body["id"], str):
        raise UsageError(f"{path} is a damaged key file", next_step="Make a new key: deltarefit keygen DIR")
    return Signer(kind, body["id"], Secret(value))


def read_trust(paths: Iterable[str | os.PathLike[str]]) -> Trust | None:
    """All keys of some trust files; None for no file. ``UsageError`` if anybody may write to one."""
    parts = [_one(Path(path)) for path in paths]
    return merged(parts) if parts else None


def new_key(directory: Path, kind: Kind, key: str) -> tuple[Path, Path]:
    """Make a key: its key file, and a trust file with which it may sign everything. ``UsageError`` if there is one."""
    key_path, trust_path = directory / f"{key}.key", directory / f"{key}.trust"
    signer = Signer(kind, key, Secret(secrets.token_bytes(SECRET_BYTES)))
    entry: dict[str, Any] = {"id": key, "kind": kind.value, "roles": [role.value for role in Role]}
    if kind is Kind.ED25519:
        entry["public"] = signer.public().hex()
    else:
        entry["secret_file"] = key_path.name
    body = {"format": FORMAT, "id": key, "kind": kind.value, "secret": signer.secret.reveal().hex()}
    with disk_errors(f"cannot make a key in {directory}"):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _create(key_path, json.dumps(body, indent=1), 0o600)
        _create(trust_path, json.dumps({"format": TRUST_FORMAT, "keys": [entry]}, indent=1), 0o644)
    return key_path, trust_path


def read_guarded(path: Path, most: int, forbidden: int) -> bytes:
    """A small file, whose mode has none of the bits ``forbidden``: looked at when it is open, to be the same. Raises
    ``UsageError``, ``NotFoundError`` if there is none; no error shows content."""
    with disk_errors(f"cannot read {path}"):
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(handle, "rb") as file:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                raise UsageError(f"{path} is not a file")
            if found.st_mode & forbidden:
                _refuse_mode(path, stat.S_IMODE(found.st_mode), forbidden)
            data = file.read(most + 1)
    if len(data) > most:
        raise UsageError(f"{path} is too large for what it should be", expected=f"<= {most} bytes")
    return data


def _one(path: Path) -> Trust:
    def read_secret(name: str) -> Secret:
        signer = read_signer(path.parent / name)
        if signer.kind is not Kind.HMAC:
            raise UsageError(f"{path} takes {name} for an HMAC key", found=signer.kind.value)
        return signer.secret

    return parse_trust(read_guarded(path, MAX_TRUST_FILE, 0o002).decode("utf-8", "replace"), read_secret, str(path))


def _create(path: Path, text: str, mode: int) -> None:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        step = "Choose another name. A key that is in use must not be lost."
        raise UsageError(f"{path} is there already", next_step=step) from None
    with os.fdopen(handle, "w", encoding="ascii") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(handle)


def _refuse_mode(path: Path, mode: int, forbidden: int) -> None:
    wanted, who = _MODES[forbidden]
    raise UsageError(
        f"others may {who} {path}",
        expected=f"mode {wanted}",
        found=f"{mode:o}",
        next_step=f"chmod {wanted} {path}; if others had access, make a new key.",
    )


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None  # its message could quote the file
    if not isinstance(body, dict):
        raise UsageError(f"{path} is not a key file", next_step="deltarefit keygen DIR makes one.")
    return body
