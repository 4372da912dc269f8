# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Published analyses of social networks."""

import itertools

import networkx as nx
import numpy as np
from outcome import Row

import jax

import ebmpp


def florentine() -> list[Row]:
    """Marriages of 16 Florentine families (Padgett), edges and triangles; exact errors."""
    network = nx.florentine_families_graph()
    network.add_node("Pucci")  # a family without marriages
    pairs = list(itertools.combinations(range(16), 2))
    number = {pair: i for i, pair in enumerate(pairs)}
    triangles = [
        [number[pair] for pair in itertools.combinations(nodes, 2)]
        for nodes in itertools.combinations(range(16), 3)
    ]
    model = ebmpp.FactorGraph(
        {"dyads": ebmpp.Bernoulli(len(pairs))},
        factors=[
            ebmpp.Bias("dyads", shared=(0,), name="edges"),
            ebmpp.Hyperedges("dyads", triangles, shared=True, name="triangles"),
        ],
    )
    nodes = sorted(network)
    married = [network.has_edge(nodes[i], nodes[j]) for i, j in pairs]
    fit = ebmpp.estimate(model, np.array(married, float), rng_key=jax.random.key(0))
    published = {"edges": (-1.675, 0.351), "triangles": (0.158, 0.589)}
    rows = []
    for name, (value, deviation) in published.items():
        estimate, spread, error = (
            float(np.ravel(tree[name])[0])
            for tree in (fit.params, fit.standard_error, fit.monte_carlo_error)
        )
        rows.append(Row(name, value, estimate, error, 0.0005))
        # the standard error is estimated to two per cent
        rows.append(Row(f"its error, {name}", deviation, spread, 0.01 * deviation))
    return rows
