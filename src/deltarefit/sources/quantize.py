"""Block quantizers for ``sources.blocks``."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

FP8_MAX = 448.0
"""The largest finite value of float8_e4m3fn."""


def fp8_blocks(tensor: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix as FP8 E4M3 and, per block, the float32 factor that brings it back (``weight_scale_inv`` as DeepSeek-V3
    stores it): scale = max |x| / 448, quantized = x / scale, both computed in float32. Blocks at the right and lower
    edge may be partial. A block of zeros has scale 1; a block with infinities or NaN does not come back.
    """
    (rows, columns), (height, width) = tensor.shape, block
    padded = pad(tensor.float(), (0, -columns % width, 0, -rows % height))
    tiles = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    largest = tiles.abs().amax(dim=(1, 3))
    scales = torch.where(largest == 0, torch.ones_like(largest), largest / FP8_MAX)
    scaled = (tiles / scales[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    quantized = scaled.view(padded.shape).to(torch.float8_e4m3fn)
    return quantized[:rows, :columns].contiguous(), scales
