# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Published analyses of social networks."""

import itertools

import networkx as nx
import numpy as np
from outcome import Row
import references

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
    x = np.array(married, float)
    fits = [ebmpp.estimate(model, x, rng_key=jax.random.key(seed)) for seed in range(8)]
    published = {"edges": (-1.675, 0.351), "triangles": (0.158, 0.589)}
    rows = []
    for name, (value, deviation) in published.items():
        estimates, spreads = (
            np.array([np.ravel(tree[name])[0] for tree in trees], float)
            for trees in zip(*((f.params, f.standard_error) for f in fits), strict=True)
        )
        ours = references.mean_of_chains(estimates)
        # the published fit is of simulated networks, too
        reference = references.FLORENTINE[name]
        slack = abs(value - reference.value)
        rows.append(Row(name, value, *ours, slack))
        rows.append(
            Row(f"{name}, reference", reference.value, *ours, 2 * reference.error)
        )
        # the standard error is estimated to two per cent
        rows.append(
            Row(f"its error, {name}", deviation, spreads.mean(), 0.01 * deviation)
        )
    return rows
