"""The C++ kernel: scan, encode, validate, apply and digest on integer views (docs/format.md §4-5)."""

from deltarefit._kernel._native import (
    apply,
    apply_values,
    count_changed,
    decode,
    digest,
    encode,
    extract,
    gather,
    level,
    levels,
    pieces,
    preview,
    sums,
    use_level,
    validate,
)

__all__ = [
    "apply",
    "apply_values",
    "count_changed",
    "decode",
    "digest",
    "encode",
    "extract",
    "gather",
    "level",
    "levels",
    "pieces",
    "preview",
    "sums",
    "use_level",
    "validate",
]
