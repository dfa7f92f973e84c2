"""What runs inside the actors: one relay, or one follower, in threads of its own. Ray asks from the main thread.

What goes wrong is kept and told when it is asked for: an actor that raises in its constructor
would be dead for good, with its error as mere text.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import ray

from deltarefit.cli.engines import engine_at
from deltarefit.cli.following import Errand, Report, name_of
from deltarefit.cli.keys import notary
from deltarefit.cli.output import Flags, Output
from deltarefit.cli.patience import DIRECTORY, ENGINE, Patience, Stop
from deltarefit.cli.relaying import CHUNK_BYTES
from deltarefit.cli.verbs import Call
from deltarefit.errors import RefitError, UnavailableError
from deltarefit.events import Event, ignore
from deltarefit.ray.plans import FollowerPlan, RelayPlan
from deltarefit.relay.auth import Auth
from deltarefit.relay.cache import Cache
from deltarefit.relay.running import serving
from deltarefit.relay.serving import Relay, Settings
from deltarefit.relay_api import Role
from deltarefit.stores.relay import RelayStore
from deltarefit.targets.agent import private_directory
from deltarefit.tls import client_context, server_context

END_S = 10.0
"""For a follower to end between two steps."""
MOST_CACHES = 64
"""Relays of one user on one node that keep their caches in one place."""


class RelayActor:
    """A relay that serves until ``close``."""

    def __init__(self, plan: RelayPlan) -> None:
        self._stack = ExitStack()
        self._own: RelayStore | None = None
        self._trouble: RefitError | None = None
        try:
            self._own = self._serve(plan)
        except RefitError as error:
            self._trouble = error
            self._stack.close()

    def _serve(self, plan: RelayPlan) -> RelayStore:
        """The relay as its clients see it."""
        access, stack = plan.access, self._stack
        store = access.enter().open(plan.parents, plan.name)
        stack.callback(getattr(store, "close", lambda: None))
        cache = stack.enter_context(_cache(plan))
        settings = Settings(auth=Auth.of_token(access.token, Role.FOLLOW), streams=plan.streams, name=plan.name)
        tls = server_context(Path(access.cert), Path(access.key) if access.key else None) if access.cert else None
        url = stack.enter_context(
            serving(lambda: Relay(store, cache, settings, _warn), plan.host, plan.port, tls=tls, plain=True)
        )
        checked = client_context(Path(access.ca) if access.ca else None) if tls else None
        own = RelayStore(url, token=access.token, tls=checked)
        stack.callback(own.close)
        return own

    def trouble(self) -> RefitError | None:
        """Why it does not serve."""
        return self._trouble

    def status(self) -> dict[str, Any]:
        """What it says of itself over HTTP, as ``GET /v1/status``."""
        if self._own is None:
            return {**_self(), "error": str(self._trouble)}
        try:
            return {**_self(), "error": "", "url": self._own.url, **self._own.status()}
        except RefitError as error:
            return {**_self(), "error": str(error), "url": self._own.url}

    def close(self) -> None:
        """End what it sends, let go of the cache."""
        self._stack.close()


class FollowerActor:
    """A follower that follows until ``close``, or until something happens that no retry cures."""

    def __init__(self, plan: FollowerPlan) -> None:
        self._told, self._stop = _Told(), Stop()
        self._trouble: RefitError | None = None
        self._thread = threading.Thread(target=self._live, args=(plan,), name="follower", daemon=True)
        self._thread.start()

    def _live(self, plan: FollowerPlan) -> None:
        try:
            self._follow(plan)
        except RefitError as error:
            self._trouble = error
        except Exception as error:  # noqa: BLE001  # as the command line does: told, with a name
            self._trouble = RefitError(f"unexpected: {type(error).__name__}: {error}")
        if self._trouble is not None:
            self._told.error(self._trouble, self._trouble.exit_code)

    def _follow(self, plan: FollowerPlan) -> None:
        call = Call(self._told, plan.access.enter())
        engine = engine_at(plan.vllm, plan.sglang, plan.in_flight)
        into = Path(plan.into) if plan.into else None
        how = {
            "name": name_of(str(into.absolute()) if into else engine.url if engine else ""),
            "poll_s": plan.poll_s,
            "prove": plan.prove,
            "switch_run": plan.switch_run,
            "trust": notary([Path(path) for path in plan.trust]).trust,
        }
        patience = Patience(self._told, self._stop, ENGINE if engine else DIRECTORY, endless=True)
        report = Report(self._told, ignore, patience)
        errand = Errand(call, plan.parents, False, how, self._stop, patience, report)
        if into is not None:
            errand.keep_directory(into)
        elif engine is not None:
            errand.keep_engine(engine, None, None)

    def trouble(self) -> RefitError | None:
        """Why it follows no more."""
        return self._trouble

    def status(self) -> dict[str, Any]:
        """The version held (0: none known yet), and why it follows no more."""
        error = str(self._trouble) if self._trouble else ""
        return {**_self(), "error": error, "version": self._told.version}

    def close(self) -> None:
        """End between two steps; whoever has no time for that is killed, and goes on from there."""
        self._stop.number = signal.SIGTERM
        self._thread.join(END_S)


class _Told(Output):
    """What ``follow`` prints goes to the log of the actor, but for the version held: that is kept."""

    def __init__(self) -> None:
        super().__init__(Flags(no_progress=True))
        self.version = 0

    def result(self, text: object, body: Mapping[str, object]) -> None:
        """A version is held."""
        self.version = int(str(body["version"]))


def _self() -> dict[str, Any]:
    return {"pid": os.getpid(), "node": ray.get_runtime_context().get_node_id()}


def _warn(event: Event) -> None:
    Output(Flags()).warn(event.text)


@contextlib.contextmanager
def _cache(plan: RelayPlan) -> Iterator[Cache]:
    """The first cache directory that no relay uses: one that is started anew finds its own, or one as good, as objects
    are named by their content. Below the system's place for temporary files it is removed at the end."""
    base = private_directory(Path(plan.directory or Path(tempfile.gettempdir()) / f"deltarefit-relays-{os.geteuid()}"))
    for number in range(MOST_CACHES):
        path = base / f"{number}"
        try:
            cache = Cache(path, plan.cache_bytes, CHUNK_BYTES)
        except UnavailableError as error:
            if not str(error.found).startswith("process"):
                raise
            continue  # in use
        with contextlib.closing(cache):
            yield cache
            if plan.directory is None:
                shutil.rmtree(path, ignore_errors=True)
        return
    raise UnavailableError(f"{MOST_CACHES} relays use {base}", next_step="Give another directory.")
