"""An HTTP proxy between an object client and a real server, which breaks what passes through it: seeded, and counted.

It knows HTTP/1.1 as far as object stores speak it, and forwards heads untouched, so that signatures stay valid. One
request of a connection at a time; every request goes to the server over a connection of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import threading
from collections import Counter
from dataclasses import dataclass
from types import TracebackType

LIMIT = 1 << 20
"""Most bytes of a head."""
SERVER_S = 20.0
REFUSAL = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 36\r\n\r\n<Error><Code>SlowDown</Code></Error>"


class Fault(enum.Enum):
    DELAY = "the request waits"
    LOST = "reset before the server has seen the request"
    AMBIGUOUS = "the server has done it, and the answer is dropped"
    CUT = "reset in the middle of the answer"
    HALF = "closed in the middle of the answer"
    CORRUPT = "a bit of the body of a GET is flipped"
    TWICE = "sent to the server twice; either answer may come back"
    BURST = "this one and the next few are answered 503"


@dataclass
class Message:
    """A request or an answer: its head with the empty line, its body as framed on the wire, where the first byte of
    content stands in that."""

    head: bytes
    body: bytes = b""
    content: int = 0

    @property
    def verb(self) -> str:
        return self.head.split(b" ", 1)[0].decode("latin-1")

    @property
    def bytes(self) -> bytes:
        return self.head + self.body

    def field(self, name: bytes) -> bytes | None:
        for line in self.head.split(b"\r\n")[1:]:
            key, _, value = line.partition(b":")
            if key.strip().lower() == name:
                return value.strip()
        return None


class FaultProxy:
    """Listens on a free port of ``host`` in a thread of its own. ``rate`` of the requests meet one of ``faults``;
    assign to either at any time."""

    def __init__(self, server: tuple[str, int], seed: int = 0, host: str = "127.0.0.1", port: int = 0) -> None:
        self.rate = 0.0
        self.faults: tuple[Fault, ...] = tuple(Fault)
        self.struck: Counter[Fault] = Counter()
        self.requests = 0
        self.host, self.port = host, port
        self._server, self._random, self._refusing = server, random.Random(seed), 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault-proxy", daemon=True)

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        listening = self._loop.run_until_complete(asyncio.start_server(self._serve, self.host, self.port, limit=LIMIT))
        self.port = listening.sockets[0].getsockname()[1]
        self._ready.set()
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        listening.close()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    # ------------------------------------------------------------------------------------ one connection

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.TimeoutError, asyncio.CancelledError):
            while (request := await read_message(reader, b"")) is not None:
                self.requests += 1
                if not await self._answer(request, writer):
                    break
                await writer.drain()
        with contextlib.suppress(OSError, RuntimeError):
            writer.close()

    def _fault(self, request: Message) -> Fault | None:
        """What happens to a request; faults that cannot happen to it do not."""
        if self._refusing:
            self._refusing -= 1
            return Fault.BURST
        if self._random.random() >= self.rate:
            return None
        fault = self._random.choice(self.faults)
        if fault is Fault.CORRUPT and request.verb != "GET":
            return None
        if fault is Fault.BURST:
            self._refusing = self._random.randint(1, 4)
        self.struck[fault] += 1
        return fault

    async def _answer(self, request: Message, writer: asyncio.StreamWriter) -> bool:
        """False if the connection is over."""
        fault = self._fault(request)
        if fault is Fault.BURST:
            writer.write(REFUSAL)
            return True
        if fault is Fault.DELAY:
            await asyncio.sleep(self._random.uniform(0.01, 0.4))
        if fault is Fault.LOST:
            return _reset(writer)
        answers = [await asyncio.wait_for(self._forward(request), SERVER_S)]
        if fault is Fault.TWICE:
            answers.append(await asyncio.wait_for(self._forward(request), SERVER_S))
        if fault is Fault.AMBIGUOUS:
            return _reset(writer)
        data = self._random.choice(answers)
        if fault is Fault.CORRUPT and data.body:
            data = self._flipped(data)
        if fault in (Fault.CUT, Fault.HALF):
            writer.write(data.bytes[: self._random.randrange(len(data.bytes))])
            await writer.drain()
            return _reset(writer) if fault is Fault.CUT else False
        writer.write(data.bytes)
        return True

    def _flipped(self, answer: Message) -> Message:
        body = bytearray(answer.body)
        body[self._random.randrange(answer.content, len(body))] ^= 1 << self._random.randrange(8)
        return Message(answer.head, bytes(body))

    async def _forward(self, request: Message) -> Message:
        reader, writer = await asyncio.open_connection(*self._server, limit=LIMIT)
        try:
            writer.write(request.bytes)
            await writer.drain()
            answer = await read_message(reader, request.verb.encode())
            while answer is not None and answer.head.startswith(b"HTTP/1.1 100"):
                answer = await read_message(reader, request.verb.encode())
            if answer is None:
                raise ConnectionResetError("the server closed")
            return answer
        finally:
            writer.close()


def _reset(writer: asyncio.StreamWriter) -> bool:
    writer.transport.abort()  # type: ignore[attr-defined]
    return False


async def read_message(reader: asyncio.StreamReader, answer_to: bytes) -> Message | None:
    """One message, whole; None at the end. ``answer_to`` is the verb of the request that it answers, if any."""
    try:
        message = Message(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise
        return None
    status = message.head.split(b" ", 2)[1] if answer_to else b""
    if answer_to == b"HEAD" or status[:1] == b"1" or status in (b"204", b"304"):
        return message
    if (message.field(b"transfer-encoding") or b"").lower() == b"chunked":
        message.body, message.content = await _chunks(reader)
    elif (length := message.field(b"content-length")) is not None:
        message.body = await reader.readexactly(int(length))
    elif answer_to:
        message.body = await reader.read(-1)
    return message


async def _chunks(reader: asyncio.StreamReader) -> tuple[bytes, int]:
    """A chunked body as framed, and where the first content stands in it."""
    parts, content = [], 0
    while True:
        line = await reader.readuntil(b"\r\n")
        size = int(line.split(b";")[0], 16)
        content = content or len(line)
        parts += [line, await reader.readexactly(size + 2)]
        if not size:
            return b"".join(parts), content
