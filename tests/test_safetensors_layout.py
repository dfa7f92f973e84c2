"""Header parsing agrees with the safetensors library on everything it accepts, and refuses the rest."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from deltarefit import safetensors_layout as layout
from deltarefit.errors import FormatError, IntegrityError, UsageError
from deltarefit.manifest import WIDTHS, Catalog, TensorEntry
from deltarefit.safetensors_layout import DirectoryLayout

BITS = {name: width * 8 for name, width in WIDTHS.items()} | {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def header_of(body: dict[str, Any] | str, pad: int = 0) -> bytes:
    text = (body if isinstance(body, str) else json.dumps(body, separators=(",", ":"))).encode() + b" " * pad
    return len(text).to_bytes(8, "little") + text


def body_of(tensors: list[tuple[str, str, tuple[int, ...]]]) -> dict[str, Any]:
    body: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        size = math.prod(shape) * BITS[dtype] // 8
        body[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    return body


SMALL = header_of(
    {"__metadata__": {"format": "pt"}}
    | body_of(
        [
            ("w", "BF16", (3, 5)),
            ("b", "U8", (3,)),
            ("s", "F32", ()),
            ("e", "I64", (0, 4)),
            ("h", "F4", (2, 8)),
        ]
    ),
    pad=3,
)


def library_layout(header: bytes, size: int) -> dict[str, tuple[str, list[int], bytes]]:
    """What the safetensors library reads from this header and ``size`` bytes; each byte says where it is."""
    data = bytes((i * 37 + 11) % 251 for i in range(size - len(header)))
    return {name: (i["dtype"], list(i["shape"]), bytes(i["data"])) for name, i in deserialize(header + data)}


def our_layout(header: bytes) -> dict[str, tuple[str, bytes]]:
    found = layout.parse_header(header, "x")
    data = bytes((i * 37 + 11) % 251 for i in range(found.size - len(header)))
    whole = header + data
    return {t.entry.name: (t.entry.dtype, whole[t.offset : t.offset + t.entry.nbytes]) for t in found.tensors}


def assert_agrees(header: bytes) -> None:
    """If we accept a header, the library accepts it too and finds the same bytes under the same names."""
    found = layout.parse_header(header, "x")
    theirs = library_layout(header, found.size)
    assert our_layout(header) == {name: (dtype, data) for name, (dtype, _, data) in theirs.items()}
    for tensor in found.tensors:
        if tensor.entry.dtype not in ("F4", "F6_E2M3", "F6_E3M2"):
            assert list(tensor.entry.shape) == theirs[tensor.entry.name][1]


def structure(header: bytes) -> list[tuple[str, tuple[int, ...], int]]:
    """Layout without names, and without the free shape of empty tensors."""
    found = layout.parse_header(header, "x")
    return [(t.entry.dtype, t.entry.shape if t.entry.numel else (0,), t.offset) for t in found.tensors]


def test_parses_what_the_library_writes() -> None:
    assert_agrees(SMALL)
    names = {t.entry.name: t.entry for t in layout.parse_header(SMALL, "x").tensors}
    assert names["w"] == TensorEntry("w", "BF16", (3, 5))
    assert names["h"] == TensorEntry("h", "F4", (2, 4))


def test_every_bit_flip_is_refused_or_agrees_with_the_library() -> None:
    accepted = 0
    for bit in range(len(SMALL) * 8):
        flipped = bytearray(SMALL)
        flipped[bit // 8] ^= 1 << bit % 8
        try:
            layout.parse_header(bytes(flipped), "x")
        except FormatError:
            continue
        accepted += 1
        assert_agrees(bytes(flipped))
        if len(flipped) == len(SMALL):
            assert structure(bytes(flipped)) == structure(SMALL)
    assert accepted  # names and metadata are free: a flip there gives another catalog, not a wrong place


def test_every_truncation_and_extension_is_refused() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(FormatError):
            layout.parse_header(SMALL[:length], "x")
    with pytest.raises(FormatError, match="truncated header"):
        layout.parse_header(SMALL + b" ", "x")


entries = st.tuples(st.sampled_from(sorted(WIDTHS)), st.lists(st.integers(0, 5), max_size=3).map(tuple)).filter(
    lambda e: math.prod(e[1]) * BITS[e[0]] % 8 == 0
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1, max_size=8), entries, max_size=6),
    st.data(),
)
def test_any_layout_and_any_damage_to_it(tensors: dict[str, tuple[str, tuple[int, ...]]], data: st.DataObject) -> None:
    tensors.pop("__metadata__", None)
    header = header_of(body_of([(name, dtype, shape) for name, (dtype, shape) in tensors.items()]))
    assert_agrees(header)
    damaged = bytearray(header)
    for _ in range(data.draw(st.integers(1, 3))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        layout.parse_header(bytes(damaged), "x")
    except FormatError:
        return
    assert_agrees(bytes(damaged))


T = '"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'


@pytest.mark.parametrize(
    "body",
    [
        "[]",
        "1",
        f" {{{T}}}",
        f"{{{T},{T}}}",
        '{"a":{"dtype":"U8","dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,3]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[2,0]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2,2]}}',
        '{"a":{"dtype":"U8","shape":[-2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[-0,2],"data_offsets":[-0,0]}}',
        '{"a":{"dtype":"U8","shape":[2.0],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[true,2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[18446744073709551616,0],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":2,"data_offsets":[0,2]}}',
        '{"a":{"dtype":"C128","shape":[2],"data_offsets":[0,32]}}',
        '{"a":{"dtype":["U8"],"shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2],"more":1}}',
        '{"a":{"dtype":"U8","shape":[2]}}',
        '{"a":[]}',
        '{"__metadata__":{"a":1}}',
        '{"__metadata__":null}',
        '{"\\ud800":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}',
        '{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}}',
        '{"a":{"dtype":"F4","shape":[3],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"F4","shape":[],"data_offsets":[0,0]}}',
        '{"a":%s}' % ("[" * 100000),
        '{"a":1e400}',
        '{"a":NaN}',
        '{"a":%s}' % ("9" * 10000),
        '{"a":{"dtype":"U8","shape":[%s1],"data_offsets":[0,1]}}' % ("1," * 20),
    ],
)
def test_what_is_refused(body: str) -> None:
    with pytest.raises(FormatError, match=r"^some\.safetensors"):
        layout.parse_header(header_of(body), "some.safetensors")


def test_limits_are_checked_before_anything_is_read() -> None:
    with pytest.raises(FormatError, match="header too large"):
        layout.header_bytes((layout.MAX_HEADER_BYTES + 1).to_bytes(8, "little"), "x")
    assert layout.header_bytes(layout.MAX_HEADER_BYTES.to_bytes(8, "little"), "x") == layout.MAX_HEADER_BYTES + 8
    with pytest.raises(FormatError, match="not JSON"):
        layout.parse_header(header_of("")[:8] + b"", "x")
    with pytest.raises(FormatError, match="not JSON"):
        layout.parse_header((1).to_bytes(8, "little") + b"\xff", "x")


def test_the_library_is_not_stricter_than_we_are_about_gaps() -> None:
    gap = header_of('{"a":{"dtype":"U8","shape":[2],"data_offsets":[1,3]}}')
    with pytest.raises(SafetensorError):
        deserialize(gap + b"\0\0\0")


@pytest.mark.parametrize(
    ("dtype", "shape", "expected"),
    [
        ("F4", (4, 8), (4, 4)), ("F4", (8, 3), (12,)), ("F4", (0,), (0,)), ("F6_E2M3", (2, 4), (2, 3)),
        ("F6_E3M2", (4, 2), (6,)), ("F8_E4M3", (4, 3), (4, 3)), ("BF16", (), ()),
    ],
)  # fmt: skip
def test_sub_byte_shapes_count_bytes(dtype: str, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    header = header_of(body_of([("t", dtype, shape)]))
    (tensor,) = layout.parse_header(header, "x").tensors
    assert tensor.entry.shape == expected
    again = layout.default_header(Catalog((tensor.entry,)))
    assert layout.parse_header(again, "x").tensors[0].entry == tensor.entry
    assert_agrees(again)


def catalog_of(*entries: TensorEntry) -> Catalog:
    return Catalog(tuple(sorted(entries, key=lambda e: e.name)))


MIXED = catalog_of(
    TensorEntry("a", "BOOL", (3,)), TensorEntry("b", "F32", (2, 2)), TensorEntry("c", "BF16", (5,)),
    TensorEntry("d", "I64", ()), TensorEntry("é", "F8_E5M2", (0, 7)),
)  # fmt: skip


def test_default_header_is_aligned_and_readable() -> None:
    header = layout.default_header(MIXED)
    found = layout.parse_header(header, "x")
    assert len(header) % 8 == 0
    assert all(t.offset % t.entry.width == 0 for t in found.tensors)
    assert_agrees(header)
    assert layout.catalog_of_files({"model.safetensors": found}) == MIXED


def test_default_header_of_one_width_is_in_catalog_order() -> None:
    catalog = catalog_of(*(TensorEntry(n, "BF16", (2,)) for n in "dacb"))
    found = layout.parse_header(layout.default_header(catalog), "x")
    assert [t.entry.name for t in found.tensors] == ["a", "b", "c", "d"]


def test_default_header_refuses_half_an_element() -> None:
    with pytest.raises(FormatError, match="no whole"):
        layout.default_header(catalog_of(TensorEntry("t", "F6_E2M3", (2, 4))))


def two_files() -> dict[str, bytes]:
    return {
        "m-1.safetensors.header": header_of(body_of([("b", "F32", (2, 2)), ("a", "BOOL", (3,))])),
        "m-2.safetensors.header": header_of(body_of([("d", "I64", ()), ("c", "BF16", (5,)), ("é", "F8_E5M2", (0, 7))])),
    }


def test_split_files_lays_out_what_the_headers_say() -> None:
    layouts, side = layout.split_files(MIXED, two_files() | {"config.json": b"{}"})
    assert sorted(layouts) == ["m-1.safetensors", "m-2.safetensors"]
    assert side == {"config.json": b"{}"}
    assert [p.file for p in layout.places(MIXED, layouts)] == [f"m-{n}.safetensors" for n in (1, 1, 2, 2, 2)]


def test_split_files_without_headers_makes_one_file() -> None:
    layouts, _ = layout.split_files(MIXED, {})
    assert list(layouts) == ["model.safetensors"]


def test_split_files_refuses_headers_of_another_catalog() -> None:
    files = two_files()
    with pytest.raises(FormatError, match="é in no file"):
        layout.split_files(
            MIXED,
            files | {"m-2.safetensors.header": header_of(body_of([("d", "I64", ()), ("c", "BF16", (5,))]))},
        )
    with pytest.raises(FormatError, match="c in m-2"):
        layout.split_files(MIXED, files | {"m-2.safetensors.header": header_of(body_of([("c", "F16", (5,))]))})
    with pytest.raises(FormatError, match="d in m-3"):
        layout.split_files(MIXED, files | {"m-3.safetensors.header": header_of(body_of([("d", "I64", ())]))})
    with pytest.raises(FormatError, match="x in m-3"):
        layout.split_files(MIXED, files | {"m-3.safetensors.header": header_of(body_of([("x", "I64", ())]))})


@pytest.mark.parametrize(
    "name",
    [
        "x.py",
        "pytorch_model.bin",
        "a.pt",
        "a.pth",
        "b.safetensors",
        "../config.json",
        ".hidden.json",
        "a/b.json",
        "no_suffix",
        "c.json.header",
        "../m.safetensors.header",
        ".m.safetensors.header",
        "a b.safetensors.header",
        "",
    ],
)
def test_split_files_refuses_names(name: str) -> None:
    with pytest.raises(FormatError):
        layout.split_files(MIXED, two_files() | {name: header_of("{}")})


def test_a_file_may_use_a_tied_name_once() -> None:
    tied = catalog_of(TensorEntry("head", "U8", (2,), ("embed",)))
    layouts, _ = layout.split_files(tied, {"m.safetensors.header": header_of(body_of([("embed", "U8", (2,))]))})
    assert layout.places(tied, layouts)[0].file == "m.safetensors"
    both = header_of(body_of([("embed", "U8", (2,)), ("head", "U8", (2,))]))
    with pytest.raises(FormatError, match="exactly the catalog"):
        layout.split_files(tied, {"m.safetensors.header": both})


def test_a_name_in_two_files_is_refused() -> None:
    one = layout.parse_header(header_of(body_of([("a", "U8", (2,))])), "x")
    with pytest.raises(FormatError, match="stands in one and in two"):
        layout.catalog_of_files({"one": one, "two": one})


def test_index() -> None:
    layouts, _ = layout.split_files(MIXED, two_files())
    right = {t.entry.name: file for file, found in layouts.items() for t in found.tensors}

    def index(weight_map: Any) -> bytes:
        return json.dumps({"metadata": {"total_size": 1.5}, "weight_map": weight_map}).encode()

    layout.check_index(index(right), layouts)
    layout.split_files(MIXED, two_files() | {layout.INDEX_FILE: index(right)})
    for wrong in (right | {"z": "m-1.safetensors"}, right | {"a": "m-2.safetensors"}, {}, [], {"a": 1}):
        with pytest.raises(FormatError):
            layout.check_index(index(wrong), layouts)
    for data in (b"", b"[]", b"{}", b"\xff", b'{"weight_map":{},"weight_map":{}}'):
        with pytest.raises(FormatError):
            layout.check_index(data, layouts)


def test_which_files_hold_the_weights() -> None:
    index = b'{"weight_map":{"a":"s-2.safetensors","b":"s-1.safetensors"}}'
    choose = layout.choose_weight_files
    assert choose(["model.safetensors", "other.safetensors"], None) == ("model.safetensors",)
    assert choose(["b.safetensors", "a.safetensors", ".c.safetensors", "x"], None) == (
        "a.safetensors",
        "b.safetensors",
    )
    assert choose(["s-1.safetensors", "s-2.safetensors", "consolidated.safetensors"], index) == (
        "s-1.safetensors",
        "s-2.safetensors",
    )
    with pytest.raises(UsageError, match="both"):
        choose(["model.safetensors", "s-1.safetensors", "s-2.safetensors"], index)
    with pytest.raises(UsageError, match="no "):
        choose(["config.json"], None)


def test_directory_layout_is_a_record_that_finds_other_files() -> None:
    layouts, side = layout.split_files(MIXED, two_files() | {"config.json": b""})
    record = layout.directory_layout(MIXED, layouts, side)
    assert DirectoryLayout.from_bytes(record.to_bytes()) == record
    assert record.files == ("config.json",)
    first, found = record.weights[0], layouts["m-1.safetensors"]
    assert layout.check_weight_file(first, found.header, found.size, "x") == found
    with pytest.raises(IntegrityError, match=r"wrong size.*seeded anew"):
        layout.check_weight_file(first, found.header, found.size - 1, "x")
    with pytest.raises(IntegrityError, match=r"not the weight file.*seeded anew"):
        layout.check_weight_file(first, found.header[:-1] + b" ", found.size, "x")
