"""The contract suites: what every implementation of a port must pass, yours too. Needs no test framework.

With pytest, subclass a suite and say how to open yours::

    class TestMyStore(StoreContract):
        def open(self) -> Store:
            return MyStore(...)

Failures are ``AssertionError`` raised by hand, so that ``python -O`` and the doctor still see them.
"""

from __future__ import annotations

import functools
import itertools
import secrets
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec

from deltarefit.errors import AlreadyExistsError, NotFoundError, RefitError, UnavailableError, UsageError
from deltarefit.ports import Store
from deltarefit.stores.wrappers import Prefixed

_P = ParamSpec("_P")

ODD_KEYS = (
    "",
    "/",
    "a//b",
    "/a",
    "a/",
    ".",
    "..",
    "a/../b",
    "a/./b",
    "a b",
    "a\\b",
    "a\n",
    "é",
    "a#1",
    "~tmp/a",
    "%2e%2e",
)
"""Keys that every store refuses with ``UsageError``, whatever its backend would make of them."""


def within(seconds: float) -> Callable[[Callable[_P, None]], Callable[_P, None]]:
    """Decorator: the function fails if it has not returned after so many seconds."""

    def decorate(function: Callable[_P, None]) -> Callable[_P, None]:
        @functools.wraps(function)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> None:
            _run_within(seconds, lambda: function(*args, **kwargs))

        return timed

    return decorate


def _run_within(seconds: float, call: Callable[[], None]) -> None:
    raised: list[BaseException] = []

    def body() -> None:
        try:
            call()
        except BaseException as err:  # noqa: BLE001  # handed to the caller below
            raised.append(err)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    thread.join(seconds)
    check(not thread.is_alive(), f"not done after {seconds:.0f} s")
    if raised:
        raise raised[0]


def check(good: bool, what: str) -> None:
    """Fail with ``what`` unless ``good``."""
    if not good:
        raise AssertionError(what)


def check_bytes(found: bytes, expected: bytes, what: str) -> None:
    """Fail, with lengths and the first difference but never the bytes, unless both are equal."""
    if type(found) is not bytes:
        raise AssertionError(f"{what}: expected bytes, found {type(found).__name__}")
    if found == expected:
        return
    pairs = enumerate(zip(found, expected, strict=False))
    where = next((number for number, (a, b) in pairs if a != b), min(len(found), len(expected)))
    raise AssertionError(
        f"{what}: expected {len(expected)} bytes, found {len(found)}; first difference at byte {where}"
    )


def check_raises(kind: type[RefitError], call: Callable[[], object], what: str) -> None:
    """Fail unless ``call`` raises exactly ``kind`` or a kind of it."""
    try:
        call()
    except kind:
        return
    except Exception as err:
        raise AssertionError(f"{what}: expected {kind.__name__}, found {type(err).__name__}: {err}") from err
    raise AssertionError(f"{what}: expected {kind.__name__}, found no error")


class StoreContract:
    """What a ``Store`` promises. Each test works below a fresh random prefix and leaves its objects there."""

    racers = 16
    rounds = 50
    races_at_once = 1
    """More than one where a lost create takes long: SeaweedFS lets losers wait for seconds."""
    large_bytes = 40 << 20

    def open(self) -> Store:
        """A store to test. Two calls give two views of the same objects."""
        raise NotImplementedError("open() must return the store to test")

    def room(self) -> Store:
        """A fresh, empty part of the store."""
        return Prefixed(self.open(), f"contract-{secrets.token_hex(6)}")

    @within(60)
    def test_gets_what_was_put(self) -> None:
        store = self.room()
        data = bytes(range(256)) * 5
        store.put("a/b/c", data)
        check_bytes(store.get("a/b/c"), data, "get after put")
        check(store.size("a/b/c") == len(data), "size after put")

    @within(60)
    def test_put_replaces(self) -> None:
        store = self.room()
        for data in (b"first", b"a longer second one", b"3"):
            store.put("k", data)
            check_bytes(store.get("k"), data, "get after the next put")
            check(store.size("k") == len(data), "size after the next put")

    @within(60)
    def test_put_twice_is_harmless(self) -> None:
        store = self.room()
        store.put("k", b"same")
        store.put("k", b"same")
        check_bytes(store.get("k"), b"same", "get after two puts")

    @within(60)
    def test_keeps_no_view_of_the_callers_buffer(self) -> None:
        store = self.room()
        buffer = bytearray(b"payload")
        store.put("k", memoryview(buffer))
        buffer[:] = b"garbage"
        check_bytes(store.get("k"), b"payload", "get after the caller reused its buffer")

    @within(60)
    def test_takes_a_view_of_any_element_size(self) -> None:
        store = self.room()
        store.put("k", memoryview(bytes(range(16))).cast("I"))
        check_bytes(store.get("k"), bytes(range(16)), "get after put of four 32-bit numbers")

    @within(60)
    def test_ranges(self) -> None:
        store = self.room()
        data = secrets.token_bytes(1000)
        store.put("k", data)
        for start, length in ((0, 1), (0, 1000), (999, 1), (10, 500), (3, None), (0, None), (7, 0)):
            stop = None if length is None else start + length
            check_bytes(store.get("k", start, length), data[start:stop], f"range {start}, {length}")

    @within(60)
    def test_a_range_past_the_end_gives_what_is_there(self) -> None:
        store = self.room()
        store.put("k", b"0123456789")
        for start, length, expected in ((8, 5, b"89"), (10, 5, b""), (50, 5, b""), (50, None, b"")):
            check_bytes(store.get("k", start, length), expected, f"range {start}, {length} of 10 bytes")

    @within(60)
    def test_refuses_negative_ranges(self) -> None:
        store = self.room()
        store.put("k", b"0123456789")
        check_raises(UsageError, lambda: store.get("k", -1), "start -1")
        check_raises(UsageError, lambda: store.get("k", 0, -1), "length -1")

    @within(60)
    def test_missing_keys(self) -> None:
        store = self.room()
        store.put("there/x", b"1")
        for key in ("absent", "there", "there/x/y", "there/xy"):
            check_raises(NotFoundError, functools.partial(store.get, key), f"get of missing {key!r}")
            check_raises(NotFoundError, functools.partial(store.get, key, 0, 0), f"empty get of missing {key!r}")
            check_raises(NotFoundError, functools.partial(store.get, key, 3, 4), f"range of missing {key!r}")
            check_raises(NotFoundError, functools.partial(store.size, key), f"size of missing {key!r}")

    @within(60)
    def test_creates_once(self) -> None:
        store = self.room()
        store.create("k", b"mine")
        check_raises(AlreadyExistsError, lambda: store.create("k", b"other"), "second create")
        check_raises(AlreadyExistsError, lambda: store.create("k", b"mine"), "second create with the same bytes")
        check_bytes(store.get("k"), b"mine", "get after a lost create")

    @within(60)
    def test_create_respects_put_and_delete(self) -> None:
        store = self.room()
        store.put("k", b"put")
        check_raises(AlreadyExistsError, lambda: store.create("k", b"created"), "create over a put")
        store.delete("k")
        store.create("k", b"created")
        check_bytes(store.get("k"), b"created", "get after delete and create")

    @within(240)
    def test_racing_creates_have_one_winner(self) -> None:
        """Racers on one key, while a reader looks on: whole objects only, and the first one stays."""
        store = self.room()
        races = [_Race(store, f"race/{n}", self.racers, extra=n % 3 * 40_000) for n in range(self.rounds)]
        with ThreadPoolExecutor(self.races_at_once) as pool:
            for race in [pool.submit(race.run) for race in races]:
                race.result(240)

    @within(120)
    def test_others_see_a_write_at_once(self) -> None:
        prefix = f"contract-{secrets.token_hex(6)}"
        writer, reader = (Prefixed(self.open(), prefix) for _ in range(2))
        for number in range(20):
            check_raises(NotFoundError, lambda: reader.get("k"), "get before the write")
            write = writer.create if number % 2 else writer.put
            write("k", b"%d" % number)
            check_bytes(reader.get("k"), b"%d" % number, "get through another view, right after the write")
            writer.delete("k")

    @within(120)
    def test_readers_see_whole_objects(self) -> None:
        """While two versions replace each other, no reader sees a mixture, a part, or nothing."""
        store = self.room()
        versions = [bytes([fill]) * (100_000 + fill) for fill in (1, 2)]
        store.put("k", versions[0])

        written = threading.Event()

        def read() -> int:
            reads = 0
            while reads < 30 or not written.is_set():
                check(store.get("k") in versions, "a reader saw neither the old nor the new object")
                reads += 1
            return reads

        with ThreadPoolExecutor(2) as pool:
            readers = [pool.submit(read) for _ in range(2)]
            try:
                for data in itertools.islice(itertools.cycle(versions), 60):
                    store.put("k", data)
            finally:
                written.set()
        check(all(reader.result() for reader in readers), "no reader read")

    @within(60)
    def test_lists_by_prefix_sorted_by_key(self) -> None:
        store = self.room()
        keys = ["a/b/c", "a/x", "a-b/x", "a.b/x", "ab/x", "z"]
        for size, key in enumerate(keys):
            store.put(key, bytes(size))
        sizes = {key: size for size, key in enumerate(keys)}
        check_equal(list(store.list()), sorted(sizes.items()), "list of everything")
        for prefix in ("a", "a/"):
            check_equal(list(store.list(prefix)), [("a/b/c", 0), ("a/x", 1)], f"list below {prefix!r}")
        check_equal(list(store.list("a/x")), [], "list below an object")
        check_equal(list(store.list("none")), [], "list below nothing")

    @within(120)
    def test_lists_more_than_one_page(self) -> None:
        store = self.room()
        keys = [f"p/{number:04}" for number in range(1100)]
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda key: store.put(key, b"x"), keys))
        check_equal([key for key, _ in store.list("p")], keys, "list of 1100 objects")

    @within(60)
    def test_deletes(self) -> None:
        store = self.room()
        store.put("a/b", b"1")
        store.put("a/c", b"2")
        for _ in range(2):
            store.delete("a/b")
        store.delete("never/was/there")
        check_raises(NotFoundError, lambda: store.get("a/b"), "get after delete")
        check_bytes(store.get("a/c"), b"2", "get of the neighbour of a deleted object")

    @within(60)
    def test_empty_objects(self) -> None:
        store = self.room()
        store.put("put", b"")
        store.create("created", b"")
        for key in ("put", "created"):
            check_bytes(store.get(key), b"", f"get of empty {key!r}")
            check_bytes(store.get(key, 0, 10), b"", f"range of empty {key!r}")
            check(store.size(key) == 0, f"size of empty {key!r}")
        check_raises(AlreadyExistsError, lambda: store.create("created", b""), "second create, empty")

    @within(240)
    def test_large_objects(self) -> None:
        store = self.room()
        data = secrets.token_bytes(self.large_bytes)
        store.put("large", memoryview(data))
        check_bytes(store.get("large"), data, "get of a large object")
        start, length = len(data) // 3, len(data) // 2
        check_bytes(store.get("large", start, length), data[start : start + length], "large range")
        check(store.size("large") == len(data), "size of a large object")
        store.create("created", data[: len(data) // 2])
        check_raises(AlreadyExistsError, lambda: store.create("created", data), "second large create")
        check_bytes(store.get("created"), data[: len(data) // 2], "get of a large created object")

    @within(60)
    def test_refuses_odd_keys(self) -> None:
        store = self.open()
        for key in (*ODD_KEYS, "x" * 2000):
            what = f"key {key[:20]!r}"
            check_raises(UsageError, functools.partial(store.put, key, b""), f"put of {what}")
            check_raises(UsageError, functools.partial(store.create, key, b""), f"create of {what}")
            check_raises(UsageError, functools.partial(store.get, key), f"get of {what}")
            check_raises(UsageError, functools.partial(store.size, key), f"size of {what}")
            check_raises(UsageError, functools.partial(store.delete, key), f"delete of {what}")

    @within(60)
    def test_says_where_it_is(self) -> None:
        url = self.open().url
        check(isinstance(url, str) and url != "", f"url is {url!r}")


def check_equal(found: Sequence[object], expected: Sequence[object], what: str) -> None:
    """Fail with both (cut to some hundred characters) unless they are equal."""
    check(found == expected, f"{what}: expected {str(expected)[:300]}, found {str(found)[:300]}")


class _Race:
    """One round: ``racers`` creates of one key at once, each with bytes of its own."""

    def __init__(self, store: Store, key: str, racers: int, extra: int) -> None:
        self._store = store
        self._key = key
        self._start = threading.Barrier(racers + 1, timeout=30)
        self._over = threading.Event()
        self._entries = [b"racer-%d-" % number + secrets.token_bytes(16 + extra) for number in range(racers)]

    def run(self) -> None:
        """Raises ``AssertionError`` unless exactly one racer won and everybody sees its bytes."""
        with ThreadPoolExecutor(len(self._entries) + 1) as pool:
            self._judge(*self._race(pool))

    def _race(self, pool: ThreadPoolExecutor) -> tuple[list[bool], bytes]:
        looking = pool.submit(self._look_on)
        try:
            jobs = [pool.submit(self._enter, entry) for entry in self._entries]
            won = [job.result(120) for job in jobs]
        finally:
            self._over.set()
        looking.result(120)
        return won, self._store.get(self._key)

    def _judge(self, won: list[bool], final: bytes) -> None:
        check(sum(won) == 1, f"{sum(won)} of {len(won)} racers won {self._key}: create is not atomic here")
        check_bytes(final, self._entries[won.index(True)], f"get of {self._key} after the race")

    def _enter(self, entry: bytes) -> bool:
        """Whether ``entry`` won, as the protocol decides it: after any doubt by reading back."""
        self._start.wait()
        with_answer = self._create(entry)
        found = self._store.get(self._key)
        check(found in self._entries, f"a racer read {len(found)} bytes of {self._key} that nobody wrote")
        check(not with_answer or found == entry, f"create of {self._key} succeeded, yet others' bytes are there")
        return found == entry

    def _create(self, entry: bytes, tries: int = 5) -> bool:
        """Whether ``create`` returned; False if it said the key is taken."""
        for _ in range(tries):
            try:
                self._store.create(self._key, entry)
            except AlreadyExistsError:
                return False
            except UnavailableError:  # unknown: the next try tells
                continue
            return True
        raise AssertionError(f"create of {self._key} gave no answer {tries} times")

    def _look_on(self) -> None:
        """Read during the race: nothing, then one whole entry for ever."""
        self._start.wait()
        first: bytes | None = None
        while not self._over.is_set():
            try:
                found = self._store.get(self._key)
            except NotFoundError:
                check(first is None, f"{self._key} vanished during the race")
                continue
            check(found in self._entries, f"a reader saw {len(found)} bytes of {self._key} that nobody wrote")
            check(first in (None, found), f"{self._key} changed during the race: create overwrote it")
            first = found
