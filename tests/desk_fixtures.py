"""Fixtures for tests of the command line; asked for with ``pytest_plugins = ["tests.desk_fixtures"]``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltarefit.cli import main
from tests.desk import Desk, Done, Here, make_desk


@pytest.fixture(scope="session")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Desk, list[Done]]]:
    """Three versions, published one after another; nobody may write to this desk's store."""
    desk = make_desk(tmp_path_factory.mktemp("cli") / "desk")
    yield (
        desk,
        [desk.run("publish", desk.checkpoint(n), "--to", desk.store, "--step", 10 * n) for n in range(3)],
    )
    assert list((desk.root / "tmp").iterdir()) == []


@pytest.fixture(scope="session")
def desk(published: tuple[Desk, list[Done]]) -> Desk:
    assert [done.code for done in published[1]] == [0, 0, 0]
    return published[0]


@pytest.fixture
def spoiled(desk: Desk, tmp_path: Path) -> Desk:
    return desk.copy(tmp_path / "copy")


@pytest.fixture
def here(capfd: pytest.CaptureFixture[str]) -> Here:
    """A command in this process, for the many that need no other: starting Python takes longer than most verbs."""

    def run(*arguments: object) -> Done:
        capfd.readouterr()
        code = main([str(argument) for argument in arguments])
        return Done(code, *capfd.readouterr())

    return run
