"""docs/failures.md against the tests: one row for every fault, and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "failures.md").read_text()
FAULTS = 54
ROW = re.compile(r"^\| F(\d+) \|(.*)\|$", re.MULTILINE)
NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NOT_BUILT = {35}


def rows(page: str = PAGE) -> list[tuple[int, list[str]]]:
    """(number, cells after it) of each fault of the second table."""
    return [(int(number), [cell.strip() for cell in rest.split("|")]) for number, rest in ROW.findall(page)]


@cache
def names_in(file: str) -> frozenset[str]:
    """Names of the tests in a file, as pytest would find them; nothing if there is no such file."""
    path = ROOT / file
    body = ast.parse(path.read_text()).body if path.exists() else []
    return frozenset(node.name for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"))


def unknown(page: str) -> list[str]:
    """Tests and files that a page names and that are not there."""
    missing = []
    for file, test in NAMED.findall(page):
        there = test in names_in(file) if test else (ROOT / file).exists()
        missing += [] if there else [f"{file}::{test}"]
    return missing


def test_every_fault_has_one_row() -> None:
    assert [number for number, _ in rows()] == list(range(1, FAULTS + 1))


def test_every_row_says_everything() -> None:
    for number, cells in rows():
        assert len(cells) == 4, f"F{number}"
        assert all(cells), f"F{number}"
        assert cells[-1].startswith("not built yet: ") is (number in NOT_BUILT), f"F{number}"
        assert number in NOT_BUILT or NAMED.search(cells[-1]), f"F{number} names no test"


def test_every_test_that_is_named_exists() -> None:
    assert not unknown(PAGE)


@pytest.mark.parametrize(
    "named",
    [
        "tests/test_votes.py::test_of_nothing",
        "tests/test_of_nothing.py::test_policies",
        "tests/test_votes.py::count",
        "tests/test_of_nothing.py",
    ],
)
def test_what_is_not_there_is_noticed(named: str) -> None:
    assert unknown(f"| F1 | x | `tests/test_votes.py::test_policies`, `{named}` |")


def test_other_words_in_ticks_are_tests_too() -> None:
    """A test that is misspelt so that ``NAMED`` passes over it would be believed."""
    for number, cells in rows():
        ticked = re.findall(r"`([^`]*)`", cells[-1])
        assert all(NAMED.fullmatch(f"`{one}`") for one in ticked), f"F{number}: {ticked}"
