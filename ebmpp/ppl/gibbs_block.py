# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph as a block of a NumPyro model's Gibbs sampler."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, checks, random
from ebmpp.core.display import Card, Grid, Shown
from ebmpp.errors import ArgumentError, IntractableError, StateError
from ebmpp.graph import FactorGraph, cards
from ebmpp.graph.arrays import check_values
from ebmpp.kernels.base import Init, Kwargs
from ebmpp.moves import Layer, gibbs
from ebmpp.ppl import binding
from ebmpp.ppl.model_block import ModelBlock, ModelFunction
from ebmpp.ppl.sites import Call, SiteKernel, Sites, Surroundings, one_chain, plain, verify
from ebmpp.sampling import search
from ebmpp.sampling.search import STARTS


class BlockState(NamedTuple):
    """The state of :class:`GibbsBlock`.

    - **z** - the sites, each ``(*batch, *shape)``, of the dtype that they came with.
    - **latents** - blocks of the graph that are no site of the model, ``(rows, *shape)``.
    - **i** - steps done.
    - **accepted** - Metropolis proposals taken so far, ``(rows,)``; 0 without a ``log_weight``.
    - **rng_key** - the block's key; step ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    latents: dict[str, Array]
    i: Array
    accepted: Array
    rng_key: Array


class GibbsBlock(SiteKernel, Shown):
    """Some sites of a NumPyro model, updated by the sweeps of a graph: a block of ``numpyro.infer.Gibbs``.

    The graph, with its params at this moment's values, must be the posterior of the sites given everything
    else: the energy prior, and a factor for each likelihood that reads them. :meth:`verify` compares it
    with the model. Blocks of the graph that are no site (the latent units of a Boltzmann machine that is
    the prior of an image) are sampled along.

    Discrete sites need no graph: :meth:`from_model` makes a block of the model itself.

    :param graph: the declaration.
    :param sites: names of blocks that are sites; or a dict from site to block, or to the
        :class:`~ebmpp.ppl.layout.Layout` of several blocks in one array. The visible blocks unless given.
    :param params: by factor, arrays or functions ``fn(sites, *model_args, **model_kwargs)`` of the sibling
        sites' values and the model's own arguments; or one function that returns them all; or None: the
        model's first argument. A leaf may have leading axes like the sites' (rows of a plate).
    :param given: blocks that are fixed: values, or functions as for ``params``.
    :param log_weight: ``fn(x, sites, *model_args, **model_kwargs)`` of the block's own sites ``x``: a log
        density beside the energy that is not affine, of shape ``batch``. Layers of the sites are then
        proposed from their conditionals under the energy, and accepted by Metropolis.
    :param fraction: of a layer's units that are proposed at a time; smaller is accepted more often.
    :param num_sweeps: sweeps a step.
    :param init: "uniform" (where the model's prototype is), or "local_mode".
    :raises ArgumentError: for anything but a :class:`~ebmpp.FactorGraph`.
    :raises StateError: for an unknown block, or one in two sites.
    :raises ArgumentError: for an unknown ``init``, or numbers out of range.

    **References**

    1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the Bayesian restoration
       of images*.

    **Example**

    >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
    >>> from numpyro.infer import MCMC, NUTS, Gibbs
    >>> rbm = ebmpp.layered(x=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
    >>> prior = rbm.init(jax.random.key(0))
    >>> def model(y):
    ...     scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    ...     x = numpyro.sample("x", ebmpp.EnergyDistribution(rbm, prior))
    ...     numpyro.sample("y", dist.Normal(x, scale).to_event(1), obs=y)
    >>> def field(sites, y):  # log N(y; 1, s) - log N(y; 0, s) is the likelihood's part of x's bias
    ...     return prior["x"] + (y - 0.5) / sites["scale"] ** 2
    >>> block = ebmpp.GibbsBlock(rbm, sites=["x"], params=prior | {"x": field})
    >>> y = jnp.array([1.1, 0.9, 0.0, 0.2, 1.0, -0.1])
    >>> block.verify(model, y)
    >>> mcmc = MCMC(Gibbs([(block, ["x"]), (NUTS(model), None)]), num_warmup=20, num_samples=20,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(1), y)
    >>> {name: draws.shape for name, draws in mcmc.get_samples().items()}
    {'scale': (20,), 'x': (20, 6)}
    """

    def __init__(
        self,
        graph: FactorGraph,
        sites: Sites = None,
        params: Mapping[str, Any] | Callable[..., Any] | None = None,
        *,
        given: Mapping[str, Any] | None = None,
        log_weight: Callable[..., Array] | None = None,
        fraction: float = 1.0,
        num_sweeps: int = 1,
        init: str = "uniform",
    ) -> None:
        checks.instance("GibbsBlock: graph", graph, FactorGraph, "a FactorGraph")
        self.graph, self.start = graph, checks.choice("GibbsBlock: init", init, STARTS)
        self.fraction = checks.number("GibbsBlock: fraction", fraction, above=0, most=1)
        self.num_sweeps = checks.count("GibbsBlock: num_sweeps", num_sweeps)
        self.within = Surroundings(graph, sites, params, given, log_weight)

    @classmethod
    def from_model(
        cls,
        model: Callable[..., Any],
        sites: Sequence[str],
        *model_args: Any,
        num_sweeps: int = 1,
        unit_by_unit: bool = False,
        **model_kwargs: Any,
    ) -> ModelBlock:
        """A block that follows from the model: no graph, and no field written by hand.

        The sites take finitely many values: Bernoulli, Categorical, Binomial, DiscreteUniform,
        :class:`~ebmpp.EnergyDistribution`, or any law whose support is an interval of whole numbers. Which of
        their units interact is read off the traced program of the model's log density, with plates, masks,
        scales and ``obs`` as the model has them, and errs toward interacting: a primitive that is not known
        reads all that it is given. Units that do not interact form a layer, and a layer is drawn at once: all
        its units are set to each of their K values in turn, and K evaluations give every unit's conditional.
        A mixture's assignments are one layer, a hidden Markov chain two, a lattice two. ``verify`` compares
        the conditionals with the model.

        :param model: a NumPyro model, conditioned on the data.
        :param sites: names of its latent sites that the block draws.
        :param model_args: the model's arguments. Arrays may have other values when the block runs; other
            shapes, other numbers, and other values of index arrays that decide who interacts need another
            block, which an error tells.
        :param num_sweeps: sweeps a step.
        :param unit_by_unit: whether units may be drawn one at a time where (nearly) all of them interact, at
            K evaluations of the whole model for each unit.
        :param model_kwargs: the model's keyword arguments; none can be called like the two options.
        :raises StateError: for sites that the model has not, subsampled plates, or another latent site that
            is summed out by enumeration.
        :raises IntractableError: for sites of infinitely many values, or values that depend on other sites;
            and where hardly two units can be drawn at once, unless ``unit_by_unit``, with what it would cost.

        **References**

        1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the Bayesian restoration
           of images*.

        **Example**

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
        >>> from numpyro.infer import MCMC, NUTS, Gibbs
        >>> def model(y):
        ...     means = numpyro.sample("means", dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1))
        ...     with numpyro.plate("points", len(y)):
        ...         z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.5])))
        ...         numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)
        >>> y = jnp.array([-2.1, 1.9, -1.0, 2.5, 0.1])
        >>> block = ebmpp.GibbsBlock.from_model(model, ["z"], y)
        >>> block.layers["z"].tolist()
        [0, 0, 0, 0, 0]
        >>> law = block.log_conditionals({"z": jnp.zeros(5, int), "means": jnp.array([-2.0, 2.0])})
        >>> jnp.exp(law["z"])[:2, 1].round(3).tolist()
        [0.0, 1.0]
        >>> mcmc = MCMC(Gibbs([(block, ["z"]), (NUTS(model), None)]), num_warmup=20, num_samples=20,
        ...             progress_bar=False)
        >>> mcmc.run(jax.random.key(1), y)
        >>> mcmc.get_samples()["z"].shape
        (20, 5)
        """
        options = {"num_sweeps": num_sweeps, "unit_by_unit": unit_by_unit}
        return ModelBlock(model, sites, model_args, model_kwargs, **options)

    def __repr__(self) -> str:
        return f"GibbsBlock({self.graph!r}, sites={list(self.within.layouts)})"

    def _card(self) -> Card:
        rows = [(s, str(v.shape), ", ".join(v.names)) for s, v in self.within.layouts.items()]
        card = cards.card(self.graph, "GibbsBlock")
        return card._replace(grids=(Grid(("site", "shape", "blocks"), rows), *card.grids))

    # -- states ----------------------------------------------------------------------------------

    def begin(self, values: Rows, made: binding.Bound, keys: Array) -> dict[str, Array]:
        """Rows of the first state: sites where ``values`` are, latents drawn."""
        x = search.start(made, keys, self.within.to_rows(values, {}, made))
        return made.map(search.near_modes, x, keys) if self.start == "local_mode" else x

    def advance(self, made: binding.Bound, x: Rows, keys: Array) -> tuple[dict[str, Array], Array]:
        """One step: ``num_sweeps`` sweeps, and the Metropolis proposals each row took."""

        def one(s: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            moved, took = binding.move(made, carry[0], random.fold_in(keys, s), self.fraction)
            return moved, carry[1] + took

        carry = dict(x), jnp.zeros(len(keys), jnp.int32)
        if self.num_sweeps == 1:
            return one(jnp.uint32(0), carry)
        return lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_sweeps), one, carry)

    # -- NumPyro's contract ----------------------------------------------------------------------

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> BlockState:
        """The first state; ``init_params`` are the sites' values, which Gibbs gives.

        :raises StateError: for missing sites, or values outside of their support.
        :raises ParameterError: for params that do not fit.
        """
        del num_warmup
        one_chain(rng_key)
        if not init_params:
            raise StateError(f"GibbsBlock needs initial values of its sites {sorted(self.within.layouts)}")
        values = {site: plain(jnp.asarray(v)) for site, v in init_params.items()}
        self.within.batch_of(values)
        for site, layout in self.within.layouts.items():
            for b, v in layout.split(values[site]).items():
                check_values(b, self.graph.families[b], v)
        made = self.within.bind(values, Call.of(model_args, model_kwargs), check=True)
        x, none = self.begin(values, made, made.keys(rng_key, 0)), jnp.zeros(made.num_rows, jnp.int32)
        return self._state(x, values, jnp.zeros((), jnp.int32), none, rng_key)

    def sample(self, state: BlockState, model_args: tuple, model_kwargs: Kwargs) -> BlockState:
        """One step, given the siblings' values in ``model_kwargs``."""
        made = self.within.bind(state.z, Call.of(model_args, model_kwargs))
        x = self.within.to_rows(state.z, state.latents, made)
        x, took = self.advance(made, x, made.keys(state.rng_key, (state.i + 1).astype(jnp.uint32)))
        return self._state(x, state.z, state.i + 1, state.accepted + took, state.rng_key)

    def _state(self, x: Rows, like: Rows, i: Array, accepted: Array, rng_key: Array) -> BlockState:
        z = self.within.to_sites(x, like, self.within.batch_of(like))
        return BlockState(z, {b: x[b] for b in self.within.latents}, i, accepted, rng_key)

    def get_diagnostics_str(self, state: BlockState) -> str:
        """Steps done, and acceptance where there are Metropolis steps."""
        steps = int(np.max(state.i))
        sites = [layer for layer in self.within.layers if set(layer) & set(self.within.site_blocks)]
        layers = sum(Layer(layer).num_parts(self.graph) for layer in sites)
        told = f"{steps} steps of {list(self.within.layouts)}"
        if self.within.log_weight is None:
            return told
        rate = np.asarray(state.accepted).mean() / max(1, steps * layers * self.num_sweeps)
        return f"{told}, acceptance {rate:.2g}"

    def verify(self, model: Callable[..., Any], *model_args: Any, **model_kwargs: Any) -> None:
        """Compare the graph with the model: raises where it is not the posterior of the sites.

        See :func:`ebmpp.ppl.sites.verify`.
        """
        verify(self.within, model, *model_args, **model_kwargs)


def gibbs_fn(
    graph: FactorGraph | ModelBlock,
    sites: Sites = None,
    params: Mapping[str, Any] | Callable[..., Any] | None = None,
    **options: Any,
) -> "GibbsFunction | ModelFunction":
    """The same update as a function for :class:`numpyro.infer.HMCGibbs`.

    HMCGibbs does not pass the model's arguments on, so functions among ``params`` are of the sibling sites'
    values alone, and there is no state but the sites: latent blocks are drawn afresh every time.

    :param graph: the declaration; or a block of :meth:`GibbsBlock.from_model`, which says all, and keeps the
        model's arguments that it was made for.
    :param sites: as for :class:`GibbsBlock`.
    :param params: as for :class:`GibbsBlock`, functions ``fn(sites)``.
    :param options: the other arguments of :class:`GibbsBlock`, but ``init``.
    :return: a function ``(rng_key, gibbs_sites, hmc_sites)`` of new values of the sites.
    :raises IntractableError: for latent blocks that interact: they cannot be drawn afresh in one go.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(x=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
    >>> update = ebmpp.ppl.gibbs_fn(rbm, ["x"], rbm.init(jax.random.key(0)))
    >>> update(rng_key=jax.random.key(1), gibbs_sites={"x": jnp.zeros(6)}, hmc_sites={})["x"].shape
    (6,)
    """
    if isinstance(graph, ModelBlock):
        if sites is not None or params is not None or options:
            raise ArgumentError(
                "gibbs_fn: a block of GibbsBlock.from_model has its sites and options already"
            )
        return ModelFunction(graph)
    block = GibbsBlock(graph, sites, params, **options)
    clash = graph.interacting(block.within.latents)
    if clash:
        raise IntractableError(
            f"latent blocks {clash[0]} interact, so they cannot be drawn afresh in one go, and HMCGibbs "
            "keeps no state for them; use GibbsBlock in numpyro.infer.Gibbs"
        )
    return GibbsFunction(block)


class GibbsFunction:
    """What :func:`gibbs_fn` returns."""

    def __init__(self, block: GibbsBlock) -> None:
        self.block = block

    def __call__(self, rng_key: Array, gibbs_sites: Rows, hmc_sites: Rows) -> dict[str, Array]:
        within = self.block.within
        made = within.bind(gibbs_sites, Call(hmc_sites, (), {}))
        drawn = gibbs.initial_rows(within.graph, within.latents, made.keys(rng_key, 0))
        x = within.to_rows(gibbs_sites, drawn, made)
        x, _ = self.block.advance(made, x, made.keys(rng_key, 1))
        return within.to_sites(x, gibbs_sites, made.batch)
