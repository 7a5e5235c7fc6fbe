"""Lookups priced as TorchRec's planner does: bytes at one bandwidth, a penalty for narrow tables, nothing fitted.

After `torchrec.distributed.planner` (constants and shard estimators of release 1.8), which knows neither launches nor
caches nor how often rows are used again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from lumos_nb.workloads.dlrm.pieces import Floats
from lumos_nb.workloads.dlrm.plan import element_bytes

INDEX_BYTES, OUTPUT_BYTES = 8, 4
FULL_BLOCK, HALF_PENALTY, QUARTER_PENALTY = 128, 1.15, 1.75
"""Columns that fill a block of threads, and how much longer half of them and fewer take."""
BACKWARD = 2.0
"""Times the forward pass."""


@dataclass(frozen=True)
class PlannerConstants:
    """A `LookupModel` with TorchRec's constants.

    Attributes
    ----------
    bytes_per_us
        Bandwidth of the device's memory.

    Examples
    --------
    >>> from lumos_nb.embedding_tables import complete_tables
    >>> tables = complete_tables(pl.DataFrame({"rows": [1000], "dim": [128], "pooling": [10.0]}))
    >>> model = PlannerConstants()
    >>> model.of_sums(model.parts(tables, 4096)).round(1).tolist()
    [[24.3, 48.6]]
    """

    bytes_per_us: float = 963146.416128

    def parts(self, tables: pl.DataFrame, batch: int) -> Floats:
        """Forward microseconds of each table: (n, 1)."""
        dim, pooling = tables["dim"].to_numpy(), tables["pooling"].to_numpy()
        read = batch * pooling * (INDEX_BYTES + dim * element_bytes(tables))
        penalty = np.select([dim >= FULL_BLOCK, dim >= FULL_BLOCK / 2], [1.0, HALF_PENALTY], QUARTER_PENALTY)
        took: Floats = (read + batch * dim * OUTPUT_BYTES) * penalty / self.bytes_per_us
        return took[:, None]

    def of_sums(self, sums: Floats) -> Floats:
        """Microseconds: (m, 2)."""
        both: Floats = sums * np.array([1.0, BACKWARD])
        return both
