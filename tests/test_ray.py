"""Relays and followers as actors of a real Ray on this machine: what is published arrives, whoever is killed."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltarefit.errors import UnavailableError, UsageError
from deltarefit.publisher import Publisher
from deltarefit.relay_api import content_hash
from deltarefit.sources.checkpoint import CheckpointSource
from deltarefit.stores import open_store
from deltarefit.stores.relay import RelayStore
from deltarefit.tree import parents_of
from tests import helpers as h
from tests import live_ranks as live
from tests.desk import Desk, make_desk, same_files
from tests.engine_http import VllmHttp
from tests.seaweed import Seaweed

ray = pytest.importorskip("ray")

from ray.cluster_utils import Cluster  # noqa: E402

from deltarefit.ray import Access, Followers, Relays, Server, nodes_of  # noqa: E402

pytestmark = pytest.mark.slow
PATIENCE_S = 60.0


def until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def running(text: str) -> list[str]:
    """Processes whose command line holds this text."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if text in line:
            found.append(f"{path.parent.name}: {line}")
    return found


def gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A Ray of two nodes on this machine, that tells nobody; gives the directory where it logs. Nothing is left."""
    place = Path("/tmp") / f"rt{secrets.token_hex(4)}"  # paths of sockets are short
    small = {"num_cpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False, "temp_dir": str(place)}
    scratch = tmp_path_factory.mktemp("scratch")
    (scratch / "ray").mkdir()
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as stack:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_TOKEN", secrets.token_hex(32))  # else it would write one into the home directory
        patch.setenv("TMPDIR", str(scratch))
        patch.setattr(tempfile, "tempdir", None)  # looked up before
        stack.callback(_end, place)
        nodes = Cluster()
        stack.callback(nodes.shutdown)
        try:
            for _ in range(2):
                nodes.add_node(**small)
            ray.init(nodes.address, namespace="deltarefit", log_to_driver=False, logging_level="error")
        except Exception as error:
            pytest.skip(f"Ray does not start here: {error}")
        stack.callback(ray.shutdown)
        yield place


def _end(place: Path) -> None:
    until(lambda: not running(str(place)), "Ray is still there")
    shutil.rmtree(place, ignore_errors=True)


@pytest.fixture(scope="module")
def node(cluster: Path) -> str:
    """This driver's node."""
    return str(ray.get_runtime_context().get_node_id())


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return make_desk(tmp_path / "desk")


def publish(desk: Desk, number: int) -> None:
    source = CheckpointSource(desk.checkpoint(number))
    assert Publisher(open_store(desk.store), source).publish(step=number).version == number + 1


def pids(status: list[dict[str, Any]]) -> list[int]:
    assert all(one["alive"] and not one["error"] for one in status), status
    return [one["pid"] for one in status]


def test_versions_arrive_whoever_is_killed(desk: Desk, node: str, cluster: Path, tmp_path: Path) -> None:
    publish(desk, 0)
    intos = [tmp_path / "a", tmp_path / "b"]
    servers = [Server(node, into=str(into)) for into in intos]
    relays = Relays.start(desk.store, [node, node], degree=1, directory=str(tmp_path / "caches"), cache_bytes=64 << 20)
    followers = Followers.start(relays, servers, poll_s=0.1)
    try:
        upper, lower = relays.tree.relays
        assert parents_of(relays.tree, lower.name) == (upper.url, *relays.tree.roots)
        assert relays.status()[2]["path"] == [lower.name, upper.name, "root"]
        for number in (0, 1):
            if number:
                publish(desk, number)  # which waits for their votes, through the tree
            followers.wait_for(number + 1, PATIENCE_S)
            assert followers.versions() == {server.name: number + 1 for server in servers}
            assert all(same_files(into, Path(desk.checkpoint(number))) for into in intos)
        before = pids(relays.status() + followers.status())
        os.kill(before[2], signal.SIGKILL)  # the lower relay
        os.kill(before[3], signal.SIGKILL)  # the first follower
        until(lambda: all(one["alive"] for one in relays.status()), "the relay does not come back")
        _check_cache_is_kept(relays, desk)
        publish(desk, 2)
        followers.wait_for(3, PATIENCE_S)
        assert all(same_files(into, Path(desk.checkpoint(2))) for into in intos)
        after = pids(relays.status() + followers.status())
        assert [old == new for old, new in zip(before, after, strict=True)] == [True, True, False, False, True]
    finally:
        for actors in (followers, relays, followers):
            actors.close()
    until(lambda: all(map(gone, after)), "an actor is still there")
    assert followers.versions() == {}
    logs = [path for path in cluster.rglob("*") if path.is_file() and path.suffix in (".out", ".err", ".log")]
    assert logs
    assert not [path for path in logs if relays.access.token.encode() in path.read_bytes()]
    assert relays.access.token not in repr(relays.access)


def test_each_is_on_its_node(desk: Desk, node: str, tmp_path: Path) -> None:
    (other,) = {one["NodeID"] for one in ray.nodes()} - {node}
    publish(desk, 0)
    with Relays.start(desk.store, degree=1) as relays:
        assert [one["node"] for one in relays.status()] == [node, node, other]
        upper, lower = relays.tree.relays
        assert relays.store_for(node, "any") == f"{upper.url},{relays.tree.roots[0]}"
        for far in (other, "a node without a relay"):
            assert relays.store_for(far, "any") == f"{lower.url},{upper.url},{relays.tree.roots[0]}"
        with Followers.start(relays, [Server(other, into=str(tmp_path / "into"))]) as followers:
            followers.wait_for(1, PATIENCE_S)
            assert followers.status()[0]["node"] == other


def _check_cache_is_kept(relays: Relays, desk: Desk) -> None:
    """The lower relay has the anchor and what came after it, and asks nobody for that; small records it does."""
    root, store = open_store(desk.store), RelayStore(relays.tree.relays[1].url, token=relays.access.token)
    contents = [(key, size) for key, size in root.list() if content_hash(key)]
    assert all(store.get(key) == root.get(key) for key, _ in contents)
    assert store.status()["fetched_bytes"] < sum(size for _, size in contents) / 4
    store.close()


def test_only_the_token_comes_in(desk: Desk, node: str, tmp_path: Path) -> None:
    publish(desk, 0)
    with Relays.start(desk.store, [node]) as relays:
        url = relays.tree.relays[0].url
        for token in (None, secrets.token_hex(32)):
            store = RelayStore(url, token=token)
            with pytest.raises(UsageError, match="token"):
                store.get("run")
            store.close()
        store = RelayStore(url, token=relays.access.token)
        assert store.get("run") == open_store(desk.store).get("run")
        with pytest.raises(UsageError, match="publish token"):
            store.put("head", b"")
        store.close()
        caches = [path for path in Path(os.environ["TMPDIR"]).rglob("lock") if "relays" in str(path)]
        assert len(caches) == 2  # the root's, and the relay's
        with pytest.raises(UsageError, match="access with relays"):
            Followers.start(relays, [], access=Access())
    assert not any(path.exists() for path in caches)


def test_what_goes_wrong_is_named(desk: Desk, node: str, tmp_path: Path) -> None:
    publish(desk, 0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "model.safetensors").write_bytes(b"of somebody else")
    with Followers.start(desk.store, [Server(node, into=str(tmp_path / "mine"))]) as followers:
        with pytest.raises(UsageError, match="mine"):
            followers.wait_for(1, PATIENCE_S)
        assert "mine" in followers.status()[0]["error"]
    with Followers.start(str(tmp_path / "later"), [Server(node, into=str(tmp_path / "into"))]) as followers:
        with pytest.raises(UnavailableError, match=r"version 1 is not held everywhere.*into': 0"):
            followers.wait_for(1, 1.0)
        publisher = Publisher(open_store(str(tmp_path / "later")), CheckpointSource(desk.checkpoint(0)))
        publisher.publish()
        followers.wait_for(1, PATIENCE_S)
    with pytest.raises(UsageError, match="no such node"):
        Relays.start(desk.store, ["0" * 56])
    with pytest.raises(UsageError, match="memory"):
        Relays.start("memory://x")
    with pytest.raises(UnavailableError, match=r"did not start.*num_cpus"):
        Relays.start(desk.store, [node], options={"num_cpus": 64}, timeout_s=30)
    with pytest.raises(UsageError, match="one of into"):
        Server(node, into="x", vllm="http://127.0.0.1:8000")


def test_a_port_that_is_taken_is_told(desk: Desk, node: str) -> None:
    with Relays.start(desk.store, [node], port=29_900) as relays:
        assert relays.tree.relays[0].url.endswith(":29901")  # the root has the first
        with pytest.raises(UsageError, match=r"cannot listen on .*:29900"):
            Relays.start(desk.store, [node], port=29_900)
        assert all(one["alive"] for one in relays.status())


def test_a_bucket_with_credentials(desk: Desk, node: str, seaweed: Seaweed, tmp_path: Path) -> None:
    url, keys = (
        "s3://refits/ray",
        {"AWS_ACCESS_KEY_ID": seaweed.access_key, "AWS_SECRET_ACCESS_KEY": seaweed.secret_key},
    )
    store = open_store(url, **seaweed.login)
    Publisher(store, CheckpointSource(desk.checkpoint(0))).publish()
    access = Access(environment={"DELTAREFIT_ENDPOINT": seaweed.endpoint, "AWS_REGION": "us-east-1", **keys})
    assert seaweed.secret_key not in repr(access)
    with Relays.start(url, [node], access=access) as relays:
        assert relays.tree.roots == (url,)
        with Followers.start(relays, [Server(node, into=str(tmp_path / "into"))]) as followers:
            followers.wait_for(1, PATIENCE_S)
    assert same_files(tmp_path / "into", Path(desk.checkpoint(0)))


def test_tls(desk: Desk, node: str, tmp_path: Path) -> None:
    publish(desk, 0)
    cert = str(certificate(tmp_path / "relay.pem", ray.util.get_node_ip_address()))
    with Relays.start(desk.store, [node], access=Access(cert=cert, ca=cert)) as relays:
        assert relays.tree.relays[0].url.startswith("https://")
        assert pids(relays.status())
        with Followers.start(relays, [Server(node, into=str(tmp_path / "into"))]) as followers:
            followers.wait_for(1, PATIENCE_S)
    assert same_files(tmp_path / "into", Path(desk.checkpoint(0)))


def certificate(path: Path, address: str) -> Path:
    """A certificate for an address, signed by itself, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "relay")])
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(now + datetime.timedelta(days=1))
    host = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    path.write_bytes(secret + made.add_extension(host, critical=False).sign(key, hashes.SHA256()).public_bytes(pem))
    path.chmod(0o600)
    return path


def test_an_engine_is_followed(node: str, tmp_path: Path) -> None:
    chain = h.publish_chain(np.random.default_rng(5), ("some",), live.SHAPES, open_store(str(tmp_path / "store")))
    engine = live.Engine(tmp_path / "engine", 2, chain.models[1], chain.models[1], 0.0)
    http = VllmHttp(lambda: list(engine.paths), tmp_path / "engine" / "paused")
    (tmp_path / "run").mkdir(mode=0o700)
    access = Access(
        environment={"DELTAREFIT_RUN_DIR": str(tmp_path / "run")}
    )  # reaches the actor, or no agent is found
    try:
        with Followers.start(chain.store.url, [Server(node, vllm=http.url)], access=access, poll_s=0.1) as followers:
            followers.wait_for(2, PATIENCE_S)
            assert not engine.wrong(chain.models[2])
            assert list((tmp_path / "run").iterdir())  # the environment has reached the actor
            (before,) = pids(followers.status())
            os.kill(before, signal.SIGKILL)
            until(lambda: followers.versions() == {f"{node[:12]}:{http.url}": 2}, "the follower does not come back")
            assert pids(followers.status()) != [before]
            assert not engine.paused
    finally:
        http.stop()
        engine.close()


def test_nodes_of_a_placement_group(node: str) -> None:
    group = ray.util.placement_group([{"CPU": 0.1}] * 2, strategy="STRICT_SPREAD")
    ray.get(group.ready(), timeout=PATIENCE_S)
    assert sorted(nodes_of(group)) == sorted(one["NodeID"] for one in ray.nodes())
    ray.util.remove_placement_group(group)
    until(lambda: ray.util.placement_group_table(group)["state"] == "REMOVED", "the group is still there")
    with pytest.raises(UnavailableError, match="not placed"):
        nodes_of(group)


def test_without_ray_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['ray'] = None; import deltarefit; import deltarefit.ray"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "UsageError" in done.stderr
    assert "pip install 'deltarefit[ray]'" in done.stderr
