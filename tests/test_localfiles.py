"""Mapped windows of files: what overlapping writers see of each other."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from deltarefit.localfiles import mapped


@pytest.mark.parametrize("offset", [8, 9], ids=["aligned", "unaligned"])
def test_overlapping_windows_keep_each_others_elements(tmp_path: Path, offset: int) -> None:
    """Column shards of one tensor are written side by side: their windows overlap, their elements do not."""
    path = tmp_path / "bits"
    path.write_bytes(bytes(offset) + bytes(200))
    handle = os.open(path, os.O_RDWR)
    try:
        with mapped(handle, offset, 100, 2, writable=True) as even:
            with mapped(handle, offset, 100, 2, writable=True) as odd:
                even[::2] = 0x1122
                odd[1::2] = 0x3344
        with mapped(handle, offset, 100, 2) as found:
            assert found.tolist() == [0x1122, 0x3344] * 50
    finally:
        os.close(handle)
