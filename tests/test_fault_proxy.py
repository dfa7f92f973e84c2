"""Publish and follow through a network that cuts, corrupts, repeats and forgets, to a real S3 server.

``weather`` runs for a given time with a seeded schedule of faults; calm follows, and then everything is held against a
store that looks past the proxy.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from deltarefit import Publisher, Receiver, open_store
from deltarefit.errors import AlreadyExistsError, RefitError, UnavailableError
from deltarefit.ports import Store
from deltarefit.runlog import RunLog
from deltarefit.stores import Limits
from tests import helpers as h
from tests.fault_proxy import Fault, FaultProxy
from tests.seaweed import Seaweed

LIMITS = Limits(connect_s=2.0, request_s=4.0, retries=4, retry_s=4.0)
SHAPES: h.Shapes = {"a": ("BF16", (40_000,)), "b": ("F32", (3000,)), "c": ("I64", (7,))}
CALM_S = 60.0
UNKNOWN = "is unknown"


def through(proxy: FaultProxy, server: Seaweed, name: str) -> Store:
    return open_store(f"s3://refits/{name}", **(server.login | {"endpoint": proxy.endpoint}), limits=LIMITS)


@pytest.fixture
def proxy(seaweed: Seaweed) -> Iterator[FaultProxy]:
    with FaultProxy(("127.0.0.1", seaweed.s3), seed=3) as made:
        yield made


# ------------------------------------------------------------------------------------------ the proxy itself


def test_without_faults_nothing_changes(proxy: FaultProxy, seaweed: Seaweed) -> None:
    store, data = through(proxy, seaweed, "plain"), np.random.default_rng(1).bytes(300_000)
    store.put("one", data)
    store.create("two", b"2")
    with pytest.raises(AlreadyExistsError):
        store.create("two", b"3")
    assert (store.get("one"), store.get("one", 5, 10), store.size("one")) == (data, data[5:15], len(data))
    assert [key for key, _ in store.list()] == ["one", "two"]
    store.delete("one")
    assert [key for key, _ in store.list()] == ["two"]
    assert not proxy.struck
    assert proxy.requests >= 7


@pytest.mark.parametrize("fault", Fault)
def test_each_fault_strikes(proxy: FaultProxy, seaweed: Seaweed, fault: Fault) -> None:
    """What a caller sees of it: bytes that are wrong, an error, or nothing; and it is over as soon as it is over."""
    store = through(proxy, seaweed, f"each-{fault.name}")
    store.put("key", b"x" * 5000)
    proxy.faults, proxy.rate = (fault,), 1.0
    try:
        wrong = store.get("key") != b"x" * 5000
    except UnavailableError:
        wrong = fault in (Fault.LOST, Fault.AMBIGUOUS, Fault.CUT, Fault.HALF, Fault.BURST)
    assert wrong == (fault not in (Fault.DELAY, Fault.TWICE))
    with contextlib.suppress(UnavailableError, AlreadyExistsError):
        store.create("new", b"1")
    proxy.rate, proxy._refusing = 0.0, 0
    assert proxy.struck[fault] > 0
    assert store.get("key") == b"x" * 5000
    direct = open_store(f"s3://refits/each-{fault.name}", **seaweed.login, limits=LIMITS)
    there = "new" in [key for key, _ in direct.list()]
    assert there == (fault not in (Fault.LOST, Fault.BURST))


# ------------------------------------------------------------------------------------------ weather


@dataclass
class Weather:
    """``steps`` has the weights of each step; ``said`` the version that publish returned for a step."""

    store: Store
    seed: int
    said: dict[int, int] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    errors: Counter[str] = field(default_factory=Counter)
    seen: dict[int, list[bytes]] = field(default_factory=dict)
    failure: BaseException | None = None
    over: threading.Event = field(default_factory=threading.Event)

    def model(self, step: int) -> h.Model:
        model = h.random_model(np.random.default_rng(self.seed), SHAPES)
        h.step(np.random.default_rng([self.seed, step]), model, ("some", "few", "many", "nothing", "nudge")[step % 5])
        return model

    def publish(self, step: int) -> None:
        """Until it is said to be done: three times by one publisher, then by a new one."""
        while step not in self.said:
            source = h.ArraySource(self.model(step), SHAPES)
            try:
                with contextlib.closing(Publisher(self.store, source, threads=2, payload_bytes=20_000)) as publisher:
                    self._publish(publisher, step)
            except RefitError as error:
                self.note(error, step)

    def _publish(self, publisher: Publisher, step: int) -> None:
        for _ in range(3):
            try:
                self.said[step] = publisher.publish(step).version
            except UnavailableError as error:
                self.note(error, step)
            else:
                return

    def note(self, error: RefitError, step: int = 0) -> None:
        self.errors[type(error).__name__] += 1
        if UNKNOWN in str(error):
            self.unknown.add(step)

    def follow(self) -> None:
        """All the time, on one target, with a new receiver after an error that it says no retry cures."""
        try:
            while not self.over.is_set():
                with contextlib.suppress(RefitError):
                    self._follow(h.strict_target(self.store))
        except BaseException as error:
            self.failure = error

    def _follow(self, target: h.StrictTarget) -> None:
        while not self.over.is_set():
            try:
                with contextlib.closing(Receiver(self.store, target, threads=2, poll_s=0.05)) as receiver:
                    while not self.over.is_set():
                        version = receiver.follow(once=True)
                        self.seen[version] = h.bits(target)
                        time.sleep(0.02)
            except RefitError as error:
                self.note(error)


def run_weather(proxy: FaultProxy, server: Seaweed, name: str, seconds: float, rate: float, seed: int) -> Counter[str]:
    """Some minutes of faults, then calm; counts of what happened."""
    weather = Weather(through(proxy, server, name), seed)
    weather.publish(0)
    follower = threading.Thread(target=weather.follow, daemon=True)
    follower.start()
    proxy.rate, step = rate, 0
    calm = threading.Timer(seconds, lambda: setattr(proxy, "rate", 0.0))  # even if no publish ever succeeds
    calm.start()
    while calm.is_alive():
        step += 1
        weather.publish(step)
    weather.publish(step + 1)
    wait_for_head(weather, weather.said[step + 1])
    weather.over.set()
    follower.join(20)
    assert weather.failure is None, weather.failure
    check(weather, open_store(f"s3://refits/{name}", **server.login))
    counts = Counter({fault.name: number for fault, number in proxy.struck.items()})
    return counts + weather.errors + Counter(versions=len(weather.said), seen=len(weather.seen))


def wait_for_head(weather: Weather, head: int) -> None:
    until = time.monotonic() + CALM_S
    while head not in weather.seen:
        assert time.monotonic() < until, f"not at version {head} after {CALM_S} s of calm; {weather.errors}"
        assert weather.failure is None, weather.failure
        time.sleep(0.05)


def check(weather: Weather, direct: Store) -> None:
    """Linear; nothing that was said is lost; a step was committed twice only if its publish did not know; every version
    that was held has the bits of its step."""
    versions, log = h.check_linear(direct), RunLog.open(direct)
    step_of = {version: log.version(version).manifests[0].step for version in versions}
    assert set(weather.said.values()) <= set(versions), "a committed version is lost"
    for step, version in weather.said.items():
        assert step_of[version] == step
    double = {step for step, times in Counter(step_of.values()).items() if times > 1}
    assert double <= weather.unknown, f"steps {double - weather.unknown} were committed twice"
    for version, bits in weather.seen.items():
        assert bits == h.bytes_of(weather.model(step_of[version])), f"version {version} has other bits"


@pytest.mark.slow
def test_weather(proxy: FaultProxy, seaweed: Seaweed) -> None:
    counts = run_weather(proxy, seaweed, "weather", 25.0, 0.08, 5)
    print(dict(counts))
    for fault in Fault:
        assert counts[fault.name] > 0, f"{fault.name} never struck: {counts}"
    assert counts["versions"] >= 5
    assert counts["seen"] >= 3


def test_what_a_check_would_notice() -> None:
    """A version that is not in the log, one of another step, a step that was committed twice, other bits."""
    weather = Weather(h.new_store(), 9)
    for step in (0, 1, 1):
        weather.said = {}
        weather.publish(step)
    weather.said, weather.unknown = {0: 1}, {1}
    log = RunLog.open(weather.store)
    assert [log.version(version).manifests[0].step for version in (1, 2, 3)] == [0, 1, 1]
    check(weather, weather.store)
    for wrong in ({"said": {0: 9}}, {"said": {1: 1}}, {"unknown": set()}, {"seen": {1: h.bytes_of(weather.model(1))}}):
        doctored = Weather(weather.store, 9, {0: 1}, {1})
        vars(doctored).update(wrong)
        with pytest.raises(AssertionError):
            check(doctored, weather.store)
