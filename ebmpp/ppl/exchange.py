# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: posteriors of an energy model's params, without log Z."""

from collections.abc import Callable, Mapping
import math
from typing import NamedTuple
import warnings

import numpy as np
import numpyro.distributions as dist

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import Params, State, checks, random
from ebmpp.errors import IntractableError, ParameterError, UnmetError, clash
from ebmpp.exact import perfect
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import Init, Kwargs, is_batched
from ebmpp.moves import Layer, Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.traced.block import Call, SiteKernel

Sites = dict[str, Array]


class ExchangeState(NamedTuple):
    """The state of :class:`Exchange`.

    - **z** - a dict of the sites, constrained.
    - **unconstrained** - the same sites where the random walk lives.
    - **i** - steps done.
    - **num_warmup** - how many of them adapt the step size.
    - **step_size** - standard deviation of a proposal, in each unconstrained dimension.
    - **accept_prob** - acceptance probability of the last step.
    - **mean_accept_prob** - its mean since the start, or since the end of the warm-up.
    - **failures** - auxiliary draws that could not be made; from the first one on, ``z`` is NaN.
    - **rng_key** - the key of the next step.
    """

    z: Sites
    unconstrained: Sites
    i: Array
    num_warmup: Array
    step_size: Array
    accept_prob: Array
    mean_accept_prob: Array
    failures: Array
    rng_key: Array


class Exchange(SiteKernel):
    """Metropolis for what the params of an energy model depend on, given data: a NumPyro kernel.

    The likelihood has log Z, which nobody knows. A proposal draws one auxiliary data set from the model
    at the proposed params; in the acceptance ratio of Murray et al. (2006) log Z then cancels, and
    with perfect draws the posterior is exact. Latent blocks are summed out of the data's and of the auxiliary
    rows' densities. The proposal is a random walk in unconstrained space, whose step size adapts in
    the warm-up and is fixed afterwards.

    It runs alone in :class:`numpyro.infer.MCMC`, whose positional and keyword arguments reach the functions
    below, or as a block of :class:`numpyro.infer.Gibbs`, beside ``NUTS(model)`` for example. There ``sites``
    holds the other blocks' sites as well; ``data`` gets those alone, for data cannot depend on the params.

    An auxiliary draw that cannot be made (params that are not attractive, or chains that had not met
    after ``max_sweeps``) must be neither rejected nor replaced, for both would bias the posterior. A start
    there is refused; later a warning says so, ``failures`` counts it, and the chain is NaN from there on.

    :param graph: the declaration.
    :param prior: by site, a NumPyro distribution of continuous values; the params' sites.
    :param params: ``params(sites, *args, **kwargs)``, the graph's params.
    :param data: ``data(sites, *args, **kwargs)``, a dict of the visible blocks or the only one's array, each
        of shape ``(*batch, *shape)``: independent rows. Latent blocks may be given too.
    :param auxiliary: "enumerate" (every step lists the states anew), "coupling_from_the_past",
        "random_cluster" (which strong couplings do not stop), or "auto": see
        :func:`~ebmpp.exact.perfect.perfect_sample`. Or a number of Gibbs sweeps from the data (Liang 2010,
        double Metropolis-Hastings), which is **approximate**, and warns.
    :param step_size: where adaptation starts.
    :param target_accept: the acceptance that adaptation aims at; 0.44 in one dimension, else 0.234.
    :param log_weight: ``log_weight(sites, *args, **kwargs)``, a number: log density of whatever else depends
        on the sites of ``prior``, or what a prior that depends on siblings adds to ``prior``.
    :param max_sweeps: how far into the past to couple.
    :raises IntractableError: when the graph allows no such auxiliary draw.
    :raises ParameterError: a prior that is no dict of continuous distributions.
    :raises UnmetError: by ``init``, where the auxiliary draws of the initial params cannot be made.

    **References**

    1. Murray, Ghahramani, MacKay (2006), *MCMC for doubly-intractable distributions*.
    2. Liang (2010), *A double Metropolis-Hastings sampler for spatial models with intractable normalizing
       constants*.
    3. Robbins, Monro (1951), *A stochastic approximation method*.

    **Example**

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Spin, layered
    >>> from ebmpp.ppl import Exchange
    >>> pair = layered(a=Spin(2), b=Spin(2))
    >>> def params(sites, x):
    ...     return {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": sites["J"] * jnp.eye(2)}
    >>> kernel = Exchange(pair, {"J": dist.Uniform(0, 1)}, params, lambda sites, x: {"a": x[0], "b": x[1]})
    >>> mcmc = MCMC(kernel, num_warmup=20, num_samples=50, progress_bar=False)
    >>> mcmc.run(jax.random.key(0), (jnp.ones((4, 2)), jnp.ones((4, 2))))
    >>> mcmc.get_samples()["J"].shape
    (50,)
    """

    def __init__(
        self,
        graph: FactorGraph,
        prior: Mapping[str, dist.Distribution],
        params: Callable[..., Params],
        data: Callable[..., Mapping[str, Array] | Array],
        *,
        auxiliary: str | int = "auto",
        step_size: float = 0.5,
        target_accept: float | None = None,
        log_weight: Callable[..., Array] | None = None,
        max_sweeps: int = perfect.MAX_SWEEPS,
    ) -> None:
        checks.instance("Exchange: graph", graph, FactorGraph, "a FactorGraph")
        for name, given in {"params": params, "data": data}.items():
            checks.function(f"Exchange: {name}", given, f"the sites, {name}(sites, *args)")
        self.graph, self.prior = graph, _check_prior(prior)
        self.params, self.data, self.log_weight = params, data, log_weight
        self.auxiliary = _check_auxiliary(graph, auxiliary)
        self.step_size = checks.number("Exchange: step_size", step_size, above=0)
        self.max_sweeps = checks.count("Exchange: max_sweeps", max_sweeps)
        if target_accept is None:
            target_accept = 0.44 if sum(math.prod(p.shape()) for p in self.prior.values()) == 1 else 0.234
        self.target_accept = checks.number("Exchange: target_accept", target_accept, above=0, below=1)

    def __repr__(self) -> str:
        return f"Exchange({self.graph!r}, sites={list(self.prior)}, auxiliary={self.auxiliary!r})"

    # -- NumPyro's contract ------------------------------------------------------------------------

    def init(
        self, rng_key: Array, num_warmup: int, init_params: Init, model_args: tuple, model_kwargs: Kwargs
    ) -> ExchangeState:
        """The initial state: ``init_params``, constrained, or draws from the prior.

        :param rng_key: one key, or a batch of keys (``chain_method="vectorized"``).
        :raises ParameterError: a wrong site or shape, or params that do not fit the graph.
        :raises StateError: data that do not fit the graph.
        :raises IntractableError: params that are not attractive, where they can be looked at now.
        """
        call, batched = Call.of(model_args, model_kwargs), is_batched(rng_key)
        given = _check_init(self.prior, init_params, rng_key.shape[:1] if batched else ())
        one = lambda key, z: self._init_one(key, num_warmup, z)
        state = jax.vmap(one)(rng_key, given) if batched else one(rng_key, given)
        self._check_start(jax.tree.map(lambda v: v[0], state) if batched else state, call)
        return state

    def sample(self, state: ExchangeState, model_args: tuple, model_kwargs: Kwargs) -> ExchangeState:
        """One proposal in every chain of ``state``."""
        call = Call.of(model_args, model_kwargs)
        one = lambda s: self._sample_one(s, call)
        new = jax.vmap(one)(state) if is_batched(state.rng_key) else one(state)
        if self._may_fail:  # a loop on the device has no other way to be heard
            dead = ((new.failures > 0) & (state.failures == 0)).sum()
            jax.lax.cond(dead > 0, lambda: jax.debug.callback(_warn_dead, dead), lambda: None)
        return new

    @property
    def _may_fail(self) -> bool:
        return isinstance(self.auxiliary, str) and self.auxiliary != "enumerate"

    def wrap_model(self, wrapper: Callable) -> "Exchange":
        """Itself: there is no model."""
        return self

    def get_diagnostics_str(self, state: ExchangeState) -> str:
        """Step size and acceptance, for the progress bar."""
        said = f"exchange step size {np.mean(state.step_size):.2e}, "
        said += f"acc. prob={np.mean(state.mean_accept_prob):.2f}"
        failures = int(np.sum(state.failures))
        return f"{said}, {failures} FAILED auxiliary draws: NaN from there on" if failures else said

    # -- one chain ---------------------------------------------------------------------------------

    def _init_one(self, rng_key: Array, num_warmup: int, given: Sites) -> ExchangeState:
        rng_key, *keys = jax.random.split(rng_key, 1 + len(self.prior))
        z = {s: p.sample(key) for (s, p), key in zip(self.prior.items(), keys, strict=True)} | given
        u = {s: dist.biject_to(p.support).inv(jnp.asarray(z[s])) for s, p in self.prior.items()}
        zero, none = jnp.zeros((), jnp.result_type(float)), jnp.zeros((), jnp.int32)
        numbers = none, none + num_warmup, zero + self.step_size, zero, zero, none
        return ExchangeState(self._constrain(u), u, *numbers, rng_key)

    def _sample_one(self, state: ExchangeState, call: Call) -> ExchangeState:
        rng_key, walk, draw, accept = jax.random.split(state.rng_key, 4)
        flat, unravel = ravel_pytree(state.unconstrained)
        noise = jax.random.normal(walk, flat.shape, flat.dtype)
        u = unravel(flat + state.step_size * noise)
        log_ratio, failed = self._log_ratio(state.unconstrained, u, draw, call)
        chance = jnp.where(log_ratio > 0, 1.0, jnp.exp(log_ratio))  # NaN never compares, and is rejected
        chance = jnp.where(jnp.isnan(chance) | failed, 0.0, chance)
        taken = jax.random.uniform(accept) < chance
        new = jax.tree.map(lambda a, b: jnp.where(taken, a, b), u, state.unconstrained)
        new = jax.tree.map(lambda a: jnp.where(failed, jnp.nan, a), new)
        z = jax.tree.map(lambda a: jnp.where(failed, jnp.nan, a), self._constrain(new))
        failures = state.failures + failed.astype(state.failures.dtype)
        state = self._adapt(state, chance)
        return state._replace(z=z, unconstrained=new, failures=failures, rng_key=rng_key)

    def _adapt(self, state: ExchangeState, chance: Array) -> ExchangeState:
        i = state.i + 1
        warm = i <= state.num_warmup
        gain = jnp.where(warm, i.astype(chance.dtype) ** -0.6, 0.0)
        step_size = state.step_size * jnp.exp(gain * (chance - self.target_accept))
        number = jnp.where(warm, i, i - state.num_warmup)
        mean = state.mean_accept_prob
        mean = jnp.where(number == 1, chance, mean + (chance - mean) / number.astype(mean.dtype))
        return state._replace(i=i, step_size=step_size, accept_prob=chance, mean_accept_prob=mean)

    def _constrain(self, u: Sites) -> Sites:
        return {s: dist.biject_to(p.support)(u[s]) for s, p in self.prior.items()}

    def _log_prior(self, u: Sites, call: Call) -> Array:
        z, total = self._constrain(u), jnp.zeros(())
        for s, p in self.prior.items():
            volume = dist.biject_to(p.support).log_abs_det_jacobian(u[s], z[s])
            total += jnp.sum(p.log_prob(z[s])) + jnp.sum(volume)
        if self.log_weight is not None:
            total += self.log_weight({**call.siblings, **z}, *call.args, **call.kwargs)
        return total

    def _params(self, z: Sites, call: Call, values: bool = False) -> Params:
        params = self.params({**call.siblings, **z}, *call.args, **call.kwargs)
        self.graph.check(params, values=values)
        return params

    def _rows(self, call: Call) -> tuple[Sites, tuple[str, ...]]:
        """The data as rows, and the blocks that they leave to be summed out."""
        data = self.data(call.siblings, *call.args, **call.kwargs)
        data = dict(data) if isinstance(data, Mapping) else self.graph.as_visible(data)
        rows, _ = states.as_rows(self.graph.families, data, tuple(self.graph.visible))
        summed = tuple(b for b in self.graph.families if b not in rows)
        for a, b in self.graph.interacting(summed):
            raise IntractableError(
                f"{clash(a, b)} and data gives neither, so they cannot be summed out in "
                "closed form; sample one of them by another block of Gibbs, and let data return it"
            )
        return {b: v.astype(self.graph.families[b].dtype) for b, v in rows.items()}, summed

    def _log_ratio(self, u: Sites, proposed: Sites, rng_key: Array, call: Call) -> tuple[Array, Array]:
        """log of the acceptance ratio, and whether the auxiliary draw failed."""
        z, new = self._constrain(u), self._constrain(proposed)
        rows, summed = self._rows(call)
        old_params, params = self._params(z, call), self._params(new, call)
        number = len(next(iter(rows.values())))
        keys = random.fold_in(random.key_pair(rng_key), jnp.arange(number, dtype=jnp.uint32))
        drawn, perfect_rows = self._auxiliary(params, rows, summed, keys)

        def gain(x: Sites) -> Array:
            at = lambda p, row: energy.log_unnormalized(self.graph, p, row, summed)
            return jax.vmap(lambda row: at(params, row) - at(old_params, row))(x).sum()

        prior = self._log_prior(proposed, call) - self._log_prior(u, call)
        # impossible proposals are rejected whatever the auxiliary rows
        failed = ~perfect_rows.all() & (prior > -jnp.inf)
        return prior + gain(rows) - gain({b: drawn[b] for b in rows}), failed

    def _auxiliary(
        self, params: Params, rows: Sites, summed: tuple[str, ...], keys: Array
    ) -> tuple[Sites, Array]:
        """A draw of the model for every row of data, and which of them are as they should be."""
        target = Target(self.graph, params)
        if isinstance(self.auxiliary, str):
            return perfect.draw_rows(target, keys, self.auxiliary, self.max_sweeps)
        x, first = dict(rows), random.fold_in(keys, 0)
        if summed:
            x |= gibbs.initial_rows(self.graph, summed, first)
            x |= Layer(summed).draw(target, x, random.fold_in(first, 1))[0]
        moves = gibbs_sweep(self.graph)
        one = lambda i, x: draw_sweep(target, x, moves, random.fold_in(keys, i))[0]
        x = jax.lax.fori_loop(1, self.auxiliary + 1, one, x)
        return x, jnp.ones(len(keys), bool)

    def _check_start(self, state: ExchangeState, call: Call) -> None:
        params = self._params(state.z, call, values=True)
        rows, _ = self._rows(call)
        known = all(map(states.is_concrete, jax.tree.leaves((params, rows, state.rng_key))))
        if not known or not self._may_fail or not isinstance(self.auxiliary, str):
            return
        perfect.check(self.graph, params, self.auxiliary)
        try:
            number = len(next(iter(rows.values())))
            perfect.perfect_sample(self.graph, params, state.rng_key, number, self.auxiliary, self.max_sweeps)
        except UnmetError as error:
            raise UnmetError(
                f"Exchange: there are no auxiliary data at the initial params, {state.z}: {error}. Another "
                "start is given by init_params, and a prior can keep a walk from interactions as strong"
            ) from None


# -- checks ----------------------------------------------------------------------------------------


def _warn_dead(chains: Array) -> None:
    warnings.warn(
        f"Exchange: {int(chains)} chain(s) are NaN from here on: an auxiliary draw could not be made; raise "
        "max_sweeps, take auxiliary='random_cluster' where the model allows it, or a prior with less reach",
        stacklevel=2,
    )


def _check_prior(prior: Mapping[str, dist.Distribution]) -> dict[str, dist.Distribution]:
    """:raises ParameterError: when it is no dict of continuous distributions."""
    if not isinstance(prior, Mapping) or not prior:
        raise ParameterError(f"prior is a dict of site names and NumPyro distributions, not {prior!r}")
    for site, given in prior.items():
        if not isinstance(given, dist.Distribution):
            raise ParameterError(f"prior of site {site!r} is a NumPyro distribution, not {given!r}")
        if given.is_discrete:
            raise ParameterError(
                f"prior of site {site!r} is discrete ({type(given).__name__}), and Exchange walks over "
                "continuous values; give it a continuous prior"
            )
    return dict(prior)


def _check_auxiliary(graph: FactorGraph, auxiliary: str | int) -> str | int:
    """:raises IntractableError: when the graph allows no such draw."""
    if isinstance(auxiliary, str):
        return perfect.method_for(graph, auxiliary)
    auxiliary = checks.count("Exchange: auxiliary, if not a method of perfect_sample,", auxiliary)
    warnings.warn(
        f"Exchange with auxiliary={auxiliary} Gibbs sweeps is approximate (double Metropolis-Hastings): its "
        "posterior is exact only as their number grows. Compare with twice as many, or use perfect draws.",
        UserWarning,
        stacklevel=3,
    )
    return auxiliary


def _check_init(
    prior: Mapping[str, dist.Distribution], given: State | None, chains: tuple[int, ...]
) -> Sites:
    """:raises ParameterError: for initial values of an unknown site, a wrong shape, or at the edge."""
    made = {}
    for site, value in (given or {}).items():
        if site not in prior:
            raise ParameterError(f"init_params has site {site!r}, and Exchange updates {list(prior)}")
        value, wanted = jnp.asarray(value, jnp.result_type(float)), chains + prior[site].shape()
        if value.shape != wanted:
            raise ParameterError(f"init_params of site {site!r} got shape {value.shape}, expected {wanted}")
        free = dist.biject_to(prior[site].support).inv(value)
        if states.is_concrete(free) and not np.isfinite(np.asarray(free)).all():
            raise ParameterError(
                f"init_params of site {site!r} is not inside the support of its prior, "
                f"{prior[site].support}: got {np.asarray(value)}"
            )
        made[site] = value
    return made
