# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: exact posteriors of an energy model's params, without log Z."""

from collections.abc import Callable, Mapping
from functools import partial
import math
from typing import NamedTuple
import warnings

import numpy as np
import numpyro.distributions as dist

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.typing import ArrayLike

from ebmpp.core import (
    Blocks,
    Params,
    SiteArrays,
    State,
    at_index,
    checks,
    num_rows,
    random,
    select,
)
from ebmpp.errors import ParameterError, UnmetError
from ebmpp.exact import perfect
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import InitParams, Kwargs, is_batched, over_chains
from ebmpp.moves import Layer, Target, gibbs, gibbs_sweep
from ebmpp.moves.move import draw_sweep
from ebmpp.traced.block import Call, SiteKernel
from ebmpp.traced.rows import checked


class ExchangeState(NamedTuple):
    """The state of :class:`Exchange`.

    - **z**, **unconstrained** - the sites, and the sites in the space of the random
      walk.
    - **i**, **num_warmup** - number of steps, and of steps that adapt the step size.
    - **step_size** - standard deviation of a proposal, in each unconstrained dimension.
    - **accept_prob**, **mean_accept_prob** - acceptance probability of the last step,
      and its mean since the start, or since the end of the warm-up.
    - **failures** - number of auxiliary draws that failed; from the first one on, ``z``
      is NaN.
    - **rng_key** - the key of the next step.
    """

    z: SiteArrays
    unconstrained: SiteArrays
    i: Array
    num_warmup: Array
    step_size: Array
    accept_prob: Array
    mean_accept_prob: Array
    failures: Array
    rng_key: Array


class Exchange(SiteKernel):
    """Metropolis kernel for the sites that the params of an energy model depend on, given data.

    The likelihood contains log Z, which is unknown. A proposal draws one auxiliary data
    set from the model at the proposed params; in the acceptance ratio of Murray et al.
    (2006) log Z then cancels, and with perfect draws the posterior is exact. Latent
    blocks are summed out of the densities of data and auxiliary rows. The proposal is a
    random walk in unconstrained space, whose step size adapts in the warm-up to an
    acceptance of 0.44 in one dimension, else 0.234, and is then fixed.

    It runs alone in :class:`numpyro.infer.MCMC`, whose arguments reach the functions
    below, or as a block of :class:`numpyro.infer.Gibbs`, beside ``NUTS(model)`` for
    example. There ``sites`` holds the other blocks' sites as well; ``data`` gets only
    those, as data cannot depend on the params.

    An auxiliary draw that fails (params that are not attractive, or chains that have
    not met after ``max_sweeps``) must be neither rejected nor replaced, for both would
    bias the posterior. A start there is refused. Later it is a warning, ``failures``
    counts it, and the chain is NaN from there on.

    :param prior: by site, a NumPyro distribution of continuous values.
    :param params: ``params(sites, *args, **kwargs)``, the graph's params.
    :param data: ``data(sites, *args, **kwargs)``, a dict of the visible blocks or the
        only one's array, each of shape ``(*batch, *shape)``: independent rows. Latent
        blocks may be included.
    :param auxiliary: "enumerate" (every step lists the states),
        "coupling_from_the_past", "random_cluster" (fast for strong couplings too), or
        "auto": see :func:`~ebmpp.exact.perfect.perfect_sample`. Or a number of Gibbs
        sweeps from the data (Liang 2010, double Metropolis-Hastings), which is
        **approximate**, and warns.
    :param log_likelihood: ``log_likelihood(sites, *args, **kwargs)``, a number: log
        density of everything else that depends on the sites of ``prior``, or what a
        prior that depends on siblings adds to ``prior``.
    :raises IntractableError: for a graph that allows no such auxiliary draw.
    :raises ParameterError: for a prior that is no dict of continuous distributions.
    :raises UnmetError: by ``init``, where the auxiliary draws of the initial params
        fail.

    **References**

    1. Murray, Ghahramani, MacKay (2006), *MCMC for doubly-intractable distributions*.
    2. Liang (2010), *A double Metropolis-Hastings sampler for spatial models with
       intractable normalizing constants*.
    3. Robbins, Monro (1951), *A stochastic approximation method*.

    **Example**

    >>> import jax, jax.numpy as jnp, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from ebmpp import Spin, layered
    >>> from ebmpp.ppl import Exchange
    >>> pair = layered(a=Spin(2), b=Spin(2))
    >>> def params(sites, x):
    ...     return {"a": jnp.zeros(2), "b": jnp.zeros(2), "a:b": sites["J"] * jnp.eye(2)}
    >>> def data(sites, x):
    ...     return {"a": x[0], "b": x[1]}
    >>> kernel = Exchange(pair, {"J": dist.Uniform(0, 1)}, params, data)
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
        log_likelihood: Callable[..., Array] | None = None,
        max_sweeps: int = perfect.MAX_SWEEPS,
    ) -> None:
        checks.instance("Exchange: graph", graph, FactorGraph)
        for name, fn in {"params": params, "data": data}.items():
            checks.function(f"Exchange: {name}", fn, f"the sites, {name}(sites, *args)")

        def is_continuous(p):
            return isinstance(p, dist.Distribution) and not p.is_discrete

        is_dict = isinstance(prior, Mapping) and prior
        if not is_dict or not all(map(is_continuous, prior.values())):
            raise checks.parameter_error(
                "Exchange: prior",
                "a dict of sites and NumPyro distributions that are not discrete",
                prior,
            )
        self.graph = graph
        self.prior = dict(prior)
        self.params = params
        self.data = data
        self.log_likelihood = log_likelihood
        self.auxiliary = _check_auxiliary(graph, auxiliary)
        self._may_fail = (
            isinstance(self.auxiliary, str) and self.auxiliary != "enumerate"
        )
        self.step_size = checks.number("Exchange: step_size", step_size, above=0)
        self.max_sweeps = checks.count("Exchange: max_sweeps", max_sweeps)
        dimensions = sum(math.prod(p.shape()) for p in self.prior.values())
        self.target_accept = 0.44 if dimensions == 1 else 0.234

    def __repr__(self) -> str:
        return f"Exchange({self.graph!r}, sites={list(self.prior)}, auxiliary={self.auxiliary!r})"

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: InitParams,
        model_args: tuple,
        model_kwargs: Kwargs,
    ) -> ExchangeState:
        """Return the initial state: ``init_params``, constrained, or draws from the prior.

        :raises ParameterError: for a wrong site or shape, or params that do not fit the
            graph.
        :raises StateError: for data that do not fit the graph.
        :raises IntractableError: for concrete params that are not attractive.
        """
        call = Call.split(model_args, model_kwargs)
        batched = is_batched(rng_key)
        chains = rng_key.shape[:1] if batched else ()
        init = _check_init(self.prior, init_params, chains)
        init_one = partial(self._init_one, num_warmup=num_warmup)
        state = over_chains(init_one, rng_key)(rng_key, init)
        first = at_index(state, 0) if batched else state
        self._check_start(first, call)
        return state

    def sample(
        self, state: ExchangeState, model_args: tuple, model_kwargs: Kwargs
    ) -> ExchangeState:
        call = Call.split(model_args, model_kwargs)
        sample_one = partial(self._sample_one, call=call)
        new = over_chains(sample_one, state.rng_key)(state)
        if self._may_fail:  # a loop on the device has no other way to warn
            dead = ((new.failures > 0) & (state.failures == 0)).sum()
            jax.lax.cond(
                dead > 0, lambda: jax.debug.callback(_warn_dead, dead), lambda: None
            )
        return new

    def get_diagnostics_str(self, state: ExchangeState) -> str:
        step_size = np.mean(state.step_size)
        accept_prob = np.mean(state.mean_accept_prob)
        text = f"exchange step size {step_size:.2e}, acc. prob={accept_prob:.2f}"
        failures = int(np.sum(state.failures))
        if failures:
            text += f", {failures} FAILED auxiliary draws: NaN from there on"
        return text

    def _init_one(
        self, rng_key: Array, init: SiteArrays, num_warmup: int
    ) -> ExchangeState:
        rng_key, *keys = jax.random.split(rng_key, 1 + len(self.prior))
        u = {}
        for (site, prior), key in zip(self.prior.items(), keys, strict=True):
            value = jnp.asarray(init[site] if site in init else prior.sample(key))
            u[site] = dist.biject_to(prior.support).inv(value)
        zero = jnp.zeros(())
        none = jnp.zeros((), jnp.int32)
        return ExchangeState(
            z=self._constrain(u),
            unconstrained=u,
            i=none,
            num_warmup=none + num_warmup,
            step_size=zero + self.step_size,
            accept_prob=zero,
            mean_accept_prob=zero,
            failures=none,
            rng_key=rng_key,
        )

    def _sample_one(self, state: ExchangeState, call: Call) -> ExchangeState:
        rng_key, walk, draw, accept = jax.random.split(state.rng_key, 4)
        flat, unravel = ravel_pytree(state.unconstrained)
        noise = jax.random.normal(walk, flat.shape, flat.dtype)
        u = unravel(flat + state.step_size * noise)
        log_ratio, failed = self._log_ratio(state.unconstrained, u, draw, call)
        accept_prob = jnp.exp(jnp.minimum(log_ratio, 0.0))
        accept_prob = jnp.where(jnp.isnan(accept_prob) | failed, 0.0, accept_prob)
        accepted = jax.random.uniform(accept) < accept_prob

        def poisoned(tree):
            return jax.tree.map(lambda a: jnp.where(failed, jnp.nan, a), tree)

        def where_accepted(new, old):
            return jnp.where(accepted, new, old)

        new = poisoned(jax.tree.map(where_accepted, u, state.unconstrained))
        z = poisoned(self._constrain(new))
        failures = state.failures + failed.astype(state.failures.dtype)
        state = self._adapt(state, accept_prob)
        return state._replace(
            z=z, unconstrained=new, failures=failures, rng_key=rng_key
        )

    def _adapt(self, state: ExchangeState, accept_prob: Array) -> ExchangeState:
        i = state.i + 1
        warm = i <= state.num_warmup
        gain = jnp.where(warm, i.astype(accept_prob.dtype) ** -0.6, 0.0)
        step_size = state.step_size * jnp.exp(gain * (accept_prob - self.target_accept))
        number = jnp.where(warm, i, i - state.num_warmup)
        mean = state.mean_accept_prob
        updated = mean + (accept_prob - mean) / number.astype(mean.dtype)
        mean = jnp.where(number == 1, accept_prob, updated)
        return state._replace(
            i=i, step_size=step_size, accept_prob=accept_prob, mean_accept_prob=mean
        )

    def _constrain(self, u: SiteArrays) -> SiteArrays:
        return {s: dist.biject_to(p.support)(u[s]) for s, p in self.prior.items()}

    def _log_prior(self, u: SiteArrays, call: Call) -> Array:
        z = self._constrain(u)
        total = jnp.zeros(())
        for s, p in self.prior.items():
            volume = dist.biject_to(p.support).log_abs_det_jacobian(u[s], z[s])
            total += jnp.sum(p.log_prob(z[s])) + jnp.sum(volume)
        if self.log_likelihood is not None:
            sites = {**call.siblings, **z}
            total += self.log_likelihood(sites, *call.args, **call.kwargs)
        return total

    def _params(self, z: SiteArrays, call: Call, values: bool = False) -> Params:
        params = self.params({**call.siblings, **z}, *call.args, **call.kwargs)
        self.graph.check(params, values=values)
        return params

    def _rows(self, call: Call) -> tuple[Blocks, tuple[str, ...]]:
        """Return the data as rows, and the blocks that are summed out."""
        graph = self.graph
        data = self.data(call.siblings, *call.args, **call.kwargs)
        if not isinstance(data, Mapping):
            data = states.as_visible(graph, data)
        rows, _ = states.as_rows(graph.families, data, tuple(graph.visible))
        summed = tuple(b for b in graph.families if b not in rows)
        states.check_summable(graph, summed)
        rows = {b: v.astype(graph.families[b].dtype) for b, v in rows.items()}
        return rows, summed

    def _log_ratio(
        self, u: SiteArrays, proposed: SiteArrays, rng_key: Array, call: Call
    ) -> tuple[Array, Array]:
        """Return the log of the acceptance ratio, and True if the auxiliary draw failed."""
        z = self._constrain(u)
        new = self._constrain(proposed)
        rows, summed = self._rows(call)
        old_params = self._params(z, call)
        params = self._params(new, call)
        numbers = jnp.arange(num_rows(rows), dtype=jnp.uint32)
        keys = random.fold_in(random.key_pair(rng_key), numbers)
        drawn, valid = self._auxiliary(params, rows, summed, keys)

        def gain(x):
            new_density = energy.summed_out(self.graph, params, x, summed)
            old_density = energy.summed_out(self.graph, old_params, x, summed)
            return (new_density - old_density).sum()

        prior = self._log_prior(proposed, call) - self._log_prior(u, call)
        # impossible proposals are rejected whatever the auxiliary rows
        failed = ~valid.all() & (prior > -jnp.inf)
        return prior + gain(rows) - gain(select(drawn, rows)), failed

    def _auxiliary(
        self, params: Params, rows: Blocks, summed: tuple[str, ...], keys: Array
    ) -> tuple[Blocks, Array]:
        """Return a draw of the model for every row of data, and which draws succeeded."""
        target = Target(self.graph, params)
        if isinstance(self.auxiliary, str):
            return perfect.draw_perfect(target, keys, self.auxiliary, self.max_sweeps)
        x = dict(rows)
        first = random.fold_in(keys, 0)
        if summed:
            x |= gibbs.initial_rows(self.graph, summed, first)
            x |= Layer(summed).draw(target, x, random.fold_in(first, 1))[0]

        moves = gibbs_sweep(self.graph)

        def sweep_once(i, x):
            return draw_sweep(target, x, moves, random.fold_in(keys, i))[0]

        x = jax.lax.fori_loop(1, self.auxiliary + 1, sweep_once, x)
        return x, jnp.ones(len(keys), bool)

    def _check_start(self, state: ExchangeState, call: Call) -> None:
        params = self._params(state.z, call, values=True)
        rows, _ = self._rows(call)
        is_concrete = states.is_concrete((params, rows, state.rng_key))
        if not self._may_fail or not is_concrete:
            return
        try:
            perfect.perfect_sample(
                self.graph,
                params,
                num_rows(rows),
                rng_key=state.rng_key,
                method=str(self.auxiliary),
                max_sweeps=self.max_sweeps,
            )
        except UnmetError as error:
            advice = (
                "Start elsewhere by init_params, or give a prior that excludes "
                "interactions as strong."
            )
            error.add_note(
                f"Exchange: this is the auxiliary draw at the initial params {state.z}. {advice}"
            )
            raise


def _warn_dead(chains: Array) -> None:
    warnings.warn(
        f"Exchange: {int(chains)} chain(s) are NaN from here on, as an auxiliary draw "
        "failed. Raise max_sweeps, use auxiliary='random_cluster' where the model "
        "allows it, or a narrower prior",
        stacklevel=2,
    )


def _check_auxiliary(graph: FactorGraph, auxiliary: str | int) -> str | int:
    """Raise an IntractableError when the graph allows no such draw."""
    if isinstance(auxiliary, str):
        return perfect.method_for(graph, auxiliary)
    text = (
        f"Exchange with auxiliary={auxiliary} Gibbs sweeps is approximate (double "
        "Metropolis-Hastings), and exact only in the limit of many. Compare with twice "
        "as many, or use perfect draws."
    )
    auxiliary = checks.count(
        "Exchange: auxiliary, if not a method of perfect_sample,", auxiliary
    )
    warnings.warn(text, stacklevel=3)
    return auxiliary


def _check_init(
    prior: Mapping[str, dist.Distribution], init: State | None, chains: tuple[int, ...]
) -> SiteArrays:
    """Return initial values; raise a ParameterError for a wrong site, shape or value."""
    init = init or {}
    checks.names("site of init_params", init, prior, ParameterError)
    return {
        site: _check_site(site, prior[site], value, chains)
        for site, value in init.items()
    }


def _check_site(
    site: str, prior: dist.Distribution, value: ArrayLike, chains: tuple[int, ...]
) -> Array:
    value = jnp.asarray(value, float)
    shape = chains + prior.shape()
    name = f"init_params of site {site!r}"
    expected = f"of shape {shape}, in the support {prior.support}"
    if value.shape != shape:
        raise checks.parameter_error(name, expected, value)

    def check(rows):
        if not np.isfinite(np.asarray(dist.biject_to(prior.support).inv(rows))).all():
            raise checks.parameter_error(name, expected, np.asarray(rows).tolist())

    return checked(check, value)
