# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The exchange algorithm: exact posteriors of an energy model's params, without log Z."""

from collections.abc import Callable, Mapping
import math
from typing import Any, NamedTuple
import warnings

import numpy as np
import numpyro.distributions as dist

import jax
from jax import Array
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from ebmpp.core import Params, State, checks, random
from ebmpp.core.types import Blocks, SiteArrays
from ebmpp.errors import ParameterError, UnmetError
from ebmpp.exact import perfect
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import Init, Kwargs, is_batched, over_chains
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
    random walk in unconstrained space, whose step size adapts in the warm-up and is
    then fixed.

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
    :param target_accept: acceptance probability to adapt to; 0.44 in one dimension,
        else 0.234.
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
        log_likelihood: Callable[..., Array] | None = None,
        max_sweeps: int = perfect.MAX_SWEEPS,
    ) -> None:
        checks.instance("Exchange: graph", graph, FactorGraph, "a FactorGraph")
        for name, fn in {"params": params, "data": data}.items():
            checks.function(f"Exchange: {name}", fn, f"the sites, {name}(sites, *args)")

        def is_valid(p):
            return isinstance(p, dist.Distribution) and not p.is_discrete

        if (
            not isinstance(prior, Mapping)
            or not bool(prior)
            or not all(map(is_valid, prior.values()))
        ):
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
        if target_accept is None:
            target_accept = (
                0.44
                if sum(math.prod(p.shape()) for p in self.prior.values()) == 1
                else 0.234
            )
        self.target_accept = checks.number(
            "Exchange: target_accept", target_accept, above=0, below=1
        )

    def __repr__(self) -> str:
        return f"Exchange({self.graph!r}, sites={list(self.prior)}, auxiliary={self.auxiliary!r})"

    def init(
        self,
        rng_key: Array,
        num_warmup: int,
        init_params: Init,
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
        init = _check_init(
            self.prior, init_params, rng_key.shape[:1] if batched else ()
        )
        state = over_chains(lambda key, z: self._init_one(key, num_warmup, z), rng_key)(
            rng_key, init
        )
        self._check_start(
            jax.tree.map(lambda v: v[0], state) if batched else state, call
        )
        return state

    def sample(
        self, state: ExchangeState, model_args: tuple, model_kwargs: Kwargs
    ) -> ExchangeState:
        call = Call.split(model_args, model_kwargs)
        new = over_chains(lambda state: self._sample_one(state, call), state.rng_key)(
            state
        )
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
        return (
            f"{text}, {failures} FAILED auxiliary draws: NaN from there on"
            if failures
            else text
        )

    def _init_one(
        self, rng_key: Array, num_warmup: int, init: SiteArrays
    ) -> ExchangeState:
        rng_key, *keys = jax.random.split(rng_key, 1 + len(self.prior))
        z = {
            s: p.sample(key)
            for (s, p), key in zip(self.prior.items(), keys, strict=True)
        } | init
        u = {
            s: dist.biject_to(p.support).inv(jnp.asarray(z[s]))
            for s, p in self.prior.items()
        }
        zero = jnp.zeros((), jnp.result_type(float))
        none = jnp.zeros((), jnp.int32)
        numbers = none, none + num_warmup, zero + self.step_size, zero, zero, none
        return ExchangeState(self._constrain(u), u, *numbers, rng_key)

    def _sample_one(self, state: ExchangeState, call: Call) -> ExchangeState:
        rng_key, walk, draw, accept = jax.random.split(state.rng_key, 4)
        flat, unravel = ravel_pytree(state.unconstrained)
        u = unravel(
            flat + state.step_size * jax.random.normal(walk, flat.shape, flat.dtype)
        )
        log_ratio, failed = self._log_ratio(state.unconstrained, u, draw, call)
        accept_prob = jnp.where(log_ratio > 0, 1.0, jnp.exp(log_ratio))
        accept_prob = jnp.where(jnp.isnan(accept_prob) | failed, 0.0, accept_prob)
        accepted = jax.random.uniform(accept) < accept_prob

        def poisoned(tree):
            return jax.tree.map(lambda a: jnp.where(failed, jnp.nan, a), tree)

        new = poisoned(
            jax.tree.map(lambda a, b: jnp.where(accepted, a, b), u, state.unconstrained)
        )
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
        mean = jnp.where(
            number == 1,
            accept_prob,
            mean + (accept_prob - mean) / number.astype(mean.dtype),
        )
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
            total += self.log_likelihood(
                {**call.siblings, **z}, *call.args, **call.kwargs
            )
        return total

    def _params(self, z: SiteArrays, call: Call, values: bool = False) -> Params:
        params = self.params({**call.siblings, **z}, *call.args, **call.kwargs)
        self.graph.check(params, values=values)
        return params

    def _rows(self, call: Call) -> tuple[Blocks, tuple[str, ...]]:
        """Return the data as rows, and the blocks that are summed out."""
        data = self.data(call.siblings, *call.args, **call.kwargs)
        data = (
            dict(data)
            if isinstance(data, Mapping)
            else states.as_visible(self.graph, data)
        )
        rows, _ = states.as_rows(self.graph.families, data, tuple(self.graph.visible))
        summed = tuple(b for b in self.graph.families if b not in rows)
        states.check_summable(self.graph, summed)
        return {
            b: v.astype(self.graph.families[b].dtype) for b, v in rows.items()
        }, summed

    def _log_ratio(
        self, u: SiteArrays, proposed: SiteArrays, rng_key: Array, call: Call
    ) -> tuple[Array, Array]:
        """Return the log of the acceptance ratio, and True if the auxiliary draw failed."""
        z = self._constrain(u)
        new = self._constrain(proposed)
        rows, summed = self._rows(call)
        old_params = self._params(z, call)
        params = self._params(new, call)
        number = len(next(iter(rows.values())))
        keys = random.fold_in(
            random.key_pair(rng_key), jnp.arange(number, dtype=jnp.uint32)
        )
        drawn, valid = self._auxiliary(params, rows, summed, keys)

        def gain(x: Blocks) -> Array:
            def at(p, row):
                return energy.log_unnormalized(self.graph, p, row, summed)

            return jax.vmap(lambda row: at(params, row) - at(old_params, row))(x).sum()

        prior = self._log_prior(proposed, call) - self._log_prior(u, call)
        # impossible proposals are rejected whatever the auxiliary rows
        failed = ~valid.all() & (prior > -jnp.inf)
        return prior + gain(rows) - gain({b: drawn[b] for b in rows}), failed

    def _auxiliary(
        self, params: Params, rows: Blocks, summed: tuple, keys: Array
    ) -> tuple[Blocks, Array]:
        """Return a draw of the model for every row of data, and a mask of the draws that succeeded."""
        target = Target(self.graph, params)
        if isinstance(self.auxiliary, str):
            return perfect.draw_rows(target, keys, self.auxiliary, self.max_sweeps)
        x = dict(rows)
        first = random.fold_in(keys, 0)
        if summed:
            x |= gibbs.initial_rows(self.graph, summed, first)
            x |= Layer(summed).draw(target, x, random.fold_in(first, 1))[0]

        def sweep_once(i, x):
            return draw_sweep(
                target, x, gibbs_sweep(self.graph), random.fold_in(keys, i)
            )[0]

        x = jax.lax.fori_loop(1, self.auxiliary + 1, sweep_once, x)
        return x, jnp.ones(len(keys), bool)

    def _check_start(self, state: ExchangeState, call: Call) -> None:
        params = self._params(state.z, call, values=True)
        rows, _ = self._rows(call)
        is_concrete = all(
            map(states.is_concrete, jax.tree.leaves((params, rows, state.rng_key)))
        )
        if not is_concrete or not self._may_fail:
            return
        number = len(next(iter(rows.values())))
        method = str(self.auxiliary)
        try:
            perfect.perfect_sample(
                self.graph,
                params,
                number,
                rng_key=state.rng_key,
                method=method,
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
    """Raise a ParameterError for an unknown site, a wrong shape, or values outside of the support."""
    checks.names("site of init_params", init or {}, prior, ParameterError)
    return {
        site: _check_site(site, prior[site], value, chains)
        for site, value in (init or {}).items()
    }


def _check_site(
    site: str, prior: dist.Distribution, value: Any, chains: tuple[int, ...]
) -> Array:
    value = jnp.asarray(value, float)
    shape = chains + prior.shape()
    name = f"init_params of site {site!r}"
    expected = f"of shape {shape}, in the support {prior.support}"
    if value.shape != shape:
        raise checks.parameter_error(name, expected, value)

    def check(rows: Array) -> None:
        if not np.isfinite(np.asarray(dist.biject_to(prior.support).inv(rows))).all():
            raise checks.parameter_error(name, expected, np.asarray(rows).tolist())

    return checked(check, value)
