# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of chains of a whole composite: blocks of a graph, and sites with a conditional of their own."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import NamedTuple

import numpy as np
import numpyro.distributions as dist
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, checks, random
from ebmpp.errors import ArgumentError, StateError
from ebmpp.kernels.base import Init, Kwargs, is_batched
from ebmpp.moves import Target, couplings
from ebmpp.moves.gibbs import initial_rows
from ebmpp.ppl import binding
from ebmpp.ppl.gibbs_block import GibbsBlock
from ebmpp.traced.block import Call
from ebmpp.traced.model_block import ModelBlock


@dataclasses.dataclass(frozen=True)
class Conjugate:
    """A site that is drawn from its conditional, a NumPyro distribution in closed form.

    :param site: its name.
    :param conditional: ``fn(sites, *model_args, **model_kwargs)`` of all other sites' values to the
        distribution of this one given everything else.
    :param initial: the law of starting values, a distribution of the same shape.

    The two chains of a pair are coupled maximally: they draw one value, with the largest probability that
    two draws of their conditionals can be equal, for any distribution that has a density.

    **References**

    1. Thorisson (2000), *Coupling, stationarity, and regeneration*, chapter 1, section 4.4.
    """

    site: str
    conditional: Callable[..., dist.Distribution]
    initial: dist.Distribution

    def __post_init__(self) -> None:
        checks.instance("Conjugate: site", self.site, str, "the name of a site")
        checks.function("Conjugate: conditional", self.conditional, "the other sites")
        checks.instance("Conjugate: initial", self.initial, dist.Distribution, "a NumPyro distribution")


Step = GibbsBlock | ModelBlock | Conjugate


class CompositeState(NamedTuple):
    """The state of :class:`CoupledComposite`.

    - **z** - the leading chain: every site, and the latent blocks of the graphs.
    - **y** - the chain that follows it, ``lag`` sweeps behind; equal to ``z`` once they have met.
    - **t** - sweeps that the leading chain has done.
    - **met** - whether the pair has met.
    - **meeting_time** - the first t with ``z == y``; while unmet, the present ``t``.
    - **rng_key** - the run's key; sweep ``t`` draws from the key and ``t``, so it does not change.
    - **broken** - whether a conditional had no law (params out of their domain); such a pair never meets.
    """

    z: dict[str, Array]
    y: dict[str, Array]
    t: Array
    met: Array
    meeting_time: Array
    rng_key: Array
    broken: Array


class CoupledComposite(MCMCKernel):
    """Two coupled copies of a Gibbs sampler over several blocks, a kernel for :class:`numpyro.infer.MCMC`.

    A coupled kernel cannot be one block of ``numpyro.infer.Gibbs``, because its two chains would be given
    the same values of the other sites. Here the whole composite is coupled: blocks of a graph by maximal
    couplings layer by layer, those of :meth:`GibbsBlock.from_model <ebmpp.GibbsBlock.from_model>` by maximal
    couplings unit by unit, other sites by :class:`Conjugate`. Meeting times and unbiased estimates
    (:func:`ebmpp.ppl.composite_expectation`) of the posterior of a NumPyro model follow. A pair meets when
    all sites and latent blocks are equal, and stays together. Use ``num_warmup=0``.

    :param steps: blocks (:class:`~ebmpp.GibbsBlock`, also ``GibbsBlock.from_model``) and :class:`Conjugate`
        objects, in the order of a sweep. They are the posterior: no model is looked at (``verify`` of a block
        does).
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: of the layers of graphs: "maximal" (the default), "maximal_independent", "common",
        "reflection" or "independent".
    :raises ArgumentError: for a step that is neither, a lag below 1, an unknown coupling, or a site in two
        steps.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with couplings*.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with L-lag couplings*.

    **Example**

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist, ebmpp
    >>> from numpyro.infer import MCMC
    >>> pixels = ebmpp.FactorGraph({"x": ebmpp.Bernoulli(4)}, factors=[ebmpp.Bias("x")])
    >>> field = lambda sites, y: (y - 0.5) * sites["precision"]
    >>> precision = lambda sites, y: dist.Gamma(3.0, 1 + 0.5 * ((y - sites["x"]) ** 2).sum())
    >>> steps = [ebmpp.GibbsBlock(pixels, ["x"], {"x": field}),
    ...          ebmpp.ppl.Conjugate("precision", precision, dist.Gamma(1.0, 1.0))]
    >>> pairs = MCMC(ebmpp.ppl.CoupledComposite(steps), num_warmup=0, num_samples=60, num_chains=3,
    ...              chain_method="vectorized", progress_bar=False)
    >>> pairs.run(jax.random.key(0), jnp.array([0.9, 0.1, 1.2, 0.0]))
    >>> pairs.last_state.met.tolist()
    [True, True, True]
    """

    sample_field = "z"
    model = None  #: as of :class:`~ebmpp.kernels.RowKernel`

    def __init__(self, steps: Sequence[Step], lag: int = 1, coupling: str | None = None) -> None:
        lag = checks.count("CoupledComposite: lag", lag)
        steps = checks.sequence("CoupledComposite: steps", steps, "GibbsBlocks and Conjugates")
        self.steps, self.lag, self.coupling = tuple(steps), lag, coupling
        names: list[str] = []
        wanted = "a GibbsBlock or a Conjugate"
        for step in self.steps:
            checks.instance("CoupledComposite: a step", step, (GibbsBlock, ModelBlock, Conjugate), wanted)
            names.extend(_names(step))
            _check_coupled(step)
            if isinstance(step, GibbsBlock):
                couplings.resolve(coupling, step.within.layers)
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not names:
            raise ArgumentError(f"every site and latent block is in one step; {twice or 'no site'} is wrong")

    # -- one sweep -------------------------------------------------------------------------------

    def start(self, keys: Array, call: Call, given: Rows) -> dict[str, Array]:
        """Sites drawn from their starting laws, or as ``given``; then the blocks' latents."""
        z: dict[str, Array] = {}
        for index, step in enumerate(self.steps):
            key = random.fold_in(keys, index)
            if isinstance(step, Conjugate):
                z[step.site] = jnp.asarray(given.get(step.site, step.initial.sample(_as_jax(key))))
                continue
            if isinstance(step, ModelBlock):
                drawn = step.uniform(_as_jax(key))
            else:
                drawn = {site: _uniform(step, site, key) for site in step.within.layouts}
            z |= {site: jnp.asarray(given.get(site, v)) for site, v in drawn.items()}
        for index, step in enumerate(self.steps):
            if isinstance(step, GibbsBlock):
                made, own = _bind(step, z, call, check=True)
                z |= _taken(step, step.begin(own, made, made.keys(random.fold_in(keys, index), 0)), own)
        return z

    def single(self, z: Rows, keys: Array, call: Call) -> dict[str, Array]:
        """One sweep of one chain, over all steps.

        :param keys: of this sweep, ``(2,)``; step i draws from ``fold_in(keys, i)``.
        """
        z = dict(z)
        for index, step in enumerate(self.steps):
            key = random.fold_in(keys, index)
            if isinstance(step, Conjugate):
                law = step.conditional(z, *call.args, **call.kwargs)
                z[step.site] = law.sample(_as_jax(key)).astype(z[step.site].dtype)
                continue
            if isinstance(step, ModelBlock):
                own, around = _own(step, z), _around(step, z, call)
                z |= step.advance(own, around, key).z
                continue
            made, own = _bind(step, z, call)
            rows = step.within.to_rows(own, _latents(step, z), made)
            z |= _taken(step, step.advance(made, rows, made.keys(key, 1)).x, own)
        return z

    def pair(
        self, z: Rows, y: Rows, keys: Array, call: Call
    ) -> tuple[dict[str, Array], dict[str, Array], Array]:
        """One coupled sweep; also whether a conditional had no law.

        :param keys: of this sweep, ``(2,)``; step i draws from ``fold_in(keys, i)``.
        """
        z, y, broken = dict(z), dict(y), jnp.zeros((), bool)
        for index, step in enumerate(self.steps):
            together = _equal(z, y)
            move = _MOVES.get(type(step), self._block)
            *new, wrong = move(step, z, y, random.fold_in(keys, index), call)
            broken |= wrong
            # equal chains stay equal, whatever the last bits of their conditionals say
            new[1] = {name: jnp.where(together, new[0][name], v) for name, v in new[1].items()}
            z, y = z | new[0], y | new[1]
        return z, y, broken

    def _block(self, step: GibbsBlock, z: Rows, y: Rows, key: Array, call: Call) -> list:
        bounds, own = zip(*(_bind(step, chain, call) for chain in (z, y)), strict=True)
        each = zip(own, (z, y), bounds, strict=True)
        rows = [step.within.to_rows(o, _latents(step, chain), made) for o, chain, made in each]
        x = {b: jnp.stack([rows[0][b], rows[1][b]]) for b in rows[0]}
        keys = bounds[0].keys(key, 1)
        kinds = couplings.resolve(self.coupling, step.within.layers)
        broken = jnp.zeros((), bool)
        for sweep in range(step.num_sweeps):
            x, wrong = binding.couple(bounds, x, random.fold_in(keys, sweep), kinds, step.fraction)
            broken |= wrong.any()
        return [*(_taken(step, {b: v[i] for b, v in x.items()}, own[i]) for i in range(2)), broken]

    # -- NumPyro's contract ----------------------------------------------------------------------

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> CompositeState:
        """The first state: the leading chain ``lag`` sweeps ahead.

        :raises StateError: for an unknown site in ``init_params``.
        """
        del num_warmup
        given, call = dict(init_params or {}), Call({}, model_args, dict(model_kwargs or {}))
        sites = [site for step in self.steps for site in _sites(step)]
        unknown = sorted(set(given) - set(sites))
        if unknown:
            raise StateError(f"init_params has {unknown}; the sites are {sites}")
        one = lambda key, given: self._init_one(key, given, call)
        return jax.vmap(one)(rng_key, given) if is_batched(rng_key) else one(rng_key, given)

    def _init_one(self, key: Array, given: Rows, call: Call) -> CompositeState:
        words = random.key_pair(key)
        start = self.start(random.fold_in(words, 0), call, given)
        ahead = lambda t, z: self.single(z, random.fold_in(words, t + 1), call)
        z = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.lag), ahead, start)
        t = jnp.full((), self.lag, jnp.int32)
        return CompositeState(z, start, t, _equal(z, start), t, key, jnp.zeros((), bool))

    def sample(self, state: CompositeState, model_args: tuple, model_kwargs: Kwargs) -> CompositeState:
        """One coupled sweep of every pair in ``state``."""
        one = lambda s: self._sample_one(s, Call({}, model_args, dict(model_kwargs or {})))
        return jax.vmap(one)(state) if is_batched(state.rng_key) else one(state)

    def _sample_one(self, state: CompositeState, call: Call) -> CompositeState:
        t = state.t + 1
        keys = random.fold_in(random.key_pair(state.rng_key), t)
        z, y, wrong = self.pair(state.z, state.y, keys, call)
        broken = state.broken | wrong
        met = (state.met | _equal(z, y)) & ~broken
        time = jnp.where(state.met, state.meeting_time, t)
        return CompositeState(z, y, t, met, time, state.rng_key, broken)

    def get_diagnostics_str(self, state: CompositeState) -> str:
        """How many pairs have met, and their mean meeting time so far."""
        met, time = np.asarray(state.met), np.asarray(state.meeting_time)
        mean = f", mean meeting time {time[met].mean():.3g}" if met.any() else ""
        return f"{int(met.sum())} of {met.size} pairs met{mean}"


def _model(step: ModelBlock, z: Rows, y: Rows, key: Array, call: Call) -> list:
    chains = [(_own(step, chain), _around(step, chain, call)) for chain in (z, y)]
    return list(step.couple(chains[0], chains[1], key))


def _conjugate(step: Conjugate, z: Rows, y: Rows, key: Array, call: Call) -> list:
    laws = (step.conditional(chain, *call.args, **call.kwargs) for chain in (z, y))
    *drawn, sound = maximal(key, *laws)
    return [*({step.site: v.astype(z[step.site].dtype)} for v in drawn), ~sound]


_MOVES = {Conjugate: _conjugate, ModelBlock: _model}


def maximal(key: Array, p: dist.Distribution, q: dist.Distribution) -> tuple[Array, Array, Array]:
    """A draw of ``p`` and one of ``q``, equal with the largest probability possible.

    A log density that is not a number ends the rejection loop, and :data:`~ebmpp.moves.couplings.MOST_TRIALS`
    do; both are flagged.

    :param key: a jax key, or a key pair ``(2,)``. Trial i draws from what is folded with i: each key that
        ``jax.random`` derives is eight kernels to compile, and here it is one.
    :param p: a distribution.
    :param q: another of the same shape.
    :return: the two draws, and whether they could be made.

    **References**

    1. Thorisson (2000), *Coupling, stationarity, and regeneration*, chapter 1, section 4.4.
    """
    words = random.key_pair(key)
    density = lambda law, x: jnp.sum(law.log_prob(x))

    def pending(carry: tuple[Array, Array, Array, Array, Array]) -> Array:
        number, _, _, accepted, sound = carry
        return ~accepted & sound & (number <= couplings.MOST_TRIALS)

    def trial(carry: tuple[Array, Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array, Array]:
        # trial 0 draws from p, the others from q: one loop, because a sampler such as gamma's takes the
        # better part of a second to compile
        number, x = carry[:2]
        leads = number == 0
        y = _draw(leads, p, q, _as_jax(random.fold_in(words, number)))
        gap = density(q, y) - density(p, y)
        level = jnp.log(random.uniform(random.words(random.fold_in(words, number, 1), 1))[0])
        accepted = jnp.where(leads, level <= gap, level > -gap)
        return number + 1, jnp.where(leads, y, x), y, accepted, ~jnp.isnan(gap)

    shape = jax.eval_shape(p.sample, _as_jax(words))
    none = jnp.zeros(shape.shape, shape.dtype)
    start = jnp.uint32(0), none, none, jnp.zeros((), bool), jnp.ones((), bool)
    _, x, y, accepted, sound = lax.while_loop(pending, trial, start)
    return x, y, accepted & sound


def _draw(leads: Array, p: dist.Distribution, q: dist.Distribution, key: Array) -> Array:
    """Return a draw of ``p`` where ``leads``, else of ``q``, by one sampler where the two are alike.

    They are where they have the same tree of arrays. A custom distribution that names none in its
    ``pytree_data_fields`` is not rebuilt from them, and takes two samplers.
    """
    if jax.tree.structure(p) == jax.tree.structure(q):
        law = jax.tree.map(lambda a, b: jnp.where(leads, a, b), p, q)
        if vars(law).keys() >= vars(p).keys() | vars(q).keys():
            return jnp.asarray(law.sample(key))
    return jnp.where(leads, jnp.asarray(p.sample(key)), jnp.asarray(q.sample(key)))


def _check_coupled(step: Step) -> None:
    """:raises ArgumentError: for what draws a block in a way that two chains are not coupled in."""
    if isinstance(step, Conjugate):
        return
    options: dict[str, object] = {"tempering": step.tempering}
    options |= {"moves": step.moves} if isinstance(step, GibbsBlock) else {"clusters": step.clusters}
    given = [name for name, value in options.items() if value]
    if given:
        raise ArgumentError(
            f"CoupledComposite: {step!r} has {given[0]}, and its chains would not be coupled; leave that "
            "away: pairs are coupled layer by layer"
        )
    if isinstance(step, ModelBlock) and step.sweep.continuous:
        named = [site.name for site in step.sweep.continuous]
        raise ArgumentError(
            f"CoupledComposite: {step!r} draws continuous sites {named}, which are coupled as steps of their "
            "own: give a Conjugate for each, and the discrete sites to GibbsBlock.from_model"
        )


# -- sites of a step -----------------------------------------------------------------------------


def _sites(step: Step) -> tuple[str, ...]:
    if isinstance(step, GibbsBlock):
        return tuple(step.within.layouts)
    return (step.site,) if isinstance(step, Conjugate) else step.sites


def _names(step: Step) -> tuple[str, ...]:
    return (*_sites(step), *step.within.latents) if isinstance(step, GibbsBlock) else _sites(step)


def _own(step: Step, z: Rows) -> dict[str, Array]:
    return {site: z[site] for site in _sites(step)}


def _around(step: Step, z: Rows, call: Call) -> Call:
    """The call with the other sites in ``z`` as siblings."""
    names = _names(step)
    return call._replace(siblings={name: v for name, v in z.items() if name not in names})


def _bind(
    step: GibbsBlock, z: Rows, call: Call, check: bool = False
) -> tuple[binding.Bound, dict[str, Array]]:
    """The step's graph given the other sites in ``z``, and the step's own sites."""
    own = _own(step, z)
    return step.within.bind(own, _around(step, z, call), check), own


def _latents(step: GibbsBlock, z: Rows) -> dict[str, Array]:
    return {b: z[b] for b in step.within.latents}


def _taken(step: GibbsBlock, x: Rows, own: Rows) -> dict[str, Array]:
    """Sites and latents from rows."""
    sites = step.within.to_sites(x, own, step.within.batch_of(own))
    return sites | {b: x[b] for b in step.within.latents}


def _uniform(step: GibbsBlock, site: str, key: Array) -> Array:
    layout, families = step.within.layouts[site], step.graph.families
    drawn = initial_rows(step.graph, layout.names, Target(step.graph, {}).keys(key, 1))
    return layout.join({b: drawn[b].reshape(families[b].shape) for b in layout.names})


def _equal(z: Rows, y: Rows) -> Array:
    return jnp.stack([(z[name] == y[name]).all() for name in z]).all()


def _as_jax(key: Array) -> Array:
    """A key pair as a jax key."""
    return jax.random.wrap_key_data(key, impl="threefry2x32")
