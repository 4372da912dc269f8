# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of chains of a whole composite: blocks, and sites with a conjugate conditional."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import identity

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import Rows, SiteArrays, checks, omit, random
from ebmpp.errors import StateError
from ebmpp.kernels.base import (
    InitParams,
    Kwargs,
    all_still,
    flags_after,
    over_chains,
)
from ebmpp.kernels.coupling import describe_meetings
from ebmpp.ppl.conjugate import Conjugate
from ebmpp.ppl.gibbs_block import GibbsBlock, GraphBlock, ModelBlock
from ebmpp.ppl.hamiltonian import CoupledHMC
from ebmpp.ppl.pilot import Starts, run_pilot
from ebmpp.traced.block import BlockChain, Call, Coupled
from ebmpp.traced.data import with_deterministic
from ebmpp.traced.rows import checked
from ebmpp.traced.start import Strategy, named_values, search
from ebmpp.traced.sweep.kinds import KINDS, kinds_of_sites

_FOLLOWER = 1  # folded into the key of the following chain's start


#: One update of a sweep; a composite uses its ``advance`` and ``couple``, and draws its
#: start.
Step = GibbsBlock | Conjugate | CoupledHMC


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
    sites by :class:`Conjugate` and :class:`CoupledHMC`. :meth:`from_model` chooses the
    steps of a model. Meeting times and unbiased estimates
    (:func:`ebmpp.ppl.composite_expectation`) follow. A pair meets when all sites and
    latent blocks are equal, and stays together. Use ``num_warmup=0``.

    :param steps: blocks (:class:`~ebmpp.GibbsBlock`, also ``GibbsBlock.from_model``),
        :class:`Conjugate` and :class:`CoupledHMC` objects, in the order of a sweep.
        They define the posterior.
    :param lag: sweeps that the leading chain is ahead, at least 1, in
        :class:`numpyro.infer.MCMC`, where no pilot can choose it; as in
        :class:`~ebmpp.MaximalCoupling`. :func:`ebmpp.ppl.composite_expectation` takes
        it from a pilot.
    :param coupling: of the layers of graphs: "maximal" (the default),
        "maximal_independent", "common", "reflection" or "independent".
    :param starts: a distribution of starts, as :meth:`from_model` sets it.
    :param independent_starts: True to draw the start of the following chain
        independently.
    :param call: arguments of the model for calls without any.
    :param init_strategy: where chains start, as in
        :meth:`GibbsBlock.from_model <ebmpp.GibbsBlock.from_model>`, for all sites that a
        model's steps draw; ``numpyro.infer.init_to_value`` also names others.
        ``init_params``, natural values too, replace it.
    :raises ArgumentError: for a step of another kind, a lag below 1, an unknown
        coupling, or a site in two steps.
    :raises StateError: for an unknown site in ``init_strategy``.

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
        self,
        steps: Sequence[Step],
        lag: int = 1,
        coupling: str | None = None,
        *,
        starts: Starts | None = None,
        independent_starts: bool = False,
        call: Call | None = None,
        init_strategy: Strategy | None = None,
    ) -> None:
        self.lag = checks.count("CoupledComposite: lag", lag)
        self.coupling = coupling
        self.starts = starts
        self.independent_starts = checks.flag(
            "CoupledComposite: independent_starts", independent_starts
        )
        self.call = call
        self.init_strategy = init_strategy
        self.steps = tuple(checks.sequence("CoupledComposite: steps", steps, "steps"))
        for step in self.steps:
            if not isinstance(step, Step):
                what = "a GibbsBlock, a Conjugate or a CoupledHMC"
                raise checks.error("CoupledComposite: a step", what, step)
            if isinstance(step, GibbsBlock):
                step.check_coupled(coupling)
        self.blocks = [step for step in self.steps if isinstance(step, ModelBlock)]
        #: the steps that read a model, and so know what is possible
        self.models = [s for s in self.steps if isinstance(s, ModelBlock | CoupledHMC)]
        self.sites = [site for step in self.steps for site in step.sites]
        names = self.sites + [name for step in self.steps for name in step.latents]
        if not names or len(set(names)) != len(names):
            raise checks.error(
                "CoupledComposite: steps",
                "of one site or more, each in one step",
                names,
            )
        named = named_values("CoupledComposite", init_strategy)
        self.check_sites(named, "init_strategy")
        discrete = {
            site
            for step in self.steps
            if isinstance(step, GibbsBlock)
            for site in step.sites
            if not (isinstance(step, ModelBlock) and site in step.info.continuous)
        }
        #: values that the strategy names
        self.named = {
            site: jnp.asarray(v, None if site in discrete else float)
            for site, v in named.items()
        }

    @classmethod
    def from_model(
        cls,
        model: Callable[..., object],
        *model_args: object,
        kinds: Mapping[str, str] | None = None,
        lag: int = 1,
        hmc: Mapping[str, object] | None = None,
        init_strategy: Strategy | None = None,
        num_warmup: int = 500,
        num_samples: int = 500,
        rng_key: Array | None = None,
        progress_bar: bool = False,
        **model_kwargs: object,
    ) -> "CoupledComposite":
        """Return pairs of chains of a NumPyro model's posterior.

        Sites with finitely many values, and continuous ones whose conditional is of a
        known family, are steps of one
        :meth:`GibbsBlock.from_model <ebmpp.GibbsBlock.from_model>`. All others are one
        :class:`CoupledHMC`. Printing the composite shows what it does with each site.

        A pilot of four NumPyro chains tunes step size and mass, and finds where the
        posterior is. Pairs then start independently, twice as widely spread as the
        pilot's chains, around one of them at random. Their estimates are unbiased,
        whatever the pilot found.

        :param model_args: the model's arguments, also of later calls without any.
        :param kinds: "gibbs" or "hmc" for sites that shall not be moved in the default
            way.
        :param lag: sweeps that the leading chain is ahead in :class:`numpyro.infer.MCMC`.
        :param hmc: arguments of :class:`CoupledHMC` that replace the pilot's, such as
            ``{"step_size": 0.1}``.
        :param init_strategy: where the pilot's chains start. Pairs start at the values
            that ``numpyro.infer.init_to_value`` names, too.
        :param num_warmup: warm-up steps of the pilot's chains.
        :param num_samples: further steps of the pilot's chains.
        :param rng_key: of the pilot; a fixed key by default.
        :param model_kwargs: the model's keyword arguments; none may be named like one
            of the options.
        :raises ArgumentError: for an option out of range.
        :raises StateError: for a model without latent sites, an unknown site in
            ``kinds``, and subsampled plates.
        :raises IntractableError: for a site that cannot be drawn, such as an unbounded
            count: sum it out, or use a bounded distribution.

        **Example**

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
        >>> def model(y):
        ...     scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        ...     mean = numpyro.sample("mean", dist.Normal(0.0, 5.0))
        ...     numpyro.sample("y", dist.Normal(mean, scale), obs=y)
        >>> y = jnp.array([1.2, 0.3, 2.1, 0.9])
        >>> kernel = ebmpp.ppl.CoupledComposite.from_model(model, y, num_warmup=200)
        >>> [type(step).__name__ for step in kernel.steps]
        ['ModelBlock', 'CoupledHMC']
        >>> estimate = ebmpp.ppl.composite_expectation(kernel, lambda sites: sites["mean"],
        ...                                            rng_key=jax.random.key(1), num_pairs=50)
        >>> estimate.num_unmet
        0
        """
        who = "CoupledComposite.from_model"
        call = Call({}, model_args, model_kwargs)
        fixed = dict(kinds or {})
        for site, kind in fixed.items():
            checks.choice(f"{who}: kinds[{site!r}]", kind, KINDS)
        strategy = init_strategy or init_to_uniform()
        by_site = kinds_of_sites(model, call, fixed)
        drawn = [site for site, kind in by_site.items() if kind == "gibbs"]
        moved = [site for site, kind in by_site.items() if kind == "hmc"]
        if hmc and not moved:
            hint = "Omit it, or give kinds."
            expected = "None where no site moves by CoupledHMC"
            raise checks.error(f"{who}: hmc", expected, dict(hmc), hint=hint)
        block = None
        if drawn:
            block = ModelBlock(
                model,
                drawn,
                *call.inputs,
                sequential=True,
                init_strategy=strategy,
            )
        starts, tuning = run_pilot(
            model,
            call,
            block,
            moved,
            init_strategy=strategy,
            rng_key=jax.random.key(0) if rng_key is None else rng_key,
            num_warmup=checks.count(f"{who}: num_warmup", num_warmup),
            num_samples=checks.count(f"{who}: num_samples", num_samples, 2),
            progress_bar=checks.flag(f"{who}: progress_bar", progress_bar),
        )
        steps: list[Step] = [] if block is None else [block]
        if tuning is not None:
            options: dict[str, Any] = {**tuning._asdict(), **(hmc or {})}
            steps.append(CoupledHMC(model, moved, **options))
        return cls(
            steps,
            lag,
            starts=starts,
            independent_starts=True,
            call=call,
            init_strategy=init_strategy,
        )

    def __repr__(self) -> str:
        lines = [f"  {step!r}" for step in self.steps]
        return "\n".join(["CoupledComposite:", *lines])

    def call_of(self, args: tuple, kwargs: Kwargs) -> Call:
        """Return a call of the model, by default with the arguments of :meth:`from_model`."""
        call = Call.split(args, kwargs)
        has_arguments = call.args or call.kwargs
        return call if has_arguments or self.call is None else self.call

    def start(self, keys: Array, call: Call, init: Rows) -> tuple[SiteArrays, Array]:
        """Draw starting values of the sites not in ``init``, then of the blocks' latents.

        Sites of a model's steps are drawn by the strategy given the other steps' sites,
        and then discrete ones of blocks given these. If that is impossible, the search
        for a possible start redraws all sites but those in ``init``.

        :return: the values, and whether they are possible.
        """
        blocks = self.blocks
        strategy = self.init_strategy
        init = {**self.named, **init}

        def draw(keys):
            z: SiteArrays = {}
            for index, step in enumerate(self.steps):
                # a strategy may have values of a block's discrete sites
                if not strategy or step not in blocks:
                    z |= step.draw_initial(random.fold_in(keys, index))
            z |= {site: jnp.asarray(v) for site, v in init.items()}
            if self.starts is not None:
                z = self.starts.draw(z, call, random.as_key(keys)) | z
            for step in reversed(self.models):
                z |= step.draw_prior(z, call, keys, strategy)
            return z

        def sweep(z, keys):
            for index, block in enumerate(blocks):
                values, inputs = _split(block, z, call)
                inputs = values, block.info.context(values, inputs)
                moved = block.start.relaxed(inputs, random.fold_in(keys, index))
                z = z | omit(moved, init)
            return z

        def is_possible(z):
            possible = [
                step.is_possible(*_split(step, z, call)) for step in self.models
            ]
            return jnp.stack(possible).all()

        def redraw(z, keys, number):
            return draw(keys)

        z = draw(keys)
        possible = jnp.ones((), bool)
        if self.models:
            z, possible = search(z, keys, redraw, sweep, is_possible)
        for index, step in enumerate(self.steps):
            if isinstance(step, GraphBlock):
                new = step.begin(*_split(step, z, call), random.fold_in(keys, index))
                z |= new.z
                possible &= step.is_in_support(new.z)
        finite = [jnp.isfinite(v).all() for v in z.values()]
        return z, possible & jnp.stack(finite).all()

    def check_data(self, call: Call) -> None:
        """Raise a StateError for data of a model that are impossible whatever its sites are."""
        for block in self.blocks:
            block.info.check_data(call)

    def check_sites(
        self, init: Mapping[str, object], name: str = "init_params"
    ) -> None:
        """Raise a StateError for initial values of anything but a site."""
        checks.names(f"site of {name}", init, self.sites, StateError)

    def check_started(self, possible: Array) -> None:
        """Raise a StateError if chains start at impossible values."""
        if not possible.all():
            raise checks.state_error(
                "CoupledComposite: starts",
                f"possible and finite values of sites {self.sites} in all chains",
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
        call = self.call_of(model_args, model_kwargs)
        self.check_sites(init)
        self.check_data(call)

        def init_one(key, init):
            words = random.key_pair(key)
            start, possible = self.start(random.fold_in(words, 0), call, init)
            follower = start
            if self.independent_starts:
                follower_words = random.fold_in(words, 0, _FOLLOWER)
                follower, is_also_possible = self.start(follower_words, call, init)
                possible &= is_also_possible
            broken = ~checked(self.check_started, possible)

            def advance(t, z):
                return self.single(z, random.fold_in(words, t + 1), call)

            z = lax.fori_loop(jnp.uint32(0), jnp.uint32(self.lag), advance, start)
            t = jnp.full((), self.lag, jnp.int32)
            met = _equal(z, follower)
            return CompositeState(z, follower, t, met, t, key, broken, all_still(z))

        return over_chains(init_one, rng_key)(rng_key, init)

    def sample(
        self, state: CompositeState, model_args: tuple, model_kwargs: Kwargs
    ) -> CompositeState:
        call = self.call_of(model_args, model_kwargs)

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
            still = flags_after(z, state.z, state.still)
            return after._replace(still=still)

        return over_chains(sample_one, state.rng_key)(state)

    def postprocess_fn(self, model_args: tuple, model_kwargs: Kwargs) -> Callable:
        """Return a function that adds the deterministic sites of :meth:`from_model`."""
        if self.starts is None:
            return identity
        call = self.call_of(model_args, model_kwargs)
        return partial(with_deterministic, self.starts.model, call)

    def get_diagnostics_str(self, state: CompositeState) -> str:
        return describe_meetings(state)


def _split(step: Step, z: Rows, call: Call) -> BlockChain:
    """Return a step's sites and latents, and the call with everything else as siblings."""
    names = (*step.sites, *step.latents)
    values = {name: z[name] for name in names if name in z}
    siblings = omit(z, names)
    return values, call._replace(siblings=siblings)


def _equal(z: Rows, y: Rows) -> Array:
    return jnp.stack([(z[name] == y[name]).all() for name in z]).all()
