# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Cluster moves: connected components, negative weights, and graphs that have no clusters.

Tests moves/clusters.py.
"""

import networkx as nx
import numpy as np
import pytest
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
import zoo

import jax
import jax.numpy as jnp

from ebmpp import Categorical, FactorGraph, MaximalCoupling
from ebmpp.errors import ParameterError
from ebmpp.graph.factors.pairwise import table
from ebmpp.kernels import SwendsenWang
from ebmpp.moves import Clusters, cluster_sweep
from ebmpp.moves.clusters import components
from ebmpp.moves.move import coupled_sweep
from ebmpp.moves.target import Target
from helpers import nightly


@pytest.mark.parametrize(
    ("graph", "chance"),
    [
        (nx.grid_2d_graph(12, 12), 0.5),
        (nx.star_graph(60), 0.5),  # a hub of more neighbours than slots
        nightly(nx.path_graph(200), 0.98),
        nightly(nx.complete_graph(12), 0.1),  # more slots than are unrolled
    ],
)
def test_components_match_scipy(graph: nx.Graph, chance: float) -> None:
    edges = np.array(nx.convert_node_labels_to_integers(graph).edges)
    bonds = np.random.default_rng(0).random((len(edges), 5)) < chance
    label = np.asarray(
        jax.jit(lambda b: components(table(len(graph), edges), b))(bonds)
    )
    for row in range(5):
        a, b = edges[bonds[:, row]].T
        _, expected = connected_components(
            coo_array((np.ones(len(a)), (a, b)), shape=[len(graph)] * 2)
        )
        first = np.unique(expected, return_index=True)[1]
        np.testing.assert_array_equal(label[:, row], first[expected])


def test_negative_weights_of_categories_are_refused_or_reported() -> None:
    graph = FactorGraph.from_networkx(nx.cycle_graph(4), lambda n: Categorical(n, 3))
    params = {"x": np.zeros((4, 3), np.float32), "x:x": np.float32([1, -1, 1, 1])}
    for kernel in (
        SwendsenWang(graph),
        MaximalCoupling(graph, coupling=cluster_sweep(graph)),
    ):
        with pytest.raises(ParameterError, match="'x:x'.*-1"):
            kernel.init(zoo.KEY, 0, None, (params,), {})
    # traced params have no values: the draw is invalid, and a pair is marked
    keys, z = np.zeros((4, 2), np.uint32), {"x": np.zeros((2, 4, 4), np.int32)}

    @jax.jit
    def run(params):
        target = Target(graph, params)
        new, _ = Clusters("x").draw(target, {"x": jnp.asarray(z["x"][0])}, keys)
        return new, coupled_sweep(target, z, (Clusters("x"),), keys)[2]

    new, broken = run(params)
    assert (np.asarray(new["x"]) == -1).all() and np.asarray(broken).all()
