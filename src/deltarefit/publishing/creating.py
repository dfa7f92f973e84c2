"""Create-once records, whatever the store answers: ours, not ours, or worth reading back (protocol §3.5 rule 5)."""

from __future__ import annotations

from deltarefit import runtime
from deltarefit.errors import AlreadyExistsError, NotFoundError, RefitError, StorageFullError, UnavailableError
from deltarefit.protocol import messages as m
from deltarefit.records import Record
from deltarefit.runlog import RunLog, attempt_key

CREATE_TRIES = 5


def create_record(log: RunLog, number: int, name: str, record: Record) -> m.Event:
    """``Created``, or ``NotCreated`` once something can be read there. Raises ``UnavailableError`` if the store did not
    take it, ``StorageFullError`` if it has no room."""
    data = log.bytes_of(attempt_key(number, name), record)
    last: UnavailableError | None = None
    for attempt in range(CREATE_TRIES):
        try:
            log.store.create(attempt_key(number, name), data)
        except AlreadyExistsError:
            return _taken(log, number, name)
        except StorageFullError:
            raise
        except UnavailableError as error:
            if found := _readable(log, number, name):
                return found
            last = error
            runtime.sleep(0.1 * 2**attempt)
        else:
            return m.Created()
    raise UnavailableError(
        f"the store did not take {name} of attempt {number} in {CREATE_TRIES} tries",
        found=last,
        next_step="Publish again.",
    ) from last


def _taken(log: RunLog, number: int, name: str) -> m.Event:
    """NotCreated, once what stands there can be read: a machine that reads nothing would ask again for ever."""
    try:
        log.fetch(attempt_key(number, name), len, most=0)
    except NotFoundError as error:
        what = f"the store says that {name} of attempt {number} exists, and does not find it"
        raise UnavailableError(what) from error
    return m.NotCreated()


def _readable(log: RunLog, number: int, name: str) -> m.Event | None:
    """After an ambiguous create: NotCreated if something stands there now (the machine compares nonces)."""
    try:
        return m.NotCreated() if log.store.size(attempt_key(number, name)) else None
    except RefitError:
        return None
