"""Affine maps: where the elements of a rank's local tensors go in the canonical checkpoint, as a few strided boxes.

``maps`` derives, composes, restricts and inverts them; ``coverage`` proves that all ranks own every element once.
"""

from deltarefit.affine.boxes import Box, NotAffineError, Span, rows_of
from deltarefit.affine.coverage import check_coverage, check_segments, disjoint
from deltarefit.affine.fitting import fit
from deltarefit.affine.maps import AffineMap, compose, derive, invert, probe, restrict, shard

__all__ = [
    "AffineMap",
    "Box",
    "NotAffineError",
    "Span",
    "check_coverage",
    "check_segments",
    "compose",
    "derive",
    "disjoint",
    "fit",
    "invert",
    "probe",
    "restrict",
    "rows_of",
    "shard",
]
