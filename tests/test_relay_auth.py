"""Who may do what at a relay, and where it may listen."""

from __future__ import annotations

import hmac
import re
import ssl
from pathlib import Path

import pytest

from deltarefit.errors import NotFoundError, UsageError
from deltarefit.relay import auth as auth_module
from deltarefit.relay.auth import MAX_TOKENS_FILE, MOST_TOKENS, Auth, check_listen, parse_listen
from deltarefit.relay_api import Role

TOKENS = {Role.READ: "r" * 16, Role.FOLLOW: "follow-token.~+/=A9_", Role.PUBLISH: "p" * 512}
TEXT = "# who may what\n\n" + "".join(f"{role.name.lower()}  {token}  # mine\n" for role, token in TOKENS.items())
ASKS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
ASKS.verify_mode = ssl.CERT_REQUIRED
PLAIN_TLS = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)


def tokens(directory: Path, text: str = TEXT, mode: int = 0o600) -> Path:
    path = directory / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.fixture
def three(tmp_path: Path) -> Auth:
    return Auth.of_file(tokens(tmp_path))


# --------------------------------------------------------------------------------------------------- tokens


@pytest.mark.parametrize("role", TOKENS)
def test_a_token_has_its_role(three: Auth, role: Role) -> None:
    for scheme in ("Bearer ", "bearer ", "BEARER   "):
        assert three.role(scheme + TOKENS[role]) is role


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        TOKENS[Role.READ],
        f"Basic {TOKENS[Role.READ]}",
        f"Bearer {TOKENS[Role.READ][:-1]}",
        f"Bearer {TOKENS[Role.READ]}x",
        f"Bearer {TOKENS[Role.READ]} {TOKENS[Role.PUBLISH]}",
        f"Bearer {TOKENS[Role.READ]}\n",
        f"Bearer {TOKENS[Role.READ]},",
        f"Bearer {TOKENS[Role.PUBLISH]}p",
        "Bearer " + "x" * 100_000,
        "Bearer " + "é" * 16,
        "Bearer \udcff" + "x" * 16,
    ],
)
def test_anything_else_has_none(three: Auth, header: str | None) -> None:
    assert three.role(header) is None


def test_every_token_is_compared_with_whichever_fits(three: Auth, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    real = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return real(one, other)

    monkeypatch.setattr(auth_module.hmac, "compare_digest", compare)
    for token in (*TOKENS.values(), "x" * 16):
        compared.clear()
        three.role(f"Bearer {token}")
        assert len(compared) == len(TOKENS)
        assert {len(side) for pair in compared for side in pair} == {32}, "hashes, never tokens"


def test_several_tokens_of_one_role(tmp_path: Path) -> None:
    """So that one can be changed while the other still counts."""
    found = Auth.of_file(tokens(tmp_path, f"follow {'a' * 16}\nfollow {'b' * 16}\n"))
    assert [found.role(f"Bearer {letter * 16}") for letter in "abc"] == [Role.FOLLOW, Role.FOLLOW, None]


def test_no_token_is_shown(three: Auth) -> None:
    for shown in (repr(three), str(three), f"{three}"):
        assert not any(token in shown for token in TOKENS.values())
        assert "b'" not in shown
    assert not any(token.encode() in digest for token in TOKENS.values() for digest, _ in three.digests)


BAD_FILES = {
    "empty": ("", "tokens; expected 1 to"),
    "comments": ("# nothing\n \n", "tokens; expected 1 to"),
    "short": (f"read {'hunter2' * 2}\n", "line 1: not a token"),
    "long": (f"read {'hunter2' * 100}\n", "line 1: not a token"),
    "alphabet": (f"# x\nread hunter2{'é' * 16}\n", "line 2: not a token"),
    "role": (f"admin {'hunter2' * 3}\n", "line 1: not a role and a token"),
    "role in capitals": (f"READ {'hunter2' * 3}\n", "line 1: not a role and a token"),
    "no role": ("hunter2" * 3, "line 1: not a role and a token"),
    "three words": (f"read {'hunter2' * 3} hunter2\n", "line 1: not a role and a token"),
    "twice": (f"read {'hunter2' * 3}\npublish {'hunter2' * 3}\n", "a token stands twice"),
    "many": ("".join(f"read {n:016d}\n" for n in range(MOST_TOKENS + 1)), "found 1025"),
    "large": ("# hunter2\n" * (MAX_TOKENS_FILE // 10 + 1), "too large"),
}


@pytest.mark.parametrize(("text", "why"), BAD_FILES.values(), ids=BAD_FILES)
def test_files_that_are_none(text: str, why: str, tmp_path: Path) -> None:
    path = tokens(tmp_path, text)
    with pytest.raises(UsageError, match=re.escape(why)) as caught:
        Auth.of_file(path)
    assert "hunter2" not in str(caught.value).replace(str(path), "")


def test_as_many_tokens_as_there_may_be(tmp_path: Path) -> None:
    found = Auth.of_file(tokens(tmp_path, "".join(f"read {n:016d}\n" for n in range(MOST_TOKENS))))
    assert found.role(f"Bearer {MOST_TOKENS - 1:016d}") is Role.READ


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o610, 0o644, 0o620])
def test_a_file_that_others_may_read_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="chmod 600"):
        Auth.of_file(tokens(tmp_path, mode=mode))


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError):
        Auth.of_file(tmp_path / "none")
    with pytest.raises(UsageError, match="EISDIR"):
        Auth.of_file(tmp_path)


def test_without_tokens() -> None:
    assert Auth.open().role(None) is Role.PUBLISH
    assert Auth.certified(Role.FOLLOW).role("Bearer whatever") is Role.FOLLOW
    assert Auth().role(f"Bearer {'x' * 16}") is None


# ---------------------------------------------------------------------------------------- where to listen


LOOPBACK = ["127.0.0.1", "127.1.2.3", "::1", "localhost"]
ELSEWHERE = ["0.0.0.0", "::", "10.0.0.1", "example", "localhost.example", "::ffff:10.0.0.1"]


@pytest.mark.parametrize("host", LOOPBACK)
def test_on_loopback_everything_goes(host: str, three: Auth) -> None:
    for auth in (Auth.open(), three):
        for tls in (None, PLAIN_TLS):
            check_listen(host, auth, tls)


@pytest.mark.parametrize("plain", [True, False])
@pytest.mark.parametrize("host", ELSEWHERE)
def test_no_listener_without_authentication(host: str, plain: bool) -> None:
    for auth in (Auth.open(), Auth()):
        for tls in (None, PLAIN_TLS):
            with pytest.raises(UsageError, match="no authentication"):
                check_listen(host, auth, tls, plain)


@pytest.mark.parametrize("host", ELSEWHERE)
def test_no_tokens_in_the_clear(host: str, three: Auth) -> None:
    with pytest.raises(UsageError, match="--plain-http"):
        check_listen(host, three, None)
    check_listen(host, three, None, plain=True)
    check_listen(host, three, PLAIN_TLS)


@pytest.mark.parametrize("host", [*ELSEWHERE, *LOOPBACK])
def test_certificates_count_only_where_they_are_asked_for(host: str) -> None:
    for tls in (None, PLAIN_TLS):
        with pytest.raises(UsageError, match="none is asked for"):
            check_listen(host, Auth.certified(Role.FOLLOW), tls, plain=True)
    check_listen(host, Auth.certified(Role.FOLLOW), ASKS)


def test_a_client_certificate_alone_gives_no_role(three: Auth) -> None:
    """With tokens and certificates both are needed."""
    check_listen("0.0.0.0", three, ASKS)
    assert three.role(None) is None


def test_what_is_listened_on_is_what_is_checked() -> None:
    host, port = parse_listen("[::1]:0")
    check_listen(host, Auth.open(), None)
    assert port == 0
