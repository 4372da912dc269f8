# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""scikit-learn's Boltzmann machine as a graph and params, and back."""

import numpy as np
from sklearn.neural_network import BernoulliRBM
from sklearn.utils.validation import check_is_fitted

import jax.numpy as jnp

from ebmpp.core import Params, checks
from ebmpp.errors import ArgumentError
from ebmpp.families import Bernoulli
from ebmpp.graph import FactorGraph
from ebmpp.graph.networks import terms
from ebmpp.sklearn.harmonium import harmonium


def from_bernoulli_rbm(machine: BernoulliRBM) -> tuple[FactorGraph, Params]:
    """The graph and params of a fitted :class:`sklearn.neural_network.BernoulliRBM`: the same law.

    :param machine: fitted.
    :return: a graph with blocks "v" and "h", and its params, in JAX's floats.
    :raises ArgumentError: for anything else.
    :raises sklearn.exceptions.NotFittedError: for one that is not fitted.

    **Example**

    >>> import numpy as np, ebmpp
    >>> from sklearn.neural_network import BernoulliRBM
    >>> from ebmpp.sklearn import from_bernoulli_rbm
    >>> machine = BernoulliRBM(3, n_iter=1, random_state=0).fit(np.eye(4))
    >>> graph, params = from_bernoulli_rbm(machine)
    >>> params["v:h"].shape, ebmpp.exact.log_likelihood(graph, params, np.eye(4)).shape
    ((4, 3), (4,))
    """
    checks.instance("from_bernoulli_rbm: machine", machine, BernoulliRBM, "a fitted BernoulliRBM")
    check_is_fitted(machine)
    latent, visible = machine.components_.shape
    as_float = lambda a: jnp.asarray(a, jnp.result_type(float))
    made = {"v": machine.intercept_visible_, "h": machine.intercept_hidden_, "v:h": machine.components_.T}
    return harmonium(Bernoulli(visible), Bernoulli(latent)), {name: as_float(a) for name, a in made.items()}


def to_bernoulli_rbm(graph: FactorGraph, params: Params, **options: object) -> BernoulliRBM:
    """A fitted :class:`sklearn.neural_network.BernoulliRBM` of the same law, which transforms and trains on.

    :param graph: one visible and one latent block of Bernoulli units, no two of one block interacting.
    :param params: its params.
    :param options: of ``BernoulliRBM`` (``learning_rate``, ``batch_size``, ...).
    :raises ArgumentError: for another graph.
    :raises ParameterError: for params that do not fit.

    **Example**

    >>> import jax, ebmpp, numpy as np
    >>> from ebmpp.sklearn import to_bernoulli_rbm
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> to_bernoulli_rbm(rbm, rbm.init(jax.random.key(0))).transform(np.eye(4)).shape
    (4, 3)
    """
    checks.instance("to_bernoulli_rbm: graph", graph, FactorGraph, "a FactorGraph")
    graph.check(params)
    visible, latent = sum(f.size for f in graph.visible.values()), sum(f.size for f in graph.latent.values())
    one_each = len(graph.visible) == len(graph.latent) == 1
    if not one_each or {type(f) for f in graph.families.values()} != {Bernoulli} or graph.splits:
        raise ArgumentError(
            "to_bernoulli_rbm takes one visible and one latent block of Bernoulli units, no two of one block "
            f"interacting; got {graph!r}"
        )
    found = terms(graph, params)
    weights = np.zeros((latent, visible))
    weights[found.pairs[:, 1] - visible, found.pairs[:, 0]] = found.weights
    options.setdefault("n_components", latent)
    made = BernoulliRBM(**options)
    if made.n_components != latent:
        raise ArgumentError(f"to_bernoulli_rbm: n_components={made.n_components}, and the graph has {latent}")
    biases = np.split(found.linear.astype(float), [visible])
    learned = {"components_": weights, "intercept_visible_": biases[0], "intercept_hidden_": biases[1]}
    for name, value in {**learned, "n_features_in_": visible, "_n_features_out": latent}.items():
        setattr(made, name, value)
    return made
