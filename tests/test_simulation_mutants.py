"""Is the simulator blind? Each rule of the product is broken once; some seed of a bounded range must then fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from deltarefit.beginning import Beginning
from deltarefit.errors import UnavailableError
from deltarefit.landing import Windows
from deltarefit.manifest import State
from deltarefit.protocol import coordinator as c
from deltarefit.protocol import follower as f
from deltarefit.protocol import messages as m
from deltarefit.publishing import creating, driving, encoding
from deltarefit.publishing import trainers as meetings
from deltarefit.publishing.encoding import SegmentEncoder
from deltarefit.publishing.shard_baseline import ShardBaseline
from deltarefit.publishing.share import Share
from deltarefit.receiver import Receiver
from deltarefit.runlog import RunLog, attempt_key
from deltarefit.simulation import MODES, Run, run_seed
from tests.test_mutants import baseline_moves_at_encode

Patch = pytest.MonkeyPatch
SEEDS = 200
"""A mutant is dead within so many, each in both modes."""


def handler(patch: Patch, phase: f.Phase, event: type, broken: Callable[..., Any]) -> None:
    patch.setitem(f._HANDLERS, (phase, event), broken)


def nothing_is_classified(patch: Patch) -> None:
    """On redo every payload is applied again."""
    patch.setattr(f, "_op", lambda live, ref: m.Op.APPLY)


def torn_is_applied(patch: Patch) -> None:
    patch.setattr(f, "_op", lambda live, ref: m.Op.SKIP if live == ref.post else m.Op.APPLY)


def dirty_is_not_written(patch: Patch) -> None:
    real = f.Follower._dirty

    def dirty(self: f.Follower, attempt: Any) -> f.Step:
        after, actions = real(self, attempt)
        return after, actions[:1]

    patch.setattr(f.Follower, "_dirty", dirty)


def header_comes_after_the_bytes(patch: Patch) -> None:
    real = Receiver._do

    def do(self: Receiver, action: m.Action) -> Any:
        later = self._queue[0] if self._queue else None
        if isinstance(action, m.WriteHeader) and action.header.state is State.DIRTY and isinstance(later, m.Write):
            self._queue.popleft()
            answer = real(self, later)
            real(self, action)
            return answer
        return real(self, action)

    patch.setattr(Receiver, "_do", do)


def resumes_before_clean(patch: Patch) -> None:
    real = f.Follower._committed

    def committed(self: f.Follower) -> f.Step:
        after, actions = real(self)
        rest = [action for action in actions if not isinstance(action, m.Resume)]
        return after, (m.Resume(), *rest)

    patch.setattr(f.Follower, "_committed", committed)


def does_not_pause(patch: Patch) -> None:
    patch.setattr(Receiver, "_do_Pause", lambda self, action: None)


def written_is_not_read_back(patch: Patch) -> None:
    real = f.Follower._written

    def written(self: f.Follower, event: m.Written) -> f.Step:
        return real(self, m.Written(tuple(ref.post for ref in self.refs)))

    handler(patch, f.Phase.WRITING, m.Written, written)


def starts_unproven(patch: Patch) -> None:
    patch.setattr(Beginning, "header", lambda self, ours: self.target.read_header())


def loads_unproven(patch: Patch) -> None:
    def seeded(self: f.Follower, event: m.AnchorLoaded) -> f.Step:
        assert self.anchor is not None
        return f.Follower._seeded(self, m.AnchorLoaded(self.anchor.digest))

    handler(patch, f.Phase.SEEDING, m.AnchorLoaded, seeded)
    patch.setattr("deltarefit.receiver.check_loaded", lambda anchor, digest: None)


def does_not_flush(patch: Patch) -> None:
    patch.setattr(Windows, "flush", lambda self: None)


def keeps_no_values(patch: Patch) -> None:
    patch.setattr(Windows, "_values", lambda self, ref: None)


def takes_abort_for_commit(patch: Patch) -> None:
    real = f.Follower._outcome

    def outcome(self: f.Follower, event: m.AttemptRead) -> f.Step:
        if event.attempt.outcome is None or event.attempt.committed:
            return real(self, event)
        dirty, actions = replace(self, attempt=event.attempt)._dirty(event.attempt)
        after, more = dirty._apply(self.refs)
        return after, (*actions, *more)

    handler(patch, f.Phase.STAGED, m.AttemptRead, outcome)


def sums_are_not_compared(patch: Patch) -> None:
    """Neither before a write nor after it; each alone is made good by the other."""
    patch.setattr(f.Follower, "_fits", lambda self, sums: True)
    written_is_not_read_back(patch)


def believes_answerless_creates(patch: Patch) -> None:
    real = creating.create_record

    def create(log: RunLog, number: int, name: str, record: Any) -> m.Event:
        try:
            log.store.create(attempt_key(number, name), log.bytes_of(attempt_key(number, name), record))
        except UnavailableError:
            return m.Created()
        except Exception:
            return real(log, number, name, record)
        return m.Created()

    patch.setattr(driving, "create_record", create)


def nonces_are_not_compared(patch: Patch) -> None:
    done = lambda self, event: (replace(self, phase=c.Phase.COMMITTED), ())  # noqa: E731
    patch.setitem(c._HANDLERS, (c.Phase.COMMITTING, m.AttemptRead), done)


def commits_what_does_not_add_up(patch: Patch) -> None:
    patch.setattr(c, "check_manifests", lambda intent, manifests: None)
    patch.setattr(c, "check_lists", lambda intent, manifests, batches: None)
    patch.setattr(
        c, "new_digest", lambda intent, manifests: sum((one.part for one in manifests), type(intent.base_digest)())
    )
    patch.setattr(SegmentEncoder, "check", lambda self, expected: None)


def commits_without_the_others(patch: Patch) -> None:
    """Rank 0 takes the others' last reports, whatever attempt they are of."""
    real = driving.Driver._report_of
    last: dict[int, Any] = {}

    def report(self: Any, rank: int, number: int) -> Any:
        if rank in last:
            return last[rank]
        found = last[rank] = real(self, rank, number)
        return found

    patch.setattr(driving.Driver, "_report_of", report)


def baseline_stays_behind(patch: Patch) -> None:
    patch.setattr(ShardBaseline, "move", lambda self, version: None)


def source_is_not_summed(patch: Patch) -> None:
    """A wrong baseline is not noticed where the delta is made."""
    patch.setattr(SegmentEncoder, "check", lambda self, expected: None)


def stored_payloads_are_not_checked(patch: Patch) -> None:
    patch.setattr(Share, "_check_stored", lambda self, prefix, refs: None)


def hint_is_believed(patch: Patch) -> None:
    real = RunLog.head

    def head(self: RunLog) -> Any:
        hinted = self.hint().head
        return self.attempt(hinted) if hinted else real(self)

    patch.setattr(RunLog, "head", head)


def open_attempts_are_passed(patch: Patch) -> None:
    """The next attempt is opened beside one that is undecided."""

    def tail(self: c.Coordinator, event: m.AttemptRead) -> c.Step:
        if event.attempt.open:
            return self._past(event.attempt)
        return c.Coordinator._tail(self, event)

    patch.setitem(c._HANDLERS, (c.Phase.TAIL, m.AttemptRead), tail)


def no_union(patch: Patch) -> None:
    """A retry ships what changed, and not what failed attempts may have written."""
    patch.setattr("deltarefit.publishing.share.touched_since", lambda *given: encoding.Touched())
    patch.setattr(f.Follower, "_proven", lambda self, event: replace(self, proven=True)._go_on(self._attempt()))
    handler(patch, f.Phase.PROVING, m.Proven, f.Follower._proven)


def lists_are_left_open(patch: Patch) -> None:
    """What aborted streams have announced may still grow when the next attempt overwrites it."""
    patch.setattr(driving, "end_lists", lambda *given, **more: None)


def dead_ranks_are_waited_for(patch: Patch) -> None:
    """Whoever waits for a rank waits for ever."""
    real = meetings.Trainers.__init__

    def init(self: Any, exchange: Any, deadline_s: float) -> None:
        real(self, exchange, 1e9)

    patch.setattr(meetings.Trainers, "__init__", init)


def prunes_what_is_needed(patch: Patch) -> None:
    """The newest anchor is no limit."""
    patch.setattr("deltarefit.pruning._Pruning._floor", lambda self, kept: self._head + 1)


def prunes_unannounced(patch: Patch) -> None:
    patch.setattr("deltarefit.pruning._Pruning._condemn", lambda self, plan, floor: None)


def anchors_are_put_over(patch: Patch) -> None:
    """A writer of an anchor uploads what is there already."""
    patch.setattr("deltarefit.anchoring._KeepsWhole", lambda store: store)


def base_is_any_attempt(patch: Patch) -> None:
    """The coordinator takes the last attempt for the base, whatever became of it."""

    def past(self: c.Coordinator, attempt: Any) -> c.Step:
        outcome = attempt.outcome
        passed = replace(self, phase=c.Phase.TAIL, number=attempt.number + 1, base=attempt.number)
        digest = outcome.digest if attempt.committed else self.digest
        return replace(passed, digest=digest), (m.ReadAttempt(passed.number),)

    patch.setattr(c.Coordinator, "_past", past)


def last_element_is_not_compared(patch: Patch) -> None:
    real = encoding.encode_delta

    def encode(piece: Any, old: Any, new: Any, start: int, key: int) -> Any:
        kept = new.copy()
        kept[-1:] = old[-1:]
        return real(piece, old, kept, start, key)

    patch.setattr(encoding, "encode_delta", encode)
    patch.setattr(SegmentEncoder, "check", lambda self, expected: None)


MUTANTS: list[Callable[[Patch], None]] = [
    nothing_is_classified,
    torn_is_applied,
    dirty_is_not_written,
    header_comes_after_the_bytes,
    resumes_before_clean,
    does_not_pause,
    written_is_not_read_back,
    starts_unproven,
    loads_unproven,
    does_not_flush,
    keeps_no_values,
    takes_abort_for_commit,
    sums_are_not_compared,
    lists_are_left_open,
    dead_ranks_are_waited_for,
    prunes_what_is_needed,
    prunes_unannounced,
    anchors_are_put_over,
    base_is_any_attempt,
    believes_answerless_creates,
    nonces_are_not_compared,
    commits_what_does_not_add_up,
    commits_without_the_others,
    baseline_moves_at_encode,
    baseline_stays_behind,
    source_is_not_summed,
    stored_payloads_are_not_checked,
    hint_is_believed,
    open_attempts_are_passed,
    no_union,
    last_element_is_not_compared,
]


def first_failure(seeds: int) -> Run | None:
    runs = (run_seed(seed, mode) for seed in range(seeds) for mode in MODES)
    return next((run for run in runs if run.failures), None)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_some_seed_kills_the_mutant(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    assert first_failure(SEEDS) is not None
