"""Fuzz one Python parser, guided by coverage (atheris):  python -m fuzz.fuzz_python TARGET SECONDS [libFuzzer options]

Exits non-zero on the first input for which a target raises or takes more memory than it may; the input lies in
build/fuzz/. ``python -m fuzz.fuzz_python TARGET FILE`` runs one input again.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["deltarefit"], enable_loader_override=False):
    from fuzz.targets import TARGETS

ROOT = Path(__file__).resolve().parent.parent
MOST_BYTES = 4 << 30
"""Address space of the whole process; what is beyond is a MemoryError, which no target may raise."""
MOST_RSS_MB = 700


def main() -> None:
    name, what, *options = sys.argv[1:]
    run, seeds = TARGETS[name]
    if Path(what).is_file():
        run(Path(what).read_bytes())
        return
    out = ROOT / "build" / "fuzz"
    corpus = out / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    limits = [f"-max_total_time={what}", f"-rss_limit_mb={MOST_RSS_MB}", "-timeout=10", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={out}/{name}-", *options, str(corpus)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
