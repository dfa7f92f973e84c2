"""What callers pass to a source, checked when it is made; and lists in messages, kept short."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from deltarefit.errors import UsageError

Files = Mapping[str, bytes] | Callable[[], Mapping[str, bytes]] | None
"""Side files of an anchor by name, or what gives them when an anchor is made."""
LISTED = 8
"""How many names a message has at most: models have thousands."""


def listed(every: Sequence[str], separator: str = "; ") -> str:
    """The first ``LISTED`` of many, and how many more there are."""
    more = f" and {len(every) - LISTED} more" if len(every) > LISTED else ""
    return separator.join(every[:LISTED]) + more


def check_dtypes(wanted: object) -> None:
    """``UsageError`` if this is neither a dtype, nor a mapping of names to dtypes, nor None."""
    if wanted is None or isinstance(wanted, torch.dtype):
        return
    wrong = dict(wanted) if isinstance(wanted, Mapping) else {"": wanted}
    for name, dtype in wrong.items():
        if not isinstance(dtype, torch.dtype):
            of = f" of {name}" if name else ""
            raise UsageError(
                f"dtype{of} is not a torch.dtype", found=repr(dtype)[:80], next_step="Write torch.bfloat16."
            )


def checked_files(files: Any) -> Mapping[str, bytes]:
    """These side files. ``UsageError`` if they are no mapping of names to bytes."""
    if not isinstance(files, Mapping):
        _refuse_files(f"{type(files).__name__} {files!r}"[:80])
    for name, data in files.items():
        if not isinstance(name, str) or not isinstance(data, bytes):
            _refuse_files(f"{name!r}: {type(data).__name__}")
    return dict(files)


def _refuse_files(found: str) -> None:
    raise UsageError(
        "files are not bytes by name",
        expected="a mapping of str to bytes, or a function that gives one",
        found=found,
        next_step='Write files={"config.json": Path("config.json").read_bytes()}.',
    )
