"""Does a store keep create-once? Asked before anything of a run is written (F16): without it two trainers could both
commit one attempt.
"""

from __future__ import annotations

import contextlib

from deltarefit import runtime
from deltarefit.errors import AlreadyExistsError, RefitError, UnavailableError, UsageError
from deltarefit.ports import Store


def check_create_once(store: Store) -> None:
    """``UsageError`` if a second create of one key replaces the first. What the store does under a race only
    ``deltarefit doctor`` finds out; a store that cannot be reached now is for others to tell."""
    key = f"probe/{runtime.token()}"
    try:
        with contextlib.suppress(AlreadyExistsError):  # our own, seen again
            store.create(key, b"first")
        if not _refuses(store, key) or store.get(key) != b"first":
            raise UsageError(
                f"{store.url} does not keep create-once: a second create of one key was taken",
                next_step="Use another store, or mend this one (deltarefit doctor STORE). Nothing was written.",
            )
    except UnavailableError:
        return
    finally:
        with contextlib.suppress(RefitError):
            store.delete(key)


def _refuses(store: Store, key: str) -> bool:
    try:
        store.create(key, b"second")
    except AlreadyExistsError:
        return True
    return False
