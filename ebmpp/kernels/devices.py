# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains of NumPyro's MCMC over the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec as P

from ebmpp.core import sharding
from ebmpp.errors import ArgumentError


def over_devices(mesh: Mesh) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """A ``chain_method`` of NumPyro's ``MCMC``: chains over a mesh's devices, vectorized on each.

    Choose it where chains are many: "vectorized" runs all of them on one device, "parallel" one a device.
    Draws are bitwise those of the other methods, and stay where their chains are. As with any function for a
    ``chain_method``, NumPyro shows no progress. Chains never wait for one another. A single chain is run
    on one device: NumPyro does not ask a ``chain_method`` about it.

    :param mesh: of devices of this process; chains, a multiple of them, go over its first axis.
    :raises ArgumentError: for what is no mesh, or a number of chains that it does not divide.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> method = ebmpp.kernels.over_devices(jax.make_mesh((len(jax.devices()),), ("chains",)))
    >>> mcmc = MCMC(ebmpp.BlockedGibbs(rbm), num_warmup=0, num_samples=5, num_chains=8, chain_method=method,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(0), rbm.init(jax.random.key(1)))
    >>> mcmc.get_samples(group_by_chain=True)["v"].shape
    (8, 5, 4)
    """
    name = "over_devices: mesh"
    with sharding.over(name, mesh):
        devices, axis = sharding.width(), mesh.axis_names[0]

    def method(one: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def run(chains: Any) -> Any:
            count = len(jax.tree.leaves(chains)[0])
            if count % devices:
                raise ArgumentError(
                    f"over_devices: num_chains is a multiple of the axis's {devices} devices, not {count}"
                )
            with sharding.over(name, mesh):
                cut = jax.shard_map(jax.vmap(one), in_specs=P(axis), out_specs=P(axis), check_vma=False)
                return jax.jit(cut)(chains)

        return run

    return method
