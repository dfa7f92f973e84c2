"""Secrets are planted wherever this program is handed any; then it is run through, errors included, and all that it
says and stores is searched for them."""

from __future__ import annotations

import base64
import json
import os
import secrets
import traceback
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit import Publisher, Receiver, RefitError
from deltarefit.cli import main
from deltarefit.events import Event
from deltarefit.keyfiles import read_signer, read_trust
from deltarefit.signing import Kind
from tests import helpers as h
from tests.desk import Desk, Done, make_desk
from tests.seaweed import Seaweed


class Canaries:
    """Secrets, in every writing in which one could show."""

    def __init__(self) -> None:
        self._shapes: dict[str, str] = {}

    def plant(self, name: str, secret: bytes | None = None) -> str:
        """A new secret as hex digits, or one that exists; as text it is a key of 32 bytes."""
        data = secret or f"{name[:10]:-<12}{secrets.token_hex(10)}".encode()[:32].ljust(32, b"!")
        text = data.decode("latin-1")
        for shape in (text, repr(data)[2:-1], data.hex(), data.hex().upper(), base64.b64encode(data).decode()[:-2]):
            self._shapes[shape] = name
        self._shapes[str(list(data))[1:-1]] = name
        return data.hex()

    def check(self, text: str, where: str) -> None:
        for shape, name in self._shapes.items():
            assert shape not in text, f"the {name} shows in {where}"


def test_the_search_finds_what_is_there() -> None:
    """The net has no hole: each writing of a secret is found."""
    canaries = Canaries()
    value = bytes.fromhex(canaries.plant("net"))
    assert len(value) == 32
    for text in (value.decode(), value.hex(), repr(value), str(list(value)), base64.b64encode(value).decode()):
        with pytest.raises(AssertionError, match="the net shows in x"):
            canaries.check(f"... {text} ...", "x")


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk")


def _key_file(path: Path, kind: Kind, secret: str, mode: int = 0o600) -> Path:
    path.write_text(json.dumps({"format": "deltarefit-key/1", "id": "trainer", "kind": kind.value, "secret": secret}))
    path.chmod(mode)
    return path


def _trust_file(path: Path, kind: Kind, key: Path) -> Path:
    entry: dict[str, Any] = {"id": "trainer", "kind": kind.value}
    entry |= {"secret_file": key.name} if kind is Kind.HMAC else {"public": read_signer(key).public().hex()}
    path.write_text(json.dumps({"format": "deltarefit-trust/1", "keys": [entry]}))
    return path


class Listener:
    """Runs commands in this process and searches all they say, down to the file descriptors."""

    def __init__(self, canaries: Canaries, capfd: pytest.CaptureFixture[str]) -> None:
        self.canaries, self._capfd = canaries, capfd
        self.codes: list[int] = []

    def __call__(self, *arguments: object, code: int | None = 0) -> Done:
        self._capfd.readouterr()
        done = Done(main([str(argument) for argument in arguments]), *self._capfd.readouterr())
        self.canaries.check(done.out, f"stdout of {arguments[0]}")
        self.canaries.check(done.err, f"stderr of {arguments[0]}")
        assert "Traceback" not in done.err or "-v" in arguments, done.err
        assert code is None or done.code == code, done.err
        self.codes.append(done.code)
        return done

    def both(self, *arguments: object, code: int | None = 0) -> None:
        """As text, and as JSON with all there is to say."""
        self(*arguments, code=code)
        self(*arguments, "-v", "--json", code=code)


@dataclass
class Stage:
    """A signed run on S3, whose secrets are all known to the search."""

    run: Listener
    desk: Desk
    store: str
    key: Path
    trust: Path
    other: Path
    """A trust file that lists another key."""


@pytest.fixture(params=Kind, ids=str)
def stage(
    request: pytest.FixtureRequest,
    desk: Desk,
    seaweed: Seaweed,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    kind, canaries = request.param, Canaries()
    run = Listener(canaries, capfd)
    canaries.plant("S3 secret", seaweed.secret_key.encode())
    key = _key_file(tmp_path / "trainer.key", kind, canaries.plant("signing key"))
    trust = _trust_file(tmp_path / "trainer.trust", kind, key)
    environment = {
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "AWS_ACCESS_KEY_ID": seaweed.access_key,
        "AWS_SECRET_ACCESS_KEY": seaweed.secret_key,
        "AWS_ENDPOINT_URL": seaweed.endpoint,
        "AWS_REGION": "us-east-1",
        "DELTAREFIT_ENGINE_KEY": bytes.fromhex(canaries.plant("engine key")).decode(),
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = run("keygen", tmp_path / "keys", "--kind", {Kind.HMAC: "hmac"}.get(kind, "ed25519"), "--json", "-v")
    canaries.plant("new key", read_signer(made.body["key"]).secret.reveal())
    canaries.check(made.out + made.err, "keygen")
    store = f"s3://refits/canary-{secrets.token_hex(4)}"
    run("publish", desk.checkpoint(0), "--to", store, "--sign", key)
    run("publish", desk.checkpoint(1), "--to", store, "--sign", key, "--trust", trust, "-v", "--json")
    return Stage(run, desk, store, key, trust, Path(made.body["trust"]))


def test_a_whole_run_on_s3_shows_no_secret(stage: Stage, tmp_path: Path) -> None:
    run, store, key, trust, into = stage.run, stage.store, stage.key, stage.trust, tmp_path / "into"
    run.both("follow", store, "--into", into, "--once", "--trust", trust)
    for verb in (["log", store], ["show", store, "--tensors"], ["verify", store, into]):
        run.both(*verb, "--trust", trust)
    run.both("anchor", store, "--sign", key, "--trust", trust)
    run.both("doctor")
    assert set(run.codes) == {0}


def test_refusals_on_s3_show_no_secret(stage: Stage, tmp_path: Path) -> None:
    run, store, key, trust = stage.run, stage.store, stage.key, stage.trust
    for verb in (["log", store], ["follow", store, "--into", tmp_path / "other", "--once"]):
        run.both(*verb, "--trust", stage.other, code=4)
    run.both("publish", stage.desk.checkpoint(2), "--to", store, code=2)
    for engine in ("--vllm", "--sglang"):
        run.both("verify", store, engine, "http://127.0.0.1:9", "--trust", trust, code=5)
    password = bytes.fromhex(run.canaries.plant("password")).decode()
    for address in (f"s3://user:{password}@bucket/x", f"s3://bucket/x?secret={password}", f"s3://bucket/x#{password}"):
        run.both("log", address, code=2)
        run.both("publish", stage.desk.checkpoint(2), "--to", address, "--sign", key, code=2)
    for url in (f"http://user:{password}@127.0.0.1:9", f"http://127.0.0.1:9/?key={password}"):
        run.both("log", store, "--endpoint", url, code=2)
        run.both("verify", store, "--vllm", url, "--trust", trust, code=2)
    run.both("log", f"s3:/user:{password}@bucket", code=2)


@pytest.mark.slow
def test_credentials_that_are_refused_are_not_shown(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = stage.run, stage.store
    token = bytes.fromhex(run.canaries.plant("session token")).decode()
    wrong = bytes.fromhex(run.canaries.plant("wrong S3 secret")).decode()
    for name, value in {"AWS_SECRET_ACCESS_KEY": wrong, "AWS_SESSION_TOKEN": token}.items():
        with monkeypatch.context() as changed:
            changed.setenv(name, value)
            run.both("log", store, code=None)
            run.both("doctor", store, code=None)


def test_key_files_that_are_refused_are_not_quoted(
    desk: Desk, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    canaries = Canaries()
    run = Listener(canaries, capfd)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run("publish", desk.checkpoint(0), "--to", desk.store)
    secret = canaries.plant("signing key")
    text = bytes.fromhex(secret).decode()
    bad = {
        "readable": (_key_file(tmp_path / "a", Kind.HMAC, secret, 0o644)).read_text(),
        "cut": json.dumps({"format": "deltarefit-key/1", "secret": secret})[:-1],
        "raw": secret,
        "more": json.dumps({"format": "deltarefit-key/1", "id": "k", "kind": "ed25519", "secret": secret, "x": secret}),
        "not hex": json.dumps({"format": "deltarefit-key/1", "id": "k", "kind": "ed25519", "secret": text}),
        "odd": json.dumps({"format": "deltarefit-key/1", "id": "k", "kind": "ed25519", "secret": secret + "00"}),
        "as id": json.dumps({"format": "deltarefit-key/1", "id": [text], "kind": "ed25519", "secret": secret}),
        "as kind": json.dumps({"format": "deltarefit-key/1", "id": "k", "kind": secret, "secret": secret}),
    }
    for name, content in bad.items():
        path = tmp_path / "bad"
        path.unlink(missing_ok=True)
        path.write_text(content)
        path.chmod(0o644 if name == "readable" else 0o600)
        run.both("publish", desk.checkpoint(0), "--to", desk.store, "--sign", path, code=2)
        run.both("log", desk.store, "--trust", path, code=2)
    for field in ("public", "secret_file", "secret", "roles", "tensors", "kind", "producers"):
        entry: dict[str, Any] = {"id": "k", "kind": "ed25519", "public": "00" * 32, field: secret}
        path = tmp_path / "bad.trust"
        path.write_text(json.dumps({"format": "deltarefit-trust/1", "keys": [entry]}))
        if field not in ("tensors", "public"):
            run.both("log", desk.store, "--trust", path, code=2)


@pytest.mark.parametrize("kind", Kind, ids=str)
def test_events_errors_and_records_show_no_secret(kind: Kind, tmp_path: Path) -> None:
    """The library: whatever its objects, events and errors print, and all that is stored."""
    canaries = Canaries()
    key = _key_file(tmp_path / "k.key", kind, canaries.plant("signing key"))
    signer, trust = read_signer(key), read_trust([_trust_file(tmp_path / "k.trust", kind, key)])
    assert trust is not None
    heard: list[Event] = []
    store, source = h.new_store(), h.ArraySource(h.random_model(np.random.default_rng(1), h.SMALL), h.SMALL)
    publisher = Publisher(store, source, threads=1, sign=signer, trust=trust, emit=heard.append)
    with closing(publisher):
        publisher.publish()
        h.step(np.random.default_rng(2), source.model, "some")
        publisher.publish()
    target = h.StrictTarget(publisher.log.run)
    receiver = Receiver(store, target, threads=1, trust=trust, emit=heard.append)
    with closing(receiver):
        receiver.follow(once=True)
    said = [repr(event) for event in heard]
    for thing in (signer, trust, publisher, publisher.log, publisher.log.notary, receiver.log.notary, receiver):
        said += [repr(thing), str(thing), repr(getattr(thing, "__dict__", ""))]
    for name in ("intent", "p/0", "outcome"):
        place = f"a/0000000002/{name}"
        good = store.get(place)
        store.put(place, good[:-2] + (b"1\n" if good[-2:-1] == b"0" else b"0\n"))
        fresh = h.StrictTarget(publisher.log.run)
        with pytest.raises(RefitError) as caught, closing(Receiver(store, fresh, trust=trust)) as again:
            again.follow(once=True)
        said += [str(caught.value), repr(caught.value), "".join(traceback.format_exception(caught.value))]
        said += [repr(frame.f_locals) for frame, _ in traceback.walk_tb(caught.value.__traceback__)]
        store.put(place, good)
    for text in said:
        canaries.check(text, text[:80])
    for name, _ in store.list():
        canaries.check(store.get(name).decode("latin-1"), name)
    canaries.check(json.dumps(dict(os.environ)), "the environment of other programs")
