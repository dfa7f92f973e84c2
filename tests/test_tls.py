"""TLS contexts, by handshakes over real sockets with certificates made here."""

from __future__ import annotations

import datetime
import socket
import ssl
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from deltarefit.errors import UsageError
from deltarefit.tls import MAX_PEM_FILE, client_context, server_context

PATIENCE_S = 20.0
HOST = "relay.example"
PEM = serialization.Encoding.PEM


def name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def key_pem(key: ec.EllipticCurvePrivateKey, passphrase: bytes | None = None) -> bytes:
    lock = serialization.BestAvailableEncryption(passphrase) if passphrase else serialization.NoEncryption()
    return key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, lock)


@dataclass
class Authority:
    """Signs certificates, itself first."""

    where: Path

    def __post_init__(self) -> None:
        self.where.mkdir()
        self.key, self.subject = ec.generate_private_key(ec.SECP256R1()), name(f"authority {self.where.name}")
        self.ca = self.file("ca.pem", self.signed(self.key, self.subject, ca=True).public_bytes(PEM), 0o644)

    def signed(self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, ca: bool = False) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        day = datetime.timedelta(days=1)
        made = x509.CertificateBuilder(self.subject, subject, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - day).not_valid_after(now + day)
        made = made.add_extension(x509.BasicConstraints(ca, None), critical=True)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(HOST)]), critical=False)
        return made.sign(self.key, hashes.SHA256())

    def pair(self, stem: str) -> tuple[Path, Path]:
        """A certificate and its key, in files of their own."""
        key = ec.generate_private_key(ec.SECP256R1())
        cert = self.signed(key, name(stem)).public_bytes(PEM)
        return self.file(f"{stem}.crt", cert, 0o644), self.file(f"{stem}.key", key_pem(key), 0o600)

    def both(self, stem: str) -> Path:
        """The same in one file."""
        cert, key = self.pair(stem)
        return self.file(f"{stem}.pem", cert.read_bytes() + key.read_bytes(), 0o600)

    def file(self, file: str, data: bytes, mode: int) -> Path:
        path = self.where / file
        path.write_bytes(data)
        path.chmod(mode)
        return path


@pytest.fixture
def mine(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "mine")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other")


def talk(server: ssl.SSLContext, client: ssl.SSLContext, host: str = HOST) -> str | None:
    """One byte each way over a socket pair; the version of TLS, or None if either side refused."""
    ends = socket.socketpair()
    failed: list[BaseException] = []
    for end in ends:
        end.settimeout(PATIENCE_S)

    def serve() -> None:
        try:
            with server.wrap_socket(ends[0], server_side=True) as stream:
                stream.sendall(stream.recv(1))
        except OSError as error:
            failed.append(error)
            ends[0].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ends[1], server_hostname=host) as stream:
            stream.sendall(b"x")
            return stream.version() if stream.recv(1) == b"x" else None
    except OSError:
        return None
    finally:
        ends[1].close()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# ----------------------------------------------------------------------------------------------- handshakes


def test_a_relay_is_known_by_its_certificate(mine: Authority) -> None:
    for cert, key in ((mine.both("relay"), None), mine.pair("two")):
        assert talk(server_context(cert, key), client_context(mine.ca)) == "TLSv1.3"


def test_a_relay_of_another_authority_is_refused(mine: Authority, other: Authority) -> None:
    assert talk(server_context(other.both("relay")), client_context(mine.ca)) is None
    assert talk(server_context(mine.both("relay")), client_context()) is None, "the system's roots do not know it"


@pytest.mark.parametrize("host", ["other.example", "10.0.0.1", "sub.relay.example"])
def test_a_relay_of_another_name_is_refused(mine: Authority, host: str) -> None:
    assert talk(server_context(mine.both("relay")), client_context(mine.ca), host) is None


def test_mutual(mine: Authority, other: Authority) -> None:
    server = server_context(mine.both("relay"), None, mine.ca)
    assert talk(server, client_context(mine.ca, mine.both("client"))) == "TLSv1.3"
    assert talk(server, client_context(mine.ca)) is None, "no certificate"
    assert talk(server, client_context(mine.ca, other.both("stranger"))) is None, "another authority's"
    assert talk(server_context(mine.both("relay")), client_context(mine.ca, mine.both("client"))) == "TLSv1.3"


@pytest.mark.parametrize(("newest", "good"), [(ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_1, False)])
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_versions(mine: Authority, newest: ssl.TLSVersion, good: bool) -> None:
    """Whoever speaks nothing newer: both sides refuse what is older than 1.2."""
    for limited in ("server", "client"):
        server, client = server_context(mine.both("relay")), client_context(mine.ca)
        old = server if limited == "server" else client
        old.minimum_version = ssl.TLSVersion.TLSv1
        old.maximum_version = newest
        for side in (server, client):
            side.set_ciphers("DEFAULT:@SECLEVEL=0")  # else the library refuses, not we
        assert (talk(server, client) is not None) == good


def test_session_keys_go_nowhere(mine: Authority, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    log = tmp_path / "keys.log"
    monkeypatch.setenv("SSLKEYLOGFILE", str(log))
    assert talk(server_context(mine.both("relay")), client_context(mine.ca)) is not None
    assert not log.exists()


# ---------------------------------------------------------------------------------------------------- files


def damaged(path: Path) -> bytes:
    lines = path.read_bytes().splitlines(keepends=True)
    return b"".join([lines[0], b"AAAA" + lines[1][4:], *lines[2:]])


def bad_files(mine: Authority) -> dict[str, tuple[Path, str]]:
    """Files that are wrong as a certificate with key, and what is said of them."""
    cert, key = mine.pair("a")
    stray = mine.pair("b")[1].read_bytes()
    secret = key_pem(ec.generate_private_key(ec.SECP256R1()), b"open sesame")
    make: Callable[[str, bytes], Path] = lambda file, data: mine.file(file, data, 0o600)  # noqa: E731
    return {
        "missing": (mine.where / "none", "cannot read"),
        "directory": (mine.where, "cannot read"),
        "empty": (make("empty", b""), "a certificate as PEM"),
        "noise": (make("noise", bytes(range(256))), "a certificate as PEM"),
        "large": (make("large", bytes(MAX_PEM_FILE + 1)), "too large"),
        "no key": (make("no-key", cert.read_bytes()), "a private key as PEM"),
        "no certificate": (make("no-cert", key.read_bytes()), "a certificate as PEM"),
        "mismatch": (make("mismatch", cert.read_bytes() + stray), "a key that belongs to another certificate"),
        "damaged certificate": (make("d-cert", damaged(cert) + key.read_bytes()), "cannot be used for TLS"),
        "damaged key": (make("d-key", cert.read_bytes() + damaged(key)), "cannot be used for TLS"),
        "encrypted": (make("locked", cert.read_bytes() + secret), "is encrypted"),
        "open to all": (mine.file("open", cert.read_bytes() + key.read_bytes(), 0o644), "chmod 640"),
    }


def test_files_that_cannot_be_used(mine: Authority) -> None:
    for path, why in bad_files(mine).values():
        for use in (lambda path: server_context(path), lambda path: client_context(mine.ca, path)):
            with pytest.raises(UsageError, match=why) as caught:
                use(path)
            said = str(caught.value)
            assert str(path) in said
            if path.is_file() and path.stat().st_size < MAX_PEM_FILE:
                lines = path.read_bytes().decode("latin-1").splitlines()
                assert not any(line in said for line in lines if len(line) > 8), "content"


def test_a_key_of_another_file(mine: Authority) -> None:
    cert, key = mine.pair("a")
    with pytest.raises(UsageError, match="another certificate") as caught:
        server_context(cert, mine.pair("b")[1])
    assert str(cert) in str(caught.value)
    with pytest.raises(UsageError, match=r"cannot read .*none"):
        server_context(cert, mine.where / "none")
    with pytest.raises(UsageError, match="a private key as PEM"):
        server_context(cert, cert)
    key.chmod(0o640)  # as Debian's group ssl-cert has them
    server_context(cert, key)


def test_roots_that_cannot_be_used(mine: Authority) -> None:
    cert = mine.both("relay")
    for file, data in {"empty": b"", "key": mine.pair("k")[1].read_bytes(), "damaged": damaged(mine.ca)}.items():
        path = mine.file(file, data, 0o600)
        for use in (lambda path: client_context(path), lambda path: server_context(cert, None, path)):
            with pytest.raises(UsageError, match="authorities to trust") as caught:
                use(path)
            assert str(path) in str(caught.value)
    with pytest.raises(UsageError, match=r"cannot read .*none"):
        client_context(mine.where / "none")


def test_roots_with_words_between_them(mine: Authority, other: Authority) -> None:
    several = b"# \xc3\xa9\n" + other.ca.read_bytes() + b"\nsubject: x\n" + mine.ca.read_bytes()
    path = mine.file("bundle", several, 0o644)
    for authority in (mine, other):
        assert talk(server_context(authority.both("relay")), client_context(path)) == "TLSv1.3"
