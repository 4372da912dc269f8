# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A block of a Gibbs sampler that is derived from a NumPyro model."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import functools
import itertools
from types import FunctionType
from typing import Any

from jaxtyping import PyTree
import numpy as np
from numpyro.distributions import Distribution
from numpyro.infer.gibbs import GIBBS_SITES_KWARG
from numpyro.util import identity

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import SiteArrays, checks, random, select
from ebmpp.distribution.tractability import read_by_params
from ebmpp.errors import IntractableError, StateError
from ebmpp.kernels.base import InitParams, Kwargs, is_batched
from ebmpp.moves.forests.sums import MarginalsByPair, PairMarginals
from ebmpp.traced import block
from ebmpp.traced.block import (
    Advanced,
    BlockChain,
    BlockState,
    Call,
    Coupled,
    SiteValues,
)
from ebmpp.traced.data import with_deterministic
from ebmpp.traced.maximum import Maximum, maximise
from ebmpp.traced.model import Inputs, ModelInfo
from ebmpp.traced.start import BlockStart, Strategy
from ebmpp.traced.sweep import (
    BlockSweep,
    CollapsedSweep,
    ForestLayers,
    collapsed_sweep,
)
from ebmpp.traced.sweep.pointwise import Likelihood

# folded into the keys of the latents that a tempered transition starts with
_HEATED = 1 << 19


class ModelKernel(block.Block):
    """A block of sites of a NumPyro model, which :meth:`ebmpp.GibbsBlock.from_model` makes.

    The model's log density is traced once, and which of its terms read which units is
    read off the traced program, erring toward interaction. The discrete units that
    interact are coloured. A sweep first draws the latents of energy priors
    (``ebmpp.traced.sweep.augmented``), then the discrete sites layer by layer, each
    from K evaluations of the model for units of K values, then the continuous sites,
    each from derivatives of the log density (``ebmpp.traced.sweep.continuous``).

    :param args: the model's arguments. Later calls may have arrays with other values,
        but not other shapes.
    :param kwargs: the model's keyword arguments; see
        :meth:`ebmpp.GibbsBlock.from_model` for the options.
    """

    latents: tuple[str, ...] = ()

    def __init__(
        self,
        model: Callable,
        sites: Sequence[str],
        args: tuple,
        kwargs: Mapping[str, object],
        *,
        num_sweeps: int = 1,
        sequential: bool = False,
        tempering: Any = None,
        joint: str = "auto",
        init_strategy: Strategy | None = None,
        collapse: str | bool | Sequence[str] = "auto",
    ) -> None:
        self.num_sweeps = checks.count("GibbsBlock.from_model: num_sweeps", num_sweeps)
        self.sequential = checks.flag("GibbsBlock.from_model: sequential", sequential)
        self.tempering = block.check_tempering(
            "GibbsBlock.from_model: tempering", tempering
        )
        self.joint = checks.choice(
            "GibbsBlock.from_model: joint", joint, ("auto", "forest", "units")
        )
        self.init_strategy = init_strategy
        self.collapse = collapse
        self.call = Call({}, tuple(args), dict(kwargs))
        self.info = ModelInfo(model, sites, self.call)
        self.sites = self.info.sites
        self.sweep = BlockSweep(self.info, self.sequential, self.joint)
        if not self.sweep.finite and joint == "forest":
            raise checks.error(
                "GibbsBlock.from_model: joint",
                "'auto' for sites without finite units",
                joint,
            )
        #: the log density as a function of the discrete sites
        self.posterior = self.sweep.posterior
        #: conditionals of the discrete units; None without discrete sites
        self.conditionals = self.sweep.conditionals
        self.start = BlockStart(self.info, self.sweep, init_strategy)
        conflict = "with tempering" if self.tempering is not None else None
        if joint == "forest":
            conflict = "with joint='forest'"
        #: the sweep of a step, with some continuous sites integrated out
        self.drawn = collapsed_sweep(self.sweep, collapse, conflict)
        self._walk = jax.jit(self.drawn.walk)
        if self.tempering is not None and self.sweep.augmented is not None:
            self._check_tempered(self.sweep.augmented.valid)

    def _check_tempered(self, priors: Iterable[str]) -> None:
        """Raise an IntractableError if a continuous site were heated with latents summed out."""
        names = {site.name for site in self.sweep.continuous}
        if not names:
            return
        read = read_by_params(self.info.model, *self.call.inputs, known=True)
        for prior in priors:
            for name in names.intersection(read.get(prior, ())):
                raise IntractableError(
                    f"from_model: tempering heats the latents of site {prior!r}, but "
                    f"the conditional of site {name!r}, on which their params depend, "
                    f"has them summed out. Omit tempering, or put {name!r} into "
                    "another block"
                )

    def __repr__(self) -> str:
        model = self.info.model
        conditionals = self.conditionals
        facts = []
        if conditionals is not None:
            layers = "layers" if conditionals.num_layers > 1 else "layer"
            facts.append(
                f"{conditionals.size} units, {conditionals.num_layers} {layers}"
            )
        if self.sweep.augmented is not None:
            facts.append(
                f"given {self.sweep.augmented.num_latents} latents of the prior"
            )
        facts += [f"{site.family} {site.name!r}" for site in self.sweep.continuous]
        if isinstance(self.drawn, CollapsedSweep):
            names = sorted(name for site in self.drawn.sets for name in site.names)
            facts.append("collapsed: " + ", ".join(map(repr, names)))
        name = model.__qualname__ if isinstance(model, FunctionType) else repr(model)
        return f"GibbsBlock.from_model({name}, {list(self.sites)}): {', '.join(facts)}"

    def __copy__(self) -> "ModelKernel":
        """Return the same block, without tracing the model again, which unpickling does."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self))
        return copied

    def __reduce__(self) -> tuple:
        """Pickle the arguments."""
        names = "num_sweeps sequential tempering joint init_strategy collapse".split()
        options = {name: getattr(self, name) for name in names}
        make = functools.partial(type(self), **options)
        return make, (self.info.model, self.sites, *self.call.inputs)

    @property
    def layers(self) -> dict[str, np.ndarray]:
        """By discrete site, the number of the layer in which each unit is drawn."""
        conditionals = self.conditionals
        return conditionals.by_site(conditionals.colors) if conditionals else {}

    # -- steps ------------------------------------------------------------------------

    def advance(
        self,
        values: SiteValues,
        call: Call,
        keys: Array,
        index: Array | None = None,
    ) -> Advanced:
        """Make one step: ``num_sweeps`` sweeps, then a tempered transition with ``tempering``.

        Layer l of sweep s draws from the words of this step, folded with s and l.
        """
        context = self.info.context(values, call)
        keys = keys if index is None else random.key_pair(keys, index)
        is_single = self.num_sweeps == 1 and self.tempering is None

        def sweep_once(s, carry):
            sites, degenerate = carry
            sweep_keys = keys if is_single else random.fold_in(keys, s)
            moved, more = self.drawn((sites, context), sweep_keys)
            return select(moved, self.sites), degenerate + more

        zero = jnp.int32(0)
        z, degenerate = block.repeat(self.num_sweeps, sweep_once, (dict(values), zero))
        if self.tempering is None:
            return Advanced(z, degenerate=degenerate)

        def density(z):
            return self.sweep.joint.log_density((z, context))

        def sweep(z, keys, beta, backward):
            return self.sweep((z, context), keys, beta, backward)

        heated_keys = random.fold_in(keys, 0, _HEATED)
        start, _ = self.sweep.with_latents((z, context), heated_keys)
        z, accepted, more = block.tempered_transition(
            self.tempering, density, sweep, start, keys
        )
        return Advanced(
            select(z, self.sites),
            degenerate=degenerate + more,
            transitions=accepted.astype(jnp.int32),
        )

    def couple(
        self,
        first: BlockChain,
        second: BlockChain,
        keys: Array,
        coupling: str | None = None,
    ) -> Coupled:
        x_context = self.info.context(*first)
        y_context = self.info.context(*second)

        def sweep_once(s, carry):
            x, y, broken = carry
            sweep_keys = random.fold_in(keys, s)
            x, y, more = self.drawn.couple((x, x_context), (y, y_context), sweep_keys)
            return x, y, broken | more

        carry = dict(first[0]), dict(second[0]), jnp.bool_(False)
        count = jnp.uint32(self.num_sweeps)
        return lax.fori_loop(jnp.uint32(0), count, sweep_once, carry)

    def check_coupled(self, coupling: str | None) -> None:
        if self.tempering:
            raise checks.error(
                f"CoupledComposite: {self!r}",
                "without tempering, in which chains are not coupled",
                self.tempering,
            )

    def draw_initial(self, keys: Array) -> SiteArrays:
        return self.start.draw_finite(keys)

    def is_possible(self, values: SiteValues, call: Call) -> Array:
        """Return True for values in their supports, of a finite log density."""
        return self.start.is_possible((values, self.info.context(values, call)))

    def draw_prior(
        self,
        values: SiteValues,
        call: Call,
        keys: Array,
        strategy: Strategy | None = None,
    ) -> SiteArrays:
        """Draw the sites that are not among the values; see :meth:`BlockStart.draw`."""
        arguments = self.info.arguments.take(call, set())
        drawn, _ = self.start.draw(values, arguments, keys, strategy)
        return {s: drawn[s] for s in self.sites if s not in values}

    # -- conditionals -----------------------------------------------------------------

    def log_conditionals(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> SiteArrays:
        """Return log probabilities of every unit given everything but latents of priors.

        :param values: of all latent sites of the model.
        :param model_args: the model's arguments; the block's by default.
        :param model_kwargs: the model's keyword arguments.
        :return: ``(*shape, K)`` for each site, for its K values in rising order.
        :raises StateError: for missing and unknown sites, shapes that are not the
            model's, and values and data outside of their support.
        """
        inputs = self._split(values, model_args, model_kwargs)
        conditionals = self.sweep.collapsed
        if conditionals is None:
            return {}
        table = jax.jit(conditionals.table)(inputs)
        return conditionals.values_by_site(jax.nn.log_softmax(table, -1))

    def conditional(
        self, site: str, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> Distribution:
        """Return the distribution of a continuous site given everything else.

        :return: a Normal, Gamma, InverseGamma, Beta or Dirichlet of the site's shape;
            for units that interact a MultivariateNormal of the flattened site. Where
            the prior's support is an interval, it is restricted to that: a distribution
            with ``sample``, ``log_prob`` and ``support``.
        :raises StateError: for another site, and as in :meth:`log_conditionals`.
        """
        named = {c.name: c for c in self.sweep.continuous}
        checks.names("continuous site", [site], named, StateError)
        inputs = self._split(values, model_args, model_kwargs)
        return named[site].distribution(jax.jit(named[site].derivatives)(inputs))

    def _split(
        self, values: SiteValues, args: tuple, kwargs: Mapping[str, object]
    ) -> Inputs:
        """Return the block's sites among all of a model's, and their context, checked."""
        checks.names("site", values, self.info.latent, StateError)
        arrays = {site: jnp.asarray(v) for site, v in values.items()}
        sites = {site: arrays[site] for site in self.sites if site in arrays}
        call = Call({}, args, kwargs) if args or kwargs else self.call
        self.info.check_data(call)
        context = self.info.context(sites, call._replace(siblings=arrays))
        self.start.check_values(arrays, context)
        return sites, context

    # -- sums over discrete sites -----------------------------------------------------

    def log_marginal(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> Array:
        """Return the log of the model's density with the block's discrete sites summed out.

        All terms count: priors of the ``values``, log K for each unit of a uniform
        prior over K values beside a factor, and log K for each masked unit of K values.
        :meth:`log_likelihood` leaves them out.

        :param values: of all other latent sites of the model.
        :param model_args: the model's arguments; the block's by default.
        :param model_kwargs: the model's keyword arguments.
        :return: a scalar; -inf where no values of the discrete sites are possible.
        :raises StateError: for missing and unknown sites, shapes that are not the
            model's, and values and data outside of their support.
        :raises IntractableError: where the discrete units do not form a forest.
        """
        return self._summed("log_sum", values, model_args, model_kwargs)

    def marginals(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> SiteArrays:
        """Return every discrete unit's probabilities, all other discrete units summed out.

        Arguments and errors are as in :meth:`log_marginal`.

        :return: ``(*shape, K)`` for each site, for its K values in rising order.
        """
        table, _ = self._summed("marginals", values, model_args, model_kwargs)
        return self.sweep.sums.values_by_site(table)

    def pair_marginals(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> MarginalsByPair:
        """Return probabilities of pairs of neighbouring discrete units, all others summed out.

        Arguments and errors are as in :meth:`log_marginal`. Neighbours are units that
        interact. The sum over the pairs of a chain is the expected number of its
        transitions.

        :return: by the sites of the two units,
            :class:`~ebmpp.moves.PairMarginals`.
        """
        _, table = self._summed("marginals", values, model_args, model_kwargs)
        sums = self.sweep.sums
        units = {
            site: (np.arange(stop - start), len(self.posterior.values[site].table))
            for site, (start, stop) in sums.spans.items()
        }
        return PairMarginals.by_name(sums.layers[0].forest, table, units)

    def most_probable(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> SiteArrays:
        """Return the jointly most probable discrete sites, such as a chain's Viterbi path.

        Arguments and errors are as in :meth:`log_marginal`. Where no values are
        possible, they are arbitrary.
        """
        return self._summed("most_probable", values, model_args, model_kwargs)

    def pointwise(
        self, values: SiteValues, *model_args: object, **model_kwargs: object
    ) -> SiteArrays:
        r"""Return the log likelihood of each observation, discrete sites summed out.

        It is :math:`\log p(y_i \mid y_{-i}, \theta)` with theta the ``values``: for
        observations that are independent given theta, :math:`\log p(y_i \mid \theta)`.
        Both are right for PSIS-LOO; WAIC needs the latter. Arguments and errors are as
        in :meth:`log_marginal`. :func:`ebmpp.to_datatree` maps it over draws.

        It takes one sum over the discrete sites where each tree of units is read by one
        observation, as in a mixture, and T sums for a hidden Markov chain of T steps.

        :return: by observed site, its batch shape: an observation is an element of the
            plates. The elements of a site without a batch, such as of
            ``Normal(z, 1).to_event(1)``, are observations too. Masked ones are 0.

        **References**

        1. Vehtari, Gelman, Gabry (2017), *Practical Bayesian model evaluation using
           leave-one-out cross-validation and WAIC*.

        **Example**

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
        >>> def model(y):
        ...     share = numpyro.sample("share", dist.Beta(1, 1))
        ...     with numpyro.plate("points", len(y)):
        ...         z = numpyro.sample("z", dist.Bernoulli(share))
        ...         numpyro.sample("y", dist.Normal(4.0 * z, 1.0), obs=y)
        >>> y = jnp.array([-0.1, 4.2])
        >>> block = ebmpp.GibbsBlock.from_model(model, ["z", "share"], y)
        >>> block.pointwise({"share": 0.5})["y"].round(3).tolist()
        [-1.617, -1.632]
        """
        return self._likelihood[1](self._siblings(values, model_args, model_kwargs))

    def log_likelihood(
        self,
        values: SiteValues,
        *model_args: object,
        uniform: Sequence[str] = (),
        **model_kwargs: object,
    ) -> Array:
        """Return the log density of the data alone, with the block's discrete sites summed out.

        This is :meth:`log_marginal`, whose arguments and errors it has, without the
        priors of the ``values``, and without log K for each masked unit of K values.

        :param uniform: discrete sites whose uniform prior shall not count either, as a
            factor holds their distribution.
        :raises StateError: for sites among ``uniform`` that are not discrete.
        """
        finite = self.sweep.finite
        checks.names("site of uniform", uniform, finite, StateError)
        others = [site for site in self.info.latent if site not in finite]
        inputs = self._siblings(values, model_args, model_kwargs)
        return self._likelihood[0](inputs, (*uniform, *others))

    def maximise(
        self,
        *model_args: object,
        rng_key: Array,
        prior: bool = True,
        num_starts: int = 8,
        uniform: Sequence[str] = (),
        **model_kwargs: object,
    ) -> Maximum:
        """Return the posterior mode or maximum likelihood, with discrete sites summed out.

        It is over natural values of all other sites. The search (L-BFGS, then Newton's
        method) starts from draws of the prior and from NUTS's starts in turn. Standard
        errors follow from the Hessian on the unconstrained scale.

        :param prior: False for the likelihood alone.
        :param num_starts: local searches, of which the best counts.
        :param uniform: see :meth:`log_likelihood`; not used with ``prior``.
        :return: ``values``, ``log_density``, ``standard_error``, ``converged``.
        :raises StateError: for other discrete sites than the block's.

        Source: Zucchini, MacDonald, Langrock (2016), *Hidden Markov models for time
        series*, chapter 3.

        **Example**

        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, ebmpp
        >>> def model(seen):
        ...     p, q = (numpyro.sample(name, dist.Uniform(0, 1)) for name in "pq")
        ...     with numpyro.plate("sites", len(seen)):
        ...         z = numpyro.sample("z", dist.Bernoulli(p))
        ...         numpyro.sample("seen", dist.Binomial(5, z * q), obs=seen)
        >>> seen = jnp.array([0, 2, 0, 3, 0, 1, 2, 2])
        >>> block = ebmpp.GibbsBlock.from_model(model, ["z"], seen)
        >>> result = block.maximise(rng_key=jax.random.key(0), prior=False)
        >>> result.converged, round(float(result.values["q"]), 2)
        (True, 0.36)
        """
        density = functools.partial(self.log_likelihood, uniform=uniform)
        density = self.log_marginal if prior else density
        call = Call({}, model_args, model_kwargs)
        call = call if model_args or model_kwargs else self.call
        num_starts = checks.count("maximise: num_starts", num_starts)
        keys = jax.random.split(rng_key, num_starts)
        fixed = select(self.info.latent, self.sweep.finite)
        return maximise(self.info, density, call, fixed, keys)

    def marginal_model(self, model: Callable | None = None) -> Callable[..., None]:
        """Return the model with the block's discrete sites summed out, a NumPyro model for NUTS.

        Its log density is :meth:`log_marginal`. It lacks deterministic sites that
        depend on discrete ones.

        :param model: the block's model, the default.
        :raises ArgumentError: for another model.
        :raises IntractableError: where the discrete units do not form a forest.
        """
        if model not in (None, self.info.model):
            raise checks.error(
                "marginal_model: model", f"the block's model {self.info.model!r}", model
            )
        return self.sweep.sums.posterior.summed_out(self.log_marginal)

    @functools.cached_property
    def _sums(self) -> dict[str, Callable]:
        with jax.ensure_compile_time_eval():
            sums = self.sweep.sums
        names = ("log_sum", "marginals", "most_probable")
        return {name: jax.jit(getattr(sums, name)) for name in names}

    @functools.cached_property
    def _likelihood(self) -> tuple[Callable, Callable]:
        """Functions to the log likelihood of all data, and of each observation."""
        with jax.ensure_compile_time_eval():
            sums = self.sweep.sums if self.sweep.finite else None
            likelihood = Likelihood(self.info, sums)
        total = jax.jit(likelihood.log_likelihood, static_argnums=1)
        return total, jax.jit(likelihood.pointwise)

    def _summed(
        self,
        name: str,
        values: SiteValues,
        args: tuple,
        kwargs: Mapping[str, object],
    ) -> PyTree:
        """Return one of the sums at values of the other sites; the discrete ones may have any."""
        return self._sums[name](self._siblings(values, args, kwargs))

    def _siblings(
        self, values: SiteValues, args: tuple, kwargs: Mapping[str, object]
    ) -> Inputs:
        fixed = select(self.info.latent, self.sweep.finite)
        return self._split({**values, **fixed}, args, kwargs)

    def walk(
        self, values: SiteValues, call: Call, key: Array
    ) -> Iterator[tuple[SiteValues, float]]:
        """Yield states by random values of layers and draws of continuous sites."""
        keys = random.key_pair(key)
        values = self.start(values, call, key, is_free=True)
        context = self.info.context(values, call)
        if isinstance(self.conditionals, ForestLayers):
            inputs = self.sweep.with_latents((values, context), keys)
            self.conditionals.check_tables(inputs)
        log_prob = 0.0
        for step in itertools.count():
            yield values, log_prob
            keys = random.key_pair(jax.random.fold_in(key, step))
            values, change = self._walk((values, context), keys)
            log_prob += float(change)

    # -- NumPyro's contract -----------------------------------------------------------

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: InitParams,
        model_args: tuple,
        model_kwargs: Kwargs,
    ) -> BlockState:
        """Return the first state, at ``init_params``, the values of the sites.

        A block of all latent sites is a kernel by itself. Sites without a value start
        by the ``init_strategy``, at a possible state that a search from there finds.
        Impossible ``init_params`` are refused. In ``numpyro.infer.Gibbs``, where they
        may be draws of the prior, the search starts from them, and an
        ``init_strategy`` replaces them.

        :raises StateError: for unknown and missing sites, values outside of their
            support, impossible states and data, or units whose conditional is not a
            number.
        """
        # one key per chain, of chain_method="vectorized"
        if is_batched(rng_key):

            def first(key, values):
                return self.init(key, num_warmup, values, model_args, model_kwargs)

            return jax.vmap(first)(rng_key, init_params)
        values = dict(init_params or {})
        checks.names("site of init_params", values, self.sites, StateError)
        call = Call.split(model_args, model_kwargs)
        is_free = GIBBS_SITES_KWARG in (model_kwargs or {})
        sites = set(self.sites)
        if is_free and self.init_strategy is not None:
            is_free = False
            values = {}
            siblings = {**call.siblings, **self.start.named}
            call = call._replace(siblings=siblings)
        elif set(values) != sites and sites != set(self.posterior.shapes):
            raise StateError(
                f"GibbsBlock needs initial values of its sites {sorted(self.sites)}"
            )
        values = {**select(self.start.named, sites & {*self.start.named}), **values}
        values = self.start(values, call, rng_key, is_free)
        return self._first(Advanced(values), rng_key)

    def postprocess_fn(self, model_args: tuple, model_kwargs: Kwargs) -> Callable:
        """Return a function that adds deterministic sites to the values of all latent sites."""
        names = self.info.deterministic
        if not names or set(self.sites) != set(self.posterior.shapes):
            return identity
        call = Call.split(model_args, model_kwargs)
        return functools.partial(with_deterministic, self.info.model, call)
