"""When a rank enters a collective."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd


def entered_ns(collectives: pd.DataFrame) -> npt.NDArray[np.int64]:
    """(N,) when each collective is both launched by the host and wanted by the device that it is for.

    A host runs ahead of its device, by more than a step if nothing stops it, so that what it launches says little.
    Where a collective begins on the device counts only for those that wait for no bucket, as buffers: a bucket may be
    ready long before the one ahead of it is over.
    """
    began_ns = collectives["ready_ns"].fillna(collectives["start_ns"]).to_numpy(np.int64, na_value=0)
    return np.maximum(collectives["launch_ns"].to_numpy(np.int64), began_ns)
