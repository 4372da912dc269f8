# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Dataset of a run's history. It imports xarray, so it is imported late."""

from collections.abc import Hashable, Sequence

import pandas as pd
import xarray as xr


class HistoryDataset(xr.Dataset):
    """History of a run: metrics per ``step`` and monitors per ``monitor_step``."""

    __slots__ = ()

    def to_dataframe(self, dim_order: Sequence[Hashable] | None = None) -> pd.DataFrame:
        """Return a frame with one row per step: its metrics, and the monitors after it.

        Rows without monitors have nan there. The values before the first step are in
        the dataset only.

        :param dim_order: as in xarray, for a part of the history without monitors or
            without metrics.
        """
        if {*self.dims} != {"step", "monitor_step"}:
            return super().to_dataframe(dim_order)
        metrics = self.drop_dims("monitor_step").to_dataframe()
        monitors = self.drop_dims("step").to_dataframe()
        # step 0 is over when one step is done
        monitors.index = monitors.index.rename("step") - 1
        return metrics.join(monitors)
