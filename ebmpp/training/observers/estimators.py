# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Warnings that estimators report at the end of a run."""

import dataclasses
import warnings

from ebmpp.core import Key, random, sharding
from ebmpp.core.rows import num_rows
from ebmpp.graph import FactorGraph
from ebmpp.training.batches import BatchSource
from ebmpp.training.history import Log
from ebmpp.training.observers.base import Observer
from ebmpp.training.steps import Stages, TrainState


@dataclasses.dataclass
class EstimatorDiagnosis(Observer):
    """Warn of what estimators report about their stages, and the last one about its chains."""

    graph: FactorGraph
    stages: Stages
    source: BatchSource
    key: Key
    log: Log

    def at(self, step: int, state: TrainState, is_last: bool) -> None:
        if not is_last:
            return
        columns = self.log.steps.columns()
        sample = self.source.sample()
        has_chains = sharding.processes() == 1 and not sample.known
        done = num_rows(columns)
        last = self.stages.at(done - 1)
        for number, stage in enumerate(self.stages.stages[: last + 1]):
            first = self.stages.first[number]
            stop = min(self.stages.end(number), done)
            history = {name: v[first:stop] for name, v in columns.items()}
            message = stage.estimator.diagnose(history)
            if message is None and number == last and has_chains:
                key = random.fold_in(self.key, number, 2)
                message = stage.estimator.diagnose_chains(
                    self.graph, state.params, sample.rows, history, key
                )
            if message is not None:
                text = f"fit: steps {first} to {stop - 1}: {message}"
                warnings.warn(text, stacklevel=4)
