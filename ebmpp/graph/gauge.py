# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Gauge of Potts models: params that give the same distribution."""

from ebmpp.core import Params, checks
from ebmpp.graph.factors import Bias, Coupling
from ebmpp.graph.graph import FactorGraph


def zero_sum_gauge(graph: FactorGraph, params: Params) -> Params:
    r"""Return params of the same distribution whose couplings and biases sum to 0.

    .. math::

        J'_{ij}(a, b) = J_{ij}(a, b) - \bar J_{ij}(a, \cdot) - \bar J_{ij}(\cdot, b)
        + \bar J_{ij}(\cdot, \cdot),

    where a bar is the mean over categories. The means go to the biases of both sites,
    less their own means, so the energy of all states changes by one constant. Among all
    gauges this one has the smallest Frobenius norms, by which sites are ranked as
    contacts.

    :param graph: each :class:`~ebmpp.Coupling` has a block of Categorical units with a
        :class:`~ebmpp.Bias` that is not shared. Other factors stay as they are.
    :raises ArgumentError: for another graph, or couplings with impossible values.
    :raises ParameterError: for params with wrong names or shapes.

    **References**

    1. Ekeberg, Lövkvist, Lan, Weigt, Aurell (2013), *Improved contact prediction in
       proteins: using pseudolikelihoods to infer Potts models*, equation 10.

    **Example**

    >>> import jax.numpy as jnp
    >>> from ebmpp import Bias, Categorical, Coupling, FactorGraph
    >>> potts = FactorGraph({"s": Categorical(2, 2)}, factors=[Bias("s"), Coupling("s", [(0, 1)])])
    >>> params = {"s": jnp.zeros((2, 2)), "s:s": jnp.array([[[4.0, 0.0], [0.0, 0.0]]])}
    >>> params = zero_sum_gauge(potts, params)
    >>> params["s"].tolist(), params["s:s"].tolist()
    ([[1.0, -1.0], [1.0, -1.0]], [[[1.0, -1.0], [-1.0, 1.0]]])
    """
    checks.instance("zero_sum_gauge: graph", graph, FactorGraph)
    graph.check(params)
    result = dict(params)
    biases = {
        f.blocks[0]: f.name
        for f in graph.factors
        if isinstance(f, Bias) and not f.shared
    }
    for factor in graph.factors:
        if not isinstance(factor, Coupling):
            continue
        (family,) = factor.scope(graph.families)
        name = biases.get(*factor.blocks)
        if name is None or not family.is_one_hot or factor.has_zeros:
            raise checks.error(
                f"zero_sum_gauge: {factor!r}",
                "finite, over Categorical units with a Bias each",
                family,
                hint="Declare a Bias that is not shared.",
            )
        tables = result[factor.name]
        rows = tables.mean(-1, keepdims=True)
        columns = tables.mean(-2, keepdims=True)
        result[factor.name] = tables - rows - columns + rows.mean(-2, keepdims=True)
        first, second = factor.tuples(graph.families).T
        fields = result[name].reshape(family.size, -1)
        fields = fields.at[first].add(rows[..., 0]).at[second].add(columns[..., 0, :])
        fields -= fields.mean(1, keepdims=True)
        result[name] = fields.reshape(family.statistic_shape)
    return result
