"""Addresses of relays: URLs in one form, where to listen, what is loopback."""

from __future__ import annotations

import pytest

from deltarefit.addresses import is_loopback, parse_listen, relay_url
from deltarefit.errors import UsageError

URLS = {
    "http://A.Example": "http://a.example:8470", "https://[::1]": "https://[::1]:8470", "http://h:80/": "http://h:80",
    "https://[0:0::1]:5": "https://[::1]:5", "http://10.0.0.1:65535": "http://10.0.0.1:65535", "http://h_1": "http://h_1:8470",
}  # fmt: skip
NO_URLS = [
    "", "a:8470", "s3://bucket", "http://", "http://u:hunter2@h", "http://hunter2@h:1", "http://h/p", "http://h?x",
    "http://h#x", "http://h?", "http://h:0", "http://h:65536", "http://h:x", "http://::1", "http://[::1", "http://h\n",
    " http://h", "http://h h", "http://-h", "http://1.2.3", "http://256.1.1.1", "http://[1.2.3.4]", "http://é",
    "http://" + "h" * 254,
]  # fmt: skip


@pytest.mark.parametrize(("text", "url"), URLS.items())
def test_urls_of_relays(text: str, url: str) -> None:
    assert relay_url(text) == url == relay_url(url)


@pytest.mark.parametrize("text", NO_URLS)
def test_urls_that_are_none_and_are_not_repeated(text: str) -> None:
    with pytest.raises(UsageError, match="bad URL of a relay") as caught:
        relay_url(text)
    assert "hunter2" not in str(caught.value)


def test_addresses_to_listen_on() -> None:
    for text, found in {
        "0.0.0.0:1": ("0.0.0.0", 1), "localhost": ("localhost", 8470), "[::1]:0": ("::1", 0), "[::]": ("::", 8470),
    }.items():  # fmt: skip
        assert parse_listen(text) == found
    for text in ("", ":8470", "::1", "h:", "h:65536", "h:x", "[h]:1", "[]:1", "a b:1", "1.2.3:4", "h:1:2", "h:１"):
        with pytest.raises(UsageError, match="listen on"):
            parse_listen(text)
    with pytest.raises(UsageError) as caught:
        parse_listen("u:hunter2@h:1")
    assert "hunter2" not in str(caught.value)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "10.0.0.1", "128.0.0.1", "example", "localhost.example", "")))
