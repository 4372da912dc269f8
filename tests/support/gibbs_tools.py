# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What the tests of BlockedGibbs share."""

import numpy as np
from numpyro.infer import MCMC

import jax

from ebmpp import Bernoulli, BlockedGibbs, Categorical, Gaussian, Spin, layered

RBM = layered(v=Bernoulli(4), h=Bernoulli(3))
GRAPHS = {
    "bernoulli": RBM,
    "spin": layered(v=Spin(5), h1=Spin(4), h2=Spin(3)),
    "categorical": layered(v=Categorical(4, 3), h=Categorical(3, 4)),
    "gaussian": layered(v=Gaussian(6), h=Bernoulli(4)),
}
METHODS = {"sequential": "sequential", "vectorized": "vectorized", "parallel": "parallel", "vmap": jax.vmap}


def perturbed(graph, seed=0, scale=0.7):
    params = graph.init(jax.random.key(seed))
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(seed + 100), len(leaves))
    drawn = [a + scale * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, drawn)


PARAMS = perturbed(RBM)


def sampler(graph, num_samples=8, num_chains=1, chain_method="vectorized", num_warmup=0, **kwargs):
    kwargs.setdefault("progress_bar", False)
    return MCMC(
        BlockedGibbs(graph),
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method=chain_method,
        **kwargs,
    )


def draws(mcmc, key, params, extra_fields=(), init_params=None, **clamped):
    mcmc.run(key, params, extra_fields=extra_fields, init_params=init_params, **clamped)
    return jax.tree.map(np.asarray, mcmc.get_samples(group_by_chain=True))


def assert_same(first, second):
    jax.tree.map(np.testing.assert_array_equal, first, second)
