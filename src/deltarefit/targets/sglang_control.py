"""``engine.Control`` of an SGLang server, over HTTP.

    python -m sglang.launch_server --model-path CKPT --custom-weight-loader deltarefit.targets.sglang.load

What becomes of requests that run when a refit begins is the user's choice (``in_flight``): with ``keep`` SGLang
retracts them to its queue; what was computed for them with older weights is thrown away, and computed anew from their
prompt and the tokens said so far when generation goes on. With ``abort`` they end at once. SGLang cannot wait for them.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.records import Digest
from deltarefit.targets.agent import alive, private_directory, run_directory
from deltarefit.targets.http import HttpClient
from deltarefit.targets.vllm_control import refuse_objections

NAME = "SGLang"
LOADER = "deltarefit.targets.sglang.load"
IN_FLIGHT = ("keep", "abort")
START_S = 120.0
PAUSE_S = 120.0
CACHE_S = 60.0
_RETRY_S = 0.05
_NOTHING = base64.b64encode(b"\x80\x04]\x94.").decode()
"""An empty list, as SGLang's own serializer writes it: no tensor travels, and nothing of ours has to be trusted."""


class SglangControl:
    """One SGLang server at ``url``. ``in_flight`` is one of ``IN_FLIGHT``; ``key`` is the server's API key.

    ``serving``: generation ran when it was last looked at. ``guard`` is called with the sockets of agents before they
    are given out."""

    def __init__(self, url: str, *, in_flight: str = "keep", key: str | None = None) -> None:
        if in_flight not in IN_FLIGHT:
            step = "SGLang cannot wait for requests to end." if in_flight == "wait" else None
            raise UsageError("bad choice for requests in flight", expected=IN_FLIGHT, found=in_flight, next_step=step)
        self._http = HttpClient(url, NAME, key=key)
        self._in_flight = in_flight
        self.sockets: list[str] = []
        self.serving = False
        self.guard: Callable[[Sequence[str]], None] = lambda sockets: None

    @property
    def url(self) -> str:
        return self._http.url

    def check(self) -> None:
        """``UnavailableError`` while it does not answer, ``UsageError`` for what is no SGLang server."""
        try:
            reply = self._http.request("GET", "/ping")
            if reply.status == 404:
                raise self._http.stranger("/ping", reply.shown)
            self._http.check(reply, "/ping")
            self.serving = self._http.request("GET", "/ready").ok
        except BaseException:
            self.serving = False
            raise

    def agents(self) -> list[str]:
        """Sockets of the agents, rank by rank. If they do not run yet, generation stands still for a moment while the
        workers start them."""
        facts = self._facts()
        size, port = int(facts["tp_size"]) * int(facts["pp_size"]), int(facts["port"])
        marker, found = _marker(port), self._written(port, size)
        if len(found) < size or marker.exists() or any("error" in one for one in found):
            self._start(size, marker)
            found = self._written(port, size)
        if len(found) < size:
            raise UnavailableError(
                "not all workers of SGLang have an agent",
                expected=size,
                found=len(found),
                next_step="Run the follower where SGLang runs, as the same user, with the same DELTAREFIT_RUN_DIR.",
            )
        if errors := [f"rank {one['rank']}: {one['error']}" for one in found if "error" in one]:
            step = "Look into the log of the engine."
            raise UsageError("SGLang's workers cannot start agents", found="; ".join(errors), next_step=step)
        refuse_objections(NAME, found)
        sockets = [str(one["socket"]) for one in found]
        self.guard(sockets)
        self.sockets = sockets
        return sockets

    def pause(self) -> None:
        if self._in_flight == "abort":
            self._pause("abort")
        self._pause("retract")
        self._facts()  # the pause is only on its way; ranks answer this once they have carried it out

    def reset_cache(self) -> None:
        """All keys and values. Requests that the pause has retracted have none."""
        until = time.monotonic() + CACHE_S
        # Without a timeout of its own: SGLang would wait until its queue is empty, which it cannot be in a pause.
        while (reply := self._http.request("POST", "/flush_cache", deadline_s=CACHE_S)).status == 400:
            if time.monotonic() > until:
                raise UnavailableError(
                    "SGLang does not forget what older weights computed",
                    found=reply.shown,
                    next_step="Look into its log for requests that still run; it stays paused meanwhile.",
                )
            time.sleep(_RETRY_S)
        self._http.check(reply, "/flush_cache")

    def set_version(self, version: int, digest: Digest) -> None:
        self._http.post("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})

    def resume(self) -> None:
        self._http.post("/continue_generation", {"torch_empty_cache": False})
        self.serving = True

    def version(self) -> str:
        """What the engine says that it serves: a version, or "default" before the first refit."""
        return str(self._http.get("/model_info").get("weight_version"))

    # ------------------------------------------------------------------------------------ parts

    def _pause(self, mode: str) -> None:
        self.serving = False
        self._http.post("/pause_generation", {"mode": mode}, deadline_s=PAUSE_S)

    def _facts(self) -> dict[str, Any]:
        """How it was started, as its ranks answer. ``UsageError`` for what is no SGLang server, or one without our
        loader: SGLang ends if it is asked for a loader that it was not started with."""
        reply = self._http.request("GET", "/server_info", deadline_s=PAUSE_S)
        if reply.status == 404:
            raise self._http.stranger("/server_info", reply.shown)
        self._http.check(reply, "/server_info")
        facts = self._http.parsed(reply, "/server_info")
        if not isinstance(facts, dict) or not {"tp_size", "pp_size", "custom_weight_loader"} <= set(facts):
            raise self._http.stranger("/server_info", facts)
        if LOADER not in (facts["custom_weight_loader"] or ()):
            raise UsageError(
                "SGLang runs without the loader of deltarefit",
                found=facts["custom_weight_loader"] or "none",
                next_step=f"Start it with --custom-weight-loader {LOADER}.",
            )
        for option in ("dp_size", "tokenizer_worker_num"):
            if int(facts.get(option) or 1) > 1:
                step = "Start each replica as a server of its own, with one tokenizer, and one follower for each."
                raise UsageError("SGLang serves replicas", expected=f"{option} 1", found=facts[option], next_step=step)
        facts.setdefault("port", urllib.parse.urlsplit(self.url).port or 80)
        return facts

    def _written(self, port: int, size: int) -> list[dict[str, Any]]:
        """What living workers have written down, rank by rank."""
        found = []
        for rank in range(size):
            path = run_directory() / f"sglang-{port}-{rank}.json"
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                told = json.loads(path.read_text())
                if alive(int(told["pid"])) and int(told["size"]) == size:
                    found.append(told)
        return found

    def _start(self, size: int, marker: Path) -> None:
        """Have the loader called on every rank. It stands between the two calls that SGLang wants around a load."""
        with self._standing_still(marker) as is_left_over:
            self._begin(is_left_over)
            body = {"serialized_named_tensors": [_NOTHING] * size, "load_format": LOADER}
            try:
                self._asked("/update_weights_from_tensor", {**body, "flush_cache": False, "selector": "target"})
            finally:
                self._asked("/end_weight_update", {})

    @contextlib.contextmanager
    def _standing_still(self, marker: Path) -> Iterator[bool]:
        """Without a pause SGLang would wait for all requests to end first. A follower that is killed here leaves the
        marker behind (then it yields True): the next one ends what it began."""
        is_left_over = marker.exists()
        was_paused = not is_left_over and not self._http.request("GET", "/ready").ok
        marker.touch()
        self._pause("retract")
        try:
            yield is_left_over
        finally:
            if not was_paused:
                self.resume()
            marker.unlink(missing_ok=True)

    def _begin(self, is_left_over: bool) -> None:
        path = "/begin_weight_update"
        reply = self._http.request("POST", path, {"selector": "target"}, deadline_s=START_S)
        if "already open" not in reply.text:
            self._http.check(reply, path)
        elif is_left_over:
            self._asked("/end_weight_update", {})
            self._asked(path, {"selector": "target"})
        else:
            step = "Let it end, or end it: POST /end_weight_update."
            raise UnavailableError("somebody else is updating the weights of SGLang", found=reply.shown, next_step=step)

    def _asked(self, path: str, body: object) -> None:
        answer = self._http.post(path, body, deadline_s=START_S)
        if not isinstance(answer, dict) or not answer.get("success"):
            raise UnavailableError(f"SGLang refuses {path}", found=answer)


def _marker(port: int) -> Path:
    """Is there while a follower has agents started: SGLang stands still, and a load is under way."""
    return private_directory(run_directory()) / f"sglang-{port}.starting"
