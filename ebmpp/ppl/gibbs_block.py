# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of a Gibbs sampler of a NumPyro model: by a graph, and by the model itself."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
import itertools
import math
from typing import Any, Self

import numpy as np

from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, SiteArrays, at_index, checks, random, select
from ebmpp.errors import IntractableError, StateError
from ebmpp.families.values import check_values
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import InitParams, Kwargs
from ebmpp.moves import Forests, Layer, Move, Target, couplings, gibbs, search, sweeps
from ebmpp.moves.move import split_chains, stack_chains
from ebmpp.ppl import bound
from ebmpp.ppl.binding import Binding, ParamsLike, SitesLike
from ebmpp.traced import block
from ebmpp.traced.block import Advanced, BlockChain, BlockState, Call, Coupled
from ebmpp.traced.model_block import ModelKernel
from ebmpp.traced.rows import checked
from ebmpp.traced.start import Strategy

#: Units that are proposed at a time, on average, where there is a ``log_likelihood``. A
#: 16x16 Ising prior seen through a blur, 600 steps: R-hat 5.2 for whole layers, 1.014
#: for four units, 1.008 for two, 1.004 for one, at 12, 15 to 21 and 17 to 22 effective
#: draws per second.
_NUM_PROPOSED = 2


class GibbsBlock(block.Block):
    """Sites of a NumPyro model that a graph's sweeps update, in ``numpyro.infer.Gibbs``.

    The graph, with its present params, must be the posterior of the sites given
    everything else: the energy prior, and a factor for each likelihood that reads them.
    :meth:`verify` compares it with the model. Blocks of the graph that are no site,
    such as the latent units of a Boltzmann machine, are sampled too. :meth:`from_model`
    makes a block of the model itself, without a graph. ``block.sites`` and
    ``block.latents`` are the names of its sites, and of the blocks that are sampled and
    are no site.

    :param sites: names of blocks that are sites; or a dict from site to block, or to
        the :class:`~ebmpp.ppl.Layout` of several blocks in one array. By default the
        visible blocks.
    :param params: by factor, arrays or functions
        ``fn(sites, *model_args, **model_kwargs)`` of the sibling sites' values and the
        model's arguments; or one function that returns all of them; or None for the
        model's first argument. A leaf may have leading axes like the sites' (rows of a
        plate).
    :param clamped: values of blocks that are fixed, or functions as for ``params``.
    :param log_likelihood: ``fn(x, sites, *model_args, **model_kwargs)`` of the block's
        sites ``x``: a log density beside the energy that is not affine, of shape
        ``batch``. Layers of the sites are then proposed from their conditionals under
        the energy, and accepted by Metropolis.
    :param fraction: of a layer's units that are proposed at a time, where there is a
        ``log_likelihood``. By default two units of the largest layer: proposals of
        whole layers are hardly ever accepted.
    :param num_sweeps: sweeps per step; by default 1, and with a ``log_likelihood``
        ``1 / fraction``, which proposes every unit once on average.
    :param init: "uniform" (at the model's prototype), or "local_mode".
    :param moves: moves of the sites in place of draws of their layers, such as
        :func:`~ebmpp.moves.cluster_sweep`. Each must leave the distribution given by
        the energy invariant.
    :param tempering: increasing inverse temperatures from more than 0 to 1. A step then
        ends with a tempered transition, which heats and cools the block by one sweep
        per temperature and is accepted or rejected. It leaves modes that sweeps do not
        leave. The more temperatures, the more often it is accepted.
    :raises ArgumentError: for an argument of the wrong kind or out of range, for moves
        that are not of the sites or not exact, and for moves beside a
        ``log_likelihood``.
    :raises StateError: for an unknown block, or one in two sites.

    **References**

    1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the
       Bayesian restoration of images*.
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

    def __new__(cls, *args: object, **options: object) -> Self:
        """Return a :class:`GraphBlock`, unless a subclass is named."""
        kind: Any = GraphBlock if cls is GibbsBlock else cls
        return super().__new__(kind)

    @classmethod
    def from_model(
        cls,
        model: Callable[..., object],
        sites: Sequence[str],
        *model_args: object,
        num_sweeps: int = 1,
        sequential: bool = False,
        tempering: Sequence[float] | None = None,
        joint: str = "auto",
        init_strategy: Strategy | None = None,
        collapse: str | bool | Sequence[str] = "auto",
        **model_kwargs: object,
    ) -> "ModelBlock":
        """Return a block that is derived from a model, without a graph.

        Which units of the sites interact is read off the traced program of the model's
        log density, with its plates, masks, scales and ``obs``, erring toward
        interaction. Units that do not interact form a layer, which is drawn at once
        from K evaluations of the model for units of K values. A mixture's assignments
        are one layer, a lattice two. Units that interact as a forest, such as a hidden
        Markov chain's or a tree's, are drawn jointly from K^2 evaluations, whatever
        their number. Such a draw leaves states that single units cannot leave, and the
        block has the sums :meth:`~ebmpp.ppl.ModelBlock.log_marginal`,
        :meth:`~ebmpp.ppl.ModelBlock.marginals`,
        :meth:`~ebmpp.ppl.ModelBlock.most_probable` and
        :meth:`~ebmpp.ppl.ModelBlock.marginal_model`.

        An energy prior whose latents are summed out (a Boltzmann machine of an image)
        ties all its units. Its latents are then drawn too, from the prior's graph,
        where that takes fewer layers. The distribution of the sites is exactly that of
        the model.

        Sites may take finitely many values: any distribution on an interval of whole
        numbers, or an :class:`~ebmpp.EnergyDistribution`. Continuous sites are drawn
        given the discrete ones where their conditional is of a known family, as the
        traced log density shows: Gaussian for real numbers, Gamma or inverse Gamma for
        positive ones, Beta for probabilities, Dirichlet for rows of probabilities. Such
        are a mixture's weights, transition probabilities, and rates that
        ``jnp.where(t < tau, a, b)`` selects. A prior on an interval, such as
        ``Uniform(0, 100)`` of a scale or ``HalfNormal`` of a location, restricts the
        conditional to it. Other sites are refused.

        Collapsed sites are integrated out while the discrete ones are drawn, one unit
        after the other, and then drawn given them. Both together are a draw of the
        joint distribution, which mixes better where a coefficient and its indicator,
        or rates and a change point, hold each other. All sites of a set must be
        jointly conjugate given the discrete sites and all others: Gaussian together,
        or independent. A scale that multiplies a collapsed Gaussian is conditioned on.

        :param sites: names of the model's latent sites that the block draws, all of
            those marked ``infer={"enumerate": "parallel"}`` among them, which a block
            alone accepts.
        :param model_args: the model's arguments. When the block runs, arrays may have
            other values, but not other shapes, nor other values of index arrays that
            decide which units interact. Numbers, strings, data frames and other objects
            are compared by content, and may not change.
        :param num_sweeps: sweeps per step. Where a sweep takes microseconds, 20 make draws
            nearly independent, in a first run that takes hardly longer than with one.
        :param sequential: True if units may be drawn one at a time where (nearly) all
            of them interact, at K evaluations of the whole model per unit.
        :param tempering: inverse temperatures of a tempered transition of all sites;
            see :class:`GibbsBlock`. It heats the whole log density, including the prior
            and jointly with its latents.
        :param joint: "auto" to draw the discrete units jointly where all of them form a
            forest whose tables are not too large, or have at most 64 joint states;
            "forest" to draw them by layers that
            are forests, such as two of a lattice; "units" to draw them by layers of
            units that do not interact.
        :param init_strategy: where chains start, as for :class:`numpyro.infer.NUTS`.
            ``numpyro.infer.init_to_value(values=...)`` takes natural values of any
            sites, discrete ones too, which are held. Other continuous sites start as
            the strategy says, by default ``init_to_uniform``, and other discrete ones
            at a draw given these. In ``numpyro.infer.Gibbs`` it replaces the
            ``init_params`` of the block's sites; without it, the block starts at these,
            or at NumPyro's draws of the prior.
        :param collapse: continuous sites that are integrated out while discrete ones
            are drawn: their names, or True for all that can be, in the order of
            Gaussian and other sites. "auto" does so where the discrete units would be
            drawn nearly sequentially without it, as indicators of regressors and single
            change points are, and the block has at most 64 continuous units; not
            beside ``tempering`` or "forest". False for none.
        :param model_kwargs: the model's keyword arguments; none may be named like one
            of the six options.
        :raises ArgumentError: for an option out of range, "forest" without discrete
            sites, and ``collapse`` beside options that exclude it.
        :raises StateError: for sites that the model does not have, subsampled plates,
            enumerated sites outside of the block, unknown sites in ``init_strategy``,
            and sites of ``collapse`` that are not among the continuous ones.
        :raises IntractableError: for sites that cannot be drawn; where hardly two units
            can be drawn at once, unless ``sequential``; for sites that the params of an
            energy without log Z depend on, whose posterior is doubly intractable; and
            for ``tempering`` of a continuous site that the params of a prior with
            latents depend on; and for sites of ``collapse`` that are not jointly
            conjugate.

        **References**

        1. Geman, Geman (1984), *Stochastic relaxation, Gibbs distributions, and the
           Bayesian restoration of images*.
        2. Tanner, Wong (1987), *The calculation of posterior distributions by data
           augmentation*.
        3. Hamze, de Freitas (2004), *From fields to trees*.
        4. Liu (1994), *The collapsed Gibbs sampler in Bayesian computations with
           applications to a gene regulation problem*.

        **Example**

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
        >>> def model(y):
        ...     prior = dist.Normal(jnp.array([-2.0, 2.0]), 1.0).to_event(1)
        ...     means = numpyro.sample("means", prior)
        ...     with numpyro.plate("points", len(y)):
        ...         z = numpyro.sample("z", dist.Categorical(jnp.array([0.5, 0.5])))
        ...         numpyro.sample("y", dist.Normal(means[z], 1.0), obs=y)
        >>> y = jnp.array([-2.1, 1.9, -1.0, 2.5, 0.1])
        >>> block = ebmpp.GibbsBlock.from_model(model, ["z"], y)
        >>> block.layers["z"].tolist()
        [0, 0, 0, 0, 0]
        >>> values = {"z": jnp.zeros(5, int), "means": jnp.array([-2.0, 2.0])}
        >>> logits = block.log_conditionals(values)
        >>> jnp.exp(logits["z"])[:2, 1].round(3).tolist()
        [0.0, 1.0]

        The block runs in ``numpyro.infer.Gibbs`` as in the example of
        :class:`GibbsBlock`.
        """
        return ModelBlock(
            model,
            sites,
            model_args,
            model_kwargs,
            num_sweeps=num_sweeps,
            sequential=sequential,
            tempering=tempering,
            joint=joint,
            init_strategy=init_strategy,
            collapse=collapse,
        )


class GraphBlock(GibbsBlock):
    """A block whose sites a graph's sweeps update: the result of :class:`GibbsBlock`."""

    def __init__(
        self,
        graph: FactorGraph,
        sites: SitesLike = None,
        params: ParamsLike = None,
        *,
        clamped: Mapping[str, object] | None = None,
        log_likelihood: Callable[..., Array] | None = None,
        fraction: float | None = None,
        num_sweeps: int | None = None,
        init: str = "uniform",
        moves: Move | Sequence[Move] | None = None,
        tempering: Sequence[float] | None = None,
    ) -> None:
        checks.instance("GibbsBlock: graph", graph, FactorGraph)
        self.graph = graph
        self.start = checks.choice("GibbsBlock: init", init, search.STARTS)
        self.binding = Binding(graph, sites, params, clamped, log_likelihood)
        self.sites = tuple(self.binding.layouts)
        self.latents = self.binding.latents
        proposes = log_likelihood is not None
        if fraction is None:
            share = _NUM_PROPOSED / self._largest_layer()
            fraction = min(1.0, share) if proposes else 1.0
        self.fraction = checks.number("GibbsBlock: fraction", fraction, above=0, most=1)
        if num_sweeps is None:
            num_sweeps = math.ceil(1 / self.fraction) if proposes else 1
        self.num_sweeps = checks.count("GibbsBlock: num_sweeps", num_sweeps)
        self.moves = self._check_moves(sweeps.as_moves("GibbsBlock: moves", moves))
        self.tempering = block.check_tempering("GibbsBlock: tempering", tempering)

    def __repr__(self) -> str:
        return f"GibbsBlock({self.graph!r}, sites={list(self.sites)})"

    def _largest_layer(self) -> int:
        """Return the number of units of the sites that are drawn at once, at most."""
        sizes = []
        for layer in self.binding.layers:
            blocks = [b for b in layer if b in self.binding.site_blocks]
            units = sum(self.graph.sizes(blocks))
            sizes.append(math.ceil(units / Layer(layer).num_parts(self.graph)))
        return max(sizes)

    def _check_moves(self, moves: tuple[Move, ...] | None) -> tuple[Move, ...] | None:
        """Raise an ArgumentError for moves that are not of the sites, or not exact."""
        if moves is None:
            return None
        if self.binding.log_likelihood is not None:
            raise checks.error(
                "GibbsBlock: moves",
                "None beside a log_likelihood",
                moves,
                hint="Write the likelihood as factors.",
            )
        fixed = (*self.binding.clamped, *self.latents)
        resolved = sweeps.resolve_moves(self.graph, moves, fixed, exact=False)
        for move in resolved:
            if not move.exact or move.marginalize:
                raise checks.error(
                    "GibbsBlock: moves", "exact, and sum nothing out", move
                )
        return resolved

    def draw_initial(self, keys: Array) -> SiteArrays:
        values = {}
        row_keys = Target(self.graph, {}).keys(keys, 1)
        for site, layout in self.binding.layouts.items():
            rows = gibbs.initial_rows(self.graph, layout.names, row_keys)
            values[site] = layout.join(at_index(rows, 0))
        return values

    def begin(self, values: Rows, call: Call, keys: Array) -> Advanced:
        """Return the first state: sites at ``values`` or a mode near them, latents drawn."""
        target = self.binding.bind(values, call, check=True)
        sweeps.check_params(target, self.moves or ())
        keys = target.keys(keys, 0)
        sites = self.binding.to_rows(values, target)
        x = gibbs.initial_rows(self.graph, self.graph.families, keys) | sites
        rest = partial(search.draw_rest, known=tuple(sites))
        x = target.map(rest, target.with_observed(x), random.fold_in(keys, 3))
        if self.start == "local_mode":
            x = target.map(search.near_modes, x, keys)
        none = jnp.zeros(len(keys), jnp.int32)
        return Advanced(self._from_rows(x, values, target), none, transitions=none)

    def advance(
        self, values: Rows, call: Call, keys: Array, index: Array | None = None
    ) -> Advanced:
        """Make one step; row r draws from the words folded with the step's number and r."""
        target = self.binding.bind(values, call)
        keys = target.keys(keys, 1 if index is None else index)

        def sweep_once(number, carry):
            x, total = carry
            sweep_keys = random.fold_in(keys, number)
            if self.moves is not None:
                return bound.sweep_by_moves(target, self.moves, x, sweep_keys), total
            x, accepted = bound.sweep(target, x, sweep_keys, self.fraction)
            return x, total + accepted

        none = transitions = jnp.zeros(len(keys), jnp.int32)
        start = self.binding.to_rows(values, target), none
        x, accepted = block.repeat(self.num_sweeps, sweep_once, start)
        if self.tempering is not None:
            x, transitions = self._temper(target, x, keys)
        z = self._from_rows(x, values, target)
        return Advanced(z, accepted, transitions=transitions)

    def _temper(
        self, target: bound.BoundGraph, x: Rows, keys: Array
    ) -> tuple[SiteArrays, Array]:
        # as many passes as propose every unit once, which are reversed as a whole
        passes = 1 if target.log_likelihood is None else self.num_sweeps

        def sweep(x, keys, beta, backward):
            rung = target.at(beta)

            def step(index, carry):
                pass_keys = random.fold_in(keys, index)
                return bound.sweep(rung, carry[0], pass_keys, self.fraction, backward)

            start = dict(x), jnp.zeros(len(keys), jnp.int32)
            return lax.fori_loop(jnp.uint32(0), jnp.uint32(passes), step, start)

        x, accepted, _ = block.tempered_transition(
            self.tempering or (), partial(bound.log_density, target), sweep, x, keys
        )
        return dict(x), accepted.astype(jnp.int32)

    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        values = first[0], second[0]
        targets = [self.binding.bind(*chain) for chain in (first, second)]
        x, y = map(self.binding.to_rows, values, targets)
        z = stack_chains(x, y)
        keys = targets[0].keys(keys, 1)
        broken = jnp.zeros((), bool)
        kinds = couplings.resolve(coupling, self.binding.layers)
        for number in range(self.num_sweeps):
            sweep_keys = random.fold_in(keys, number)
            z, wrong = bound.couple(
                targets, z, sweep_keys, kinds, self.fraction, self.moves or ()
            )
            broken |= wrong.any()
        new_x, new_y = map(self._from_rows, split_chains(z), values, targets)
        return new_x, new_y, broken

    def check_coupled(self, coupling: str | None) -> None:
        others = [
            move for move in self.moves or () if not isinstance(move, Forests | Layer)
        ]
        for name, value in (("tempering", self.tempering), ("moves", others)):
            if value:
                raise checks.error(
                    f"CoupledComposite: {name}",
                    f"None or from forest_sweep in {self!r}, as pairs are coupled layer by layer",
                    value,
                )
        couplings.resolve(coupling, self.binding.layers)

    def _from_rows(
        self, x: Rows, template: Rows, target: bound.BoundGraph
    ) -> SiteArrays:
        return self.binding.to_sites(x, template, target.batch) | {
            b: x[b] for b in self.latents
        }

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: InitParams,
        model_args: tuple,
        model_kwargs: Kwargs,
    ) -> BlockState:
        """Return the first state, at ``init_params``, the values of the sites."""
        values = block.initial_values(rng_key, init_params or {})
        if not values:
            raise checks.state_error(
                "GibbsBlock: init_params",
                f"initial values of the sites {sorted(self.sites)}",
                init_params,
            )
        checks.names("site of init_params", values, self.sites, StateError)
        self.binding.batch_of(values)
        values = checked(self._check_values, values)
        call = Call.split(model_args, model_kwargs)
        new = self.begin(values, call, rng_key)
        new = new._replace(z=checked(self._check_values, new.z))
        return self._first(new, rng_key)

    def _check_values(self, values: Rows) -> None:
        for b, v in self.binding.split(values).items():
            check_values(b, self.graph.families[b], v)

    def is_in_support(self, values: Rows) -> Array:
        """Return True if the values of all blocks are in their families' support."""
        families = self.graph.families
        blocks = self.binding.split(values).items()
        return jnp.stack([families[b].in_support(v).all() for b, v in blocks]).all()

    def get_diagnostics_str(self, state: BlockState) -> str:
        text = super().get_diagnostics_str(state)
        if self.binding.log_likelihood is None:
            return text
        parts = sum(
            Layer(layer).num_parts(self.graph)
            for layer in self.binding.layers
            if not set(layer).isdisjoint(self.binding.site_blocks)
        )
        proposals = max(1, int(np.max(state.i)) * parts * self.num_sweeps)
        return f"{text}, acceptance {np.mean(state.accepted) / proposals:.2g}"

    def walk(
        self, values: Rows, call: Call, key: Array
    ) -> Iterator[tuple[Rows, float]]:
        """Yield random states of the sites with their log density, latents summed out."""
        graph = self.graph
        target = self.binding.bind(values, call, check=True)
        states.check_summable(graph, self.latents)

        def of_rows(target, rows):
            return energy.summed_out(graph, target.params, rows, self.latents)

        for index in itertools.count():
            keys = target.keys(key, index)
            x = gibbs.initial_rows(graph, self.binding.site_blocks, keys)
            x |= target.clamped
            density = target.map(of_rows, x).sum()
            if target.log_likelihood is not None:
                density += target.log_likelihood(x).sum()
            yield self.binding.to_sites(x, values, target.batch), float(density)


class ModelBlock(GibbsBlock, ModelKernel):
    """A block of sites of a NumPyro model: the result of :meth:`GibbsBlock.from_model`.

    Beside what every :class:`GibbsBlock` has, it returns the conditionals of its units,
    and sums over its discrete sites.
    """


def gibbs_fn(
    graph: FactorGraph | ModelBlock,
    sites: SitesLike = None,
    params: ParamsLike = None,
    **options: Any,
) -> Callable[..., SiteArrays]:
    """Return a block as a function for :class:`numpyro.infer.HMCGibbs`.

    HMCGibbs does not pass the model's arguments, so functions among ``params`` are of
    the sibling sites' values alone, and it has no state but the sites, so latent blocks
    are drawn afresh at each step.

    :param graph: the declaration; or a block of :meth:`GibbsBlock.from_model`, as the
        only argument, which keeps the model's arguments that it was made for.
    :param params: as for :class:`GibbsBlock`, functions ``fn(sites)``. The other
        arguments are its too.
    :return: a function ``(rng_key, gibbs_sites, hmc_sites)`` to new values of the
        sites.
    :raises IntractableError: for latent blocks that interact: they cannot be drawn
        afresh at once.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(x=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(3))
    >>> update = ebmpp.ppl.gibbs_fn(rbm, ["x"], rbm.init(jax.random.key(0)))
    >>> update(rng_key=jax.random.key(1), gibbs_sites={"x": jnp.zeros(6)}, hmc_sites={})["x"].shape
    (6,)
    """
    if isinstance(graph, ModelBlock):
        if sites is not None or params is not None or options:
            raise checks.error(
                "gibbs_fn: sites and options",
                "left away for a block of from_model",
                (sites, params, options),
            )
        graph.info.check_data(graph.call)
        return partial(_update, graph, graph.call)
    kernel = GraphBlock(graph, sites, params, **options)
    clash = graph.interacting(kernel.latents)
    if clash:
        raise checks.error(
            "latent blocks",
            "without interaction",
            clash,
            IntractableError,
            "HMCGibbs keeps no state for others: use GibbsBlock in numpyro.infer.Gibbs.",
        )
    return partial(_update, kernel, Call({}, (), {}))


def _update(
    kernel: block.Block, call: Call, rng_key: Array, gibbs_sites: Rows, hmc_sites: Rows
) -> dict:
    call = call._replace(siblings=hmc_sites)
    if isinstance(kernel, GraphBlock):
        gibbs_sites = kernel.begin(gibbs_sites, call, rng_key).z
        z = kernel.advance(gibbs_sites, call, rng_key).z
    else:
        z = kernel.advance(gibbs_sites, call, random.key_pair(rng_key)).z
    return select(z, kernel.sites)
