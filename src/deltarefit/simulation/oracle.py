"""What must hold, judged from outside: by the bits that were published, and by what really is in the store."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from deltarefit.digest import array_digest, catalog_keys
from deltarefit.elements import Elements
from deltarefit.manifest import Anchor, Decision, Intent, Mode, Outcome, PayloadRef, ProducerManifest, Run, State
from deltarefit.publisher import Published
from deltarefit.records import Digest
from deltarefit.retention import Doomed, tomb_key
from deltarefit.runlog import RUN, anchor_prefix, attempt_key, payload_prefix
from deltarefit.simulation.model import CATALOG, Model, Owned, part_of
from deltarefit.simulation.store import Shelf
from deltarefit.simulation.weights import Weights
from deltarefit.simulation.world import World


class Oracle:
    """Knows every published model by its step number, and every version by the step in its manifests."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.shelf: Shelf | None = None
        self.models: dict[int, Model] = {}
        self.versions: dict[int, int] = {}
        """Step by committed version, in the order in which they were committed."""
        self.refused: set[int] = set()
        """Steps whose publishers were told that nothing was committed."""
        self.adrift = 0
        """The newest attempt of mode stream that was aborted. While it is newer than the head, receivers may stand
        still, and rightly: only the next attempt brings them back."""

    @property
    def head(self) -> int:
        """The newest committed version, or 0."""
        return next(reversed(self.versions), 0)

    def model_of(self, version: int) -> Model | None:
        return self.models.get(self.versions.get(version, -1))

    # ------------------------------------------------------------------------------------ the log

    def landed(self, key: str, data: bytes) -> None:
        """An object has appeared in the store."""
        if key.startswith("a/") and key.endswith("/outcome"):
            outcome = Outcome.from_bytes(data, key)
            if outcome.decision is Decision.COMMIT:
                self._judge_commit(outcome)
            elif Intent.from_bytes(self._object(attempt_key(outcome.attempt, "intent"))).mode is Mode.STREAM:
                self.adrift = max(self.adrift, outcome.attempt)
        elif key.endswith("/anchor"):
            self._judge_anchor(Anchor.from_bytes(data, key))

    def _judge_commit(self, outcome: Outcome) -> None:
        number, fail = outcome.attempt, self.world.fail
        if outcome.base != self.head:
            fail(f"version {number} is based on {outcome.base}, the head was {self.head}")
        intent = Intent.from_bytes(self._object(attempt_key(number, "intent")))
        manifests = [self._manifest(number, producer) for producer in range(intent.producers)]
        steps = {manifest.step for manifest in manifests if manifest}
        if None in manifests or len(steps) != 1:
            fail(f"version {number} is committed with manifests of steps {sorted(steps)}")
            return
        self.versions[number] = steps.pop()
        self.world.note("oracle", f"version {number} is committed: step {self.versions[number]}")
        model = self.model_of(number)
        if model is None or outcome.digest != self.digest(model):
            fail(f"version {number} is not what was published")
        if not outcome.base and anchor_prefix(number) + "anchor" not in self._shelf.objects:
            fail(f"version {number} has neither a base nor an anchor")
        if steps & self.refused:
            fail(f"version {number} is committed, and its publisher was told that it is not")
        for manifest in manifests:
            for ref in manifest.payloads if manifest else ():
                self._judge_payload(f"version {number}", payload_prefix(number), ref)

    def _judge_anchor(self, anchor: Anchor) -> None:
        """May come before the first COMMIT, then for a version that may still be aborted."""
        model = self.model_of(anchor.version)
        if model is not None and anchor.digest != self.digest(model):
            self.world.fail(f"the anchor of version {anchor.version} is not of its bits")
        for ref in anchor.payloads:
            self._judge_payload(f"anchor {anchor.version}", anchor_prefix(anchor.version) + "pl/", ref)

    def _judge_payload(self, whose: str, prefix: str, ref: PayloadRef) -> None:
        data = self._shelf.objects.get(prefix + ref.sha256)
        if data is None or len(data) != ref.size or hashlib.sha256(data).hexdigest() != ref.sha256:
            self.world.fail(f"{whose} is there, its payload {ref.sha256[:12]} is not")

    def _manifest(self, number: int, producer: int) -> ProducerManifest | None:
        data = self._shelf.objects.get(attempt_key(number, f"p/{producer}"))
        return None if data is None else ProducerManifest.from_bytes(data)

    def _object(self, key: str) -> bytes:
        return self._shelf.objects[key]

    @property
    def _shelf(self) -> Shelf:
        if self.shelf is None:
            raise AssertionError("the oracle has no store")
        return self.shelf

    def digest(self, model: Model) -> Digest:
        keys = catalog_keys(Run.from_bytes(self._object(RUN)).run, CATALOG)
        return sum((array_digest(array, 0, key) for array, key in zip(model, keys, strict=True)), Digest())

    def removed(self, key: str) -> None:
        """An object is gone (I14): it was condemned before, and nobody needs it who starts from an anchor."""
        root, _, rest = key.partition("/")
        number, _, name = rest.partition("/")
        if root not in ("a", "anchor"):
            return
        what = Doomed.ATTEMPT if root == "a" else Doomed.ANCHOR
        if tomb_key(what, int(number)) not in self._shelf.objects:
            self.world.fail(f"{key} was deleted, and nobody was told before")
        if name in ("intent", "outcome") or not any(self._usable(one) for one in self.versions if one >= int(number)):
            self.world.fail(f"{key} was deleted, and there is no way around it")

    def _usable(self, version: int) -> bool:
        """Whether there is an anchor of a version, with all that it names."""
        prefix, objects = anchor_prefix(version), self._shelf.objects
        if (data := objects.get(prefix + "anchor")) is None:
            return False
        return all(f"{prefix}pl/{ref.sha256}" in objects for ref in Anchor.from_bytes(data).payloads)

    # ------------------------------------------------------------------------------------ answers

    def answered(self, step: int, done: Published) -> None:
        """A publisher was told that its step is committed."""
        model = self.models[step]
        if self.versions.get(done.version) != step or done.digest != str(self.digest(model)):
            self.world.fail(f"step {step} is not version {done.version}, as its publisher was told")

    def denied(self, step: int) -> None:
        """A publisher was told that its step is not committed."""
        self.refused.add(step)
        if step in self.versions.values():
            self.world.fail(f"step {step} is committed, and its publisher was told that it is not")

    # ------------------------------------------------------------------------------------ weights

    def judge(self, weights: Weights, when: str) -> None:
        """I1: CLEAN(v) means v's bits. I7: users run under CLEAN only."""
        header = weights.header
        if header is None:
            return
        if header.state is not State.CLEAN:
            if not weights.paused:
                self.world.fail(f"{weights.name} is used while {header.state.value} {when}")
            return
        model = self.model_of(header.version)
        if model is None:
            self.world.fail(f"{weights.name} is CLEAN({header.version}) {when}, which is no version")
        elif not same(weights.arrays, model) and not self._only_flipped(weights, model):
            self.world.fail(f"{weights.name} is CLEAN({header.version}) {when}, and holds other bits")

    def _only_flipped(self, weights: Weights, model: Model) -> bool:
        """Whether all that differs are bits that flipped, and were not written since."""
        pairs = enumerate(zip(weights.arrays, model, strict=True))
        wrong = [(number, int(at)) for number, (one, other) in pairs for at in np.flatnonzero(one != other)]
        return not any(weights.flipped.get(where, True) for where in wrong)

    def judge_baseline(self, name: str, version: int, pieces: Owned, arrays: Sequence[Elements]) -> None:
        """I5: a CLEAN baseline holds its part of a version's bits."""
        model = self.model_of(version)
        if model is None:
            self.world.fail(f"the baseline of {name} is CLEAN({version}), which is no version")
        elif not same(arrays, [part_of(model, piece) for piece in pieces]):
            self.world.fail(f"the baseline of {name} is CLEAN({version}), and holds other bits")


def same(found: Sequence[Elements], expected: Sequence[Elements]) -> bool:
    """Bit for bit."""
    return all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))
