"""A live torch model is written where it lies, whatever its dtypes and strides, or refused by name."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from deltarefit.errors import BaseMismatch, UsageError
from deltarefit.manifest import WIDTHS, Catalog, Header, State, TensorEntry
from deltarefit.records import Digest

torch = pytest.importorskip("torch")
nn = torch.nn

from deltarefit.targets.module import DTYPES, ModuleTarget, catalog_of  # noqa: E402


def of(**tensors: torch.Tensor) -> nn.Module:
    """A module with these buffers; a dot in a name is written ``__``."""
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def raw(tensor: torch.Tensor) -> bytes:
    """Bits of a tensor in row-major order, by torch alone."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    return bytes(tensor.detach().view(integers).contiguous().reshape(-1).view(torch.uint8).tolist())


def set_all(target: ModuleTarget, seed: int) -> list[bytes]:
    """Random bits into every element through windows of parts; gives what each tensor must hold."""
    rng, expected = np.random.default_rng(seed), []
    for number, entry in enumerate(target.catalog.tensors):
        bits = rng.integers(0, 256, entry.nbytes, np.uint8).view(f"u{entry.width}")
        cut = entry.numel // 3
        for start, stop in ((0, cut), (cut, entry.numel)):
            with target.window(number, start, stop) as (elements, first):
                assert elements.dtype == np.dtype(f"u{entry.width}")
                assert elements.size == entry.numel
                for position in range(stop - start):
                    elements.flat[first + position] = bits[start + position]
        expected.append(bits.tobytes())
    return expected


def check_bits(model: nn.Module, target: ModuleTarget, expected: list[bytes]) -> None:
    state = model.state_dict()
    for entry, bits in zip(target.catalog.tensors, expected, strict=True):
        for name in {entry.name, *entry.aliases} & set(state):
            assert raw(state[name]) == bits, name


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
def test_every_dtype_in_every_shape(dtype: torch.dtype) -> None:
    def make(*shape: int) -> torch.Tensor:
        return torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8).view(dtype).reshape(shape)

    model = of(
        a=make(3, 5),
        b=make(),
        c=make(0, 4),
        d=make(7, 4).t(),
        e=make(6, 8)[1:5:2, ::3],
        f=make(2, 3, 4).permute(2, 0, 1),
    )
    target = ModuleTarget(model)
    assert {e.dtype for e in target.catalog.tensors} == {DTYPES[dtype]}
    assert {e.width for e in target.catalog.tensors} == {dtype.itemsize}
    assert [e.shape for e in target.catalog.tensors] == [tuple(t.shape) for t in model.buffers()]
    check_bits(model, target, set_all(target, 1))


def test_all_dtypes_of_the_catalog_but_six_bit_ones_have_a_torch_dtype() -> None:
    assert set(WIDTHS) - set(DTYPES.values()) <= {"F6_E2M3", "F6_E3M2", "F4", "F8_E8M0"}


def test_windows_copy_nothing_and_keep_strides() -> None:
    model = of(a=torch.zeros(4, 6).t())
    target = ModuleTarget(model)
    with target.window(0, 5, 9) as (elements, first):
        assert first == 5
        assert elements.ctypes.data == model.a.data_ptr()
        assert elements.shape == (6, 4)
        assert elements.strides == (4, 24)


def test_the_catalog_is_that_of_state_dict() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2, bias=False)).to(torch.bfloat16)
    model.register_buffer("scratch", torch.zeros(3), persistent=False)
    model.register_parameter("nothing", None)
    catalog = catalog_of(model)
    state = model.state_dict()
    assert [e.name for e in catalog.tensors] == sorted(state)
    assert "1.num_batches_tracked" in state
    assert all(e.shape == tuple(state[e.name].shape) for e in catalog.tensors)
    assert all(e.dtype == DTYPES[state[e.name].dtype] for e in catalog.tensors)
    assert all(not e.aliases for e in catalog.tensors)


def tied() -> nn.Module:
    model = nn.Module()
    model.head, model.embed = nn.Linear(4, 5, bias=False), nn.Embedding(5, 4)
    model.embed.weight = model.head.weight
    model.body = nn.Linear(4, 4)
    return model


def test_tied_tensors_are_one_entry() -> None:
    catalog = catalog_of(tied())
    assert catalog.tensors[-1] == TensorEntry("embed.weight", "F32", (5, 4), ("head.weight",))
    assert [e.name for e in catalog.tensors] == ["body.bias", "body.weight", "embed.weight"]


@pytest.mark.parametrize(
    "names", [("embed.weight",), ("head.weight",), ("head.weight", "embed.weight"), ("embed.weight", "other")]
)
def test_the_seeded_catalog_names_tied_tensors(names: tuple[str, ...]) -> None:
    model = tied()
    entries = [TensorEntry("body.bias", "F32", (4,)), TensorEntry("body.weight", "F32", (4, 4))]
    catalog = Catalog((*entries, TensorEntry(names[0], "F32", (5, 4), names[1:])))
    target = ModuleTarget(model)
    target.seed(catalog, {"config.json": b"{}"})
    target.seed(catalog, {})
    target.finish_seed()
    assert target.catalog == catalog
    check_bits(model, target, set_all(target, 2))
    assert raw(model.embed.weight) == raw(model.head.weight)


def test_ties_by_view_and_by_module() -> None:
    base = torch.zeros(3, 4)
    shared = nn.Linear(2, 2)
    model = of(a=base, b=base[:], c=base.view(3, 4), z=torch.zeros(1))
    model.one, model.two = shared, shared
    names = [(e.name, e.aliases) for e in catalog_of(model).tensors]
    assert names == [
        ("a", ("b", "c")),
        ("one.bias", ("two.bias",)),
        ("one.weight", ("two.weight",)),
        ("z", ()),
    ]


def test_empty_tensors_are_never_tied() -> None:
    catalog = catalog_of(of(a=torch.zeros(0, 3), b=torch.zeros(0, 3)))
    assert [e.name for e in catalog.tensors] == ["a", "b"]


def test_disjoint_views_of_one_storage_are_fine() -> None:
    base = torch.zeros(6, 8)
    model = of(left=base[:, :4], right=base[:, 4:6], rest=base[::2, 6:], odd=base[1::2, 6:])
    target = ModuleTarget(model)
    check_bits(model, target, set_all(target, 3))


@pytest.mark.parametrize("case", ["rows", "transposed", "dtype", "inside", "columns"])
def test_overlaps_that_are_no_ties_are_refused(case: str) -> None:
    base = torch.zeros(4, 4)
    other = {
        "rows": base[1:3],
        "transposed": base.t(),
        "dtype": base.view(torch.int32),
        "inside": base[3, 3:],
        "columns": base[:, 1:2],
    }[case]
    with pytest.raises(UsageError, match=r"a overlaps b|b overlaps a"):
        ModuleTarget(of(a=base, b=other))


class Odd(torch.Tensor):
    pass


def refusals() -> dict[str, tuple[torch.Tensor, str]]:
    return {
        "expanded": (torch.zeros(1, 3).expand(4, 3), "expanded"),
        "folded": (torch.zeros(10).as_strided((4, 4), (2, 1)), "expanded"),
        "sparse": (torch.eye(3).to_sparse(), "not strided"),
        "csr": (torch.eye(3).to_sparse_csr(), "not strided"),
        "meta": (torch.zeros(3, device="meta"), "meta device"),
        "complex128": (torch.zeros(3, dtype=torch.complex128), "complex128"),
        "conjugate": (torch.zeros(3, dtype=torch.complex64).conj(), "conjugate"),
        "negative": (torch.zeros(3, dtype=torch.complex64).conj().imag, "negative"),
        "subclass": (torch.zeros(3).as_subclass(Odd), "is a Odd"),
        "quantized": (torch.quantize_per_tensor(torch.zeros(3), 1.0, 0, torch.qint8), "quantized"),
    }


@pytest.mark.parametrize(
    "case",
    [
        "expanded",
        "folded",
        "sparse",
        "csr",
        "meta",
        "complex128",
        "conjugate",
        "negative",
        "subclass",
        "quantized",
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_written_is_refused_by_name(case: str) -> None:
    tensor, reason = refusals()[case]
    model = of(good=torch.zeros(2), bad=tensor)
    for make in (ModuleTarget, catalog_of):
        with pytest.raises(UsageError, match=f"bad .*{reason}") as caught:
            make(model)
        assert "good" not in str(caught.value)


def test_every_refused_tensor_is_named() -> None:
    with pytest.raises(UsageError, match=r"a is on the meta device.*b is on the meta device"):
        catalog_of(of(a=torch.zeros(3, device="meta"), b=torch.zeros(3, device="meta")))


def test_dtensor_is_refused() -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Module()
        model.w = nn.Parameter(distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (1,))))
        with pytest.raises(UsageError, match="w is a DTensor"):
            ModuleTarget(model)
    finally:
        dist.destroy_process_group()


def test_other_devices_are_refused_for_now() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    with pytest.raises(UsageError, match=r"w is on cuda:0.*CPU for now"):
        ModuleTarget(of(w=torch.zeros(3, device="cuda")))


def test_seed_names_every_difference() -> None:
    target = ModuleTarget(tied())
    catalog = Catalog(
        (
            TensorEntry("body.bias", "BF16", (4,)),
            TensorEntry("embed.weight", "F32", (4, 5)),
            TensorEntry("extra", "F32", (1,)),
        )
    )
    with pytest.raises(BaseMismatch) as caught:
        target.seed(catalog, {})
    assert caught.value.found == (
        "body.bias is F32 (4,) in the model but BF16 (4,) in the catalog; "
        "embed.weight is F32 (5, 4) in the model but F32 (4, 5) in the catalog; "
        "extra is not in the model; body.weight is not in the catalog"
    )
    assert target.catalog == catalog_of(tied())


def test_seed_refuses_ties_that_differ() -> None:
    body = [TensorEntry("body.bias", "F32", (4,)), TensorEntry("body.weight", "F32", (4, 4))]
    both = [TensorEntry("embed.weight", "F32", (5, 4)), TensorEntry("head.weight", "F32", (5, 4))]
    with pytest.raises(BaseMismatch, match=r"embed\.weight, head\.weight are tied in the model but separate"):
        ModuleTarget(tied()).seed(Catalog((*body, *both)), {})
    loose = tied()
    loose.embed.weight = nn.Parameter(torch.zeros(5, 4))
    one = TensorEntry("embed.weight", "F32", (5, 4), ("head.weight",))
    with pytest.raises(BaseMismatch, match=r"tied to head\.weight in the catalog but not in the model"):
        ModuleTarget(loose).seed(Catalog((*body, one)), {})


MOVES = {
    "data": lambda m: setattr(m.body.weight, "data", torch.zeros(4, 4)),
    "parameter": lambda m: setattr(m.body, "weight", nn.Parameter(torch.zeros(4, 4))),
    "module": lambda m: setattr(m, "body", nn.Linear(4, 4)),
    "to": lambda m: m.to(torch.bfloat16),
    "buffer": lambda m: setattr(m, "count", torch.zeros(2)),
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(m.head.weight.detach().clone())),
    "removed": lambda m: delattr(m, "body"),
    "added": lambda m: m.register_buffer("more", torch.zeros(2)),
    "transposed": lambda m: setattr(m.body.weight, "data", m.body.weight.data.t()),
    "sparse": lambda m: setattr(m, "count", torch.eye(2).to_sparse()),
}


@pytest.mark.parametrize("case", MOVES)
def test_moved_tensors_are_found(case: str) -> None:
    model = tied()
    model.register_buffer("count", torch.zeros(2))
    calls: list[str] = []
    target = ModuleTarget(model, on_pause=lambda: calls.append("pause"))
    target.pause()
    MOVES[case](model)
    with pytest.raises(UsageError, match=r"moved or changed.*Build a new ModuleTarget"):
        target.pause()
    assert calls == ["pause"]
    if case not in (
        "module",
        "removed",
        "added",
    ):  # a dropped module still holds its tensors; pause looks from the top
        with pytest.raises(UsageError, match=r"moved or changed.*Build a new ModuleTarget"):
            set_all(target, 1)
    if case != "sparse":
        check_bits(model, ModuleTarget(model), set_all(ModuleTarget(model), 2))


def test_training_in_place_moves_nothing() -> None:
    model = tied()
    target = ModuleTarget(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model.body(model.head.weight[:, :4]).sum().backward()
    optimizer.step()
    target.pause()
    check_bits(model, target, set_all(target, 4))


def test_autograd_is_left_alone() -> None:
    model = nn.Linear(3, 3)
    target = ModuleTarget(model)
    loss = model(torch.ones(1, 3)).square().sum()
    versions = [p._version for p in model.parameters()]
    set_all(target, 5)
    assert [p._version for p in model.parameters()] == versions
    assert all(p.is_leaf and p.requires_grad and p.grad_fn is None for p in model.parameters())
    loss.backward()  # not stopped: autograd does not see the write


def test_inference_tensors_and_modes() -> None:
    with torch.inference_mode():
        model = of(w=torch.zeros(3, 4, dtype=torch.bfloat16))
    model.p = nn.Parameter(torch.zeros(5))
    assert model.w.is_inference()
    target = ModuleTarget(model)
    check_bits(model, target, set_all(target, 6))
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            check_bits(model, target, set_all(target, 7))


def test_ranges_outside_a_tensor_are_refused() -> None:
    target = ModuleTarget(of(w=torch.zeros(9)))
    for start, stop in ((-1, 3), (0, 10), (5, 4)):
        with pytest.raises(UsageError, match="no range of w"), target.window(0, start, stop):
            pass


def test_header_spool_and_callbacks() -> None:
    calls: list[str] = []
    model = of(w=torch.zeros(1))
    target = ModuleTarget(model, on_pause=lambda: calls.append("pause"), on_resume=lambda: calls.append("resume"))
    assert target.read_header() is None
    header = Header("0" * 32, target.catalog.identity, State.CLEAN, 1, 0, Digest(), 0, "ab")
    target.write_header(header)
    assert target.read_header() == header
    target.spool.put("ab", memoryview(b"xy"))
    assert target.spool.get("ab") == b"xy"
    target.spool.clear()
    assert target.spool.get("ab") is None
    target.pause()
    target.pause()
    target.flush()
    target.resume()
    assert calls == ["pause", "pause", "resume"]
    assert ModuleTarget(model).read_header() is None  # a new target knows nothing of bits it has not proven


def test_windows_of_many_threads() -> None:
    model = of(w=torch.zeros(64, 1000, dtype=torch.int64).t())
    target = ModuleTarget(model)

    def work(start: int) -> None:
        with target.window(0, start, start + 64) as (elements, first):
            elements[first // 64] += np.uint64(start)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(0, 64_000, 64)))
    assert torch.equal(model.w, (torch.arange(1000) * 64)[:, None].expand(1000, 64))


@pytest.mark.slow
def test_a_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    target = ModuleTarget(model)
    assert {n for e in target.catalog.tensors for n in (e.name, *e.aliases)} == set(model.state_dict())
    from_file = Catalog(
        tuple(  # as a checkpoint has it: under the name that is not first
            sorted(
                (
                    TensorEntry("model.embed_tokens.weight" if e.aliases else e.name, e.dtype, e.shape)
                    for e in target.catalog.tensors
                ),
                key=lambda e: e.name,
            )
        )
    )
    target.seed(from_file, {})
    check_bits(model, target, set_all(target, 8))
    target.pause()


def test_many_tensors_are_checked_quickly() -> None:
    base = torch.zeros(3000, 16)
    model = of(**{f"t{i}": base[i] for i in range(3000)})
    begun = time.monotonic()
    ModuleTarget(model).pause()
    assert time.monotonic() - begun < 5
