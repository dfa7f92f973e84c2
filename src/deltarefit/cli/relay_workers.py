"""Several processes for one relay, where one core is not enough: the first fetches, the others listen.

The first is a relay on loopback, with a token that only its workers know; they are relays in front of it, all on one
port: the kernel deals out connections. Each has a part of the cache's limit for itself. A worker that dies is started
again; all end with the first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deltarefit.addresses import shown
from deltarefit.errors import UnavailableError, UsageError

LOOK_S = 0.5
"""Between two looks at the workers."""
AGAIN_S = 2.0
"""Before a worker that died is started again."""
START_S = 60.0
END_S = 15.0


@contextlib.contextmanager
def reserved(host: str, port: int) -> Iterator[int]:
    """The time in which a port is ours to share: bound, so that nobody else gets it, but not listened on. The port, if
    ``port`` is 0."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe, socket.socket(family, socket.SOCK_STREAM) as holder:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        try:
            probe.bind((host, port))  # not shared: fails also if others share the port among themselves
            port = probe.getsockname()[1]
            probe.close()
            holder.bind((host, port))
        except OSError as error:
            found = error.strerror or str(error)
            raise UsageError(f"cannot listen on {shown(host)}:{port}", found=found) from None
        yield int(holder.getsockname()[1])


class Workers:
    """``count`` processes that run ``arguments`` after ``deltarefit``, each with a ``--dir`` of its own below
    ``directory``. Their stdin is a pipe that ends with this process, and they end with it."""

    def __init__(self, count: int, arguments: Sequence[str], directory: Path, token: str) -> None:
        self._arguments, self._directory = arguments, directory
        self._environment = {**os.environ, "DELTAREFIT_TOKEN": token}
        self._running: dict[int, subprocess.Popen[str]] = {}
        self._count = count

    async def __aenter__(self) -> Workers:
        try:
            await asyncio.gather(*(self._start(number) for number in range(self._count)))
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                await asyncio.to_thread(process.wait, END_S)
            except subprocess.TimeoutExpired:
                process.kill()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    async def watch(self) -> None:
        """For ever: a worker that has died is started again."""
        while True:
            await asyncio.sleep(LOOK_S)
            for number, process in list(self._running.items()):
                if process.poll() is not None:
                    await asyncio.sleep(AGAIN_S)
                    with contextlib.suppress(UnavailableError):
                        await self._start(number)

    async def _start(self, number: int) -> None:
        """Returns once it listens."""
        command = [
            sys.executable,
            "-m",
            "deltarefit",
            *self._arguments,
            "--dir",
            str(self._directory / f"w{number}"),
        ]
        process = subprocess.Popen(  # noqa: S603
            command,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._running[number] = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), START_S)
        except asyncio.TimeoutError:  # another class before Python 3.11
            line = ""
        if not line:
            process.kill()
            raise UnavailableError("a worker of the relay did not start", next_step="See its message above.")
