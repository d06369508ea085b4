"""Definition of the one order in which a row of float32 numbers is summed."""

from __future__ import annotations

import numpy as np

from k3.kernels.arrays import Floats

LANES = 16


def lane_sum(terms: Floats) -> Floats:
    """Sum over the last axis by sixteen running sums and then a tree.

    Lane j starts at 0 and adds terms j, j + 16, j + 32, ... in that order (the row padded with +0 to a multiple of
    16). Then lane j takes lane j + 8, then j + 4, then j + 2, then j + 1.
    """
    columns = terms.shape[-1]
    steps = -(-columns // LANES)
    padded = np.zeros((*terms.shape[:-1], steps * LANES), np.float32)
    padded[..., :columns] = terms
    lanes = np.zeros((*terms.shape[:-1], LANES), np.float32)
    for step in range(steps):
        lanes = lanes + padded[..., step * LANES : (step + 1) * LANES]
    for width in (8, 4, 2, 1):
        lanes = lanes[..., :width] + lanes[..., width:]
    return lanes[..., 0]
