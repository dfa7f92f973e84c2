"""The live weights of a serving engine, spread over the worker processes of its ranks, as one ``ports.LiveTarget``.

An agent in each worker (``agent``) does the work on its rank; here all ranks are asked side by side, and what they say
is put together so that every canonical element counts once (``ranks``). ``Control`` is the engine's own interface.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from deltarefit.errors import (
    FormatError,
    IntegrityError,
    NotFoundError,
    RefitError,
    UnavailableError,
    UsageError,
)
from deltarefit.localfiles import disk_errors
from deltarefit.manifest import Catalog, Header, PayloadRef, State
from deltarefit.protocol.messages import Op
from deltarefit.records import Digest
from deltarefit.targets.agent import alive, private_directory
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.ranks import RankGroup

T = TypeVar("T")
_FILE = re.compile(r"payload-(\d+)-[0-9a-f]+")


class Control(Protocol):
    """What an engine offers beside its weights. Calls have deadlines of their own and raise ``UnavailableError``."""

    def check(self) -> None:
        """Raises ``UnavailableError`` if the engine does not serve, ``UsageError`` for a state or an option in which
        its weights cannot be kept up (asleep, with LoRA adapters, ...)."""

    def agents(self) -> Sequence[str]:
        """Sockets of the agents, rank by rank; started where there is none yet."""

    def pause(self) -> None:
        """Stop generation; returns when none runs. May be called twice."""

    def reset_cache(self) -> None:
        """Forget all that was computed with older weights."""

    def set_version(self, version: int, digest: Digest) -> None:
        """Say which version is served from now on."""

    def resume(self) -> None:
        """Let generation go on. May be called twice."""


class EngineTarget:
    """``ports.LiveTarget`` over the agents of one engine.

    ``spool`` is a directory of the follower's that only its user can enter; the workers read payloads from there while
    they are handed over, and nothing stays. ``timings`` has the seconds of the last ``resume``'s cache reset.
    """

    def __init__(self, control: Control, spool: Path) -> None:
        self._control = control
        self._spool = private_directory(spool)
        self._remove_leftovers()
        self._clients: list[AgentClient] = []
        self._pool: ThreadPoolExecutor | None = None
        self._incarnations: list[str] = []
        self._plans: list[str] = []
        self._catalog: Catalog | None = None
        self._group: RankGroup | None = None
        self.timings: dict[str, float] = {}

    @property
    def catalog(self) -> Catalog | None:
        return self._catalog

    @property
    def group(self) -> RankGroup:
        """Who holds what. ``UsageError`` before ``attach``."""
        if self._group is None:
            raise UsageError("an engine's weights were used before they were attached to", next_step="Call attach.")
        return self._group

    def close(self) -> None:
        """Let go of the agents, at once; they go on, and finish what they were asked for."""
        for client in self._clients:
            client.close()
        self._clients = []
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None

    # ------------------------------------------------------------------------------------ who is there

    def attach(self, run: str, catalog: Catalog) -> None:
        self.close()
        self._control.check()
        paths = list(self._control.agents())
        self._pool = ThreadPoolExecutor(max(1, len(paths)), thread_name_prefix="refit-rank")
        try:
            for path in paths:
                self._clients.append(AgentClient(path))
            hellos = self._all(AgentClient.hello) if paths else []
            self._incarnations = self._met(hellos)
            quiet = all(self._all(lambda client: client.ready_for(catalog.identity)))
            with nullcontext() if quiet else self._standing_still():
                found = self._all(lambda client: client.attach(run, catalog))
                self._plans = [identity for _, identity in found]
                group = RankGroup(catalog, [plan for plan, _ in found])
                self._each(lambda rank, client: client.assign(group.assignment(rank)))
        except BaseException:
            self.close()
            raise
        self._catalog, self._group = catalog, group

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        """Recording a plan and proving it run the engine's loader, which may set what a forward pass reads. An engine
        that somebody left in the middle of a write is not resumed."""
        self._control.pause()
        try:
            yield
        finally:
            if not self._is_dirty():
                self._control.resume()

    def _is_dirty(self) -> bool:
        with suppress(RefitError):
            text = self._first().hello()["header"]
            return text is not None and read_note(text)[1].state is not State.CLEAN
        return False

    def watch(self) -> None:
        self._control.check()
        for rank, hello in enumerate(self._all(AgentClient.hello)):
            if hello["incarnation"] != self._incarnations[rank]:
                raise UnavailableError(
                    f"rank {rank} of the engine was started anew",
                    expected=self._incarnations[rank],
                    found=hello["incarnation"],
                    next_step="Attach again.",
                )
            if not hello["attached"]:
                step = "Run one follower per engine."
                raise UnavailableError(f"another follower has attached to rank {rank}", next_step=step)
            if hello["plan"] != self._plans[rank]:
                raise UnavailableError(f"the weights of rank {rank} have moved", next_step="Attach again.")

    def proof(self) -> Digest | None:
        return self._first().proof()

    # ------------------------------------------------------------------------------------ the header

    def read_header(self) -> Header | None:
        """Noted by rank 0; it counts only as long as all ranks are those that it was written for."""
        text = self._first().header()
        if text is None:
            return None
        incarnations, header = read_note(text)
        return header if incarnations == self._incarnations else None

    def write_header(self, header: Header) -> None:
        self._first().set_header(note(self._incarnations, header))

    def seed(self, catalog: Catalog, files: Mapping[str, bytes]) -> None:
        if catalog != self.group.catalog:
            raise UsageError("an engine's weights are seeded with another catalog than they were attached with")

    def finish_seed(self) -> None:
        """The bits are where users look already."""

    # ------------------------------------------------------------------------------------ payloads

    def stage(self, ref: PayloadRef, data: bytes) -> tuple[Digest, Digest]:
        with self._file(ref, data) as file:
            sums = self._all(lambda client: client.stage(ref, file))
        now = [{id_: pair[0] for id_, pair in mine.items()} for mine in sums]
        then = [{id_: pair[1] for id_, pair in mine.items()} for mine in sums]
        # what failed attempts left in copies need not agree where it is overwritten
        return self.group.total(now, alike=not ref.overwrites), self.group.total(then)

    def staged(self, ref: PayloadRef) -> bool:
        return all(self._all(lambda client: client.staged(ref)))

    def live(self, ref: PayloadRef) -> Digest:
        """``NotFoundError`` if a rank does not keep the payload any more."""
        found = self._all(lambda client: client.live(ref))
        sums = [mine for mine in found if mine is not None]
        if len(sums) < len(found):
            raise NotFoundError(f"payload {ref.sha256[:12]} is not staged", next_step="Stage it.")
        return self.group.total(sums)

    def write(self, ref: PayloadRef, op: Op) -> None:
        if op is not Op.SKIP:
            self._all(lambda client: client.write(ref, op))

    def fill(self, ref: PayloadRef, data: bytes) -> None:
        with self._file(ref, data) as file:
            self._all(lambda client: client.fill(ref, file))

    def digest(self) -> Digest:
        return self.group.total(self._all(AgentClient.digest))

    def drop(self) -> None:
        self._all(AgentClient.drop)

    # ------------------------------------------------------------------------------------ users of the weights

    def pause(self) -> None:
        self._control.pause()

    def resume(self) -> None:
        started = time.perf_counter()
        self._control.reset_cache()
        self.timings = {"cache": time.perf_counter() - started}
        header = self.read_header()
        if header is not None and header.state is State.CLEAN:
            self._control.set_version(header.version, header.digest)
        self._control.resume()

    # ------------------------------------------------------------------------------------ all ranks

    def _met(self, hellos: list[dict[str, Any]]) -> list[str]:
        """The incarnations of agents that are the ranks of one engine, in order."""
        found = [(hello["rank"], hello["size"]) for hello in hellos]
        expected = [(rank, len(hellos)) for rank in range(len(hellos))]
        if not hellos or found != expected:
            step = "Restart the engine, or look into DELTAREFIT_RUN_DIR for agents of several."
            raise UnavailableError(
                "the agents are not the ranks of one engine", expected=expected, found=found, next_step=step
            )
        return [str(hello["incarnation"]) for hello in hellos]

    def _first(self) -> AgentClient:
        if not self._clients:
            raise UnavailableError("no engine is attached to", next_step="Attach first.")
        return self._clients[0]

    def _all(self, work: Callable[[AgentClient], T]) -> list[T]:
        return self._each(lambda rank, client: work(client))

    def _each(self, work: Callable[[int, AgentClient], T]) -> list[T]:
        """What all ranks answer, asked side by side; when it returns or raises, none is asked any more. Of several
        errors one that no retry cures counts, the lowest rank's first."""
        self._first()
        pool = self._pool
        if pool is None:
            raise UnavailableError("no engine is attached to", next_step="Attach first.")
        futures = [pool.submit(work, rank, client) for rank, client in enumerate(self._clients)]
        failures = [error for future in futures if (error := future.exception()) is not None]
        failures.sort(key=lambda error: isinstance(error, RefitError) and error.retryable)
        if failures:
            raise failures[0]
        return [future.result() for future in futures]

    @contextmanager
    def _file(self, ref: PayloadRef, data: bytes) -> Iterator[Path]:
        """A payload in a file of its own, for as long as it is handed over."""
        path = self._spool / f"payload-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            self._put(path, data)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _put(self, path: Path, data: bytes) -> None:
        """Into the spool, made anew if a cleaner of temporary files took it. Never ``NotFoundError``: that would say
        that the store has lost the payload."""
        try:
            private_directory(self._spool)
            with disk_errors(f"payload file {path}"):
                handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                with os.fdopen(handle, "wb") as file:
                    file.write(data)
        except NotFoundError as error:
            step = "Keep whatever cleans temporary files away from it, and follow again."
            raise UnavailableError(f"spool {self._spool} went away", found=error.found, next_step=step) from error

    def _remove_leftovers(self) -> None:
        """Files of followers that were killed."""
        for path in self._spool.glob("payload-*"):
            match = _FILE.fullmatch(path.name)
            if match and not alive(int(match[1])):
                with suppress(OSError):
                    path.unlink()


def note(incarnations: Sequence[str], header: Header) -> str:
    """A header as rank 0 keeps it: with the incarnations of all agents whose weights it speaks of."""
    return json.dumps({"incarnations": list(incarnations), "header": header.to_bytes().decode()})


def read_note(text: str) -> tuple[list[str], Header]:
    """Incarnations and header of a note. ``IntegrityError`` if it is damaged."""
    try:
        body = json.loads(text)
        incarnations, header = [str(name) for name in body["incarnations"]], str(body["header"])
    except (ValueError, KeyError, TypeError) as error:
        raise IntegrityError("the note of a header is damaged", found=text[:80]) from error
    try:
        return incarnations, Header.from_bytes(header.encode(), "header")
    except FormatError as error:
        raise IntegrityError(f"the note of a header is damaged: {error.what}") from error
