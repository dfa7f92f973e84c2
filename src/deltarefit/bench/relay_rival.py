"""One relay beside nginx, which serves the same files: on one core each, loaded from another by the same program."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from deltarefit.bench.links import Link, Side
from deltarefit.bench.relay_tree import Payloads, first_line, line_within, relay_command, started, told
from deltarefit.errors import RefitError
from deltarefit.relay_api import OBJECTS
from deltarefit.stores.relay import RelayStore

NGINX = "nginx"
ROOT, WARM = "relay, from its store", "relay, from its cache"
CONNECTIONS = 8
_ANSWERS_S, _LINE_S = 20.0, 60.0
_CLOCK = os.sysconf("SC_CLK_TCK")
_CONF = """
daemon off; master_process off; worker_processes 1; pid {work}/pid; error_log stderr crit;
events {{ worker_connections 256; }}
http {{
  access_log off; sendfile on; tcp_nopush on; keepalive_requests 1000000000;
  client_body_temp_path {work}/1; proxy_temp_path {work}/2; fastcgi_temp_path {work}/3;
  uwsgi_temp_path {work}/4; scgi_temp_path {work}/5;
  server {{ listen 127.0.0.1:{port}; location {objects} {{ alias {directory}/; }} }}
}}
"""


@dataclass(frozen=True)
class Served:
    """A server under load."""

    url: str
    pid: int
    peak: Callable[[], int]


def rows(link: Link, payloads: Payloads, seconds: float, repeats: int) -> list[dict[str, Any]]:
    """A row for each server: bytes a second and CPU seconds a GiB, of the best of some loads by turns (others on this
    machine can only slow one down); peak memory."""
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="deltarefit-served-")))
        servers = {name: stack.enter_context(begin(link.near, payloads, work)) for name, begin in _servers().items()}
        for served in servers.values():
            check(served.url, payloads)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in servers}
        for _ in range(repeats):
            for name, served in servers.items():
                found[name].append(_loaded(link.near, served, payloads, seconds))
        return [
            {"server": name, **max(found[name], key=lambda load: load["bytes_s"]), "peak_bytes": servers[name].peak()}
            for name in servers
        ]


def _servers() -> dict[str, Callable[..., contextlib.AbstractContextManager[Served]]]:
    relays = {ROOT: _root, WARM: _warm}
    return {NGINX: _nginx, **relays} if nginx_path() else {**relays}


def nginx_path() -> str | None:
    """Where nginx is; administrators' directories are not on everybody's path."""
    return shutil.which(NGINX) or shutil.which(NGINX, path="/usr/sbin:/usr/local/sbin")


def cores() -> tuple[int, int]:
    """(the server's, the load's); the same one where there is only one."""
    mine = sorted(os.sched_getaffinity(0))
    return mine[0], mine[-1]


def _loaded(side: Side, served: Served, payloads: Payloads, seconds: float) -> dict[str, float]:
    """One load: what came, and what it cost the server."""
    parts = urlsplit(served.url)
    targets = [(OBJECTS + key, size) for key, size in payloads.sizes.items()]
    job = {"host": parts.hostname, "port": parts.port, "targets": targets, "connections": CONNECTIONS}
    command = [sys.executable, "-m", "deltarefit.bench.relay_load", json.dumps({**job, "seconds": seconds})]
    with started(side, command, core=cores()[1]) as load:
        first_line(load)
        before, mine = cpu_s(served.pid), cpu_s(load.pid)
        told(load, "go")
        done = json.loads(line_within(load, seconds + _LINE_S))
        spent, own = cpu_s(served.pid) - before, cpu_s(load.pid) - mine
    if not done["requests"]:
        raise RefitError("no object came whole", next_step="Give the load more seconds, or smaller objects.")
    nbytes = done["bytes"]
    return {
        "bytes_s": nbytes / done["seconds"], "cpu_s_gib": spent / nbytes * 2**30,
        "busy": spent / done["seconds"], "load_busy": own / done["seconds"],
    }  # fmt: skip


def cpu_s(pid: int) -> float:
    """Seconds of CPU that a process has used, in user and kernel mode."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK


def check(url: str, payloads: Payloads) -> None:
    """Every object whole and right, once; a cache is warm then."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWERS_S)
    with contextlib.closing(connection):
        for key in payloads.sizes:
            connection.request("GET", OBJECTS + key)
            if connection.getresponse().read() != (payloads.directory / key).read_bytes():
                raise RefitError(f"{url} does not serve {key} as it is")


# ------------------------------------------------------------------------------------------ servers


@contextlib.contextmanager
def _root(side: Side, payloads: Payloads, work: Path) -> Iterator[Served]:
    with _relay(side, str(payloads.directory), work / "root") as served:
        yield served


@contextlib.contextmanager
def _warm(side: Side, payloads: Payloads, work: Path) -> Iterator[Served]:
    above = relay_command([str(payloads.directory)], "127.0.0.1:0", work / "above")
    with started(side, above) as process, _relay(side, first_line(process), work / "warm") as served:
        yield served


@contextlib.contextmanager
def _relay(side: Side, parent: str, directory: Path) -> Iterator[Served]:
    command = relay_command([parent], "127.0.0.1:0", directory)
    with started(side, command, core=cores()[0]) as process:
        url = first_line(process)
        store = RelayStore(url)
        yield Served(url, process.pid, lambda: int(store.status()["peak_resident_bytes"]))


@contextlib.contextmanager
def _nginx(side: Side, payloads: Payloads, work: Path) -> Iterator[Served]:
    """One process without a master, on a port that was free a moment ago."""
    port, conf = _free_port(), work / "nginx.conf"
    conf.write_text(_CONF.format(work=work, port=port, objects=OBJECTS, directory=payloads.directory))
    with started(side, [str(nginx_path()), "-c", str(conf), "-p", str(work)], core=cores()[0]) as process:
        _await(port, process)
        yield Served(f"http://127.0.0.1:{port}", process.pid, lambda: _peak(process.pid))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _await(port: int, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + _ANSWERS_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), 1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise RefitError("nginx did not start", found=f"exit code {process.poll()}")


def _peak(pid: int) -> int:
    """Most resident bytes that a process ever had."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024
