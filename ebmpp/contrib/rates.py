# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Kernels whose params move away from visited states: FPCD, herding, sample penalisation.

None of them samples the given model, nor any other fixed model. They say so wherever
they are printed.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.backend import full_precision
from ebmpp.core.types import Blocks, Params, Rows, UnitMasks
from ebmpp.errors import ArgumentError, ParameterError
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import InitParams, Kwargs, RowKernel
from ebmpp.moves import Target, gibbs_sweep, search
from ebmpp.moves.move import draw_sweep


class RatesState(NamedTuple):
    """State of :class:`RatesFPCD`, :class:`RatesHerding` and :class:`SamplePenalization`.

    - **z** - the free blocks, each of shape ``(*batch, *shape)``: **not a draw of the
      model**.
    - **fast** - fast weights, added to the params in the next step; shaped like the
      params after ``batch``.
    - **drift** - norm of the fast weights over that of the params in the last step,
      ``(*batch,)``.
    - **i** - steps since the initial state.
    - **rng_key** - the run's key; step ``i`` draws from the key and ``i``, so it does
      not change.
    """

    z: Blocks
    fast: Params
    drift: Array
    i: Array
    rng_key: Array


class _FastWeights(RowKernel[RatesState]):
    r"""Base of the kernels: a move under params plus fast weights, then a step of these.

    .. math:: f' = \alpha f + \epsilon \, (\bar t - t(x'))

    Here t are minus the gradients of the energy in the params, at the model's params.
    Each chain, and each row of a chain with clamped blocks, has its own fast weights:
    the papers run one chain.
    """

    caveat = "draws of a process whose params move, not of the model"

    def __init__(
        self, graph: FactorGraph, rate: float, decay: float, init: str
    ) -> None:
        super().__init__(graph, init)
        name = type(self).__name__
        self.rate = checks.number(f"{name}: rate", rate, least=0)
        self.decay = checks.number(
            f"{name}: decay, what is left after a step,", decay, least=0, most=1
        )

    def __repr__(self) -> str:
        return f"<{super().__repr__()}: {self.caveat}>"

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Return the target of ``mcmc.run(key, params, rates)``."""
        if len(model_args) != 2:
            raise ParameterError(
                f"{type(self).__name__}: params and rates must follow the key, got "
                f"{len(model_args)}. Call mcmc.run(key, params, data_statistics(graph, "
                "params, data))."
            )
        target = super().target(model_args[:1], model_kwargs, check)
        return _with_rates(target, _check_rates(self.graph, model_args[1], check))

    def _init_one(
        self, rng_key: Array, target: "_RatedTarget", init_params: InitParams
    ) -> RatesState:
        z = target.from_rows(self._start(target, rng_key, init_params))
        zero = jax.tree.map(
            lambda p: jnp.zeros((*target.batch, *p.shape), p.dtype), target.params
        )
        return RatesState(
            z, zero, jnp.zeros(target.batch), jnp.zeros((), jnp.int32), rng_key
        )

    def _sample_one(self, state: RatesState, target: "_RatedTarget") -> RatesState:
        axes = len(target.batch)
        fast = jax.tree.map(
            lambda f: f.reshape(target.num_rows, *f.shape[axes:]), state.fast
        )

        def step_row(x: Rows, fast: Params, keep: UnitMasks, keys: Array) -> tuple:
            x = {b: v[None] for b, v in x.items()}
            keep = {b: mask[None] for b, mask in keep.items()}
            params = jax.tree.map(jnp.add, target.params, fast)
            fixed = states.Clamped(target.clamped, keep=keep)
            x = self._move(Target(target.graph, params, fixed), x, keys)
            row = {b: v[0] for b, v in x.items()}
            return row, self._learn(target, fast, x), _norm(fast)

        keys = self._keys(state, target)
        x, fast, size = jax.vmap(step_row)(
            target.to_rows(state.z), fast, target.keep, keys
        )
        fast = jax.tree.map(lambda f: f.reshape(*target.batch, *f.shape[1:]), fast)
        drift = size.reshape(target.batch) / jnp.maximum(_norm(target.params), 1e-30)
        drift = drift.astype(state.drift.dtype)
        return RatesState(target.from_rows(x), fast, drift, state.i + 1, state.rng_key)

    def _keys(self, state: RatesState, target: "_RatedTarget") -> Array:
        """Return the keys of a step's moves, ``(rows, moves, 2)``."""
        return target.keys(state.rng_key, (state.i + 1).astype(jnp.uint32))[:, None]

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        """Return the next state of a row."""
        raise NotImplementedError

    def _learn(self, target: "_RatedTarget", fast: Params, x: Blocks) -> Params:
        gradient = energy.weighted_gradient(target.graph, target.params, x, jnp.ones(1))

        def step(f, r, g):
            return self.decay * f + self.rate * (r + g)

        return jax.tree.map(step, fast, target.rates, gradient)

    def get_diagnostics_str(self, state: RatesState) -> str:
        """Return the number of steps, and the distance of the params from the model's."""
        drift = np.max(np.asarray(state.drift))
        return (
            f"{int(np.max(state.i))} steps, not of the model: params off by "
            f"{drift:.2g} of their norm"
        )


@dataclasses.dataclass(frozen=True)
class _RatedTarget(Target):
    """Target with rates."""

    rates: Params = dataclasses.field(kw_only=True)


def _with_rates(target: Target, rates: Params) -> _RatedTarget:
    return _RatedTarget(target.graph, target.params, target.fixed, rates=rates)


class RatesFPCD(_FastWeights):
    """Rates-FPCD: blocked Gibbs under params that move away from visited states.

    For samples that soon cover the data's modes.

    **It does not sample the model.** Fast weights are added to the params. They move by
    ``rate * (rates - statistics of the state)`` per step and decay by ``decay``.
    Visiting a state makes it less likely, so the chain leaves modes in which
    :class:`~ebmpp.BlockedGibbs` stays. The rates, mean statistics of training data
    under the model (:func:`ebmpp.contrib.data_statistics`), keep the visited states
    close to the data. For expectations under the model use
    :class:`~ebmpp.ParallelTempering`. ``extra_fields=("drift",)`` reports the distance
    of the params from the model's.

    Params and rates are the arguments of ``mcmc.run``, clamped blocks its keyword
    arguments. With a clamped block, pass the rates of rows with its values (of one
    label, say): otherwise the fast weights never balance.

    Each chain has its own fast weights, so its draws do not depend on the number of
    chains. A chain takes the memory of the params once more, and about twice the time
    of plain Gibbs. Families with restricted natural parameters (exponential, Gaussian
    of learned variance) can leave their domain; draws are then nan.

    :param graph: the declaration.
    :param rate: step size of the fast weights, eps_F in the paper; 0 is
        :class:`~ebmpp.BlockedGibbs`.
    :param decay: factor of the fast weights per step, alpha in the paper, in [0, 1]. 1
        was best there for trained models; smaller values stay nearer to the model.
    :param k: sweeps per draw; the fast weights move once per draw.
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from
       an RBM-derived process*, section 4 and algorithm 1.
    2. Tieleman, Hinton (2009), *Using fast weights to improve persistent contrastive
       divergence*.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import RatesFPCD, data_statistics
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0), data)
    >>> rates = data_statistics(rbm, params, data)
    >>> mcmc = MCMC(RatesFPCD(rbm, rate=0.05), num_warmup=0, num_samples=100, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params, rates, extra_fields=("drift",))
    >>> mcmc.get_samples()["v"].shape, bool(mcmc.get_extra_fields()["drift"][-1] > 0)
    ((100, 9), True)
    """

    def __init__(
        self,
        graph: FactorGraph,
        rate: float = 0.01,
        decay: float = 1.0,
        k: int = 1,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, rate, decay, init)
        self.k = checks.count(f"{type(self).__name__}: k", k)

    def _keys(self, state: RatesState, target: "_RatedTarget") -> Array:
        first = self.k * state.i.astype(jnp.uint32) + 1
        steps = [
            target.keys(state.rng_key, first + jnp.uint32(j)) for j in range(self.k)
        ]
        return jnp.stack(steps, axis=1)

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        moves = gibbs_sweep(target.graph, target.clamped)
        if self.k == 1:
            return draw_sweep(target, x, moves, keys)[0]
        return lax.scan(
            lambda x, key: (draw_sweep(target, x, moves, key[None])[0], None), x, keys
        )[0]


class SamplePenalization(RatesFPCD):
    """Sample penalisation: :class:`RatesFPCD` with rates of 0, which only penalises visited states.

    For samples that spread where no data are available; otherwise use
    :class:`RatesFPCD`.

    **It does not sample the model**, and nothing keeps it close to the data: only the
    decay keeps the params near the model's, and draws are skewed (in the paper digits
    come out larger and bolder). The params are the argument of ``mcmc.run``.

    :param graph: the declaration.
    :param rate: step size of the fast weights; 0 is :class:`~ebmpp.BlockedGibbs`.
    :param decay: factor of the fast weights per step, in [0, 1); with 1 the draws would
        become uniform.
    :param k: sweeps per draw.
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), sections 3 and 4.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import SamplePenalization
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(SamplePenalization(rbm), num_warmup=0, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> mcmc.get_samples()["v"].shape
    (10, 4)
    """

    def __init__(
        self,
        graph: FactorGraph,
        rate: float = 0.01,
        decay: float = 0.95,
        k: int = 1,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, rate, decay, k, init)
        if self.decay == 1:
            raise ArgumentError(
                "SamplePenalization: decay must be below 1, got 1. The draws would "
                "become uniform; RatesFPCD takes 1, since its rates keep it close to "
                "the data."
            )

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Return the target of ``mcmc.run(key, params)``, with rates of 0."""
        target = RowKernel.target(self, model_args, model_kwargs, check)
        return _with_rates(target, jax.tree.map(jnp.zeros_like, target.params))


class RatesHerding(_FastWeights):
    """Rates-herding: local search to a mode, under params that move away from earlier modes.

    For pseudo-samples with the data's moments.

    **It does not sample the model, and draws no random number** after its start. A step
    sets each layer in turn to its conditional mode until the density stops rising, then
    moves the fast weights as :class:`RatesFPCD` does. With ``decay=1`` the sum of
    ``rates - statistics`` over T draws is the fast weights divided by ``rate``: while
    these stay bounded, the draws' mean statistics approach the rates as 1/T, not as
    1/sqrt(T). ``extra_fields=("drift",)`` reports their size.

    Params and rates are the arguments of ``mcmc.run``; chains and clamped blocks are as
    with :class:`RatesFPCD`. Families need a mode.

    :param graph: the declaration.
    :param rate: step size of the fast weights; the paper uses larger ones than for
        rates-FPCD.
    :param decay: factor of the fast weights per step, in [0, 1].
    :param init: "uniform", or "local_mode": one sweep from a local mode.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), section 4 and algorithm 2.
    2. Welling (2009), *Herding dynamic weights for partially observed random field
       models*.

    **Example**

    >>> import jax, ebmpp
    >>> from ebmpp.contrib import RatesHerding, data_statistics
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4))
    >>> data = ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0), data)
    >>> mcmc = MCMC(RatesHerding(rbm), num_warmup=0, num_samples=1000, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params, data_statistics(rbm, params, data))
    >>> bool(abs(mcmc.get_samples()["v"].mean(0) - data.mean(0)).max() < 0.02)
    True
    """

    def __init__(
        self,
        graph: FactorGraph,
        rate: float = 0.1,
        decay: float = 1.0,
        init: str = "uniform",
    ) -> None:
        super().__init__(graph, rate, decay, init)

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        return search.local_modes(target, x).x


def _check_rates(graph: FactorGraph, rates: Params, values: bool) -> Params:
    """Check the shapes of rates, and that ``values`` are finite."""
    try:
        states.check_params(graph.param_shapes, rates)
        if values:
            states.check_finite(rates)
    except ParameterError as error:
        raise ParameterError(
            f"rates must be shaped like params: {error}. Make them with "
            "ebmpp.contrib.data_statistics."
        ) from None
    return rates


@full_precision
def _norm(params: Params) -> Array:
    """Euclidean norm of all params."""
    return jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(params)))
