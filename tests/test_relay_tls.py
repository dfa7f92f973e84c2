"""Relays over TLS and mutual TLS: real certificates, real handshakes, tokens on the way; what is wrong is named."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import logging
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec

from deltarefit.errors import AlreadyExistsError, NotFoundError, UnavailableError, UsageError
from deltarefit.ports import Store
from deltarefit.relay.auth import Auth
from deltarefit.relay.serving import Settings
from deltarefit.relay_api import Role
from deltarefit.stores import open_store
from deltarefit.stores.relay import RelayStore
from deltarefit.testing import StoreContract
from deltarefit.tls import client_context, server_context
from tests import helpers as h
from tests.relays import opened, relay
from tests.test_cli_relay import objects, relay_process, run
from tests.test_tls import PEM, key_pem, name

TOKEN = secrets.token_hex(16)
HERE = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
ELSEWHERE = x509.DNSName("relay.example")


@dataclass
class Authority:
    """Signs certificates for this machine, or another, valid now or not any more."""

    where: Path

    def __post_init__(self) -> None:
        self.where.mkdir()
        self._key, self._subject = ec.generate_private_key(ec.SECP256R1()), name(f"authority {self.where.name}")
        self.ca = self._file("ca", self._signed(self._key, self._subject, HERE, ca=True).public_bytes(PEM))

    def both(self, stem: str, names: x509.GeneralName = HERE, ended_days_ago: int = -1) -> Path:
        """A certificate and its key in one file."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._signed(key, name(stem), names, ended_days_ago=ended_days_ago)
        return self._file(stem, made.public_bytes(PEM) + key_pem(key))

    def _signed(
        self, key: ec.EllipticCurvePrivateKey, subject: x509.Name, names: x509.GeneralName,
        ca: bool = False, ended_days_ago: int = -1,
    ) -> x509.Certificate:  # fmt: skip
        end = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=ended_days_ago)
        made = x509.CertificateBuilder(self._subject, subject, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(end - datetime.timedelta(days=9)).not_valid_after(end)
        made = made.add_extension(x509.BasicConstraints(ca, None), critical=True)
        made = made.add_extension(x509.SubjectAlternativeName([names]), critical=False)
        return made.sign(self._key, hashes.SHA256())

    def _file(self, stem: str, data: bytes) -> Path:
        path = self.where / f"{stem}.pem"
        path.write_bytes(data)
        path.chmod(0o600)
        return path


@pytest.fixture
def mine(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "mine")


@pytest.fixture
def other(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "other")


def guarded() -> Settings:
    return Settings(auth=Auth.of_token(TOKEN, Role.PUBLISH))


@contextlib.contextmanager
def two(root: Store, where: Path, authority: Authority, *, mutual: bool) -> Iterator[tuple[str, str]]:
    """The URLs of a root relay and of one below it, both over TLS and with a token."""
    tls = server_context(authority.both("relay"), None, authority.ca if mutual else None)
    own = client_context(authority.ca, authority.both("client") if mutual else None)
    with (
        relay(root, where / "r0", settings=guarded(), tls=tls) as top,
        opened(top, token=TOKEN, tls=own) as above,
        relay(above, where / "r1", settings=guarded(), tls=tls) as leaf,
    ):
        yield top, leaf


@pytest.fixture(autouse=True, scope="class")
def _tree(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if (here := request.cls) is None:
        yield
        return
    where = tmp_path_factory.mktemp("tls")
    authority = Authority(where / "authority")
    here._tls = client_context(authority.ca, authority.both("receiver"))
    with (
        two(open_store(str(where / "root")), where, authority, mutual=True) as (_, here._url),
        contextlib.ExitStack() as here._closing,
    ):
        yield


class TestOverMutualTls(StoreContract):
    """Depth 2 over TLS, with certificates of clients and tokens."""

    rounds = 3
    racers = 8
    large_bytes = 5 << 20

    def open(self) -> Store:
        store = open_store(self._url, token=TOKEN, tls=self._tls)  # type: ignore[attr-defined]
        self._closing.callback(store.close)  # type: ignore[attr-defined]
        return store


@pytest.mark.parametrize("mutual", [False, True])
def test_every_verb_through_two_relays(tmp_path: Path, mine: Authority, mutual: bool) -> None:
    own = client_context(mine.ca, mine.both("me") if mutual else None)
    root = open_store(str(tmp_path / "root"))
    with two(root, tmp_path, mine, mutual=mutual) as (top, leaf), opened(leaf, token=TOKEN, tls=own) as store:
        assert top.startswith("https://127.0.0.1:")
        ((key, data),) = objects(tmp_path / "root", 1, 3 << 20).items()
        assert store.get(key) == data
        assert store.get(key, 5, 10) == data[5:15]
        store.create("a/0000000001/intent", b"mine")
        with pytest.raises(AlreadyExistsError):
            store.create("a/0000000001/intent", b"other")
        assert root.get("a/0000000001/intent") == b"mine"
        assert ("a/0000000001/intent", 4) in list(store.list("a"))
        store.delete("a/0000000001/intent")
        with pytest.raises(NotFoundError):
            store.get("a/0000000001/intent")
        assert len(RelayStore(leaf, token=TOKEN, tls=own).status()["path"]) == 2


def ask(url: str, tls: object, token: str = TOKEN) -> None:
    with contextlib.closing(RelayStore(url, token=token, tls=tls)) as store:  # type: ignore[arg-type]
        store.size("run")


@pytest.mark.parametrize(
    ("names", "ended", "says"),
    [(HERE, 1, "expired"), (ELSEWHERE, -1, "127.0.0.1"), (HERE, -1, None)],
    ids=["expired", "another name", "good"],
)
def test_a_relay_whose_certificate_does_not_count(
    tmp_path: Path, mine: Authority, names: x509.GeneralName, ended: int, says: str | None
) -> None:
    tls = server_context(mine.both("relay", names, ended))
    with relay(open_store(str(tmp_path / "root")), tmp_path / "r", settings=guarded(), tls=tls) as url:
        if says is None:
            with pytest.raises(NotFoundError):
                ask(url, client_context(mine.ca))
            return
        with pytest.raises(UnavailableError, match=says) as caught:
            ask(url, client_context(mine.ca))
        assert "certificate" in str(caught.value).lower()
        assert TOKEN not in str(caught.value)


def test_a_relay_of_another_authority(tmp_path: Path, mine: Authority, other: Authority) -> None:
    tls = server_context(other.both("relay"))
    with relay(open_store(str(tmp_path / "root")), tmp_path / "r", settings=guarded(), tls=tls) as url:
        for roots in (mine.ca, None):
            with pytest.raises(UnavailableError, match="issuer certificate"):
                ask(url, client_context(roots))
        with pytest.raises(NotFoundError):
            ask(url, client_context(other.ca))


def test_a_client_without_the_certificate_that_is_asked_for(tmp_path: Path, mine: Authority, other: Authority) -> None:
    tls = server_context(mine.both("relay"), None, mine.ca)
    root = open_store(str(tmp_path / "root"))
    with relay(root, tmp_path / "r", settings=Settings(auth=Auth.certified(Role.FOLLOW)), tls=tls) as url:
        for cert in (None, other.both("stranger"), mine.both("late", HERE, 1)):
            with pytest.raises(UnavailableError) as caught:
                ask(url, client_context(mine.ca, cert))
            assert url in str(caught.value)
        own = client_context(mine.ca, mine.both("me"))
        with contextlib.closing(RelayStore(url, tls=own)) as store:
            store.put("member/me", b"here")
            with pytest.raises(UsageError, match="publish"):
                store.put("run", b"no")
        assert root.get("member/me") == b"here"


def test_plain_http_at_a_tls_port_and_the_other_way_round(tmp_path: Path, mine: Authority) -> None:
    root = open_store(str(tmp_path / "root"))
    tls = server_context(mine.both("relay"))
    with relay(root, tmp_path / "r0", settings=guarded(), tls=tls) as safe, pytest.raises(UnavailableError):
        ask(safe.replace("https", "http"), None)
    with relay(root, tmp_path / "r1", settings=guarded()) as plain, pytest.raises(UnavailableError):
        ask(plain.replace("http", "https"), client_context(mine.ca))


def test_a_parent_that_cannot_be_believed_is_left_for_one_that_can(
    tmp_path: Path, mine: Authority, other: Authority
) -> None:
    root = open_store(str(tmp_path / "root"))
    ((key, data),) = objects(tmp_path / "root", 1, 1 << 20).items()
    with (
        relay(root, tmp_path / "r0", settings=guarded(), tls=server_context(other.both("relay"))) as stranger,
        relay(root, tmp_path / "r1", settings=guarded(), tls=server_context(mine.both("relay"))) as good,
        opened(f"{stranger},{good}", token=TOKEN, tls=client_context(mine.ca)) as store,
    ):
        assert store.get(key) == data


def test_no_log_shows_a_token(tmp_path: Path, mine: Authority, caplog: pytest.LogCaptureFixture) -> None:
    """Not even at level DEBUG, of urllib3 or of aiohttp, for a request that is refused."""
    caplog.set_level(logging.DEBUG)
    tls, wrong = server_context(mine.both("relay")), secrets.token_hex(16)
    with relay(open_store(str(tmp_path / "root")), tmp_path / "r", settings=guarded(), tls=tls) as url:
        with pytest.raises(NotFoundError):
            ask(url, client_context(mine.ca))
        with pytest.raises(UsageError, match="token"):
            ask(url, client_context(mine.ca), wrong)
    assert "urllib3.connectionpool" in {record.name for record in caplog.records}
    assert TOKEN not in caplog.text
    assert wrong not in caplog.text


def test_the_command_line(tmp_path: Path, mine: Authority) -> None:
    h.published(open_store(str(tmp_path / "root")), h.ArraySource(h.random_model(np.random.default_rng(1))))
    for file, text in (("tokens", f"read {TOKEN}\n"), ("token", f"{TOKEN}\n"), ("wrong", f"{'x' * 32}\n")):
        (tmp_path / file).write_text(text)
        (tmp_path / file).chmod(0o600)
    cert, key = mine.where / "only-cert.pem", mine.where / "only-key.pem"
    _split(mine.both("relay"), cert, key)
    serve = ("--parent", str(tmp_path / "root"), "--listen", "127.0.0.1:0", "--tokens", str(tmp_path / "tokens"))
    with relay_process(*serve, "--cert", str(cert), "--key", str(key)) as (_, url):
        assert url.startswith("https://")
        ca, token = ("--ca", str(mine.ca)), ("--token-file", str(tmp_path / "token"))
        good = run("log", url, *ca, *token, "--json")
        assert good.returncode == 0, good
        assert json.loads(good.stdout.splitlines()[-1])
        for arguments, code, words in (
            ((*ca,), 2, "token"),
            ((*ca, "--token-file", str(tmp_path / "wrong")), 2, "token"),
            ((*token,), 5, "certificate"),
        ):
            ended = run("log", url, *arguments)
            _check_refused(ended.returncode, ended.stdout + ended.stderr, code, words)


def _check_refused(returncode: int, said: str, code: int, words: str) -> None:
    assert returncode == code, said
    assert words in said.lower()
    assert "Traceback" not in said
    assert TOKEN not in said


def _split(both: Path, cert: Path, key: Path) -> None:
    text = both.read_text()
    at: Sequence[str] = text.partition("-----BEGIN PRIVATE KEY-----")
    cert.write_text(at[0])
    key.write_text(at[1] + at[2])
    key.chmod(0o600)
