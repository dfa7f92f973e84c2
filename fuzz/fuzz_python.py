"""Fuzz one Python parser:  python -m fuzz.fuzz_python TARGET SECONDS [libFuzzer options]

Guided by coverage where atheris is installed, else by blind changes of the seeds. Exits non-zero on the first input for
which a target raises or takes more memory than it may; the input lies in build/fuzz/. With a file in the place of
SECONDS that one input is run again.
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "fuzz"
MOST_BYTES = 4 << 30
"""Address space of the whole process; what is beyond is a MemoryError, which no target may raise."""
MOST_RSS_MB = 700


def guided(name: str, seconds: int, options: Sequence[str]) -> None:
    """libFuzzer, on the bytecode of this package."""
    import atheris

    with atheris.instrument_imports(include=["deltarefit"], enable_loader_override=False):
        from fuzz.targets import TARGETS
    run, seeds = TARGETS[name]
    corpus = OUT / f"corpus-{name}"
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(seeds()):
        (corpus / f"seed-{number:03}").write_bytes(seed)
    limits = [f"-max_total_time={seconds}", f"-rss_limit_mb={MOST_RSS_MB}", "-timeout=10", "-max_len=4096"]
    atheris.Setup([sys.argv[0], *limits, f"-artifact_prefix={OUT}/{name}-", *options, str(corpus)], run)
    atheris.Fuzz()


def blind(name: str, seconds: int) -> None:
    """A few bytes of a seed exchanged, cut off or put behind, until the time is over."""
    from fuzz.targets import TARGETS

    run, made = TARGETS[name]
    seeds, chooser, until, runs = made(), random.Random(), time.monotonic() + seconds, 0  # noqa: S311
    while time.monotonic() < until:
        data = bytearray(chooser.choice(seeds))
        for _ in range(chooser.randrange(8)):
            data[chooser.randrange(len(data))] = chooser.randrange(256)
        data = data[: chooser.randint(1, len(data))] if chooser.random() < 0.2 else data
        data += chooser.randbytes(chooser.randrange(40))
        runs += 1
        try:
            run(bytes(data))
        except BaseException:
            (OUT / f"{name}-crash").write_bytes(data)
            raise
    print(f"Done {runs} runs in {seconds} second(s), blind: atheris is not installed")  # noqa: T201


def main() -> None:
    name, what, *options = sys.argv[1:]
    if Path(what).is_file():
        from fuzz.targets import TARGETS

        TARGETS[name][0](Path(what).read_bytes())
        return
    OUT.mkdir(parents=True, exist_ok=True)
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    try:
        import atheris  # noqa: F401
    except ImportError:
        blind(name, int(what))
    else:
        guided(name, int(what), options)


if __name__ == "__main__":
    main()
