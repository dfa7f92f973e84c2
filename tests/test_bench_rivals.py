"""The field's encodings, the entropy bounds and the generated pairs that the benchmark stands on."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from deltarefit.bench import rivals
from deltarefit.bench.data import LEARNING_RATES, Pair, generated_pair, real_pairs
from deltarefit.bench.entropy import bounds, position_bytes, symbol_bytes
from deltarefit.bench.rivals import RIVALS, Rival, changed_positions, gap_width
from deltarefit.errors import FormatError, UsageError

COPY, INDICES, XOR, GAPS = RIVALS
EACH = pytest.mark.parametrize("rival", RIVALS, ids=lambda rival: rival.name)
WIDTHS = (np.uint8, np.uint16, np.uint32, np.uint64)


@st.composite
def pairs(draw: st.DrawFn) -> Pair:
    """Up to four tensors of any width and shape: unchanged, changed throughout, in one range, here and there."""
    return {f"t{number}": draw(tensors()) for number in range(draw(st.integers(0, 4)))}


@st.composite
def tensors(draw: st.DrawFn) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    shape = tuple(draw(st.lists(st.integers(0, 40), max_size=3)))
    generator = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    dtype = draw(st.sampled_from(WIDTHS))
    old = generator.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    mask = {
        "none": lambda: np.zeros(old.size, bool),
        "all": lambda: np.ones(old.size, bool),
        "range": lambda: _between(old.size, *sorted(generator.integers(0, old.size + 1, 2).tolist())),
        "some": lambda: generator.random(old.size) < 0.1,
    }[draw(st.sampled_from(["none", "all", "range", "some"]))]()
    flips = generator.integers(1, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return np.asarray(old), np.asarray(old ^ np.where(mask.reshape(shape), flips, dtype(0)))


def _between(size: int, start: int, stop: int) -> npt.NDArray[np.bool_]:
    places = np.arange(size)
    return (places >= start) & (places < stop)


def check_round_trip(rival: Rival, pair: Pair) -> list[bytes]:
    """Parts as they travel: copies, so that nothing hangs on the encoder's memory."""
    untouched = {name: (old.tobytes(), new.tobytes()) for name, (old, new) in pair.items()}
    parts = [bytes(part) for part in rival.encode(pair)]
    targets = {name: old.copy() for name, (old, _) in pair.items()}
    rival.apply(parts, targets)
    assert {name: target.tobytes() for name, target in targets.items()} == {n: b for n, (_, b) in untouched.items()}
    assert {name: (old.tobytes(), new.tobytes()) for name, (old, new) in pair.items()} == untouched
    return parts


def single(numel: int, *positions: int) -> Pair:
    old = np.zeros(numel, np.uint16)
    new = old.copy()
    new[list(positions)] = 1
    return {"t": (old, new)}


# --- rivals -----------------------------------------------------------------------------------------------


@EACH
@given(pair=pairs())
@settings(max_examples=60, deadline=None)
def test_round_trip(rival: Rival, pair: Pair) -> None:
    check_round_trip(rival, pair)


@EACH
@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
@pytest.mark.parametrize("density", [0.0, 0.002, 0.05, 1.0])
def test_round_trip_of_generated_pairs(rival: Rival, dtype: str, density: float) -> None:
    check_round_trip(rival, generated_pair(density, 60_000, dtype))


@EACH
def test_parts_count_for_what_they_are(rival: Rival) -> None:
    """A copy costs all bytes, indices six a change; the compressing ones cost less than either here."""
    pair = generated_pair(0.02, 200_000)
    size = sum(len(part) for part in check_round_trip(rival, pair))
    changed = sum(int(np.count_nonzero(old != new)) for old, new in pair.values())
    numel = sum(old.size for old, _ in pair.values())
    expected = {COPY: (2 * numel, 2 * numel), INDICES: (6 * changed, 6 * changed)}
    low, high = expected.get(rival, (bounds(pair).total, 4 * changed))
    assert low <= size <= high


@EACH
def test_strided_arrays_are_refused(rival: Rival) -> None:
    old = np.zeros((4, 6), np.uint16)
    with pytest.raises(UsageError, match="C-contiguous"):
        rival.encode({"t": (old.T, old.T)})


@EACH
def test_missing_parts_are_noticed(rival: Rival) -> None:
    pair = generated_pair(0.1, 20_000)
    parts = rival.encode(pair)
    with pytest.raises(ValueError, match="zip"):
        rival.apply(parts[:-1], {name: old.copy() for name, (old, _) in pair.items()})


@pytest.mark.parametrize(("gap", "width"), [(65_535, 2), (65_536, 4)])
def test_gaps_are_16_bits_while_they_fit(gap: int, width: int) -> None:
    parts = check_round_trip(GAPS, single(70_000, 3, 3 + gap, 3 + gap + 1))
    assert parts[0][0] == width


def test_a_range_is_its_start_and_no_change_is_nothing() -> None:
    for positions, size in (((5, 6, 7, 8), 8 + 4 * 2), ((9,), 8 + 2), ((), 0)):
        head, packed = check_round_trip(GAPS, single(20, *positions))
        assert head[0] == 0
        assert zstandard.frame_content_size(packed) == size


def test_gap_widths() -> None:
    sizes = {0: 2, 65_535: 2, 65_536: 4, (1 << 32) - 1: 4, 1 << 32: 8, (1 << 48) - 1: 8}
    assert {largest: gap_width(largest) for largest in sizes} == sizes


def test_gap_payloads_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = generated_pair(0.05, 30_000)
    whole = check_round_trip(GAPS, pair)
    monkeypatch.setattr(rivals, "PAYLOAD_BYTES", 8192)
    split = check_round_trip(GAPS, pair)
    assert len(whole) == 2 < len(split)
    large = sum(old.nbytes > 8192 for old, _ in pair.values())
    assert 0 < large < len(split) // 2 < len(pair)


@pytest.mark.parametrize("rival", [XOR, GAPS], ids=lambda rival: rival.name)
def test_wrong_size_is_refused_before_decompression(rival: Rival) -> None:
    pair = single(1000, 4, 9)
    parts = rival.encode(pair)
    parts[-1] = zstandard.ZstdCompressor().compress(bytes(1 << 20))
    with pytest.raises(FormatError, match="found 1048576"):
        rival.apply(parts, {"t": np.zeros(1000, np.uint16)})


def test_positions_see_bits_not_numbers() -> None:
    """-0.0 differs from 0.0, a NaN equals itself and differs from another NaN."""
    old = np.array([0x0000, 0x7FC0, 0x7FC0, 0x3F80], np.uint16)
    new = np.array([0x8000, 0x7FC0, 0x7FC1, 0x3F80], np.uint16)
    assert changed_positions(old, new).tolist() == [0, 2]


def test_core_imports_no_torch() -> None:
    code = "import sys, deltarefit.bench.rivals, deltarefit.bench.entropy, deltarefit.bench.data; "
    code += "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# --- entropy ----------------------------------------------------------------------------------------------


def test_position_entropy_in_closed_form() -> None:
    assert position_bytes(0, 1000) == position_bytes(1000, 1000) == position_bytes(0, 0) == 0.0
    assert position_bytes(500, 1000) == pytest.approx(1000 / 8)
    # H2(1/4) = 2 - 3/4 log2 3
    assert position_bytes(250, 1000) == position_bytes(750, 1000) == pytest.approx(125 * (2 - 0.75 * math.log2(3)))


@given(numel=st.integers(1, 300), data=st.data())
def test_position_entropy_bounds_the_number_of_sets(numel: int, data: st.DataObject) -> None:
    """log2 of "numel choose changed" lies below numel H2, and at most log2(numel + 1) below."""
    changed = data.draw(st.integers(0, numel))
    bits, sets = 8 * position_bytes(changed, numel), math.log2(math.comb(numel, changed))
    assert sets - 1e-6 <= bits <= sets + math.log2(numel + 1) + 1e-6


@pytest.mark.parametrize("dtype", WIDTHS)
def test_symbol_entropy_in_closed_form(dtype: Any) -> None:
    assert symbol_bytes(np.array([], dtype)) == 0.0
    assert symbol_bytes(np.full(100, 7, dtype)) == 0.0
    assert symbol_bytes(np.tile(np.arange(256, dtype=dtype), 3)) == pytest.approx(768)
    # Halves and quarters: 1.5 bits a symbol.
    assert symbol_bytes(np.array([1, 1, 2, 3] * 16, dtype)) == pytest.approx(64 * 1.5 / 8)


def test_bounds_of_a_known_pair() -> None:
    """Half of 64 elements change by +1 or -1, equally often, from 8: one bit for each position and difference."""
    old = np.full(64, 8, np.uint16)
    new = old.copy()
    new[::4] += 1
    new[2::4] -= 1
    found = bounds({"t": (old, new)})
    assert (found.numel, found.changed) == (64, 32)
    assert (found.positions, found.differences, found.xors) == pytest.approx((8, 4, 4))
    assert found.total == pytest.approx(12)
    assert found.per_element == pytest.approx(12 / 32)


def test_differences_wrap_and_xor_is_another_form() -> None:
    """+1 everywhere, over the wrap too, is one difference, but as many XOR masks as there are carry lengths."""
    old = np.arange(1 << 8, dtype=np.uint8)
    found = bounds({"t": (old, old + np.uint8(1))})
    assert found.positions == found.differences == 0.0
    # Half the masks are 1, a quarter 3, ...; two end in 255: sum of k / 2^k over 8 bits, the last one twice.
    bits = sum(k / 2**k for k in range(1, 8)) + 7 / 2**7
    assert found.xors == pytest.approx(256 * bits / 8)


def test_positions_go_by_tensor_and_values_by_model_and_width() -> None:
    changed = np.zeros(64, np.uint16), np.ones(64, np.uint16)
    still = np.zeros(64, np.uint16), np.zeros(64, np.uint16)
    twos = np.zeros(64, np.uint16), np.full(64, 2, np.uint16)
    bytes_ = np.zeros(64, np.uint8), np.full(64, 2, np.uint8)
    assert bounds({"a": changed, "b": still}).total == 0.0
    assert bounds({"a": changed, "b": twos}).differences == pytest.approx(128 / 8)
    assert bounds({"a": changed, "b": bytes_}).total == 0.0
    assert bounds({}).per_element == bounds({"b": still}).per_element == 0.0


@given(pair=pairs())
@settings(max_examples=40, deadline=None)
def test_bounds_hold_for_any_pair(pair: Pair) -> None:
    found = bounds(pair)
    assert found.changed == sum(int(np.count_nonzero(old != new)) for old, new in pair.values())
    assert 0 <= found.positions <= found.numel / 8 + 1e-9
    # A table of n symbols never needs more than log2(n) bits each.
    assert max(found.differences, found.xors) <= found.changed * math.log2(max(found.changed, 1)) / 8 + 1e-9


# --- data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "width"), [("BF16", 2), ("F32", 4), ("F8_E4M3", 1)])
@pytest.mark.parametrize("density", [0.01, 0.2])
def test_generated_pairs_are_as_asked(dtype: str, width: int, density: float) -> None:
    pair = generated_pair(density, 300_000, dtype, seed=3)
    found = bounds(pair)
    assert found.numel == pytest.approx(300_000, rel=0.01)
    assert found.changed == pytest.approx(density * found.numel, rel=0.1)
    assert {old.itemsize for old, _ in pair.values()} == {width}
    assert {new.dtype for _, new in pair.values()} == {next(iter(pair.values()))[0].dtype}
    assert len({old.shape for old, _ in pair.values()}) >= 6


@pytest.mark.parametrize("dtype", ["BF16", "F32", "F8_E4M3"])
def test_generated_pairs_go_by_seed_and_reach_both_ends(dtype: str) -> None:
    one, two, other = (generated_pair(0.1, 20_000, dtype, seed) for seed in (0, 0, 1))
    for name, (old, new) in one.items():
        assert old.tobytes() + new.tobytes() == b"".join(array.tobytes() for array in two[name])
    assert any(old.tobytes() != other[name][0].tobytes() for name, (old, _) in one.items())
    for density in (0.0, 1.0):
        found = bounds(generated_pair(density, 20_000, dtype))
        assert found.changed == density * found.numel


def test_generated_bf16_changes_look_like_adamws() -> None:
    differences = np.concatenate([(new - old)[new != old] for old, new in generated_pair(0.5, 400_000).values()])
    sizes = np.abs(differences.view(np.int16).astype(np.int64))
    shares = [float(np.mean(sizes == size)) for size in (1, 2, 3)]
    assert shares == pytest.approx([0.9, 0.05, 0.025], abs=0.01)
    assert float(np.mean(differences.view(np.int16) > 0)) == pytest.approx(0.5, abs=0.01)


def test_generated_values_stay_finite_and_keep_their_sign() -> None:
    for dtype, exponent, sign in (("BF16", 0x7F80, 0x8000), ("F8_E4M3", 0x7F, 0x80)):
        for old, new in generated_pair(1.0, 50_000, dtype).values():
            assert not np.any((new & exponent) == exponent)
            assert np.array_equal(old & sign, new & sign)


@pytest.mark.parametrize("wrong", [{"density": 1.5}, {"density": -0.1}, {"numel": -1}, {"dtype": "I4"}])
def test_impossible_pairs_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="expected density in"):
        generated_pair(**{"density": 0.1, "numel": 100, **wrong})


def test_tiny_pairs_are_real_steps_made_once(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    found = real_pairs(tmp_path, quick=True)
    assert tuple(found) == LEARNING_RATES
    densities = [bounds(pair).changed / bounds(pair).numel for pair in found.values()]
    assert 0 < densities[0] < densities[1] < densities[2] < 0.2
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = real_pairs(tmp_path, quick=True)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == stamps
    for rate, pair in found.items():
        assert "model.embed_tokens.weight" in pair
        for name, (old, new) in pair.items():
            assert old.dtype == np.uint16
            assert not old.flags.writeable
            assert new.tobytes() == again[rate][name][1].tobytes()
    check_round_trip(GAPS, found[LEARNING_RATES[2]])
