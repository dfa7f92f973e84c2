"""RankGroup: who holds what, every element once, every copy checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from deltarefit.digest import array_digest, catalog_keys
from deltarefit.errors import BaseMismatch, DigestMismatch, IntegrityError, UsageError
from deltarefit.manifest import Catalog, TensorEntry
from deltarefit.records import Digest
from deltarefit.targets.ranks import NO_CLASS, RankGroup, Row
from tests import helpers as h
from tests import live_ranks as live

RUN = "ab" * 16


def catalog(**shapes: tuple[int, ...]) -> Catalog:
    return Catalog(tuple(TensorEntry(name, "BF16", shape) for name, shape in sorted(shapes.items())))


def plan(*parts: Any, **modes: Any) -> dict[str, Any]:
    """Parts of tensors by index; modes by name."""
    return {"parts": [list(part) for part in parts], "modes": {k: list(v) for k, v in modes.items()}}


XOR = ("xor", "")


def flat(tensor: int, offset: int, size: int) -> tuple[int, list[list[int]], int]:
    return tensor, [[size, 1]], offset


def summed(
    group: RankGroup, plans: Sequence[Mapping[str, Any]], model: Sequence[np.ndarray]
) -> list[dict[int, Digest]]:
    """What ranks with the right bits report of all elements."""
    keys, found = catalog_keys(RUN, group.catalog), []
    for rank, one in enumerate(plans):
        mine: dict[int, Digest] = {}
        assignment = group.assignment(rank)
        for part, class_id in zip(one["parts"], assignment["classes"], strict=True):
            positions = live.positions_of(part)
            if class_id != NO_CLASS:
                more = live.sums_at(positions, model[part[0]].reshape(-1)[positions], keys[part[0]])
                mine[class_id] = mine.get(class_id, Digest()) + more
        for tensor, class_id in zip(assignment["shadows"], assignment["shadow_classes"], strict=True):
            mine[class_id] = mine.get(class_id, Digest()) + array_digest(model[tensor].reshape(-1), 0, keys[tensor])
        found.append(mine)
    return found


def arrays(of: Catalog) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, 1 << 16, entry.shape, "u2") for entry in of.tensors]


def check(of: Catalog, plans: Sequence[Mapping[str, Any]]) -> RankGroup:
    """The total of right ranks is the digest of the model; one wrong copy is found."""
    group, model = RankGroup(of, plans), arrays(of)
    right = sum(
        (array_digest(a.reshape(-1), 0, key) for a, key in zip(model, catalog_keys(RUN, of), strict=True)), Digest()
    )
    assert group.total(summed(group, plans, model)) == right
    return group


# ------------------------------------------------------------------------------------------ classes


@pytest.mark.parametrize("size", [2, 4])
def test_a_model_of_everything(size: int) -> None:
    plans = [live.layout(rank, size) for rank in range(size)]
    model = h.random_model(np.random.default_rng(2), live.SHAPES)
    group = RankGroup(h.catalog_of(model, live.SHAPES), plans)
    digest = h.digest_of(RUN, group.catalog, model)
    assert group.total(summed(group, plans, [model[name] for name in live.NAMES])) == digest
    modes = {row.tensor: (row.mode, row.ranks) for row in group.report}
    every = tuple(range(size))
    assert modes["a.rows"] == modes["c.kv"] == modes["d.norm"] == ("xor", every)
    assert (modes["e.fan"], modes["h.late"]) == (("xor", (1,)), ("xor", (size - 1,)))
    assert (modes["f.opaque"], modes["g.skipped"]) == (("opaque", every), ("skipped", (0,)))


def test_replicas_count_once_and_must_agree() -> None:
    of = catalog(norm=(8,), weight=(12,))
    plans = [plan(flat(0, 0, 8), flat(1, 6 * rank, 6), norm=XOR, weight=XOR) for rank in range(2)]
    group = check(of, plans)
    assert group.assignment(0)["classes"] != group.assignment(1)["classes"]
    assert group.assignment(0)["classes"][0] == group.assignment(1)["classes"][0]
    sums = summed(group, plans, arrays(of))
    wrong = group.assignment(1)["classes"][0]
    sums[1][wrong] += Digest(1)
    with pytest.raises(DigestMismatch, match=r"copies of norm do not agree.*\(rank 0\).*\(rank 1\)"):
        group.total(sums)


def test_a_copy_that_a_rank_is_silent_about_does_not_agree() -> None:
    of = catalog(norm=(8,))
    plans = [plan(flat(0, 0, 8), norm=XOR)] * 2
    group = RankGroup(of, plans)
    class_id = group.assignment(0)["classes"][0]
    assert group.total([{}, {}]) == Digest()
    with pytest.raises(DigestMismatch):
        group.total([{class_id: Digest(5)}, {}])
    with pytest.raises(DigestMismatch):
        group.total([{}, {class_id: Digest(5)}])


def test_heads_on_pairs_of_ranks() -> None:
    of = catalog(kv=(8, 4))
    plans = [plan(flat(0, rank // 2 * 16, 16), kv=XOR) for rank in range(4)]
    group = check(of, plans)
    ids = [group.assignment(rank)["classes"][0] for rank in range(4)]
    assert ids[0] == ids[1] != ids[2] == ids[3]
    sums = summed(group, plans, arrays(of))
    sums[3][ids[3]] += Digest(0, 1)
    with pytest.raises(DigestMismatch, match=r"\(rank 2\).*\(rank 3\)"):
        group.total(sums)


def test_copies_on_one_rank_have_ids_of_their_own() -> None:
    of = catalog(embedding=(10,))
    plans = [plan(flat(0, 0, 10), flat(0, 0, 10), embedding=XOR), plan(flat(0, 0, 10), embedding=XOR)]
    group = check(of, plans)
    first, second = group.assignment(0)["classes"]
    assert first != second
    assert group.assignment(1)["classes"] == [first]
    sums = summed(group, plans, arrays(of))
    sums[0][second] += Digest(1)
    with pytest.raises(DigestMismatch, match="rank 0, copy 1"):
        group.total(sums)


def test_tensors_of_the_same_holders_are_one_class() -> None:
    of = catalog(**{f"norm{k}": (4,) for k in range(20)})
    plans = [plan(*(flat(k, 0, 4) for k in range(20)), **{f"norm{k}": XOR for k in range(20)})] * 3
    group = check(of, plans)
    assert len(set(group.assignment(0)["classes"])) == 1
    with pytest.raises(DigestMismatch, match=r"norm0, .* and 12 more do not agree"):
        group.total([{0: Digest()}, {0: Digest()}, {0: Digest(1)}])


def test_boxes_are_compared_by_what_they_cover() -> None:
    """Other orders, digits of size one, and digits that continue each other."""
    of = catalog(w=(6, 4))
    forms = [[[24, 1]], [[6, 4], [4, 1]], [[4, 1], [6, 4]], [[2, 12], [1, 99], [12, 1]], [[3, 8], [2, 4], [4, 1]]]
    plans = [plan((0, dims, 0), w=XOR) for dims in forms]
    group = check(of, plans)
    assert {tuple(group.assignment(rank)["classes"]) for rank in range(5)} == {(0,)}
    assert group.report == [Row("w", "xor", "", (0, 1, 2, 3, 4))]


def test_stages_of_a_pipeline() -> None:
    """A rank that skips what another holds is no conflict."""
    of = catalog(one=(4,), two=(6,))
    skipped = ("skipped", "of another stage")
    plans = [plan(flat(0, 0, 4), one=XOR, two=skipped), plan(flat(1, 0, 6), one=skipped, two=("xor-shifted", ""))]
    group = check(of, plans)
    assert group.report == [Row("one", "xor", "", (0,)), Row("two", "xor-shifted", "", (1,))]
    assert [group.assignment(rank)["shadows"] for rank in range(2)] == [[], []]


def test_first_holders_and_shadows_cover_everything_once() -> None:
    """Counted element by element: a class counts on the first rank that has it, a copy with another id does not."""
    plans = [live.layout(rank, 4) for rank in range(4)]
    group = RankGroup(h.catalog_of(h.random_model(np.random.default_rng(2), live.SHAPES), live.SHAPES), plans)
    marks = [np.zeros(entry.numel, int) for entry in group.catalog.tensors]
    seen = {NO_CLASS}
    for rank, one in enumerate(plans):
        assignment = group.assignment(rank)
        mine = set(assignment["classes"]) | set(assignment["shadow_classes"])
        counted: set[tuple[int, str]] = set()
        for part, class_id in zip(one["parts"], assignment["classes"], strict=True):
            if class_id not in seen and (part[0], str(part[1:])) not in counted:
                counted.add((part[0], str(part[1:])))
                marks[part[0]][live.positions_of(part)] += 1
        for tensor, class_id in zip(assignment["shadows"], assignment["shadow_classes"], strict=True):
            marks[tensor] += class_id not in seen
        seen |= mine
    assert all((counts == 1).all() for counts in marks)


# ------------------------------------------------------------------------------------------ tensors that are not parts


OVERLAPS = {
    "half": [flat(0, 0, 8), flat(0, 4, 8)],
    "inside": [flat(0, 0, 12), flat(0, 2, 3)],
    "columns and rows": [(0, [[3, 4], [2, 1]], 0), (0, [[12, 1]], 0)],
    "hole": [flat(0, 0, 5), flat(0, 6, 6)],
    "short": [flat(0, 0, 5), flat(0, 5, 6)],
    "not ascending": [(0, [[3, 4], [5, 1]], 0), (0, [[1, 1]], 11)],
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlaps_and_holes_make_a_tensor_opaque_everywhere(name: str) -> None:
    of = catalog(w=(3, 4), x=(2,))
    plans = [plan(part, flat(1, 0, 2), w=XOR, x=XOR) for part in OVERLAPS[name]]
    group = check(of, plans)
    assert [(row.mode, row.ranks) for row in group.report] == [("opaque", (0, 1)), ("xor", (0, 1))]
    assert group.report[0].reason
    for rank in range(2):
        assignment = group.assignment(rank)
        assert assignment["opaque"] == assignment["shadows"] == [0]
        assert assignment["classes"][0] == NO_CLASS
        assert assignment["classes"][1] != NO_CLASS
    assert group.assignment(0)["shadow_classes"] == group.assignment(1)["shadow_classes"]


def test_shadows_must_agree_too() -> None:
    of = catalog(w=(4,))
    plans = [plan(w=("opaque", "summed while loading"))] * 3
    group = check(of, plans)
    assert group.report == [Row("w", "opaque", "summed while loading", (0, 1, 2))]
    sums = summed(group, plans, arrays(of))
    sums[2][group.assignment(2)["shadow_classes"][0]] += Digest(1)
    with pytest.raises(DigestMismatch, match=r"copies of w do not agree.*\(rank 2\)"):
        group.total(sums)


def test_modes_that_differ() -> None:
    of = catalog(w=(4,))
    plans = [plan(flat(0, 0, 4), w=XOR), plan(w=("opaque", "why")), plan(w=("skipped", ""))]
    group = check(of, plans)
    assert group.report == [Row("w", "opaque", "why", (0, 1, 2))]
    assert all(group.assignment(rank)["opaque"] == [0] for rank in range(3))
    assert group.assignment(0)["classes"] == [NO_CLASS]


def test_what_nobody_stores_is_kept_by_rank_0() -> None:
    of = catalog(inv_freq=(4,), w=(2,))
    plans = [plan(flat(1, 0, 2), inv_freq=("skipped", "a buffer"), w=XOR)] * 2
    group = check(of, plans)
    assert group.report[0] == Row("inv_freq", "skipped", "a buffer", (0,))
    assert group.assignment(0)["shadows"] == [0]
    assert group.assignment(0)["opaque"] == []
    assert group.assignment(1)["shadows"] == []


def test_what_no_plan_mentions_is_not_forgotten() -> None:
    group = check(catalog(w=(2,), x=(3,)), [plan(flat(0, 0, 2), w=XOR)])
    assert group.report[1] == Row("x", "skipped", "", (0,))


def test_tensors_without_elements() -> None:
    group = check(catalog(w=(0, 5), x=()), [plan((1, [], 0), w=XOR, x=XOR)] * 2)
    assert [row.mode for row in group.report] == ["xor", "xor"]


def test_every_refused_tensor_is_named() -> None:
    of = catalog(a=(2,), b=(3,), c=(4,))
    one = plan(flat(0, 0, 2), a=XOR, b=("refused", "quantised"), c=("opaque", ""))
    other = plan(flat(0, 0, 2), a=XOR, b=("refused", "quantised"), c=("refused", "fused with a scale"))
    with pytest.raises(UsageError) as caught:
        RankGroup(of, [one, other])
    assert "2 tensors" in str(caught.value)
    assert "b: quantised" in str(caught.value)
    assert "c: fused with a scale" in str(caught.value)
    assert "a:" not in str(caught.value)


# ---------------------------------------------------------------------------------------- plans and sums that are wrong


def test_plans_of_another_catalog() -> None:
    of = catalog(w=(2,))
    for bad in (plan(flat(1, 0, 2)), plan(y=XOR), plan(w=("magic", ""))):
        with pytest.raises(BaseMismatch):
            RankGroup(of, [bad])


def test_parts_outside_their_tensor_are_not_believed() -> None:
    group = check(catalog(w=(4,)), [plan(flat(0, 0, 8), w=XOR)])
    assert group.report[0].mode == "opaque"


def test_sums_of_classes_that_a_rank_does_not_hold() -> None:
    of = catalog(w=(4,))
    group = RankGroup(of, [plan(flat(0, 0, 2), w=XOR), plan(flat(0, 2, 2), w=XOR)])
    first, second = group.assignment(0)["classes"][0], group.assignment(1)["classes"][0]
    for sums in ([{second: Digest(1)}, {}], [{first: Digest(1)}, {99: Digest()}], [{NO_CLASS: Digest()}, {}]):
        with pytest.raises(IntegrityError, match="does not hold"):
            group.total(sums)
    with pytest.raises(IntegrityError, match="number of ranks"):
        group.total([{}])


def test_random_grids_add_up() -> None:
    """Rows by columns over any number of ranks, with some ranks holding the same cell."""
    rng = np.random.default_rng(4)
    for _ in range(30):
        rows, columns = int(rng.integers(1, 4)), int(rng.integers(1, 4))
        shape = rows * int(rng.integers(1, 5)), columns * int(rng.integers(1, 5))
        height, width = shape[0] // rows, shape[1] // columns
        cells = [(r, c) for r in range(rows) for c in range(columns)]
        cells += [cells[k] for k in rng.integers(0, len(cells), 3)]
        plans = [
            plan((0, [[height, shape[1]], [width, 1]], r * height * shape[1] + c * width), w=XOR) for r, c in cells
        ]
        assert check(catalog(w=shape), plans).report[0].mode == "xor"


def test_the_whole_is_proven_again_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is wrongly believed to be whole does not get through."""
    monkeypatch.setattr(RankGroup, "_fault", lambda self, tensor: "")
    with pytest.raises(UsageError, match="element 4 is owned 2 times"):
        RankGroup(catalog(w=(12,)), [plan(flat(0, 0, 8), w=XOR), plan(flat(0, 4, 8), w=XOR)])
