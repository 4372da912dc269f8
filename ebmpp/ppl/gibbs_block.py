# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A graph as a block of a NumPyro model's Gibbs sampler."""

from collections.abc import Callable, Mapping, Sequence
import math
from typing import Any, NamedTuple

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, checks, random
from ebmpp.core.display import Card, Grid, Shown
from ebmpp.errors import ArgumentError, StateError
from ebmpp.families.values import check_values
from ebmpp.graph import FactorGraph, display
from ebmpp.kernels.base import Init, Kwargs
from ebmpp.moves import Layer, Move, search, sweeps
from ebmpp.moves.search import STARTS
from ebmpp.ppl import binding
from ebmpp.ppl.surroundings import Sites, Surroundings, verify
from ebmpp.traced import tempered
from ebmpp.traced.block import Call, SiteKernel, one_chain, plain
from ebmpp.traced.model_block import ModelBlock

#: Units that are proposed at a time, on average, where a ``log_weight`` decides. A 16x16 Ising prior seen
#: through a blur that saturates, 600 steps: all of a layer, R-hat of how well the image fits 5.2, and 2.6
#: with thirty sweeps a step; four units 1.014, two 1.008, one 1.004, at 12, 15 to 21 and 17 to 22
#: effective draws a second.
_PROPOSED = 2


class BlockState(NamedTuple):
    """The state of :class:`GibbsBlock`.

    - **z** - the sites, each ``(*batch, *shape)``, of the dtype that they came with.
    - **latents** - blocks of the graph that are no site of the model, ``(rows, *shape)``.
    - **i** - steps done.
    - **accepted** - Metropolis proposals taken so far, ``(rows,)``; 0 without a ``log_weight``.
    - **transitions** - tempered transitions taken so far, ``(rows,)``; 0 without ``tempering``.
    - **rng_key** - the block's key; step ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    latents: dict[str, Array]
    i: Array
    accepted: Array
    transitions: Array
    rng_key: Array


class Advanced(NamedTuple):
    """A step that is done: all blocks, and by how much the counts of the state grew."""

    x: dict[str, Array]
    accepted: Array
    transitions: Array


class GibbsBlock(SiteKernel, Shown):
    """Some sites of a NumPyro model, updated by the sweeps of a graph: a block of ``numpyro.infer.Gibbs``.

    The graph, with its params at this moment's values, must be the posterior of the sites given everything
    else: the energy prior, and a factor for each likelihood that reads them. :meth:`verify` compares it
    with the model. Blocks of the graph that are no site (the latent units of a Boltzmann machine that is
    the prior of an image) are sampled along.

    Discrete sites need no graph: :meth:`from_model` makes a block of the model itself.

    :param graph: the declaration.
    :param sites: names of blocks that are sites; or a dict from site to block, or to the
        :class:`~ebmpp.ppl.Layout` of several blocks in one array. The visible blocks unless given.
    :param params: by factor, arrays or functions ``fn(sites, *model_args, **model_kwargs)`` of the sibling
        sites' values and the model's own arguments; or one function that returns them all; or None: the
        model's first argument. A leaf may have leading axes like the sites' (rows of a plate).
    :param given: blocks that are fixed: values, or functions as for ``params``.
    :param log_weight: ``fn(x, sites, *model_args, **model_kwargs)`` of the block's own sites ``x``: a log
        density beside the energy that is not affine, of shape ``batch``. Layers of the sites are then
        proposed from their conditionals under the energy, and accepted by Metropolis.
    :param fraction: of a layer's units that are proposed at a time, where there is a ``log_weight``; smaller
        is accepted more often. Two units of the largest layer unless given: proposals of whole layers are
        hardly ever taken, and chains then stay where they are without a word.
    :param num_sweeps: sweeps a step; 1 unless given, and with a ``log_weight`` as many as propose every unit
        once on average, ``1 / fraction``.
    :param init: "uniform" (where the model's prototype is), or "local_mode".
    :param moves: of a sweep over the sites, in place of draws of their layers: moves that leave the law given
        by the energy as it is, such as those of :func:`~ebmpp.moves.cluster_sweep`. Blocks that are no site
        are drawn before.
    :param tempering: increasing inverse temperatures from more than 0 to 1. After the sweeps of a step the
        block makes a tempered transition (``ebmpp.traced.tempered``): it is heated and cooled, beta by beta
        a sweep over all layers at that multiple of the energy, and what comes of it is taken or not, so that
        the block's law given everything else is left as it is. That is a way out of modes that sweeps do not
        leave; the more betas, the more often it is taken, and the diagnostics tell how often.
    :raises ArgumentError: for anything but a :class:`~ebmpp.FactorGraph`, for moves that are not of the sites
        or not exact, or beside a ``log_weight``, and for betas that do not increase from more than 0 to 1.
    :raises StateError: for an unknown block, or one in two sites.
    :raises ArgumentError: for an unknown ``init``, or numbers out of range.

    **References**

    1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the Bayesian restoration
       of images*.
    2. Neal (1996), *Sampling from multimodal distributions using tempered transitions*.

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
        fraction: float | None = None,
        num_sweeps: int | None = None,
        init: str = "uniform",
        moves: Move | Sequence[Move] | None = None,
        tempering: Any = None,
    ) -> None:
        checks.instance("GibbsBlock: graph", graph, FactorGraph, "a FactorGraph")
        self.graph, self.start = graph, checks.choice("GibbsBlock: init", init, STARTS)
        self.within = Surroundings(graph, sites, params, given, log_weight)
        weighs = log_weight is not None
        fraction = (
            (min(1.0, _PROPOSED / self._most_units) if weighs else 1.0) if fraction is None else fraction
        )
        self.fraction = checks.number("GibbsBlock: fraction", fraction, above=0, most=1)
        if num_sweeps is None:
            num_sweeps = math.ceil(1 / self.fraction) if weighs else 1
        self.num_sweeps = checks.count("GibbsBlock: num_sweeps", num_sweeps)
        self.moves = self._check_moves(sweeps.as_moves("GibbsBlock: moves", moves))
        self.tempering = tempered.check_tempering("GibbsBlock: tempering", tempering)

    @classmethod
    def from_model(
        cls,
        model: Callable[..., Any],
        sites: Sequence[str],
        *model_args: Any,
        num_sweeps: int = 1,
        unit_by_unit: bool = False,
        clusters: bool = False,
        tempering: Any = None,
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

        An energy prior whose latents are summed out (a Boltzmann machine of an image) ties all its units.
        Its latents are then drawn along (data augmentation): a sweep draws them given the sites, from
        the prior's graph, and the sites given them, layer by layer. The law of the sites is that of the
        model, with latents summed out, exactly; they are drawn anew before they are read, so that they are no
        part of the state. Where that takes no fewer layers they stay summed out.

        Sites of real numbers are drawn along where their conditional is Gaussian, which it is where the
        traced log density is a polynomial of degree two in the site's units, whatever else it depends on;
        units that interact are drawn together. Sites of positive numbers are, where it is Gamma or inverse
        Gamma. Others are refused with what they are.

        :param model: a NumPyro model, conditioned on the data.
        :param sites: names of its latent sites that the block draws.
        :param model_args: the model's arguments. Arrays may have other values when the block runs; other
            shapes, other numbers, and other values of index arrays that decide who interacts need another
            block, which an error tells.
        :param num_sweeps: sweeps a step.
        :param unit_by_unit: whether units may be drawn one at a time where (nearly) all of them interact, at
            K evaluations of the whole model for each unit.
        :param clusters: whether a sweep begins with a move of clusters (``ebmpp.traced.clusters``),
            which turns whole regions where units pull one another along stronger than what holds each of
            them. For discrete units that interact in pairs.
        :param tempering: increasing inverse temperatures from more than 0 to 1, for a tempered transition of
            all sites of the block together after the sweeps of a step; see :class:`GibbsBlock`. Here the
            whole log density, as a function of these sites, is what is heated, their prior included, and
            jointly with its latents where these are drawn along.
        :param model_kwargs: the model's keyword arguments; none can be called like the four options.
        :raises StateError: for sites that the model has not, subsampled plates, or another latent site that
            is summed out by enumeration.
        :raises IntractableError: for sites of infinitely many values, or values that depend on other sites;
            for continuous sites whose conditional is no family that is known; where hardly two units can
            be drawn at once, unless ``unit_by_unit``, with what it would cost; for sites that the params of
            an energy without log Z depend on, whose posterior is doubly intractable; and for ``tempering``
            of a continuous site that the params of a prior with latents depend on.

        **References**

        1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the Bayesian restoration
           of images*.
        2. Tanner, Wong (1987), *The calculation of posterior distributions by data augmentation*.

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
        options: dict[str, Any] = {"num_sweeps": num_sweeps, "unit_by_unit": unit_by_unit}
        options |= {"clusters": clusters, "tempering": tempering}
        return ModelBlock(model, sites, model_args, model_kwargs, **options)

    def __repr__(self) -> str:
        return f"GibbsBlock({self.graph!r}, sites={list(self.within.layouts)})"

    @property
    def _most_units(self) -> int:
        """Units that are drawn at once, in the layer that has the most."""
        sizes = []
        for layer in self.within.layers:
            size = sum(self.graph.families[b].size for b in layer if b in self.within.site_blocks)
            sizes.append(-(-size // Layer(layer).num_parts(self.graph)))
        return max(1, *sizes)

    def _check_moves(self, moves: tuple[Move, ...] | None) -> tuple[Move, ...] | None:
        """:raises ArgumentError: for moves that are not of the sites, or leave another law."""
        if moves is None:
            return None
        held = (*self.within.given, *self.within.latents)
        made = sweeps.resolve_moves(self.graph, moves, held, exact=False)
        biased = [move for move in made if not move.exact or move.marginalize]
        if biased:
            raise ArgumentError(
                f"GibbsBlock: moves: {biased[0]} does not leave the law of the sites as it is by itself; "
                "give moves that are exact and sum nothing out"
            )
        if self.within.log_weight is not None:
            raise ArgumentError(
                "GibbsBlock: moves and log_weight: moves know the energy alone; leave moves away, or write "
                "what log_weight says as factors"
            )
        return made

    def _card(self) -> Card:
        rows = [(s, str(v.shape), ", ".join(v.names)) for s, v in self.within.layouts.items()]
        card = display.card(self.graph, "GibbsBlock")
        return card._replace(grids=(Grid(("site", "shape", "blocks"), rows), *card.grids))

    # -- states ----------------------------------------------------------------------------------

    def begin(self, values: Rows, made: binding.Bound, keys: Array) -> dict[str, Array]:
        """Rows of the first state: sites where ``values`` are, latents drawn."""
        x = search.start(made, keys, self.within.to_rows(values, {}, made))
        return made.map(search.near_modes, x, keys) if self.start == "local_mode" else x

    def advance(self, made: binding.Bound, x: Rows, keys: Array) -> Advanced:
        """One step: ``num_sweeps`` sweeps, and a tempered transition where such are asked for."""

        def one(s: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
            own = random.fold_in(keys, s)
            if self.moves is not None:
                return binding.move_by(made, self.moves, carry[0], own), carry[1]
            moved, took = binding.move(made, carry[0], own, self.fraction)
            return moved, carry[1] + took

        none = jnp.zeros(len(keys), jnp.int32)
        if self.num_sweeps == 1:
            x, accepted = one(jnp.uint32(0), (dict(x), none))
        else:
            x, accepted = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.num_sweeps), one, (dict(x), none))
        if self.tempering is None:
            return Advanced(x, accepted, none)
        # as many passes as propose every unit once, each of them reversed where all of them are
        passes = self.num_sweeps if self.within.log_weight is not None else 1

        def sweep(x: Rows, own: Array, beta: Any, backward: bool) -> tuple[dict[str, Array], Array]:
            one = lambda s, c: binding.move(made, c[0], random.fold_in(own, s), self.fraction, beta, backward)
            return lax.fori_loop(jnp.uint32(0), jnp.uint32(passes), one, (dict(x), none))

        density = lambda x: binding.log_density(made, x)
        x, took, _ = tempered.transition(self.tempering, density, sweep, x, keys)
        return Advanced(x, accepted, took.astype(jnp.int32))

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
        sweeps.check_params(made, self.moves or ())
        x, none = self.begin(values, made, made.keys(rng_key, 0)), jnp.zeros(made.num_rows, jnp.int32)
        return self._state(Advanced(x, none, none), values, jnp.zeros((), jnp.int32), rng_key)

    def sample(self, state: BlockState, model_args: tuple, model_kwargs: Kwargs) -> BlockState:
        """One step, given the siblings' values in ``model_kwargs``."""
        made = self.within.bind(state.z, Call.of(model_args, model_kwargs))
        x = self.within.to_rows(state.z, state.latents, made)
        new = self.advance(made, x, made.keys(state.rng_key, (state.i + 1).astype(jnp.uint32)))
        counts = state.accepted + new.accepted, state.transitions + new.transitions
        return self._state(Advanced(new.x, *counts), state.z, state.i + 1, state.rng_key)

    def _state(self, new: Advanced, like: Rows, i: Array, rng_key: Array) -> BlockState:
        z = self.within.to_sites(new.x, like, self.within.batch_of(like))
        latents = {b: new.x[b] for b in self.within.latents}
        return BlockState(z, latents, i, new.accepted, new.transitions, rng_key)

    def get_diagnostics_str(self, state: BlockState) -> str:
        """Steps done, and acceptance where there are Metropolis steps."""
        steps = int(np.max(state.i))
        sites = [layer for layer in self.within.layers if set(layer) & set(self.within.site_blocks)]
        layers = sum(Layer(layer).num_parts(self.graph) for layer in sites)
        told = f"{steps} steps of {list(self.within.layouts)}"
        if self.tempering is not None:
            told += f", tempered transitions taken {np.mean(state.transitions) / max(1, steps):.2g}"
        if self.within.log_weight is None:
            return told
        rate = np.asarray(state.accepted).mean() / max(1, steps * layers * self.num_sweeps)
        return f"{told}, acceptance {rate:.2g}"

    def verify(self, model: Callable[..., Any], *model_args: Any, **model_kwargs: Any) -> None:
        """Compare the graph with the model: raises where it is not the posterior of the sites.

        See :func:`ebmpp.ppl.surroundings.verify`.
        """
        verify(self.within, model, *model_args, **model_kwargs)
