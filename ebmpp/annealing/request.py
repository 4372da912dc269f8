# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks that annealing and particle systems share: a model, the start of a path, the path and its ladder."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.annealing import ladder as ladders, reference as references
from ebmpp.annealing.ladder import Ladder
from ebmpp.annealing.log_partition import Data
from ebmpp.annealing.path import Path
from ebmpp.core import checks, random
from ebmpp.core.types import Eta, Params
from ebmpp.errors import ArgumentError, ParameterError
from ebmpp.graph import FactorGraph

Paths = str | Path | Sequence[Params] | None


def check_model(name: str, graph: FactorGraph, params: Params, rng_key: Array) -> Array:
    """Check what every function of this room takes, and return the key pair of the key.

    :raises ArgumentError: for anything but a graph and a key, or under ``jit``.
    :raises ParameterError: for params that do not fit or do not normalise.
    """
    checks.instance(f"{name}: graph", graph, FactorGraph, "a FactorGraph")
    instead = (
        "use monitors.estimated_log_likelihood, monitors.Monitor(fn, compiled=False), or call it outside"
    )
    checks.on_host(name, params, rng_key, instead=instead)
    graph.check(params)
    return random.key_pair(checks.key(f"{name}: rng_key", rng_key))


def start(
    graph: FactorGraph,
    params: Params,
    key: Array,
    data: Data | None,
    reference: Mapping[str, Array] | None = None,
) -> tuple[Eta, float]:
    """Return natural parameters of the reference, and its log Z."""
    eta0 = references.reference(graph, params, random.fold_in(key, 4, 1), data, reference)
    return eta0, references.log_partition(graph, eta0)


class Run(NamedTuple):
    """Checked arguments of a run of particle systems."""

    path: Path
    params: Params
    ladder: Ladder
    log_z0: float
    """log Z of the reference."""
    num_sweeps: int

    @property
    def places(self) -> np.ndarray:
        """Places of the rungs."""
        return np.asarray(self.ladder.places)[: int(self.ladder.count)]


def prepare(
    name: str,
    graph: FactorGraph,
    params: Params,
    key: Array,
    num: int,
    *,
    path: Paths,
    data: Data | None,
    ladder: Any,
    cess_threshold: float,
    num_sweeps: int,
) -> Run:
    """Check the options of particle systems, and find their path and ladder.

    :param key: ``(2,)``.
    :param num: number of particles of a system.
    """
    checks.number(f"{name}: cess_threshold", cess_threshold, above=0, below=1)
    num_sweeps = checks.count(f"{name}: num_sweeps", num_sweeps)
    if isinstance(path, Path):
        eta0, log_z0 = path.eta0, references.log_partition(path.graph, path.eta0)
    else:
        eta0, log_z0 = start(graph, params, key, data)
    path = _as_path(name, graph, eta0, params, path)
    if isinstance(ladder, str):
        checks.choice(f"{name}: ladder", ladder, ("adaptive",), "places from 0 to the path's end")
        pilot = random.fold_in(key, 1, 1)
        result = ladders.adaptive_ladder(path, pilot, num, cess_threshold, num_sweeps)
    else:
        places = ladders.given_places(f"{name}: ladder", ladder, int(path.num) - 1)
        result = Ladder(jnp.asarray(places), jnp.full((), len(places), jnp.int32))
    return Run(path, params, result, log_z0, num_sweeps)


def _as_path(name: str, graph: FactorGraph, eta0: Eta, params: Params, path: Paths) -> Path:
    """Return a path that ends at ``params``."""
    if isinstance(path, Path):
        if path.graph != graph:
            raise ArgumentError(f"{name}: path must be of the graph {graph!r}, got one of {path.graph!r}.")
        return path.to(params)
    if path is None or isinstance(path, str):
        if path is not None:
            checks.choice(f"{name}: path", path, ("line",), "fit.path, or a list of params")
        return Path.line(graph, eta0, params)
    models = checks.sequence(f"{name}: path", path, 'params, or "line"')
    for index, model in enumerate(models):
        try:
            graph.check(model)
        except ParameterError as error:
            raise type(error)(f"{name}: path[{index}]: {error}") from None
    return Path.through(graph, eta0, [*models, params])
