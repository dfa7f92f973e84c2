"""Some actors, what all of them are asked, and their end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import ray
from ray.exceptions import ActorUnschedulableError, RayActorError

from deltarefit.errors import RefitError, UnavailableError

Self = TypeVar("Self", bound="Actors")

START_S = 120.0
"""Until all actors of one ``start`` run."""
ASK_S = 10.0
"""Until an actor that was asked counts as one that does not answer."""
END_S = 20.0
"""For followers to end between two steps and for relays to end what they send; then they are killed."""


class Silent(UnavailableError):
    """An actor does not answer: it is not there yet, being started anew, or gone with its node."""


class Actors:
    """Actors with a name each. Ends them at the end of a ``with`` block."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self._handles: list[Any] = []

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, name: str, handle: Any) -> None:
        """One more actor."""
        self.names.append(name)
        self._handles.append(handle)

    def close(self) -> None:
        """End all actors and their processes for good; idempotent."""
        handles, self._handles, self.names = self._handles, [], []
        if not ray.is_initialized():  # they have ended with Ray
            return
        _answers(handles, "close", END_S)
        for handle in handles:
            ray.kill(handle, no_restart=True)

    def ask(self, method: str, timeout_s: float = ASK_S) -> list[Any]:
        """All answers, in order; a ``Silent`` instead of one that does not come."""
        return _answers(self._handles, method, timeout_s)

    def await_started(self, timeout_s: float) -> list[RefitError | None]:
        """What is wrong with each by now. ``UnavailableError`` for the first that does not run."""
        answers = self.ask("trouble", timeout_s)
        for name, answer in zip(self.names, answers, strict=True):
            if isinstance(answer, Silent):
                step = "If its node has no CPU left: options={'num_cpus': 0}."
                raise UnavailableError(f"{name} did not start", found=answer.found, next_step=step)
        return answers

    def status(self) -> list[dict[str, Any]]:
        """One for each actor: ``name``, ``alive`` (whether it answers), ``error`` (empty if all is well), and what it
        tells of itself: ``pid``, ``node``, ``version`` of followers, the fields of ``GET /v1/status`` of relays."""
        told = zip(self.names, self.ask("status"), strict=True)
        return [
            {"name": name, "alive": False, "error": str(answer)}
            if isinstance(answer, Silent)
            else {**answer, "name": name, "alive": True}
            for name, answer in told
        ]


def _answers(handles: Sequence[Any], method: str, timeout_s: float) -> list[Any]:
    asked = [getattr(handle, method).remote() for handle in handles]
    done = set(ray.wait(asked, num_returns=len(asked), timeout=timeout_s)[0]) if asked else set()
    return [_answer(one, timeout_s, done=one in done) for one in asked]


def _answer(asked: Any, timeout_s: float, *, done: bool) -> Any:
    if not done:
        return Silent("an actor does not answer", found=f"nothing within {timeout_s:g} s")
    try:
        return ray.get(asked)
    except (RayActorError, ActorUnschedulableError) as error:
        return Silent("an actor does not answer", found=" ".join(str(error).split())[:500])
