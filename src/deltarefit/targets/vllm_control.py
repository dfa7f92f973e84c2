"""``engine.Control`` of a vLLM server, over HTTP: its development endpoints and our extension in its workers.

    VLLM_SERVER_DEV_MODE=1 vllm serve CKPT --worker-extension-cls deltarefit.targets.vllm.RefitWorker

What becomes of requests that run when a refit begins is the user's choice (``in_flight``):

- ``keep`` (default): they stand still while weights are written. What was computed for them with older weights is
  thrown away (vLLM preempts them), and computed anew from their prompt and the tokens said so far when generation goes
  on. No token is lost; those before the refit were chosen by the older version, those after it by the newer one.
- ``wait``: they end first, new ones wait; the pause lasts as long as the longest of them.
- ``abort``: they end at once, with ``finish_reason`` "abort".
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.records import Digest
from deltarefit.targets.http import HttpClient, Reply

NAME = "vLLM"
EXTENSION = "deltarefit.targets.vllm.RefitWorker"
START = f"Start it with VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls {EXTENSION}."
IN_FLIGHT = ("keep", "wait", "abort")
AGENTS_S = 120.0
"""Starting agents; nothing of the weights is looked at yet."""
PAUSE_S, WAIT_S = 120.0, 3600.0
"""Until generation stands still: after the step at hand, or after the longest request."""
CACHE_S = 60.0
_RETRY_S = 0.05
_SLEEP_STATE = re.compile(r'^vllm:engine_sleep_state\{[^}]*sleep_state="awake"[^}]*\} +([0-9.eE+-]+)', re.MULTILINE)


class VllmControl:
    """One vLLM server at ``url``. ``in_flight`` is one of ``IN_FLIGHT``; ``key`` is the server's API key.

    ``serving``: generation ran when it was last looked at. ``guard`` is called with the sockets of agents before they
    are given out."""

    def __init__(self, url: str, *, in_flight: str = "keep", key: str | None = None) -> None:
        if in_flight not in IN_FLIGHT:
            raise UsageError("bad choice for requests in flight", expected=IN_FLIGHT, found=in_flight)
        self._http = HttpClient(url, NAME, key=key)
        self._in_flight = in_flight
        self.sockets: list[str] = []
        self.serving = False
        self.guard: Callable[[Sequence[str]], None] = lambda sockets: None

    @property
    def url(self) -> str:
        return self._http.url

    def check(self) -> None:
        """``UnavailableError`` while it does not answer or is asleep, ``UsageError`` for what is no vLLM server, or one
        without development endpoints."""
        try:
            self.serving = self._runs()
        except BaseException:
            self.serving = False
            raise

    def agents(self) -> list[str]:
        """Sockets of the agents, rank by rank; each worker starts its own when asked first."""
        size = self._world_size()
        path = "/collective_rpc"
        reply = self._http.request("POST", path, {"method": "deltarefit_agent"}, deadline_s=AGENTS_S)
        if not reply.ok:
            raise self._no_agents(reply)
        answer = self._http.parsed(reply, path)
        found = answer.get("results") if isinstance(answer, dict) else None
        if not isinstance(found, list) or not all(isinstance(one, dict) and "socket" in one for one in found):
            raise self._http.stranger(path, answer)
        refuse_objections(NAME, found)
        if len(found) != size:
            raise UnavailableError("not all workers of vLLM answer", expected=size, found=len(found))
        sockets = [str(one["socket"]) for one in sorted(found, key=lambda one: int(one["rank"]))]
        self.guard(sockets)
        self.sockets = sockets
        return sockets

    def pause(self) -> None:
        self.serving = False
        query = {"mode": self._in_flight, "clear_cache": "false"}  # what is cached counts until weights are written
        self._http.post("/pause", query=query, deadline_s=WAIT_S if self._in_flight == "wait" else PAUSE_S)

    def reset_cache(self) -> None:
        """All keys and values, also those of requests that stand still, and what was encoded from images."""
        until = time.monotonic() + CACHE_S
        query = {"reset_running_requests": "true", "reset_external": "true"}
        while not (self._http.post("/reset_prefix_cache", query=query, deadline_s=CACHE_S) or {}).get("success"):
            if time.monotonic() > until:
                raise UnavailableError(
                    "vLLM does not forget what older weights computed",
                    found=f"/reset_prefix_cache without success for {CACHE_S:g} s",
                    next_step="Look for transfers of its cache that do not end; it stays paused meanwhile.",
                )
            time.sleep(_RETRY_S)
        self._http.request("POST", "/reset_encoder_cache", deadline_s=CACHE_S)

    def set_version(self, version: int, digest: Digest) -> None:
        self._http.post("/update_weight_version", {"new_version": str(version)})

    def resume(self) -> None:
        self._http.post("/resume")
        self.serving = True

    def version(self) -> str:
        """What the engine says that it serves: a version, or "default" before the first refit."""
        return str(self._asked("/weight_info").get("weight_version"))

    # ------------------------------------------------------------------------------------ what may be wrong

    def _runs(self) -> bool:
        """Whether generation runs; else it is paused."""
        answer = self._asked("/is_sleeping")
        if not isinstance(answer, dict) or "is_sleeping" not in answer:
            raise self._http.stranger("/is_sleeping", answer)
        if answer["is_sleeping"]:
            self._check_awake()
        return not answer["is_sleeping"]

    def _asked(self, path: str) -> Any:
        """The answer to a GET that only the development endpoints know."""
        reply = self._http.request("GET", path)
        if reply.status != 404:
            self._http.check(reply, path)
            return self._http.parsed(reply, path)
        if self._http.who() != NAME:
            raise self._http.stranger(path, reply.shown)
        raise UsageError(f"vLLM at {self.url} has no development endpoints", found=f"no {path}", next_step=START)

    def _check_awake(self) -> None:
        """vLLM also calls a paused engine sleeping: only its metrics tell whether the weights are there."""
        reply = self._http.request("GET", "/metrics")
        states = [float(value) for value in _SLEEP_STATE.findall(reply.text)] if reply.ok else []
        if states and all(states):
            return
        step = "Wake it up (POST /wake_up); it is refitted then."
        if not states:
            step = "Wake it up (POST /wake_up) or resume it (POST /resume). Its metrics would tell one from the other."
        raise UnavailableError("the engine is asleep" if states else "the engine is asleep or paused", next_step=step)

    def _world_size(self) -> int:
        ranks = int(self._asked("/get_world_size?include_dp=false")["world_size"])
        every = int(self._asked("/get_world_size?include_dp=true")["world_size"])
        if every != ranks:
            raise UsageError(
                "vLLM serves several replicas of the model (data parallel) behind one address",
                expected=f"{ranks} ranks",
                found=f"{every} ranks",
                next_step="Start each replica as a server of its own, and one follower for each.",
            )
        return ranks

    def _no_agents(self, reply: Reply) -> Exception:
        if reply.status == 404 or "deltarefit_agent" in reply.text:
            return UsageError("vLLM runs without the extension of deltarefit", found=reply.shown, next_step=START)
        if "EngineDead" in reply.text or reply.status < 500:
            return self._error_of(reply)
        return UsageError(
            "vLLM's workers cannot start agents", found=reply.shown, next_step="Look into the log of the engine."
        )

    def _error_of(self, reply: Reply) -> Exception:
        try:
            self._http.check(reply, "/collective_rpc")
        except (UnavailableError, UsageError) as error:
            return error
        return UnavailableError("vLLM did not start agents", found=reply.shown)


def refuse_objections(name: str, found: Sequence[dict[str, Any]]) -> None:
    """``UsageError`` that lists what workers have against refits of their engine as it was started."""
    objections = dict.fromkeys(str(text) for one in found for text in one.get("objections", ()))
    if objections:
        listed = "".join(f"\n  {text}" for text in objections)
        raise UsageError(
            f"{name} as it was started cannot be refitted:{listed}\n", next_step="Start it anew with other options."
        )
