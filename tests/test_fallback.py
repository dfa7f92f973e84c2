"""Several stores as one: whatever fails where, the bytes are right, and what has arrived is not fetched again."""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.errors import (
    AlreadyExistsError,
    NotFoundError,
    RefitError,
    StorageFullError,
    UnavailableError,
    UsageError,
)
from deltarefit.ports import Store, Watched
from deltarefit.stores import open_store
from deltarefit.stores.directory import DirectoryStore
from deltarefit.stores.fallback import FIRST_REST_S, LONGEST_REST_S, ROUNDS, Fallback
from deltarefit.stores.wrappers import Fault, Faulty, Kind, Retrying
from deltarefit.testing import StoreContract
from tests.told_stores import Clock, Told, Watching

CHUNK = 7
DATA = bytes(range(100))
KEY = f"a/0000000001/pl/{hashlib.sha256(DATA).hexdigest()}"


def away(_: int = 0) -> Exception:
    return UnavailableError("planned")


def full(_: int = 0) -> Exception:
    return StorageFullError("planned: full")


@contextlib.contextmanager
def fallback(*stores: Store, clock: Callable[[], float] | None = None, streams: int = 4) -> Iterator[Fallback]:
    made = Fallback(stores, chunk_bytes=CHUNK, streams=streams, clock=clock or Clock(), sleep=lambda _: None)
    with contextlib.closing(made):
        yield made


def verbs(store: Told) -> list[object]:
    return [call[0] for call in store.calls]


@pytest.fixture(autouse=True, scope="class")
def _directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """For the classes below: the root that all views show, and what is to be closed at the end."""
    if (here := request.cls) is None:
        yield
        return
    here._root = tmp_path_factory.mktemp("root")
    with contextlib.ExitStack() as here._opened:
        yield


class _Contract(StoreContract):
    """Several views of one directory, each of which fails now and then in every verb that may be tried again."""

    rounds = 10
    large_bytes = 12 << 20
    views = 1
    _root: Path
    _opened: contextlib.ExitStack

    def open(self) -> Store:
        plan = [
            Fault(kind, verb, first=first, last=None, every=20)
            for verb in ("get", "put", "size", "list", "delete")
            for kind, first in ((Kind.BEFORE, 2), (Kind.AFTER, 5))
        ]
        stores = [Faulty(DirectoryStore(self._root), plan) for _ in range(self.views)]
        made = Fallback(stores, chunk_bytes=1 << 20, sleep=lambda _: None)
        self._opened.callback(made.close)
        return made


class TestOneStore(_Contract):
    """Threads that share one failing store may each meet several of its faults in a row."""

    def open(self) -> Store:
        return Retrying(super().open(), attempts=8, backoff=0.001)


class TestThreeStores(_Contract):
    views = 3


fates = st.lists(st.sampled_from(["good", "good", "before", "after"]), max_size=12)


@settings(max_examples=300, deadline=None)
@given(
    size=st.integers(0, 60),
    start=st.integers(0, 70),
    length=st.none() | st.integers(0, 80),
    plans=st.lists(fates, max_size=2),
    reliable=st.integers(0, 2),
    steps=st.lists(st.floats(0, 40), min_size=1, max_size=5),
)
def test_whatever_fails(
    size: int, start: int, length: int | None, plans: list[list[str]], reliable: int, steps: list[float]
) -> None:
    """One store answers; the others fail as drawn, before or after they have read, while time goes on in leaps."""
    data = DATA[:size]
    key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
    clock = Clock()

    def store(plan: list[str], number: int, kind: str) -> Told:
        def say(call: int) -> Exception | None:
            clock.now += steps[call % len(steps)]
            return away() if call < len(plan) and plan[call] != "good" else None

        return Told(str(number), {key: data}, say, after=kind == "after")

    stores = [store(plan, number, plan[0] if plan else "") for number, plan in enumerate(plans)]
    stores.insert(min(reliable, len(stores)), Told("reliable", {key: data}))
    with fallback(*stores, clock=clock) as made:
        assert made.get(key, start, length) == data[start : None if length is None else start + length]
        made._pool.shutdown(wait=True)
    arrived = [(at, piece) for store in stores for at, piece in store.gave if piece]
    assert len({at for at, _ in arrived}) == len(arrived), "a chunk that had arrived was fetched again"
    assert sum(len(piece) for _, piece in arrived) == len(data[start : None if length is None else start + length])


@pytest.mark.parametrize(
    ("size", "length", "gets"),
    [
        (5, None, 1),
        (5, 6, 1),
        (CHUNK, CHUNK + 1, 2),
        (3 * CHUNK, 3 * CHUNK + 1, 4),
        (3 * CHUNK - 1, 3 * CHUNK, 3),
    ],
)
def test_no_more_requests_than_chunks(size: int, length: int | None, gets: int) -> None:
    """``length`` as readers of the log ask: a byte more than there should be. No size is asked for."""
    data = DATA[:size]
    key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
    store = Told("s", {key: data})
    with fallback(store) as made:
        assert made.get(key, 0, length) == data
    assert verbs(store) == ["get"] * gets


def test_nothing_is_asked_ahead_once_the_end_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four are under way when the short one comes, and no more follow."""
    data, ahead = DATA[: CHUNK + 3], []
    key = f"a/0000000001/pl/{hashlib.sha256(data).hexdigest()}"
    with fallback(Told("s", {key: data})) as made:
        submit = made._pool.submit
        monkeypatch.setattr(made._pool, "submit", lambda *call: ahead.append(call) or submit(*call))
        assert made.get(key) == data
    assert len(ahead) == 4


def test_a_parent_that_dies_half_way() -> None:
    """What had come from it stays; the rest comes from the next."""
    first = Told("first", {KEY: DATA}, lambda call: away() if call >= 6 else None)
    second = Told("second", {KEY: DATA})
    with fallback(first, second) as made:
        assert made.get(KEY) == DATA
    assert len(first.gave) == 6
    assert not {at for at, _ in first.gave} & {at for at, data in second.gave if data}


def test_chunks_come_side_by_side() -> None:
    """Four are under way before any of them ends."""
    barrier = threading.Barrier(4, timeout=20)

    def say(call: int) -> Exception | None:
        return None

    class Slow(Told):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if CHUNK <= start < 5 * CHUNK:
                barrier.wait()
            return super().get(key, start, length)

    with fallback(Slow("slow", {KEY: DATA}, say)) as made:
        assert made.get(KEY, 0, 10 * CHUNK) == DATA[: 10 * CHUNK]


def test_an_error_ends_what_was_asked_ahead() -> None:
    """One thread is free: the second chunk is gone, the third is being fetched, the others are never asked for."""
    over = threading.Event()

    class Gone(Told):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if start == 2 * CHUNK:
                over.wait(20)
            if start == CHUNK:
                self.calls.append((start,))
                raise NotFoundError("pruned meanwhile")
            return super().get(key, start, length)

    store, busy = Gone("s", {KEY: DATA}), threading.Event()
    with fallback(store) as made:
        for _ in range(3):
            made._pool.submit(busy.wait, 20)
        with pytest.raises(NotFoundError):
            made.get(KEY)
        over.set()
        busy.set()
        made._pool.shutdown(wait=True)
    assert {call[-1] if len(call) == 1 else call[2] for call in store.calls} <= {0, CHUNK, 2 * CHUNK}


def test_other_objects_come_whole_from_one_store() -> None:
    """Versions of what can change are never mixed."""
    old, new = Told("old", {"head": b"o" * 50}, lambda call: away() if call else None), Told("new", {"head": b"n" * 50})
    with fallback(old, new) as made:
        assert [made.get("head"), made.get("head")] == [b"o" * 50, b"n" * 50]
    assert [call[2:] for call in old.calls + new.calls] == [(0, None)] * 3


def test_not_there_is_an_answer() -> None:
    first, second = Told("first", {}), Told("second", {KEY: DATA, "head": b"x"})
    with fallback(first, second) as made:
        for key in (KEY, "head"):
            with pytest.raises(NotFoundError):
                made.get(key)
    assert second.calls == []


def test_a_call_that_is_wrong_is_wrong_everywhere() -> None:
    first, second = Told("first", {}, lambda _: UsageError("no such token")), Told("second", {})
    with fallback(first, second) as made, pytest.raises(UsageError):
        made.put("k", b"")
    assert second.calls == []


def test_all_away() -> None:
    """Each is asked all the same, each time; the error says what each of them said."""
    stores = [Told(name, {}, lambda _, name=name: UnavailableError(f"{name} is away")) for name in "abc"]  # type: ignore[misc]
    with fallback(*stores) as made:
        for _ in range(2):
            with pytest.raises(UnavailableError) as caught:
                made.get("k")
            assert all(f"{name} is away" in str(caught.value) for name in "abc")
        assert made.url == "memory://a,memory://b,memory://c"
    assert [len(store.calls) for store in stores] == [2 * ROUNDS] * 3


def test_one_that_failed_rests_longer_each_time_and_is_preferred_again() -> None:
    clock, sick = Clock(), [True]
    first = Told("first", {"head": b"x"}, lambda _: away() if sick[0] else None)
    second = Told("second", {"head": b"x"})
    with fallback(first, second, clock=clock) as made:

        def asked_first() -> bool:
            before = len(first.calls)
            made.get("head")
            return len(first.calls) > before

        rest = FIRST_REST_S
        for _ in range(8):
            assert asked_first()
            clock.now += 0.9 * rest
            assert not asked_first()
            clock.now += 0.2 * rest
            rest = min(2 * rest, LONGEST_REST_S)
        sick[0] = False
        assert asked_first()
        assert asked_first()
        sick[0] = True
        assert asked_first()
        clock.now += 1.1 * FIRST_REST_S
        assert asked_first(), "it had answered: its rest is short again"


@pytest.mark.parametrize("answer", [NotFoundError("k"), AlreadyExistsError("k"), UsageError("k")])
def test_any_answer_ends_the_long_rests(answer: RefitError) -> None:
    clock, says = Clock(), [away()]
    first, second = Told("first", {}, lambda _: says[0]), Told("second", {"k": b""})
    with fallback(first, second, clock=clock) as made:
        for _ in range(6):
            made.get("k")
            clock.now += LONGEST_REST_S
        says[0] = answer
        with pytest.raises(type(answer)):
            made.get("k")
        says[0] = away()
        made.get("k")
        clock.now += 1.1 * FIRST_REST_S
        before = len(first.calls)
        made.get("k")
        assert len(first.calls) > before


@pytest.mark.parametrize("after", [False, True])
def test_create_is_asked_once_and_read_back_elsewhere(after: bool) -> None:
    objects: dict[str, bytes] = {}
    first, second = Told("first", objects, away, after), Told("second", objects)
    with fallback(first, second) as made:
        with pytest.raises(UnavailableError):
            made.create("run", b"mine")
        assert (verbs(first), verbs(second)) == (["create"], [])
        with contextlib.suppress(NotFoundError):
            assert made.get("run") == b"mine"
        assert (verbs(first), verbs(second)) == (["create"], ["get"])
        assert ("run" in objects) == after


@pytest.mark.parametrize("verb", ["put", "create"])
def test_a_full_store_is_an_answer(verb: str) -> None:
    """The root is full whoever is asked: nobody else is, and the store is not left out."""
    first, second = Told("first", {"head": b""}, lambda call: None if call else full()), Told("second", {"head": b""})
    with fallback(first, second) as made:
        with pytest.raises(StorageFullError):
            getattr(made, verb)("k", b"")
        made.get("head")
    assert (verbs(first), verbs(second)) == ([verb, "get"], [])


def test_writes_and_lists_go_on_at_the_next() -> None:
    objects: dict[str, bytes] = {}
    for call in (lambda s: s.put("a", b"1"), lambda s: [*s.list()], lambda s: s.delete("a")):
        first, second = Told("first", objects, away, after=True), Told("second", objects)
        objects["b"] = b"22"
        with fallback(first, second) as made:
            found = call(made)
            assert found in (None, [("a", 1), ("b", 2)])
        assert (len(first.calls), len(second.calls)) == (1, 1)
    assert list(objects) == ["b"]


def test_news_begin_anew_at_another_store() -> None:
    sick = [False]
    first = Watching("first", {}, lambda _: away() if sick[0] else None)
    second = Watching("second", {})
    with fallback(Told("bucket", {}), first, second) as made:
        assert isinstance(made, Watched)
        cursor = made.news("", 0)[0]
        cursor = made.news(cursor, 0)[0]
        assert first.calls == [("news", ""), ("news", "memory://first-1")]
        sick[0] = True
        cursor = made.news(cursor, 0)[0]
        cursor = made.news(cursor, 0)[0]
        assert second.calls == [("news", ""), ("news", "memory://second-1")]


def test_whoever_can_tell_what_appears_is_asked() -> None:
    sick = [True]
    first = Watching("first", {"k": b""}, lambda _: away() if sick[0] else None)
    second = Watching("second", {"k": b""})
    with fallback(Told("bucket", {}), first, second) as made:
        with contextlib.suppress(UnavailableError):
            made.wait("k", 0)
        assert made.wait("k", 0)
        assert (len(first.calls), len(second.calls)) == (1, 1)
    with fallback(Told("bucket", {})) as made, pytest.raises(UnavailableError):
        made.wait("k", 0)


def test_open_store_of_several(tmp_path: Path) -> None:
    """A dead relay before a directory; and what may stand in such a list."""
    store = open_store(f"http://127.0.0.1:1,file://{tmp_path}", token=secrets.token_hex(16))
    with contextlib.closing(store):  # type: ignore[type-var]
        assert isinstance(store, Fallback)
        store.put(KEY, DATA)
        assert DirectoryStore(tmp_path).get(KEY) == DATA == store.get(KEY)
        assert store.url == f"http://127.0.0.1:1,file://{tmp_path}"
    for url in (
        "https://u:hunter2@h",
        "https://h?hunter2",
        "https://h,ftp://hunter2",
        "https://h,",
        "https://h/hunter2",
    ):
        with pytest.raises(UsageError) as caught:
            open_store(url)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(UsageError, match="token"):
        open_store(str(tmp_path), token="x")
