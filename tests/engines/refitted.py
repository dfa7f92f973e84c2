"""vLLM engines in this process, one after the other, refitted in place and compared with fresh ones.

    with Child(tp=1) as child:
        found = child.ask(checkpoint=..., changed=..., store=..., prompts=[[[5, 6], 0.0, None]], max_tokens=8)

One process serves many requests, because importing vLLM takes longer than loading a tiny model. A request names two
checkpoints and a store that has both as versions: the engine is started from the first, follows the store, and is
asked for the SHA-256 of every tensor and for replies; then an engine is started from the second and asked the same.
Without a store an engine is started from ``checkpoint`` and asked. Prompts come with temperature and seed.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from deltarefit.records import Digest
from deltarefit.targets.vllm_control import refuse_objections
from tests.engines.inspecting import WORKER
from tests.engines.servers import _QUIET, _VLLM, _cores, _path

ANSWER = "answer: "
ANSWER_S = 280.0
"""Longest time for a request; the process is killed then."""


class Child:
    """A process that answers requests, one at a time. A context manager; one that has failed starts anew."""

    def __init__(self, tp: int = 1) -> None:
        self._tp = tp
        self._process: subprocess.Popen[str] | None = None
        self._log: IO[bytes] | None = None
        # Sockets of agents; private, and with a short path.
        self._home = tempfile.TemporaryDirectory(prefix="refit")

    def __enter__(self) -> Child:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to one request; ``RuntimeError`` with the end of the log if the process fails."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(ANSWER_S, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps({**request, "tp": self._tp}) + "\n")
            process.stdin.flush()
            for line in process.stdout:
                if line.startswith(ANSWER):
                    return json.loads(line.removeprefix(ANSWER))  # type: ignore[no-any-return]
        finally:
            timer.cancel()
        self.close()
        raise RuntimeError(f"an engine in a child process failed\n{self._said()}")

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - read as long as the process lives
        settings = {
            **os.environ, **_QUIET, **_VLLM, "VLLM_CPU_OMP_THREADS_BIND": _cores(self._tp), "PYTHONPATH": _path(),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING",
            "DELTAREFIT_RUN_DIR": self._home.name,
        }  # fmt: skip
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.engines.refitted"], env=settings, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=self._log,
        )  # fmt: skip
        return self._process

    def _said(self) -> str:
        assert self._log is not None
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), 6000, max(0, size - 6000)).decode(errors="replace")


# ------------------------------------------------------------------------------------------ the other side


class _Control:
    """``engine.Control`` of an engine in this process, which generates only when it is asked here."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def check(self) -> None: ...

    def agents(self) -> Sequence[str]:
        found = sorted(self._engine.collective_rpc("deltarefit_agent"), key=lambda one: int(one["rank"]))
        refuse_objections("vLLM", found)
        return [str(one["socket"]) for one in found]

    def pause(self) -> None: ...

    def reset_cache(self) -> None:
        assert self._engine.reset_prefix_cache()

    def set_version(self, version: int, digest: Digest) -> None: ...

    def resume(self) -> None: ...


@contextlib.contextmanager
def _engine(checkpoint: str, request: dict[str, Any]) -> Iterator[Any]:
    from vllm import LLM
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(
        model=checkpoint, skip_tokenizer_init=True, enforce_eager=True, max_model_len=2048, max_num_seqs=4,
        kv_cache_memory_bytes=64 << 20, distributed_executor_backend="uni" if request["tp"] == 1 else "mp",
        tensor_parallel_size=request["tp"], generation_config="vllm", worker_extension_cls=WORKER,
        **request.get("options", {}),
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def _look(engine: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Prompts one after the other: what a kernel gives for a row may depend on how many it is given."""
    from vllm import SamplingParams

    tokens = []
    for prompt, temperature, seed in request["prompts"]:
        sampling = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=request["max_tokens"], ignore_eos=True, detokenize=False
        )
        [output] = engine.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens.append(list(output.outputs[0].token_ids))
    return {"sums": engine.collective_rpc("tensor_sums"), "tokens": tokens}


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    from deltarefit import Receiver
    from deltarefit.errors import RefitError
    from deltarefit.stores import open_store
    from deltarefit.targets.engine import EngineTarget

    if "store" not in request:
        with _engine(request["checkpoint"], request) as engine:
            return _look(engine, request)
    said: list[list[Any]] = []
    with _engine(request["checkpoint"], request) as engine:
        before = _look(engine, request)
        target = EngineTarget(_Control(engine), Path(request["spool"]))
        receiver = Receiver(
            open_store(request["store"]), target, emit=lambda e: said.append([e.type, e.phase, e.version, e.seconds])
        )
        try:
            version = receiver.follow(once=True)
        except RefitError as error:
            return {"refused": f"{type(error).__name__}: {error}", "same": _look(engine, request) == before}
        rows = [[row.tensor, row.mode, row.reason, list(row.ranks)] for row in target.group.report]
        refitted = {**_look(engine, request), "digest": str(target.digest())}
        receiver.close()
        target.close()
    with _engine(request["changed"], request) as engine:
        fresh = _look(engine, request)
    answer = {"version": version, "rows": rows, "events": said}
    return {**answer, "before": before, "refitted": refitted, "fresh": fresh}


if __name__ == "__main__":
    for line in sys.stdin:
        print(ANSWER + json.dumps(_answer(json.loads(line))), flush=True)
