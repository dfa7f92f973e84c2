"""What a relay keeps: objects that arrive in chunks, and the bounded directory in which they lie."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from deltarefit.errors import NotFoundError, UnavailableError, UsageError
from deltarefit.relay import cache as cache_room
from deltarefit.relay.arriving import Arrival
from deltarefit.relay.cache import Cache
from deltarefit.relay.meter import Meter
from deltarefit.relay.objects import Objects
from deltarefit.stores import open_store
from deltarefit.stores.wrappers import Fault, Faulty, Kind

CHUNK = 1000


def test_readers_get_what_is_there_but_never_the_last_byte_unproven(tmp_path: Path) -> None:
    """Against a slow model, in every order of arrival."""
    rng = random.Random(5)
    for size in (1, 999, 1000, 1001, 3500, 5000):
        arrival = Arrival("0" * 64, size, tmp_path / "x", CHUNK)
        there = bytearray(size)
        for start, length in rng.sample(arrival.chunks, len(arrival.chunks)):
            arrival.arrived(start)
            there[start : start + length] = b"\1" * length
            for position in {0, size // 2, size - 1, rng.randrange(size)}:
                run = next((at for at in range(position, size) if not there[at]), size)
                assert arrival.contiguous(position) == run
                assert arrival.readable(position) == max(position, min(run, size - 1))
        assert arrival.contiguous(0) == size
        arrival.prove()
        assert arrival.readable(0) == size


class Room:
    """A cache, a parent and what fetches from one into the other, inside one event loop."""

    def __init__(self, directory: Path, limit: int = 1 << 20) -> None:
        self.memory = open_store(f"memory://relay-cache-{secrets.token_hex(8)}")
        self.faults: list[Fault] = []
        self.parent = Faulty(self.memory, self.faults)
        self.meter = Meter()
        self.cache = Cache(directory, limit, CHUNK)
        self.objects = Objects(self.parent, self.cache, 4, self.meter)

    def put(self, size: int) -> tuple[str, str, bytes]:
        data = secrets.token_bytes(size)
        sha256 = hashlib.sha256(data).hexdigest()
        key = f"a/0000000001/pl/{sha256}"
        self.memory.put(key, data)
        return key, sha256, data

    async def close(self) -> None:
        await self.objects.close()
        self.cache.close()


def in_room(tmp_path: Path, play: Callable[[Room], object], limit: int = 1 << 20) -> None:
    async def body() -> None:
        room = Room(tmp_path / "cache", limit)
        try:
            await asyncio.wait_for(play(room), 60)  # type: ignore[arg-type]
        finally:
            await room.close()

    asyncio.run(body())


def test_many_who_want_one_object_cost_one_fetch(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        key, sha256, data = room.put(10 * CHUNK + 7)
        found = await asyncio.gather(*(room.objects.get(key, sha256) for _ in range(20)))
        assert {id(arrival) for arrival in found} == {id(found[0])}
        await found[0].settled()
        assert found[0].path.read_bytes() == data
        assert room.meter.numbers()["fetched_bytes"] == len(data)
        again = await room.objects.get(key, sha256)
        assert again is found[0]

    in_room(tmp_path, play)


def test_empty_objects_arrive(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        key, sha256, _ = room.put(0)
        arrival = await room.objects.get(key, sha256)
        await arrival.settled()
        assert arrival.readable(0) == 0

    in_room(tmp_path, play)


@pytest.mark.parametrize("kind", [Kind.CORRUPT, Kind.TRUNCATE, Kind.BEFORE])
def test_a_damaged_or_broken_fetch_is_never_proven_and_not_remembered(tmp_path: Path, kind: Kind) -> None:
    async def play(room: Room) -> None:
        key, sha256, data = room.put(5 * CHUNK)
        room.parent._plan = [Fault(kind, "get", first=3, last=3)]
        room.parent._seen = [0]
        arrival = await room.objects.get(key, sha256)
        with pytest.raises(UnavailableError):
            await arrival.settled()
        assert not arrival.proven
        assert arrival.readable(0) < len(data)
        assert room.cache.used == 0
        assert [path.name for path in (tmp_path / "cache").iterdir()] == ["lock"]
        fresh = await room.objects.get(key, sha256)
        await fresh.settled()
        assert fresh.path.read_bytes() == data

    in_room(tmp_path, play)


def test_a_missing_object_is_missing(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        with pytest.raises(NotFoundError):
            await room.objects.get("a/0000000001/pl/" + "0" * 64, "0" * 64)
        assert room.cache.used == 0

    in_room(tmp_path, play)


def test_old_files_are_proven_before_they_are_served(tmp_path: Path) -> None:
    kept: dict[str, bytes] = {}

    async def fill(room: Room) -> None:
        for _ in range(2):
            key, sha256, data = room.put(3 * CHUNK)
            await (await room.objects.get(key, sha256)).settled()
            kept[sha256] = data

    async def use(room: Room) -> None:
        good, bad = kept
        for sha256, data in kept.items():
            room.memory.put(f"a/0000000001/pl/{sha256}", data)
        arrival = await room.objects.get(f"a/0000000001/pl/{good}", good)
        assert arrival.proven
        assert room.meter.numbers()["fetched_bytes"] == 0
        arrival = await room.objects.get(f"a/0000000001/pl/{bad}", bad)
        await arrival.settled()
        assert arrival.path.read_bytes() == kept[bad]
        assert room.meter.numbers()["fetched_bytes"] == 3 * CHUNK
        assert room.meter.numbers()["damaged"] == 1

    in_room(tmp_path, fill)
    damaged = tmp_path / "cache" / list(kept)[1]
    damaged.write_bytes(b"\0" + damaged.read_bytes()[1:])
    (tmp_path / "cache" / ("f" * 64 + ".part")).write_bytes(b"half")
    in_room(tmp_path, use)
    assert not list((tmp_path / "cache").glob("*.part"))


def test_who_doubts_a_copy_has_it_proven(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        key, sha256, data = room.put(3 * CHUNK)
        arrival = await room.objects.get(key, sha256)
        await arrival.settled()
        arrival.path.write_bytes(bytes(len(data)))
        assert await room.objects.get(key, sha256) is arrival  # nobody has said anything
        fresh = await room.objects.get(key, sha256, prove=True)
        await fresh.settled()
        assert fresh.path.read_bytes() == data

    in_room(tmp_path, play)


def test_the_limit_holds_and_the_oldest_go_first(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        objects = [room.put(2 * CHUNK) for _ in range(6)]
        for key, sha256, _ in objects:
            await (await room.objects.get(key, sha256)).settled()
            assert room.cache.used <= 8 * CHUNK
            assert (
                sum(path.stat().st_size for path in (tmp_path / "cache").iterdir() if path.name != "lock") <= 8 * CHUNK
            )
        assert [room.cache.get(sha256) is not None for _, sha256, _ in objects] == [
            False,
            False,
            True,
            True,
            True,
            True,
        ]
        big = room.put(9 * CHUNK)
        assert await room.objects.get(big[0], big[1]) is None
        assert room.cache.used == 8 * CHUNK

    in_room(tmp_path, play, limit=8 * CHUNK)


def test_what_is_fetched_ahead_pushes_out_only_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def play(room: Room) -> None:
        objects = [room.put(2 * CHUNK) for _ in range(4)]
        for key, sha256, data in objects[:2]:
            await (await room.objects.get(key, sha256, size=len(data))).settled()
        key, sha256, data = objects[2]
        assert await room.objects.get(key, sha256, size=len(data)) is None
        room.cache.get(objects[0][1]).read = True
        assert await room.objects.get(key, sha256, size=len(data)) is not None
        assert room.cache.get(objects[0][1]) is None
        assert room.cache.get(objects[1][1]) is not None
        key, sha256, data = objects[3]
        assert await room.objects.get(key, sha256, size=len(data)) is None
        monkeypatch.setattr(cache_room, "UNREAD_S", -1.0)  # nobody will read what an aborted attempt left
        assert await room.objects.get(key, sha256, size=len(data)) is not None

    in_room(tmp_path, play, limit=4 * CHUNK)


def test_a_file_that_is_being_read_may_go(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        key, sha256, data = room.put(2 * CHUNK)
        arrival = await room.objects.get(key, sha256)
        await arrival.settled()
        with arrival.path.open("rb") as file:
            room.cache.drop(arrival)
            assert file.read() == data

    in_room(tmp_path, play)


def test_a_directory_is_one_relays_and_holds_nothing_else(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "one", 1000, CHUNK)
    with pytest.raises(UnavailableError, match="in use"):
        Cache(tmp_path / "one", 1000, CHUNK)
    cache.close()
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "model.safetensors").write_bytes(b"precious")
    with pytest.raises(UsageError, match="no cache"):
        Cache(tmp_path / "two", 1000, CHUNK)
    assert (tmp_path / "two" / "model.safetensors").read_bytes() == b"precious"


def test_a_full_disk_costs_the_cache_and_not_the_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    async def play(room: Room) -> None:
        key, sha256, _ = room.put(2 * CHUNK)
        monkeypatch.setattr(os, "posix_fallocate", full)
        assert await room.objects.get(key, sha256) is None
        monkeypatch.undo()
        assert room.cache.used == 0
        assert await room.objects.get(key, sha256) is not None

    in_room(tmp_path, play)


def test_ending_lets_nobody_wait(tmp_path: Path) -> None:
    async def play(room: Room) -> None:
        gate = threading.Event()
        key, sha256, _ = room.put(20 * CHUNK)
        slow = room.memory.get
        room.parent.get = lambda *a: (gate.wait(20), slow(*a))[1]  # type: ignore[method-assign]
        arrival = await room.objects.get(key, sha256)
        waiting = asyncio.ensure_future(arrival.settled())
        await asyncio.sleep(0.05)
        closing = asyncio.ensure_future(room.objects.close())
        gate.set()
        await closing
        with pytest.raises(UnavailableError, match="ending"):
            await waiting

    in_room(tmp_path, play)


def test_many_who_ask_while_it_is_hashed_cost_no_second_fetch(tmp_path: Path) -> None:
    """All chunks are there, the proof is not: neither a second proof nor a second fetch, and no wrong byte."""

    async def play(room: Room) -> None:
        for _ in range(30):
            key, sha256, data = room.put(8 * CHUNK + 1)
            stop = asyncio.Event()

            async def ask(key: str = key, sha256: str = sha256, data: bytes = data, stop: asyncio.Event = stop) -> None:
                while not stop.is_set():
                    arrival = await room.objects.get(key, sha256, prove=random.random() < 0.5)
                    stop_at = arrival.readable(0)
                    assert arrival.path.read_bytes()[:stop_at] == data[:stop_at]
                    await asyncio.sleep(0)

            asking = [asyncio.ensure_future(ask()) for _ in range(4)]
            await (await room.objects.get(key, sha256)).settled()
            await asyncio.sleep(0.005)
            stop.set()
            await asyncio.gather(*asking)
        assert room.meter.numbers()["fetched_bytes"] == 30 * (8 * CHUNK + 1)
        assert room.meter.numbers()["damaged"] == 0

    in_room(tmp_path, play)
