# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Layers do not depend on the hash seed of the interpreter."""

import os
import subprocess
import sys

import networkx as nx

from ebmpp.graph.factors.coloring import color


def colored() -> str:
    """Layers of graphs that networkx's smallest_last, fed with strings, colours by hash."""
    layers = []
    for seed in (17, 180, 188, 202, 241, 340):
        numbers = nx.gnp_random_graph(12, 0.4, seed=seed)
        graph = nx.Graph()
        graph.add_nodes_from(f"block{i}" for i in numbers)
        graph.add_edges_from({(f"block{a}", f"block{b}") for a, b in numbers.edges})
        layers.append(color(graph))
    return str(layers)


def test_layers_are_the_same_in_another_process() -> None:
    environment = os.environ | {"PYTHONHASHSEED": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    program = f"import runpy; print(runpy.run_path({__file__!r})['colored']())"
    command = [sys.executable, "-c", program]
    other = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == colored()
