"""Two checkpoints bit by bit: what is counted, what does not fit, and that the estimate is what a publish
sends."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest

from deltarefit import Publisher
from deltarefit.compare import compare
from deltarefit.events import Event
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.weights import SEGMENT_BYTES
from tests.helpers import MIXED, STEPS, ArraySource, copy_of, new_store, random_model, step

DENSE = 40 * 33 * 2 + 105 * 4 + 400 + 150 + 88 + 2 + 1 + 1800


def pair(rng: np.random.Generator, kind: str) -> tuple[ArraySource, ArraySource]:
    old = random_model(rng)
    new = copy_of(old)
    step(rng, new, kind, random_model(rng))
    return ArraySource(old), ArraySource(new)


@pytest.mark.parametrize("kind", STEPS)
def test_counts_are_those_of_numpy(kind: str) -> None:
    first, second = pair(np.random.default_rng(1), kind)
    found = compare(first, second, threads=2)
    expected = {name: int((first.model[name] != second.model[name]).sum()) for name in first.model}
    assert {change.name: change.changed for change in found.tensors} == expected
    assert found.changed == sum(expected.values())
    assert found.equal is (sum(expected.values()) == 0)
    assert found.same_model
    assert (found.numel, found.dense_bytes) == (sum(a.size for a in first.model.values()), DENSE)
    assert found.density == found.changed / found.numel
    assert (found.wire_bytes > 0) is (found.changed > 0)


@pytest.mark.parametrize("payload_bytes", [1, 3000, 1 << 20])
def test_the_estimate_is_what_a_publish_sends(payload_bytes: int) -> None:
    first, second = pair(np.random.default_rng(2), "some")
    store = new_store()
    source = ArraySource(copy_of(first.model))
    with contextlib.closing(Publisher(store, source, threads=1, payload_bytes=payload_bytes)) as publisher:
        publisher.publish()
        source.model.update(second.model)
        version = publisher.publish().version
    (manifest,) = publisher.log.version(version).manifests
    found = compare(first, second, payload_bytes=payload_bytes)
    assert (found.wire_bytes, found.payloads) == (manifest.payload_bytes, len(manifest.payloads))
    assert 0 < found.changed <= manifest.listed  # a delta may carry a few elements that did not change


def test_bits_count_not_numbers() -> None:
    """Negative zero differs from zero; one NaN equals itself and no other."""
    shapes = {"x": ("F32", (4,))}
    old = {"x": np.array([0.0, np.nan, 1.0, np.nan], "f4").view("u4")}
    new = {"x": np.array([-0.0, np.nan, 1.0, np.nan], "f4").view("u4")}
    new["x"][3] ^= 1
    found = compare(ArraySource(old, shapes), ArraySource(new, shapes))
    assert found.changed == 2


def test_other_tensors() -> None:
    old = {
        "both": np.arange(6, dtype="u2"),
        "gone": np.arange(2, dtype="u1"),
        "shape": np.arange(6, dtype="u2"),
    }
    new = {
        "both": np.arange(6, dtype="u2"),
        "here": np.arange(2, dtype="u1"),
        "shape": np.arange(6, dtype="u2").reshape(2, 3),
    }
    shapes = {"both": ("BF16", (6,)), "gone": ("U8", (2,)), "shape": ("F16", (6,)), "here": ("U8", (2,))}
    found = compare(ArraySource(old, shapes), ArraySource(new, shapes))
    assert (found.only_first, found.only_second) == (("gone",), ("here",))
    assert [(m.name, m.first, m.second) for m in found.misfits] == [("shape", "F16 [6]", "F16 [2, 3]")]
    assert not found.equal
    assert not found.same_model
    assert [(change.name, change.changed) for change in found.tensors] == [("both", 0)]


def test_another_dtype_of_the_same_width_is_no_match() -> None:
    old, new = {"x": np.arange(6, dtype="u2")}, {"x": np.arange(6, dtype="u2")}
    found = compare(ArraySource(old, {"x": ("BF16", (6,))}), ArraySource(new, {"x": ("F16", (6,))}))
    assert [(m.first, m.second) for m in found.misfits] == [("BF16 [6]", "F16 [6]")]
    assert not found.equal


def test_a_tensor_of_many_segments_and_its_progress() -> None:
    numel = SEGMENT_BYTES + 12345
    shapes = {"big": ("U8", (numel,)), "small": ("U8", (3,))}
    old = {"big": np.zeros(numel, "u1"), "small": np.zeros(3, "u1")}
    new = copy_of(old)
    new["big"][[0, SEGMENT_BYTES - 1, SEGMENT_BYTES, numel - 1]] = 1
    new["small"][2] = 9
    events: list[Event] = []
    found = compare(ArraySource(old, shapes), ArraySource(new, shapes), emit=events.append)
    assert [change.changed for change in found.tensors] == [4, 1]
    assert [(e.done, e.total) for e in events] == [(d, numel + 3) for d in (SEGMENT_BYTES, numel, numel + 3)]


def test_nothing_at_all() -> None:
    class Empty(ArraySource):
        @property
        def catalog(self) -> Catalog:
            return Catalog(())

    found = compare(Empty({}), Empty({}))
    assert found.equal
    assert found.density == 0.0
    assert found.wire_bytes == 0


def test_a_tensor_without_elements_may_differ_in_shape_only() -> None:
    shapes = {"x": ("F16", (0, 5))}
    other = {"x": ("F16", (5, 0))}
    none = {"x": np.zeros((0, 5), "u2")}
    assert compare(ArraySource(none, shapes), ArraySource(copy_of(none), shapes)).equal
    found = compare(ArraySource(none, shapes), ArraySource({"x": np.zeros((5, 0), "u2")}, other))
    assert not found.equal
    assert len(found.misfits) == 1
    assert MIXED["f.empty"] == shapes["x"]
    assert TensorEntry("x", "F16", (0, 5)).numel == 0
