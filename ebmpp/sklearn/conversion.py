# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Conversion between scikit-learn's BernoulliRBM and a graph with its params."""

import numpy as np
from sklearn.neural_network import BernoulliRBM
from sklearn.utils.validation import check_is_fitted

import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.families import Bernoulli
from ebmpp.graph import FactorGraph, layered
from ebmpp.graph.networks import terms


def from_bernoulli_rbm(machine: BernoulliRBM) -> tuple[FactorGraph, Params]:
    """Return the graph and params of a fitted :class:`sklearn.neural_network.BernoulliRBM`.

    :param machine: a fitted machine.
    :return: a graph with blocks "v" and "h", and its params in JAX's float type.
    :raises ArgumentError: another type.
    :raises sklearn.exceptions.NotFittedError: a machine that is not fitted.

    **Example**

    >>> import numpy as np, ebmpp
    >>> from sklearn.neural_network import BernoulliRBM
    >>> from ebmpp.sklearn import from_bernoulli_rbm
    >>> machine = BernoulliRBM(3, n_iter=1, random_state=0).fit(np.eye(4))
    >>> graph, params = from_bernoulli_rbm(machine)
    >>> params["v:h"].shape, ebmpp.exact.log_likelihood(graph, params, np.eye(4)).shape
    ((4, 3), (4,))
    """
    checks.instance(
        "from_bernoulli_rbm: machine", machine, BernoulliRBM, "a fitted BernoulliRBM"
    )
    check_is_fitted(machine)
    latent, visible = machine.components_.shape
    params = {
        "v": machine.intercept_visible_,
        "h": machine.intercept_hidden_,
        "v:h": machine.components_.T,
    }
    params = {name: jnp.asarray(a, float) for name, a in params.items()}
    return layered(v=Bernoulli(visible), h=Bernoulli(latent)), params


def to_bernoulli_rbm(
    graph: FactorGraph, params: Params, **options: object
) -> BernoulliRBM:
    """Return a fitted :class:`sklearn.neural_network.BernoulliRBM` with the same distribution.

    It can transform, and continue training by ``partial_fit``.

    :param graph: one visible and one latent block of Bernoulli units, without
        interactions within a block.
    :param params: its params.
    :param options: options of ``BernoulliRBM`` (``learning_rate``, ``batch_size`` and
        so on).
    :raises ArgumentError: another graph.
    :raises ParameterError: params that do not fit.

    **Example**

    >>> import jax, ebmpp, numpy as np
    >>> from ebmpp.sklearn import to_bernoulli_rbm
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> to_bernoulli_rbm(rbm, rbm.init(jax.random.key(0))).transform(np.eye(4)).shape
    (4, 3)
    """
    checks.instance("to_bernoulli_rbm: graph", graph, FactorGraph)
    graph.check(params)
    is_pair = len(graph.visible) == len(graph.latent) == 1 and not graph.splits
    if not is_pair or {type(f) for f in graph.families.values()} != {Bernoulli}:
        raise checks.error(
            "to_bernoulli_rbm: graph",
            "of one visible and one latent block of Bernoulli units, without "
            "interactions within a block",
            graph,
        )
    visible, latent = (f.size for f in graph.families.values())
    quadratic = terms(graph, params)
    weights = np.zeros((latent, visible))
    i, j = quadratic.pairs.T
    weights[j - visible, i] = quadratic.weights
    machine = BernoulliRBM(**{"n_components": latent} | options)
    number = machine.n_components
    if number != latent:
        raise checks.error("to_bernoulli_rbm: n_components", f"{latent}", number)
    biases = quadratic.linear.astype(float)
    machine.components_ = weights
    machine.intercept_visible_ = biases[:visible]
    machine.intercept_hidden_ = biases[visible:]
    vars(machine).update(n_features_in_=visible, _n_features_out=latent)
    return machine
