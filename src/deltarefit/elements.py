"""The one array type: elements as unsigned integers of 1, 2, 4 or 8 bytes (design §5)."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Elements = npt.NDArray[np.unsignedinteger[Any]]
"""A view of elements as unsigned integers; any strides; row-major order is canonical order."""
