"""Several stores as one, some of which lie: who is asked again, and which way leads to the root."""

from __future__ import annotations

import pytest

from deltarefit.errors import UnavailableError
from deltarefit.stores import fallback as room
from deltarefit.stores.fallback import DOUBT_S, LONGEST_REST_S
from tests.test_fallback import DATA, KEY, fallback
from tests.told_stores import Clock, Told


def away() -> Exception:
    return UnavailableError("planned")


def test_who_gave_damaged_bytes_is_not_asked_first_again() -> None:
    """A first parent that lies, about bytes or about the size: the second ask is right. Not for ever, nor if nobody
    else is well, nor for what is not named by its content."""
    for wrong in (bytes(100), DATA[:20], b""):
        clock, sick = Clock(), [False]
        first = Told("first", {KEY: wrong, "head": b"x"})
        second = Told("second", {KEY: DATA, "head": b"x"}, lambda _, sick=sick: away() if sick[0] else None)  # type: ignore[misc]
        with fallback(first, second, clock=clock) as made:
            assert [made.get(KEY), made.get(KEY), made.get(KEY)] == [wrong, DATA, wrong]
            assert [made.get(KEY, 5, 4), made.get(KEY, 5, 4)] == [wrong[5:9], DATA[5:9]]
            sick[0] = True
            assert made.get(KEY) == wrong
            assert [made.get("head"), made.get("head")] == [b"x", b"x"]
            sick[0] = False
            clock.now += 1.1 * max(DOUBT_S, LONGEST_REST_S)
            assert made.get(KEY) == wrong


def test_memory_of_who_gave_what_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "REMEMBERED", 5)
    with fallback(Told("s", {KEY: DATA})) as made:
        for start in range(50):
            made.get(KEY, start, 1)
        assert len(made._gave) == 5


class _On(Told):
    """A relay of a chain: the way that it tells."""

    def __init__(self, path: tuple[str, ...], loops: bool) -> None:
        super().__init__("relay", {})
        self.path, self.loops = path, loops


def test_the_way_to_the_root_is_one_that_leads_there() -> None:
    back, good = _On(("a", "me"), loops=True), _On(("b", "root"), loops=False)
    for stores, path in (((back, good), good.path), ((good, back), good.path), ((back,), back.path)):
        with fallback(*stores) as made:
            assert made.path == path
