"""Many who ask the same share an answer, and none gets one that is older than his question; whose turn is next."""

from __future__ import annotations

import asyncio

import pytest

from deltarefit.errors import NotFoundError
from deltarefit.relay.sharing import Shared
from deltarefit.relay.turns import Turns


def test_two_questions_for_any_number_at_once() -> None:
    async def play() -> None:
        shared, put = Shared(), 0

        async def question() -> int:
            nonlocal put
            put += 1
            mine = put
            await asyncio.sleep(0.02)
            return mine

        first = asyncio.ensure_future(shared.ask("k", question))
        await asyncio.sleep(0.01)
        rest = await asyncio.gather(*(shared.ask("k", question) for _ in range(50)), shared.ask("other", question))
        assert await first == 1
        assert len(set(rest[:50])) == 1
        assert rest[0] > 1  # theirs was put after they had come
        assert put == 3
        assert not shared._running
        assert not shared._next

    asyncio.run(play())


def test_no_answer_is_older_than_the_question() -> None:
    """A writer between two who ask: the second sees what was written."""

    async def play() -> None:
        shared, value = Shared(), 0

        async def question() -> int:
            seen = value
            await asyncio.sleep(0.001)
            return seen

        async def one() -> None:
            nonlocal value
            for _ in range(50):
                value += 1
                wrote = value
                assert await shared.ask("k", question) >= wrote

        await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(play())


def test_errors_are_shared_and_not_kept() -> None:
    async def play() -> None:
        shared, fail = Shared(), True

        async def question() -> str:
            await asyncio.sleep(0)
            if fail:
                raise NotFoundError("not yet")
            return "there"

        found = await asyncio.gather(*(shared.ask("k", question) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(error, NotFoundError) for error in found)
        fail = False
        assert await shared.ask("k", question) == "there"

    asyncio.run(play())


def test_one_who_goes_away_takes_nobody_along() -> None:
    async def play() -> None:
        shared, go = Shared(), asyncio.Event()

        async def question() -> str:
            await go.wait()
            return "there"

        first = asyncio.ensure_future(shared.ask("k", question))
        second = asyncio.ensure_future(shared.ask("k", question))
        await asyncio.sleep(0)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        go.set()
        assert await second == "there"

    asyncio.run(play())


def test_what_is_wanted_goes_first_and_no_turn_is_lost() -> None:
    async def play() -> None:
        turns, order, running = Turns(2), [], 0
        wanted: set[int] = set()

        async def one(number: int) -> None:
            nonlocal running
            async with turns.one(lambda: number in wanted):
                running += 1
                assert running <= 2
                order.append(number)
                await asyncio.sleep(0.001)
                running -= 1

        tasks = [asyncio.ensure_future(one(number)) for number in range(10)]
        await asyncio.sleep(0)
        wanted.update({7, 8})
        tasks[5].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert order == [0, 1, 7, 8, 2, 3, 4, 6, 9]
        await asyncio.wait_for(asyncio.gather(one(10), one(11)), 10)

    asyncio.run(play())


def test_a_turn_given_to_one_who_goes_away_goes_on() -> None:
    async def play() -> None:
        turns, done = Turns(1), []

        async def one(number: int) -> None:
            async with turns.one(lambda: False):
                done.append(number)

        async with turns.one(lambda: False):
            tasks = [asyncio.ensure_future(one(number)) for number in range(3)]
            await asyncio.sleep(0)
        tasks[0].cancel()  # in the very moment in which its turn was given
        await asyncio.gather(*tasks, return_exceptions=True)
        assert done == [1, 2]
        assert turns._free == 1

    asyncio.run(play())
