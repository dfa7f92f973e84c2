"""What verbs share that work on a serving engine: which one, who may use it, and how to look at it for a moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from deltarefit.catalogs import check_catalog
from deltarefit.cli.settings import engine_key
from deltarefit.errors import BaseMismatch, UnavailableError, UsageError
from deltarefit.localfiles import disk_errors, take_lock
from deltarefit.manifest import Header, State
from deltarefit.runlog import RunLog
from deltarefit.targets.agent import private_directory, run_directory
from deltarefit.targets.agent_client import AgentClient
from deltarefit.targets.engine import Control, EngineTarget, read_note
from deltarefit.targets.sglang_control import SglangControl
from deltarefit.targets.vllm_control import VllmControl


class Engine(Control, Protocol):
    """A server that can be refitted."""

    @property
    def url(self) -> str: ...

    sockets: list[str]
    """What ``agents`` gave last; none before that."""
    serving: bool
    """Whether generation ran when the follower last looked: not paused, not asleep."""
    guard: Callable[[Sequence[str]], None]
    """Called with the sockets before ``agents`` gives them out; may raise."""

    def version(self) -> str:
        """The version that it says it serves."""


def engine_at(vllm: str | None, sglang: str | None, in_flight: str = "keep") -> Engine | None:
    """The engine that the options name, if they do; not looked at yet."""
    if vllm is not None and sglang is not None:
        raise UsageError("two engines are given", expected="one of --vllm and --sglang")
    if vllm is not None:
        return VllmControl(vllm, in_flight=in_flight, key=engine_key())
    return None if sglang is None else SglangControl(sglang, in_flight=in_flight, key=engine_key())


def target_at(engine: Control) -> EngineTarget:
    """Its live weights; not attached to yet."""
    return EngineTarget(engine, private_directory(run_directory()) / "spool")


class HasFollowerError(UnavailableError):
    """Another ``follow`` keeps the engine; not waited for."""


@contextmanager
def sole_follower(engine: Engine) -> Iterator[None]:
    """No other ``follow`` keeps the same engine meanwhile: two would take it from each other. Its address is locked at
    once; what it is by any other name too, beside rank 0's socket, whenever its agents are asked for.

    Raises ``HasFollowerError`` that names the other's pid, here and from ``engine.agents``."""
    name = hashlib.sha256(engine.url.encode()).hexdigest()[:16]
    handle = _locked(engine, private_directory(run_directory()) / f"follow-{name}.lock")
    beside = _Beside(engine)
    engine.guard = beside.take
    try:
        yield
    finally:
        engine.guard = lambda sockets: None
        beside.close()
        os.close(handle)


class _Beside:
    """The lock beside the socket of an engine's rank 0: that of the incarnation which was seen last."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path: Path | None = None
        self._handle = -1

    def take(self, sockets: Sequence[str]) -> None:
        """Hold it for these; an older one is let go."""
        path = Path(f"{sockets[0]}.lock") if sockets else None
        if path is None or path == self._path:
            return
        handle = _locked(self._engine, path)
        self.close()
        self._path, self._handle = path, handle
        for old in path.parent.glob("agent-*.sock.lock"):  # of engines that are gone
            if not old.with_suffix("").exists():
                old.unlink(missing_ok=True)

    def close(self) -> None:
        if self._path is not None:
            os.close(self._handle)
            self._path = None


def _locked(engine: Engine, path: Path) -> int:
    try:
        with disk_errors(f"lock {path}"):
            return take_lock(path, Path(engine.url))
    except UnavailableError as error:
        if not str(error.found).startswith("process"):
            raise
        what = f"the engine at {engine.url} has a follower already"
        raise HasFollowerError(what, found=error.found, next_step="Run one follower per engine.") from error


@contextmanager
def borrowed(engine: Control, log: RunLog) -> Iterator[tuple[EngineTarget, Header | None]]:
    """An engine's weights, to be read, with their header; a follower that keeps them waits and goes on by itself.

    Raises ``BaseMismatch``, before anything is attached to, if they follow another run, and ``UnavailableError`` in
    the middle of a refit.
    """
    engine.check()
    header = peek(engine.agents())
    if header is not None and header.run != log.run:
        raise BaseMismatch("the engine follows another run", expected=log.run, found=header.run)
    if header is not None and header.state is not State.CLEAN:
        step = "Try again in a moment; or a follower was killed in a refit: start follow again."
        raise UnavailableError("the engine is being refitted", found=f"state {header.state.value}", next_step=step)
    with closing(target_at(engine)) as target:
        target.attach(log.run, log.catalog)
        if target.catalog is not None:
            check_catalog(target.catalog, log.catalog)
        yield target, target.read_header()


def peek(sockets: Sequence[str]) -> Header | None:
    """The header that an engine's agents keep, without attaching; None if there is none, or it is of an engine that
    was partly started anew since."""
    hellos = []
    for path in sockets:
        with closing(AgentClient(path)) as client:
            hellos.append(client.hello())
    text = hellos[0]["header"] if hellos else None
    if text is None:
        return None
    incarnations, header = read_note(text)
    return header if incarnations == [hello["incarnation"] for hello in hellos] else None


def held(target: EngineTarget) -> int:
    """The version that an engine holds; 0 if none, or if it is gone."""
    with contextlib.suppress(UnavailableError):
        header = target.read_header()
        return header.version if header and header.state is State.CLEAN else 0
    return 0
