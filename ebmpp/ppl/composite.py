# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of chains of a whole composite: blocks, and sites with a conjugate conditional."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from functools import partial
from typing import ClassVar, NamedTuple

import numpyro.distributions as dist
from numpyro.infer.mcmc import MCMCKernel

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, checks, random
from ebmpp.core.types import SiteArrays
from ebmpp.errors import StateError
from ebmpp.kernels.base import (
    InitParams,
    Kwargs,
    all_still,
    over_chains,
    track,
)
from ebmpp.kernels.coupling import describe_meetings
from ebmpp.moves.couplings import MOST_TRIALS
from ebmpp.ppl.gibbs_block import GibbsBlock, GraphBlock, ModelBlock
from ebmpp.traced.block import Advanced, BlockChain, Call, Coupled
from ebmpp.traced.rows import checked
from ebmpp.traced.start import search


@dataclasses.dataclass(frozen=True)
class Conjugate:
    """A site that is drawn from its conditional, a NumPyro distribution in closed form.

    :param site: its name.
    :param conditional: ``fn(sites, *model_args, **model_kwargs)`` of the values of all
        other sites to the distribution of this one given everything else.
    :param initial: the distribution of starting values, of the same shape.

    The two chains of a pair are coupled maximally, for any distribution that has a
    density.

    **References**

    1. Thorisson (2000), *Coupling, stationarity, and regeneration*, chapter 1, section
       4.4.
    """

    site: str
    conditional: Callable[..., dist.Distribution]
    initial: dist.Distribution
    latents: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        checks.instance("Conjugate: site", self.site, str, "the name of a site")
        checks.function("Conjugate: conditional", self.conditional, "the other sites")
        checks.instance(
            "Conjugate: initial",
            self.initial,
            dist.Distribution,
            "a NumPyro distribution",
        )

    @property
    def sites(self) -> tuple[str, ...]:
        return (self.site,)

    def draw_initial(self, keys: Array) -> SiteArrays:
        """Draw a starting value."""
        return {self.site: jnp.asarray(self.initial.sample(random.as_key(keys)))}

    def advance(self, values: Rows, call: Call, keys: Array) -> Advanced:
        """Draw the site from its conditional."""
        drawn = self._given(call).sample(random.as_key(keys))
        return Advanced({self.site: jnp.asarray(drawn, values[self.site].dtype)})

    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        """Draw the sites of two chains, coupled maximally."""
        values, call = first
        x, y, is_valid = maximal(keys, self._given(call), self._given(second[1]))
        dtype = values[self.site].dtype
        return {self.site: x.astype(dtype)}, {self.site: y.astype(dtype)}, ~is_valid

    def _given(self, call: Call) -> dist.Distribution:
        return self.conditional(call.siblings, *call.args, **call.kwargs)


#: One update of a sweep; a composite uses its ``advance`` and ``couple``, and draws its
#: start.
Step = GibbsBlock | Conjugate


class CompositeState(NamedTuple):
    """The state of :class:`CoupledComposite`.

    - **z** - the leading chain: every site, and the latent blocks of the graphs.
    - **y** - the following chain, ``lag`` sweeps behind; equal to ``z`` once they have
      met.
    - **t** - number of sweeps of the leading chain.
    - **met** - whether the pair has met.
    - **meeting_time** - the first t with ``z == y``; while unmet, the present ``t``.
    - **rng_key** - the run's key. Sweep ``t`` draws from the key and ``t``, so the key
      does not change.
    - **broken** - True if a conditional was degenerate; the pair then never meets.
    - **still** - by site, True while no sweep has changed ``z``.
    """

    z: SiteArrays
    y: SiteArrays
    t: Array
    met: Array
    meeting_time: Array
    rng_key: Array
    broken: Array
    still: SiteArrays


class CoupledComposite(MCMCKernel):
    """Two coupled copies of a Gibbs sampler, a kernel for :class:`numpyro.infer.MCMC`.

    A coupled kernel cannot be one block of ``numpyro.infer.Gibbs``, because its two
    chains would get the same values of the other sites. Here blocks of a graph are
    coupled maximally layer by layer, blocks of
    :meth:`GibbsBlock.from_model <ebmpp.GibbsBlock.from_model>` unit by unit, and other
    sites by :class:`Conjugate`. Meeting times and unbiased estimates
    (:func:`ebmpp.ppl.composite_expectation`) follow. A pair meets when all sites and
    latent blocks are equal, and stays together. Use ``num_warmup=0``.

    :param steps: blocks (:class:`~ebmpp.GibbsBlock`, also ``GibbsBlock.from_model``)
        and :class:`Conjugate` objects, in the order of a sweep. They define the
        posterior; no model is read.
    :param lag: sweeps that the leading chain is ahead, at least 1.
    :param coupling: of the layers of graphs: "maximal" (the default),
        "maximal_independent", "common", "reflection" or "independent".
    :raises ArgumentError: for a step that is neither, a lag below 1, an unknown
        coupling, or a site in two steps.

    **References**

    1. Jacob, O'Leary, Atchade (2020), *Unbiased Markov chain Monte Carlo with
       couplings*.
    2. Biswas, Jacob, Vanetti (2019), *Estimating convergence of Markov chains with
       L-lag couplings*.

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
    model = None  #: as in :class:`~ebmpp.kernels.RowKernel`

    def __init__(
        self, steps: Sequence[Step], lag: int = 1, coupling: str | None = None
    ) -> None:
        self.lag = checks.count("CoupledComposite: lag", lag)
        self.coupling = coupling
        self.steps = tuple(
            checks.sequence(
                "CoupledComposite: steps", steps, "GibbsBlocks and Conjugates"
            )
        )
        for step in self.steps:
            kinds = GibbsBlock, Conjugate
            checks.instance(
                "CoupledComposite: a step", step, kinds, "a GibbsBlock or a Conjugate"
            )
            if not isinstance(step, Conjugate):
                step.check_coupled(coupling)
        self.blocks = [step for step in self.steps if isinstance(step, ModelBlock)]
        names = [name for step in self.steps for name in (*step.sites, *step.latents)]
        if not names or len(set(names)) != len(names):
            raise checks.error(
                "CoupledComposite: steps",
                "of one site or more, each in one step",
                names,
            )

    def start(self, keys: Array, call: Call, init: Rows) -> tuple[SiteArrays, Array]:
        """Draw starting values of the sites not in ``init``, then of the blocks' latents.

        Sites of a model's block are drawn from its prior given the other steps' sites.
        If that is impossible, the search for a possible start redraws all sites but
        those in ``init``.

        :return: the values, and whether they are possible.
        """
        blocks = self.blocks

        def draw(keys):
            z: SiteArrays = {}
            for index, step in enumerate(self.steps):
                z |= step.draw_initial(random.fold_in(keys, index))
            z |= {site: jnp.asarray(v) for site, v in init.items()}
            for block in blocks:
                z |= block.draw_prior(z, call, random.as_key(keys))
            return z

        def split(block, z):
            values, inputs = _split(block, z, call)
            return values, block.info.context(values, inputs)

        def sweep(z, keys):
            for index, block in enumerate(blocks):
                block_keys = random.fold_in(keys, index)
                moved = block.start.relaxed(split(block, z), block_keys)
                z = z | {site: v for site, v in moved.items() if site not in init}
            return z

        def is_possible(z):
            return jnp.stack([b.start.is_possible(split(b, z)) for b in blocks]).all()

        def redraw(z, keys, number):
            return draw(keys)

        z = draw(keys)
        possible = jnp.ones((), bool)
        if blocks:
            z, possible = search(z, keys, redraw, sweep, is_possible)
        for index, step in enumerate(self.steps):
            if isinstance(step, GraphBlock):
                z |= step.begin(*_split(step, z, call), random.fold_in(keys, index)).z
        finite = [jnp.isfinite(v).all() for v in z.values()]
        return z, possible & jnp.stack(finite).all()

    def check_data(self, call: Call) -> None:
        """Raise a StateError for data of a model that are impossible whatever its sites are."""
        for block in self.blocks:
            block.info.check_data(call)

    def check_sites(self, init: Mapping[str, object]) -> None:
        """Raise a StateError for initial values of anything but a site."""
        sites = [site for step in self.steps for site in step.sites]
        checks.names("site of init_params", init, sites, StateError)

    def check_started(self, possible: Array) -> None:
        """Raise a StateError if chains start at impossible values."""
        sites = [site for step in self.steps for site in step.sites]
        if not possible.all():
            raise checks.state_error(
                "CoupledComposite: starts",
                f"possible and finite values of sites {sites} in all chains",
                f"impossible ones in {int((~possible).sum())} of {possible.size}",
                hint="Give init_params that are possible together, or look for a factor "
                "that is -inf everywhere.",
            )

    def single(self, z: Rows, keys: Array, call: Call) -> SiteArrays:
        """Make one sweep of one chain; step i draws from the words ``keys`` folded with i."""
        z = dict(z)
        for index, step in enumerate(self.steps):
            z |= step.advance(*_split(step, z, call), random.fold_in(keys, index)).z
        return z

    def pair(self, z: Rows, y: Rows, keys: Array, call: Call) -> Coupled:
        """Make one coupled sweep; also return whether a conditional was degenerate."""
        z = dict(z)
        y = dict(y)
        broken = jnp.zeros((), bool)
        for index, step in enumerate(self.steps):
            are_equal = _equal(z, y)
            new_z, new_y, wrong = step.couple(
                _split(step, z, call),
                _split(step, y, call),
                random.fold_in(keys, index),
                self.coupling,
            )
            broken |= wrong
            z |= new_z
            # equal chains stay equal, even if the last bits of their conditionals
            # differ
            y |= {name: jnp.where(are_equal, z[name], v) for name, v in new_y.items()}
        return z, y, broken

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: InitParams,
        model_args: tuple,
        model_kwargs: Kwargs,
    ) -> CompositeState:
        """Return the first state, with the leading chain ``lag`` sweeps ahead.

        :raises StateError: for an unknown site in ``init_params``, or starts that are
            impossible.
        """
        init = dict(init_params or {})
        call = Call.split(model_args, model_kwargs)
        self.check_sites(init)
        self.check_data(call)

        def init_one(key, init):
            words = random.key_pair(key)
            start, possible = self.start(random.fold_in(words, 0), call, init)
            broken = ~checked(self.check_started, possible)

            def advance(t, z):
                return self.single(z, random.fold_in(words, t + 1), call)

            z = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.lag), advance, start)
            t = jnp.full((), self.lag, jnp.int32)
            met = _equal(z, start)
            return CompositeState(z, start, t, met, t, key, broken, all_still(z))

        return over_chains(init_one, rng_key)(rng_key, init)

    def sample(
        self, state: CompositeState, model_args: tuple, model_kwargs: Kwargs
    ) -> CompositeState:
        call = Call.split(model_args, model_kwargs)

        def sample_one(state):
            t = state.t + 1
            keys = random.fold_in(random.key_pair(state.rng_key), t)
            z, y, wrong = self.pair(state.z, state.y, keys, call)
            broken = state.broken | wrong
            after = state._replace(
                z=z,
                y=y,
                t=t,
                met=(state.met | _equal(z, y)) & ~broken,
                meeting_time=jnp.where(state.met, state.meeting_time, t),
                broken=broken,
            )
            return track(after, state)

        return over_chains(sample_one, state.rng_key)(state)

    def get_diagnostics_str(self, state: CompositeState) -> str:
        return describe_meetings(state)


class _Trials(NamedTuple):
    """State of the loop of :func:`maximal`: the last trial's draw is ``y``."""

    number: Array
    x: Array
    y: Array
    accepted: Array
    is_valid: Array


def maximal(
    key: Array, p: dist.Distribution, q: dist.Distribution
) -> tuple[Array, Array, Array]:
    """Return a draw of ``p`` and one of ``q``, equal with the largest probability possible.

    :param key: a jax key, or a key pair ``(2,)``. Trial i draws from the words folded
        with i: a key that ``jax.random`` derives compiles eight kernels, this one.
    :return: the two draws, and False after a log density that is nan, or
        :data:`~ebmpp.moves.couplings.MOST_TRIALS` trials.
    """
    words = random.key_pair(key)

    def density(distribution, x):
        return jnp.sum(distribution.log_prob(x))

    def trial(state: _Trials) -> _Trials:
        # trial 0 draws from p, the others from q: one loop, because a sampler such as
        # gamma's takes the better part of a second to compile
        number = state.number
        leads = number == 0
        y = _draw(leads, p, q, random.as_key(random.fold_in(words, number)))
        gap = density(q, y) - density(p, y)
        level_words = random.words(random.fold_in(words, number, 1), 1)
        level = jnp.log(random.uniform(level_words)[0])
        accepted = jnp.where(leads, level <= gap, level > -gap)
        x = jnp.where(leads, y, state.x)
        return _Trials(number + 1, x, y, accepted, ~jnp.isnan(gap))

    def is_pending(state):
        return ~state.accepted & state.is_valid & (state.number <= MOST_TRIALS)

    shape = jax.eval_shape(p.sample, random.as_key(words))
    none = jnp.zeros(shape.shape, shape.dtype)
    start = _Trials(jnp.uint32(0), none, none, jnp.zeros((), bool), jnp.ones((), bool))
    last = lax.while_loop(is_pending, trial, start)
    return last.x, last.y, last.accepted & last.is_valid


def _draw(
    leads: Array, p: dist.Distribution, q: dist.Distribution, key: Array
) -> Array:
    """Return a draw of ``p`` where ``leads``, else of ``q``; by one sampler where possible.

    Their trees must agree, and hold all attributes. A custom distribution that names no
    arrays in ``pytree_data_fields`` takes two samplers.
    """
    if jax.tree.structure(p) == jax.tree.structure(q):
        selected = jax.tree.map(partial(jnp.where, leads), p, q)
        is_complete = vars(selected).keys() >= vars(p).keys() | vars(q).keys()
        if is_complete:
            return jnp.asarray(selected.sample(key))
    return jnp.where(leads, p.sample(key), q.sample(key))


def _split(step: Step, z: Rows, call: Call) -> BlockChain:
    """Return a step's sites and latents, and the call with everything else as siblings."""
    names = (*step.sites, *step.latents)
    values = {name: z[name] for name in names if name in z}
    siblings = {name: v for name, v in z.items() if name not in names}
    return values, call._replace(siblings=siblings)


def _equal(z: Rows, y: Rows) -> Array:
    return jnp.stack([(z[name] == y[name]).all() for name in z]).all()
