"""What the ranks of one trainer say to each other about a publish: who owns what, which attempt it is, what each made.

Nothing is decided here: the log decides. All of it is small messages over an ``Exchange``, never a collective, and
every wait ends: a rank that gives no sign of life for ``deadline_s`` seconds is given up. Working ranks give signs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from deltarefit import errors, runtime
from deltarefit.errors import AttemptLostError, BaseMismatch, IntegrityError, RefitError, UnavailableError, UsageError
from deltarefit.manifest import Intent, PayloadRef, ProducerManifest
from deltarefit.ports import Exchange
from deltarefit.records import Record

T = TypeVar("T")
R = TypeVar("R", bound=Record)
LASTING = (BaseMismatch, UsageError, IntegrityError)
"""Errors of one rank that the others raise, too; after any other they may publish again: ``AttemptLostError``."""
_NONCE = 16
"""Characters that a hello begins with, drawn for this one meeting."""
_answered: set[bytes] = set()
"""Nonces that rank 0 has answered in this process: such a hello may still lie there when the next meeting begins."""


@dataclass(frozen=True)
class Verdict(Record):
    """Rank 0's answer to what all ranks brought: the run, or why they cannot publish together. ``meeting`` is what
    their messages are kept under from now on; ``heard`` are the nonces of the others' hellos: to them it speaks."""

    meeting: str
    heard: tuple[str, ...]
    run: str
    kind: str = ""
    error: str = ""


@dataclass(frozen=True)
class Failure(Record):
    """Why one rank cannot publish, as the others are to raise it. ``kind``: its class in ``errors``, one of ``LASTING``
    or below it; empty for any other. ``advice``: its next step, empty if it had none."""

    kind: str
    text: str
    advice: str

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        kinds = [one.__name__ for one in type(error).__mro__ if issubclass(one, LASTING)]
        kind = next((name for name in kinds if hasattr(errors, name)), "")
        advice = (error.next_step or "") if isinstance(error, RefitError) else ""
        text = str(error).removesuffix(f". {advice}") or "an error"
        return cls(kind, (text if kind else f"{type(error).__name__}: {text}")[:2000], advice[:1000])

    def error(self, what: str, next_step: str) -> RefitError:
        """It, after the words of ``what``; ``next_step`` if it brought no advice of its own."""
        text = f"{what}: {self.text.rstrip('.')}"
        ended = self.text.endswith(".") and not self.advice  # the reason of a closed attempt, advice included
        kind: type[RefitError] = getattr(errors, self.kind, AttemptLostError)
        return kind(f"{text}." if ended else text, next_step=self.advice or (None if ended else next_step))


@dataclass(frozen=True)
class Ready(Record):
    """One rank holds its bits for ``step``, or cannot (one failure)."""

    step: int
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Opening(Record):
    """Rank 0 opened an attempt (one intent), or could not (one failure)."""

    intents: tuple[Intent, ...]
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True)
class Report(Record):
    """What one rank made: its manifest, the payloads it put into an anchor, and the bytes of all that."""

    manifest: ProducerManifest
    anchored: tuple[PayloadRef, ...]
    wire_bytes: int


@dataclass(frozen=True)
class Closing(Record):
    """Rank 0 is done with an attempt: read the register. ``doubt``: the parts did not add up, a baseline is wrong."""

    doubt: bool
    changed: int
    wire_bytes: int


class Trainers:
    """This rank among its trainer's ranks. One ``turn`` per publish keeps messages of different publishes apart, and
    a name for each meeting those of different publishers that talk through one exchange."""

    def __init__(self, exchange: Exchange, deadline_s: float) -> None:
        self._exchange, self.deadline_s = exchange, deadline_s
        self.rank, self.size = exchange.rank, exchange.size
        self._meeting, self._turn = "", 0
        self._beats, self._beat_at = 0, 0.0

    # ------------------------------------------------------------------------------------ meeting

    def meet(self, hello: bytes, judge: Callable[[list[bytes]], str]) -> str:
        """Bring every rank's ``hello`` to rank 0, where ``judge`` gives the run or raises; all ranks get its answer."""
        verdict = self._come(hello) if self.rank else self._lead(hello, judge)
        self._meeting = f"{verdict.meeting}/"
        return verdict.run

    def _come(self, hello: bytes) -> Verdict:
        """Other ranks: an earlier meeting's verdict does not name the nonce that this one came with."""
        key, nonce = f"hello/{self.rank}", runtime.token()[:_NONCE]

        def ready() -> Verdict | None:
            data = self._exchange.get("verdict")
            verdict = None if data is None else Verdict.from_bytes(data, "verdict")
            return verdict if verdict is not None and nonce in verdict.heard else None

        self._exchange.put(key, nonce.encode() + hello)
        try:
            verdict = self.wait(ready, 0, "rank 0 to hear what all ranks own")
        finally:
            with contextlib.suppress(UnavailableError):
                self._exchange.delete(key)  # or a later meeting would take it for one of its own
        if verdict.error:
            raise getattr(errors, verdict.kind, RefitError)(f"rank 0 refused: {verdict.error}")
        return verdict

    def _lead(self, hello: bytes, judge: Callable[[list[bytes]], str]) -> Verdict:
        """Rank 0: judge, and tell all that were heard."""
        came: list[bytes] = []
        try:
            came.extend(map(self._hello_of, range(1, self.size)))
            verdict = Verdict(runtime.token()[:16], _nonces(came), judge([hello, *(one[_NONCE:] for one in came)]))
        except Exception as error:
            text = str(error)[:4000] or "an error"
            with contextlib.suppress(UnavailableError):
                self._exchange.put("verdict", Verdict("", _nonces(came), "", type(error).__name__, text).to_bytes())
            raise
        finally:
            _answered.update(one[:_NONCE] for one in came)
        self._exchange.put("verdict", verdict.to_bytes())
        return verdict

    def _hello_of(self, rank: int) -> bytes:
        def ready() -> bytes | None:
            said = self._exchange.get(f"hello/{rank}")
            return None if said is None or said[:_NONCE] in _answered else said

        return self.wait(ready, rank, f"what rank {rank} owns")

    # ------------------------------------------------------------------------------------ one publish

    def next_turn(self) -> None:
        """Another publish begins; the messages of the one before the last are forgotten."""
        self._turn, self._beat_at = self._turn + 1, 0.0
        if self.size > 1 and self.rank == 0 and self._turn > 2:
            ranks = [f"{kind}/{rank}" for kind in ("ready", "report") for rank in range(1, self.size)]
            with contextlib.suppress(UnavailableError):  # what stays there is never read again
                for name in ("opening", "closing", *ranks):
                    self._exchange.delete(self._key(name, self._turn - 2))

    def ready(self, step: int, error: BaseException | None = None) -> None:
        """Other ranks: this one holds its bits, or cannot."""
        if self.rank:
            self._say(f"ready/{self.rank}", Ready(step, (Failure.of(error),) if error else ()))

    def all_ready(self, step: int) -> None:
        """Rank 0: wait for all ranks before anything is written. Raises ``BaseMismatch`` if one publishes another step,
        and what it said if one cannot."""
        for rank in range(1, self.size):
            found = Ready.from_bytes(
                self._hear(self._key(f"ready/{rank}"), rank, f"rank {rank} to hold its bits"), "ready"
            )
            for failure in found.failures:
                raise failure.error(f"rank {rank} cannot publish", "Look at its log.")
            if found.step != step:
                raise BaseMismatch(
                    "ranks publish different steps",
                    expected=f"{step} (rank 0)",
                    found=f"{found.step} (rank {rank})",
                    next_step="Call publish with one step, equally often, on all ranks.",
                )

    def open(self, intent: Intent) -> None:
        """Rank 0: say which attempt it is."""
        self._say("opening", Opening((intent,)))

    def refuse(self, error: BaseException) -> None:
        """Rank 0: say that there is none, if anybody can hear it."""
        with contextlib.suppress(UnavailableError):
            self._say("opening", Opening((), (Failure.of(error),)))

    def opened(self) -> Intent:
        """Other ranks: which attempt it is. Raises what rank 0 said if it opened none."""
        opening = Opening.from_bytes(self._hear(self._key("opening"), 0, "rank 0 to open an attempt"), "opening")
        for failure in opening.failures:
            raise failure.error("rank 0 opened no attempt", "Publish again.")
        return opening.intents[0]

    def report(self, report: Report) -> None:
        """Other ranks: say what this one made. It is sealed in the log already."""
        self._say(f"report/{self.rank}", report)

    def reported(self, rank: int) -> Report | None:
        """Rank 0: what a rank made, if it said so yet."""
        return self._read(f"report/{rank}", Report)

    def close(self, closing: Closing) -> None:
        """Rank 0: the attempt is over. If nobody can hear it, the register says the same."""
        with contextlib.suppress(UnavailableError):
            self._say("closing", closing)

    def closed(self) -> Closing | None:
        """Other ranks: whether rank 0 is done with the attempt."""
        return self._read("closing", Closing)

    # ------------------------------------------------------------------------------------ waiting

    def beat(self) -> None:
        """Give a sign of life, at most ten in a deadline: the turn, and a number."""
        if self.size > 1 and runtime.now() - self._beat_at > self.deadline_s / 10:
            self._beats, self._beat_at = self._beats + 1, runtime.now()
            self._exchange.put(f"{self._meeting}beat/{self.rank}", f"{self._turn} {self._beats}".encode())

    def wait(self, ready: Callable[[], T | None], rank: int, what: str) -> T:
        """What ``ready`` gives once it gives something. Raises ``UnavailableError`` when ``rank``, which is to bring it
        about, has been silent for the deadline or has gone on to a later publish."""
        heard, heard_at, pause = self._pulse(rank), runtime.now(), 0.002
        while (found := ready()) is None:
            self.beat()
            if runtime.now() - heard_at > self.deadline_s / 20 and (pulse := self._pulse(rank)) != heard:
                if pulse[0] > self._turn and (found := ready()) is not None:
                    return found
                if pulse[0] > self._turn:
                    raise UnavailableError(f"waited for {what}, and rank {rank} gave up", next_step="Publish again.")
                heard, heard_at = pulse, runtime.now()
            if runtime.now() - heard_at > self.deadline_s:
                raise UnavailableError(
                    f"waited for {what}, and rank {rank} has been silent",
                    expected=f"a sign of life within {self.deadline_s:g} s",
                    next_step="Look at that rank's log; restart the trainer, then publish again.",
                )
            runtime.sleep(pause)
            pause = min(pause * 1.5, 0.1, self.deadline_s / 20)
        return found

    def _pulse(self, rank: int) -> tuple[int, int]:
        """Turn and number of a rank's last sign of life."""
        turn, _, number = (self._exchange.get(f"{self._meeting}beat/{rank}") or b"0 0").partition(b" ")
        return int(turn), int(number)

    def _hear(self, key: str, rank: int, what: str) -> bytes:
        return self.wait(lambda: self._exchange.get(key), rank, what)

    def _key(self, name: str, turn: int | None = None) -> str:
        return f"{self._meeting}{self._turn if turn is None else turn}/{name}"

    def _say(self, name: str, record: Record) -> None:
        if self.size > 1:
            self._exchange.put(self._key(name), record.to_bytes())

    def _read(self, name: str, kind: type[R]) -> R | None:
        data = self._exchange.get(self._key(name))
        return None if data is None else kind.from_bytes(data, name)


def _nonces(hellos: Sequence[bytes]) -> tuple[str, ...]:
    return tuple(hello[:_NONCE].decode("ascii", "replace") for hello in hellos)
