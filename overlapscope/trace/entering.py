"""Arrival times of ranks at collectives."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pandas as pd


def compute_arrival_ns(collectives: pd.DataFrame) -> npt.NDArray[np.int64]:
    """Return when each collective was both launched by the host and ready on its device, shape (N,).

    A host runs ahead of its device, by more than a step if nothing stops it, so the launch time alone says little. The
    start on the device is used only for collectives that wait for no bucket, such as those of buffers: a bucket may be
    ready long before the one ahead of it has completed.
    """
    began_ns = collectives["ready_ns"].fillna(collectives["start_ns"]).to_numpy(np.int64, na_value=0)
    return np.maximum(collectives["launch_ns"].to_numpy(np.int64), began_ns)
