"""Fixtures that cost something: one real S3 server for the whole run."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.seaweed import Seaweed


@pytest.fixture(scope="session", autouse=True)
def _no_cloud_settings() -> Iterator[None]:
    """Whoever runs the tests may be logged in to a cloud; no test may use that."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seaweed]:
    """A SeaweedFS server that nobody stops: tests that kill a server start their own."""
    with Seaweed(tmp_path_factory.mktemp("seaweed")) as server:
        server.make_bucket("refits")
        yield server
