"""``keygen``, and the keys that other verbs are given."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from deltarefit.cli import options
from deltarefit.cli.verbs import Call, app, verb
from deltarefit.errors import UsageError
from deltarefit.keyfiles import new_key, read_signer, read_trust
from deltarefit.notary import Notary
from deltarefit.signing import Kind

_KINDS = {"ed25519": Kind.ED25519, "hmac": Kind.HMAC}


@verb(app, "keygen", remote=False)
def keygen(
    call: Call, directory: options.KeyDirectory, kind: options.KeyKind = "ed25519", name: options.KeyName = "trainer"
) -> None:
    """Make a key with which a trainer signs what it publishes.

    DIR/NAME.key is the secret: `publish --sign` takes it, and only its owner may read it. DIR/NAME.trust says
    what is to be believed: `follow --trust` takes it. With `--kind hmac` whoever verifies needs the secret
    too, so DIR/NAME.key must go with it. The last line of stdout is the path of the trust file.

    Example: [bold]deltarefit keygen keys[/]
    """
    if kind not in _KINDS:
        raise UsageError("bad --kind", expected=" or ".join(_KINDS), found=repr(kind)[:40])
    key_path, trust_path = new_key(directory, _KINDS[kind], name)
    call.out.say(f"Secret     {key_path}: for the trainer, nobody else")
    call.out.say(f"Trust      {trust_path}: for receivers")
    call.out.result(
        trust_path, {"id": name, "kind": _KINDS[kind].value, "key": str(key_path), "trust": str(trust_path)}
    )


def notary(trust: Sequence[Path] | None, sign: Path | None = None) -> Notary:
    """How a verb reads and writes a run, by its options ``--trust`` and ``--sign``."""
    return Notary(read_signer(sign) if sign is not None else None, read_trust(trust or ()))
