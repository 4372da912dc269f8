# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Draws from the Boltzmann distribution of a binary quadratic model, for dimod."""

from collections.abc import Mapping
from typing import Any, ClassVar

import dimod
import numpy as np
from numpyro.infer import MCMC

import jax

from ebmpp.core import checks
from ebmpp.graph import FactorGraph
from ebmpp.kernels import ParallelTempering


class BoltzmannSampler(dimod.Sampler):
    r"""Sampler of :math:`p(x) \propto e^{-\beta E(x)}` for binary quadratic models.

    Each read is the last state of a parallel tempering of its own, from
    :math:`\beta = 0`. Reads are independent, and of this distribution as far as the
    replicas mix. Composites of dimod, such as ``dimod.SpinReversalTransformComposite``,
    accept it.

    **Example**

    >>> import dimod
    >>> from ebmpp.dimod import BoltzmannSampler
    >>> bqm = dimod.BinaryQuadraticModel({}, {"ab": -1.0, "bc": -1.0}, "SPIN")
    >>> reads = BoltzmannSampler().sample(bqm, beta=5.0, num_reads=20, num_sweeps=20, seed=0)
    >>> float(reads.first.energy)
    -2.0
    """

    properties: ClassVar[Mapping[str, Any]] = {}
    parameters: ClassVar[Mapping[str, list]] = {
        "num_reads": [],
        "beta": [],
        "num_sweeps": [],
        "num_temperatures": [],
        "seed": [],
    }

    def sample(
        self,
        bqm: dimod.BinaryQuadraticModel,
        *,
        num_reads: int = 100,
        beta: float = 1.0,
        num_sweeps: int = 1000,
        num_temperatures: int = 8,
        seed: int | None = None,
        **kwargs,
    ) -> dimod.SampleSet:
        """Draw states of a model.

        :param bqm: a model of spins or of bits.
        :param num_reads: number of draws.
        :param beta: inverse temperature, above 0. Draws at a large one are near the
            minima of the energy.
        :param num_sweeps: sweeps per draw; a first half of them chooses the
            temperatures.
        :param num_temperatures: replicas per draw, at least 2.
        :param seed: seed of the draws; None for another one at each call.
        :param kwargs: ignored with a warning, as dimod's samplers do.
        :return: a ``dimod.SampleSet`` with ``num_reads`` rows.
        :raises ArgumentError: for numbers out of range.
        """
        self.remove_unknown_kwargs(**kwargs)
        num_reads = checks.count("BoltzmannSampler: num_reads", num_reads)
        num_sweeps = checks.count("BoltzmannSampler: num_sweeps", num_sweeps, least=2)
        beta = checks.number("BoltzmannSampler: beta", beta, above=0)
        if not bqm.num_variables:
            return dimod.SampleSet.from_samples_bqm(np.empty((num_reads, 0)), bqm)
        graph = FactorGraph.from_bqm(bqm)
        params = jax.tree.map(lambda p: beta * p, graph.init(jax.random.key(0)))
        mcmc = MCMC(
            ParallelTempering(graph, num_temperatures=num_temperatures),
            num_warmup=num_sweeps // 2,
            num_samples=num_sweeps - num_sweeps // 2,
            thinning=num_sweeps - num_sweeps // 2,
            num_chains=num_reads,
            chain_method="vectorized",
            progress_bar=False,
        )
        entropy = np.random.SeedSequence(seed).generate_state(1)
        mcmc.run(jax.random.key(entropy[0]), params)
        (block,) = graph.families
        states = np.asarray(mcmc.get_samples()[block])
        samples = states, list(graph.labels[block])
        return dimod.SampleSet.from_samples_bqm(samples, bqm)
