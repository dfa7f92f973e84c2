"""Verify, the view of a store as of a version, and anchors: an older version is rebuilt bit for bit or not at
all."""

from __future__ import annotations

import contextlib
from pathlib import Path

import numpy as np
import pytest

from deltarefit import MemoryBaseline, Publisher, RunLog
from deltarefit.anchoring import write_anchor
from deltarefit.asof import AsOf
from deltarefit.errors import BaseMismatch, DigestMismatch, IntegrityError, NotFoundError, UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.records import Digest
from deltarefit.runlog import HINT, anchor_prefix
from deltarefit.targets.checkpoint import CheckpointTarget
from deltarefit.verify import Verifier, bits_of_source, bits_of_target
from tests.helpers import (
    FILES,
    MIXED,
    ArraySource,
    Chain,
    bits,
    copy_of,
    digest_of,
    followed,
    new_store,
    publish_chain,
    random_model,
)


@pytest.fixture
def chain() -> Chain:
    return publish_chain(np.random.default_rng(3))


def committed(log: RunLog, version: int) -> Digest:
    outcome = log.version(version).outcome
    assert outcome is not None
    return outcome.digest


# ------------------------------------------------------------------------------------------ verify


def test_every_version_has_its_digest_and_no_other(chain: Chain) -> None:
    log = RunLog.open(chain.store)
    verifier = Verifier(log, threads=2)
    for version, model in chain.models.items():
        found = verifier.digest(bits_of_source(ArraySource(model), log.catalog))
        assert found == committed(log, version) == digest_of(log.run, log.catalog, model)
    assert len({committed(log, version) for version in chain.models}) == len(chain.models) - 1  # one step of nothing


def test_differences_name_exactly_the_wrong_elements(chain: Chain, tmp_path: Path) -> None:
    log = RunLog.open(chain.store)
    verifier = Verifier(log, scratch=tmp_path)
    for version, right in chain.models.items():
        model = copy_of(right)
        model["b.weight"].reshape(-1)[[3, 50]] ^= 1
        model["g.scalar"] ^= np.uint16(0x8000)
        found = verifier.differences(bits_of_source(ArraySource(model), log.catalog), version)
        assert [(change.name, change.changed) for change in found] == [("b.weight", 2), ("g.scalar", 1)]
        assert verifier.differences(bits_of_source(ArraySource(right), log.catalog), version) == ()
    assert list(tmp_path.iterdir()) == []


def test_bits_of_a_target_are_its_own(chain: Chain, tmp_path: Path) -> None:
    log = RunLog.open(chain.store)
    with contextlib.closing(CheckpointTarget(tmp_path / "into")) as target:
        version = followed(chain.store, target)
        assert Verifier(log).digest(bits_of_target(target)) == committed(log, version)
        with target.window(1, 0, 1) as (array, first):
            array[first] ^= 1
        found = Verifier(log).differences(bits_of_target(target), version)
        assert [(change.name, change.changed) for change in found] == [("b.weight", 1)]


def test_a_version_that_cannot_be_rebuilt_is_an_error(chain: Chain) -> None:
    log = RunLog.open(chain.store)
    name = log.version(3).payloads[0].sha256
    key = f"a/{3:010d}/pl/{name}"
    chain.store.put(key, chain.store.get(key)[:-1])
    source = bits_of_source(ArraySource(chain.models[1]), log.catalog)
    with pytest.raises(IntegrityError, match=name[:12]):
        Verifier(log).differences(source, 3)
    assert [c.name for c in Verifier(log).differences(source, 2)]  # the one before it needs no such payload
    with pytest.raises(NotFoundError, match="version 9"):
        Verifier(log).differences(source, 9)


class Named(ArraySource):
    """A source whose catalog is given."""

    def __init__(self, model: dict[str, np.ndarray], entries: tuple[TensorEntry, ...]) -> None:
        super().__init__({}, {})
        self.model, self._catalog = model, Catalog(entries)


X, Y = np.arange(7, dtype="u2"), np.arange(4, dtype="u1")
TIED = Catalog((TensorEntry("head", "F16", (7,), ("embed",)), TensorEntry("y", "U8", (4,))))


def entry(name: str, dtype: str = "F16", size: int = 7) -> TensorEntry:
    return TensorEntry(name, dtype, (size,))


def test_a_tied_tensor_may_stand_under_any_of_its_names() -> None:
    log = RunLog.open_or_create(new_store(), TIED)
    verifier = Verifier(log)
    expected = digest_of(log.run, TIED, {"head": X, "y": Y})
    y = entry("y", "U8", 4)
    for names in (("head",), ("embed",), ("embed", "head")):
        source = Named({"y": Y, **{name: X.copy() for name in names}}, (*map(entry, names), y))
        found = bits_of_source(source, TIED)
        assert verifier.digest(found) == expected
        assert verifier.tie_differences(found) == ()
    source.model["head"][2] += 1  # the copy that is not looked at first
    torn = verifier.tie_differences(bits_of_source(source, TIED))
    assert [(change.name, change.changed) for change in torn] == [("head", 1)]


@pytest.mark.parametrize(
    ("entries", "named"),
    [
        ((entry("head"),), "tensor y is not"),
        ((entry("y", "U8", 4),), "tensor head is not"),
        ((entry("head"), entry("other"), entry("y", "U8", 4)), "tensor other is not"),
        (
            (entry("embed", "BF16"), entry("y", "U8", 4)),
            r"tensor embed is not .* expected F16 \[7\]; found BF16 \[7\]",
        ),
        ((entry("head", size=8), entry("y", "U8", 4)), "tensor head is not"),
    ],
)
def test_another_model_is_refused_by_name(entries: tuple[TensorEntry, ...], named: str) -> None:
    with pytest.raises(BaseMismatch, match=named):
        bits_of_source(Named({}, entries), TIED)


# ------------------------------------------------------------------------------------------ as of


@pytest.mark.parametrize("version", [1, 2, 3, 4, 5])
def test_a_receiver_ends_at_the_version(chain: Chain, version: int) -> None:
    target = MemoryBaseline()
    assert followed(AsOf(RunLog.open(chain.store), version), target) == version
    assert bits(target) == chain.history[version]


def test_later_attempts_are_hidden_and_nothing_can_be_written(chain: Chain) -> None:
    view = AsOf(RunLog.open(chain.store), 2)
    log = RunLog.open(view)
    head = log.head()
    assert head is not None
    assert head.number == 2
    assert log.attempt(3).intent is None
    assert [a.number for a in log.attempts(1)] == [1, 2]
    assert all(not key.startswith(f"a/{3:010d}") for key, _ in view.list())
    assert {key for key, _ in view.list()} < {key for key, _ in chain.store.list()}
    assert view.size(HINT) == len(view.get(HINT))
    assert view.get(HINT, 3, 5) == view.get(HINT)[3:8]
    for call in (lambda: view.put("x", b""), lambda: view.create("x", b""), lambda: view.delete("run")):
        with pytest.raises(UsageError, match="as of version 2"):
            call()
    with pytest.raises(NotFoundError):
        view.size(f"a/{3:010d}/intent")
    with pytest.raises(NotFoundError, match="version 6"):
        AsOf(RunLog.open(chain.store), 6)


# ------------------------------------------------------------------------------------------ anchors


def test_an_anchor_is_where_late_joiners_start(chain: Chain) -> None:
    done = write_anchor(chain.store, MemoryBaseline(), threads=2, payload_bytes=900)
    assert (done.version, done.created) == (chain.head, True)
    assert done.payloads > 1
    for number in range(2, chain.head + 1):  # the chain is not needed any more
        for key, _ in list(chain.store.list(f"a/{number:010d}/pl/")):
            chain.store.delete(key)
    target = MemoryBaseline()
    assert followed(chain.store, target) == chain.head
    assert bits(target) == chain.history[chain.head]


def test_an_anchor_carries_the_side_files(chain: Chain, tmp_path: Path) -> None:
    write_anchor(chain.store, MemoryBaseline())
    with contextlib.closing(CheckpointTarget(tmp_path)) as target:
        followed(chain.store, target)
    assert {name: (tmp_path / name).read_bytes() for name in FILES} == dict(FILES)


def test_an_older_version_is_still_rebuilt_from_the_older_anchor(chain: Chain) -> None:
    write_anchor(chain.store, MemoryBaseline())
    target = MemoryBaseline()
    assert followed(AsOf(RunLog.open(chain.store), 2), target) == 2
    assert bits(target) == chain.history[2]


def test_a_second_anchor_of_a_version_changes_nothing_but_the_hint(chain: Chain) -> None:
    write_anchor(chain.store, MemoryBaseline())
    before = {key: chain.store.get(key) for key, _ in chain.store.list()}
    RunLog.open(chain.store).put_hint(1, 1)  # a publisher that did not know better
    again = write_anchor(chain.store, MemoryBaseline())
    assert (again.version, again.created) == (chain.head, False)
    assert {key: chain.store.get(key) for key, _ in chain.store.list()} == before


def test_publishing_goes_on_after_an_anchor(chain: Chain) -> None:
    write_anchor(chain.store, MemoryBaseline())
    source = ArraySource(copy_of(chain.models[chain.head]))
    source.model["a.weight"][0, 0] ^= 1
    with contextlib.closing(Publisher(chain.store, source, threads=1)) as publisher:
        done = publisher.publish()
    assert (done.version, done.changed, done.anchor) == (chain.head + 1, 1, chain.head)
    target = MemoryBaseline()
    assert followed(chain.store, target) == done.version


def test_an_anchor_needs_a_version_and_a_true_baseline(chain: Chain) -> None:
    with pytest.raises(NotFoundError, match="no run"):
        write_anchor(new_store(), MemoryBaseline())

    class Lying(MemoryBaseline):
        """Bits change after they were proven: memory that fails, or somebody who writes."""

        def finish_seed(self) -> None:
            super().finish_seed()
            self._armed = True

        @contextlib.contextmanager
        def window(self, tensor: int, start: int, stop: int):  # type: ignore[no-untyped-def]
            with super().window(tensor, start, stop) as (array, first):
                whole = getattr(self, "_armed", False) and stop - start == self._arrays[tensor].size
                if whole and tensor == 0 and self._header is not None and self._header.version == chain.head:
                    array[5] ^= 1
                yield array, first

    with pytest.raises(DigestMismatch, match=f"does not hold version {chain.head}"):
        write_anchor(chain.store, Lying())
    assert RunLog.open(chain.store).anchor(chain.head) is None
    assert RunLog.open(chain.store).newest_anchor()[0].version == 1  # type: ignore[index]
    target = MemoryBaseline()
    assert followed(chain.store, target) == chain.head


def test_an_anchor_with_a_short_payload_is_not_called_done(chain: Chain) -> None:
    baseline = MemoryBaseline()
    write_anchor(chain.store, baseline)
    key, _ = next(iter(chain.store.list(anchor_prefix(chain.head) + "pl/")))
    chain.store.put(key, chain.store.get(key)[:-1])
    with pytest.raises(IntegrityError, match="short"):
        write_anchor(chain.store, baseline)


def test_a_model_of_everything_is_covered() -> None:
    """The shapes above hold every width, an empty tensor and a scalar."""
    model = random_model(np.random.default_rng(0))
    assert {array.dtype.itemsize for array in model.values()} == {1, 2, 4, 8}
    assert set(MIXED) == set(model)
