# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What particle systems are asked for from the host, checked: a model, a path to it, and its rungs."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from jax import Array
import jax.numpy as jnp

from ebmpp.annealing import annealing_path, ladders
from ebmpp.annealing.log_partition import Data
from ebmpp.annealing.path import Path
from ebmpp.annealing.systems import Ladder
from ebmpp.core import checks, random
from ebmpp.core.types import Blocks, Params
from ebmpp.errors import ArgumentError, ParameterError
from ebmpp.graph import FactorGraph

Paths = str | Path | Sequence[Params] | None


class Run(NamedTuple):
    """What particle systems are asked for, checked."""

    path: Path
    params: Params
    ladder: Ladder
    log_z0: float
    """log Z of the reference."""
    num_sweeps: int

    @property
    def graph(self) -> FactorGraph:
        return self.path.graph

    @property
    def places(self) -> np.ndarray:
        """Of the rungs."""
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
    evenness: float,
    num_sweeps: int,
) -> Run:
    checks.instance(f"{name}: graph", graph, FactorGraph, "a FactorGraph")
    checks.on_host(name, params, key)
    graph.check(params)
    checks.number(f"{name}: evenness", evenness, above=0, below=1)
    sweeps = checks.count(f"{name}: num_sweeps", num_sweeps)
    eta0 = (
        path.eta0
        if isinstance(path, Path)
        else annealing_path.reference(graph, params, random.fold_in(key, 4, 1), data)
    )
    way = as_path(name, graph, eta0, params, path)
    log_z0 = annealing_path.log_partition_of(graph, eta0)
    if isinstance(ladder, str):
        checks.choice(f"{name}: ladder", ladder, ("adaptive",), "places from 0 to the path's end")
        found = ladders.adaptive(way, random.fold_in(key, 1, 1), num, evenness, sweeps)
    else:
        found = _given(f"{name}: ladder", ladder, int(way.num) - 1)
    return Run(way, params, found, log_z0, sweeps)


def _given(name: str, places: Any, end: int) -> Ladder:
    wanted = f"{name}: places increase from 0 to {end}, the path's end"
    try:
        made = np.asarray(places, np.float32)
    except (TypeError, ValueError):
        raise ArgumentError(f"{wanted}; got {places!r}") from None
    if made.ndim != 1 or len(made) < 2 or made[0] != 0 or made[-1] != end or not (np.diff(made) > 0).all():
        raise ArgumentError(f"{wanted}; got {checks.tell(places)}")
    return Ladder(jnp.asarray(made), jnp.full((), len(made), jnp.int32))


def as_path(name: str, graph: FactorGraph, eta0: Blocks, params: Params, path: Paths) -> Path:
    """The path that a user asks for, which ends at ``params``.

    :param path: None or "line", a :class:`~ebmpp.annealing.Path`, or a list of params.
    :raises ArgumentError: for anything else, or a path of another graph.
    :raises ParameterError: for params of the list that do not fit.
    """
    if path is None or (isinstance(path, str) and path == "line"):
        return Path.line(graph, eta0, params)
    if isinstance(path, Path):
        if path.graph != graph:
            raise ArgumentError(f"{name}: the path is one of {path.graph!r}, and the graph is {graph!r}")
        return path.to(params)
    if isinstance(path, str):
        raise ArgumentError(f'{name}: path is "line", fit.path or a list of params; got {path!r}')
    each = checks.sequence(f"{name}: path", path, 'params, or "line"')
    for index, made in enumerate(each):
        try:
            graph.check(made)
        except ParameterError as error:
            raise type(error)(f"{name}: path[{index}]: {error}") from None
    return Path.through(graph, eta0, [*each, params])
