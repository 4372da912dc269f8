# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains of NumPyro's MCMC sharded over devices."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from ebmpp.core import checks, sharding


def sharded_chains(mesh: Mesh) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Return a ``chain_method`` of NumPyro's ``MCMC`` that shards chains over devices.

    For many chains: they are vectorized on each device, where "vectorized" runs all on one device and
    "parallel" one per device. Draws are bitwise the same as by other methods, and stay on their devices.
    NumPyro shows no progress for a callable ``chain_method``, and runs a single chain without it.

    :param mesh: devices of this process. Chains are sharded over its first axis, which must divide their
        number.
    :raises ArgumentError: for anything but a mesh, or another number of chains.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> method = ebmpp.kernels.sharded_chains(jax.make_mesh((len(jax.devices()),), ("chains",)))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=0, num_samples=5, num_chains=8, chain_method=method,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(0), rbm.init(jax.random.key(1)))
    >>> mcmc.get_samples(group_by_chain=True)["v"].shape
    (8, 5, 4)
    """
    name = "sharded_chains: mesh"
    with sharding.over(name, mesh):
        devices, axis = sharding.width(), mesh.axis_names[0]

    def method(fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(chains: Any) -> Any:
            count = len(jax.tree.leaves(chains)[0])
            expected = f"a multiple of {devices} devices"
            checks.require(count % devices == 0, "sharded_chains: num_chains", expected, count)
            with sharding.over(name, mesh):
                sharded = jax.shard_map(jax.vmap(fn), in_specs=P(axis), out_specs=P(axis), check_vma=False)
                return jax.jit(sharded)(chains)

        return run

    return method
