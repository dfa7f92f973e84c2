"""The relay benchmark at tiny sizes on loopback: every case runs, wrong bytes are caught, and the arithmetic is right;
the links that it makes carry packets as late as they should, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from deltarefit.bench import links, relay, relay_goals, relay_report, relay_rival
from deltarefit.bench.links import Link, Shape
from deltarefit.bench.relay_tree import ROOT, grown, leaves, make_payloads, parents
from deltarefit.cli import main
from deltarefit.errors import RefitError, UsageError

MIB = 1 << 20


def said(capsys: pytest.CaptureFixture[str], *cases: str) -> dict[str, Any]:
    """The last line of ``bench relay --quick`` for these cases."""
    chosen = [word for case in cases for word in ("--case", case)]
    assert main(["bench", "relay", "--quick", *chosen]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_quick_run_on_loopback(capsys: pytest.CaptureFixture[str]) -> None:
    result = said(capsys)
    assert set(result["rows"]) == set(relay.CASES)
    assert result["not_shaped"] == "--quick"
    assert {row.get("link") for rows in result["rows"].values() for row in rows} <= {None, "loopback, not shaped"}
    everywhere = [row for rows in result["rows"].values() for row in rows if "equal" in row]
    assert len(everywhere) == 2 + 2 + 2 + 1
    assert all(row["equal"] for row in everywhere)
    assert [row["killed"] for row in result["rows"]["kills"]] == [None, "a"]
    servers = [row["server"] for row in result["rows"]["nginx"]]
    assert servers == [*([relay_rival.NGINX] if relay_rival.nginx_path() else []), relay_rival.ROOT, relay_rival.WARM]
    goals = {goal["goal"]: goal for goal in result["goals"]}
    assert goals["runs in which a byte was wrong or missing"]["reached"]
    assert goals["bytes that the root sent, times the payloads"]["worst"] >= 1


def test_an_unknown_case_is_refused() -> None:
    with pytest.raises(UsageError, match="egres"):
        relay.run(True, ["egres"], lambda text: None)


def test_wrong_bytes_and_missing_ones_are_not_called_equal(tmp_path: Path) -> None:
    """The originals change once the root serves copies of what they were."""
    payloads = make_payloads(tmp_path / "store", MIB, 4)
    assert sum(payloads.sizes.values()) == MIB
    assert len(set(payloads.sizes.values())) > 1
    with links.loopback() as link, grown(link, payloads, relay.ONE) as tree:
        fetch_all(tree)
        first = payloads.directory / next(iter(payloads.sizes))
        first.write_bytes(first.read_bytes()[:-1] + b"?")
        (tree_says,) = fetch_all(tree)
    assert not tree_says["equal"]
    assert tree_says["bytes"] == MIB


def fetch_all(tree: Any) -> list[dict[str, Any]]:
    group = tree.receivers(1, 2)
    group.go()
    found: list[dict[str, Any]] = group.done(60)
    return found


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    payloads = make_payloads(tmp_path / "store", MIB, 4)
    with links.loopback() as link, grown(link, payloads, {"a": ROOT}) as tree:
        tree.relays["a"].url = "nowhere://"
        with pytest.raises(RefitError, match="bad store URL"):
            tree.receivers(1, 1)


# ------------------------------------------------------------------------------------------ arithmetic


def test_parents_are_those_above_up_to_the_root() -> None:
    assert parents(relay.BUSH, "d") == ["b", "a", ROOT]
    assert parents(relay.BUSH, "a") == [ROOT]
    assert leaves(relay.BUSH) == ["c", "d", "e"]
    assert leaves(relay.THREE) == ["c"]


def test_what_was_sent_again_is_what_nobody_needed() -> None:
    """``b`` dies when 3 of 10 chunks have gone through it to ``d`` and ``e``, with one more under way to each."""
    chunk, ten = relay.CHUNK_BYTES, 10 * relay.CHUNK_BYTES
    counts = {ROOT: (10, 0), "a": (14, 10), "b": (8, 4), "c": (10, 10), "d": (3, 3), "e": (3, 3)}
    before = {name: {"sent_bytes": sent * chunk, "fetched_bytes": got * chunk} for name, (sent, got) in counts.items()}
    done = {ROOT: 10, "a": 14 + 2 * 7, "c": 10, "d": 10, "e": 10}
    after = {name: {"sent_bytes": sent * chunk} for name, sent in done.items()}
    row = relay.resent(relay.BUSH, "b", before, after, ten, 3)
    assert row == {"killed": "b", "resent": 2 * chunk, "allowed": (0 + 2) * chunk + 2 * chunk}


def test_goals_take_the_worst_and_admit_what_was_not_measured() -> None:
    rows: dict[str, Any] = {
        "egress": [{"egress": 1.0, "peak_bytes": 100 * MIB, "equal": True}, {"egress": 1.03, "equal": True}],
        "depth": [{"depth": 1, "seconds": 10.0, "equal": True}, {"depth": 3, "seconds": 11.9, "equal": True}],
        "nginx": [{"server": relay_rival.ROOT, "bytes_s": 5.0, "peak_bytes": 300 * MIB}],
        "kills": [
            {"killed": None, "equal": True},
            {"killed": "a", "times": 1.4, "resent": 9 * MIB, "allowed": 8 * MIB, "equal": False},
        ],
        "distance": [{"share": None, "equal": True}],
    }
    found = [(goal["worst"], goal["reached"]) for goal in relay_goals.goals(rows)]
    assert found == [
        (1.03, False),
        (1.19, True),
        (None, False),
        (1.4, True),
        (1, False),
        (None, False),
        (300, False),
        (1, False),
    ]
    rows["nginx"].append({"server": relay_rival.NGINX, "bytes_s": 8.0, "peak_bytes": 1 << 40})
    best, *_ = relay_goals.goals({"nginx": rows["nginx"]})
    assert (best["worst"], best["reached"]) == (0.625, True)


def test_the_median_hides_no_bad_run() -> None:
    good = {"seconds": 2.0, "egress": 1.0, "peak_bytes": 5, "damaged": 0, "equal": True}
    bad = {"seconds": 9.0, "egress": 1.5, "peak_bytes": 7, "damaged": 1, "equal": False}
    row = relay._median([good, bad, {**good, "seconds": 3.0}])
    assert row == {
        "seconds": 3.0,
        "egress": 1.5,
        "peak_bytes": 7,
        "damaged": 1,
        "equal": False,
        "all_s": [2.0, 9.0, 3.0],
    }


# ------------------------------------------------------------------------------------------ links

DELAY_S = 0.05


@pytest.fixture(scope="module")
def shaped_links() -> None:
    if reason := links.missing():
        pytest.skip(reason)


@contextlib.contextmanager
def echoing(link: Link) -> Iterator[socket.socket]:
    """A connection from far to near, and what is sent comes back."""
    with link.near.call(lambda: socket.create_server((link.near.address, 0))) as server:
        there = server.getsockname()
        with link.far.call(lambda: socket.create_connection(there, 10)) as far, server.accept()[0] as near:
            near.settimeout(10)
            far.sendall(b"hello")
            near.sendall(near.recv(5))
            yield far


def names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout


@pytest.mark.usefixtures("shaped_links")
def test_packets_pass_no_earlier_than_the_delay() -> None:
    with links.distant(Shape(100, DELAY_S)) as link:
        started = time.monotonic()
        with echoing(link) as far:
            assert far.recv(5) == b"hello"
        assert time.monotonic() - started >= 4 * DELAY_S  # a handshake, and there and back
        assert links.plain_copy(link, MIB, 2, 20) <= 100e6 / 8
        assert (link.crossed() or 0) >= MIB


@pytest.mark.usefixtures("shaped_links")
def test_packets_are_lost() -> None:
    with links.distant(Shape(100, 0.0, 1.0)) as link:
        there = (link.near.address, 9)
        with pytest.raises(OSError, match="timed out"):  # and not refused, as by a host that hears it
            link.far.call(lambda: socket.create_connection(there, 0.5))
    with links.distant(Shape(100)) as link, pytest.raises(ConnectionRefusedError):
        link.far.call(lambda: socket.create_connection(there, 10))


@pytest.mark.usefixtures("shaped_links")
def test_a_rate_holds() -> None:
    with links.shaped(Shape(40)) as link:
        assert links.plain_copy(link, 4 * MIB, 1, 20) <= 1.2 * 40e6 / 8
        assert (link.crossed() or 0) >= 4 * MIB


@pytest.mark.usefixtures("shaped_links")
@pytest.mark.parametrize("make", [links.shaped, links.distant])
def test_nothing_is_left_behind_by_an_error(make: Any) -> None:
    with contextlib.suppress(KeyError), make(Shape(40, 0.001)):
        assert links._PREFIX in names()
        raise KeyError
    assert links._PREFIX not in names()


def test_loopback_is_said_to_be_that() -> None:
    with links.loopback() as link:
        assert str(link) == "loopback, not shaped"
        assert link.crossed() is None
        assert links.plain_copy(link, MIB, 1, 20) > 0


def test_rows_are_shown() -> None:
    row = {"link": "L", "seconds": 1.0, "equal": False, "peak_bytes": MIB}
    killed = {**row, "killed": "a", "instant": 0.5, "times": 2.5, "resent": MIB, "allowed": 3 * MIB}
    rows = {
        "egress": [{**row, "receivers": 1, "egress": 1.01, "crossed": None}],
        "kills": [{**row, "killed": None}, killed],
        "distance": [{"link": "L", "bytes_s": 1e6, "share": 0.5, "equal": True, "plain_bytes_s": {"1": 2e6}}],
    }
    from rich.console import Console

    console = Console(width=160, record=True)
    console.print(relay_report.table({"rows": rows, "goals": []}))
    text = console.export_text()
    for shown in ("1.010", "2.50", "50%", "NO", "16"):
        assert shown in text
