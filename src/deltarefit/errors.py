"""Every error deltarefit raises on purpose.

::

    RefitError
    ├── UsageError            the call or command line is wrong                        exit 2
    ├── NotFoundError         an object, file, version or tensor is not there          exit 3
    ├── IntegrityError        bytes are not what a record says they are                exit 4
    │   ├── FormatError       bytes do not follow docs/format.md, or exceed a limit    exit 4
    │   ├── SignatureError    a record is not signed by a key that may sign it         exit 4
    │   └── DigestMismatch    live bits are not the bits of any expected version       exit 4
    ├── BaseMismatch          another run, base version, catalog, dtype or shape       exit 4
    ├── ProtocolError         an event that the state machine does not allow           exit 1
    ├── AlreadyExistsError    a create-once key is taken (often an answer, not a fault) exit 1
    ├── AttemptLostError      another publisher closed this attempt                    exit 5
    └── UnavailableError      the store or disk did not do it now; the only retryable  exit 5
        └── StorageFullError  no space left; retry after making room                   exit 5

Each message says what was expected, what was found, and what to do next.
"""

from __future__ import annotations


class RefitError(Exception):
    """Base of all errors of this package.

    ``what`` says what went wrong, ``expected`` and ``found`` the two sides, ``next_step`` what to do.
    """

    exit_code = 1
    retryable = False

    def __init__(
        self,
        what: str,
        *,
        expected: object = None,
        found: object = None,
        next_step: str | None = None,
    ) -> None:
        self.what = what
        self.expected = expected
        self.found = found
        self.next_step = next_step
        super().__init__(self._message())

    def _message(self) -> str:
        parts = [self.what]
        if self.expected is not None:
            parts.append(f"expected {self.expected}")
        if self.found is not None:
            parts.append(f"found {self.found}")
        text = "; ".join(parts)
        return f"{text}. {self.next_step}" if self.next_step else text


class UsageError(RefitError):
    """The caller asked for something that cannot be asked for."""

    exit_code = 2


class NotFoundError(RefitError):
    """An object, file, version or tensor is not where it should be."""

    exit_code = 3


class IntegrityError(RefitError):
    """Bytes are not what a record says they are."""

    exit_code = 4


class FormatError(IntegrityError):
    """Bytes do not follow docs/format.md or exceed one of its limits."""


class SignatureError(IntegrityError):
    """A record is not signed, not by a trusted key, not for the place where it stands, or not within what its key may
    do."""


class DigestMismatch(IntegrityError):
    """Live bits are not the bits that the log proves for this version."""


class BaseMismatch(RefitError):
    """A delta, receiver or checkpoint belongs to another run, version, catalog, dtype or shape."""

    exit_code = 4


class ProtocolError(RefitError):
    """A state machine met an event that its state does not allow."""


class AlreadyExistsError(RefitError):
    """A create-once key is taken. Read it back: it may be our own earlier success."""


class AttemptLostError(RefitError):
    """Another publisher decided the outcome of this attempt; nothing was committed by us."""

    exit_code = 5
    retryable = True


class UnavailableError(RefitError):
    """The store, network or disk did not do it now. Retrying may help, and nothing is lost by it."""

    exit_code = 5
    retryable = True


class StorageFullError(UnavailableError):
    """No space left where bytes must go; detected before anything was called done."""
