"""A relay under a launcher of training jobs, as docs/relays.md §7 shows it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deltarefit.errors import UnavailableError
from deltarefit.notary import Notary
from deltarefit.stores import Limits, open_store
from deltarefit.stores.relay import RelayStore
from deltarefit.tree import Tree, TreeRelay
from deltarefit.treefiles import write_tree

pytest.importorskip("torch")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
BY_RANK = 'exec "$0" -m deltarefit relay --tree "$1" --name "node-$GROUP_RANK" --listen 127.0.0.1:0 --json'


def test_torchrun_starts_a_relay_and_ends_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    open_store(str(root)).put("head", b"one")
    tree = Tree("", 1, 4, (f"file://{root}",), (TreeRelay("node-0", "http://127.0.0.1:8470"),))
    write_tree(tmp_path / "tree.json", tree, Notary())
    command = [*TORCHRUN, "--no-python", "bash", "-c", BY_RANK, sys.executable, str(tmp_path / "tree.json")]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as run:
        try:
            assert run.stdout is not None
            told = json.loads(run.stdout.readline() or "{}")
            assert told["name"] == "node-0"
            store = RelayStore(told["url"], limits=Limits(request_s=5, retries=1))
            assert store.get("head") == b"one"
            run.send_signal(signal.SIGTERM)
            said = run.communicate(timeout=60)[1]
            assert "Relayed" in said  # it ended by itself, as when it is told alone
            with pytest.raises(UnavailableError):
                store.get("head")
            store.close()
        finally:
            run.terminate()
    assert not list(tmp_path.glob("deltarefit-relay-*"))


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "deltarefit", "--version"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()[0]) == (0, "deltarefit")
