# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Chains that mix fast because their params move: rates-FPCD, rates-herding, sample penalisation.

None of them samples the model that it is given, nor any other fixed model. Each has a kernel of its own,
named for what it does, and says so wherever it is printed.
"""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.core.precision import full_precision
from ebmpp.core.types import Blocks, Keep, Params, Rows
from ebmpp.errors import ArgumentError, ParameterError
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.kernels.base import Kwargs, RowKernel
from ebmpp.moves import Target, gibbs_sweep, search
from ebmpp.moves.move import draw_sweep


class RatesState(NamedTuple):
    """The state of :class:`RatesFPCD`, :class:`RatesHerding` and :class:`SamplePenalization`.

    - **z** - a dict of the free blocks, each of shape ``(*batch, *shape)``: **no draw of the model**.
    - **fast** - what is added to the params at the next step, shaped like them after ``batch``.
    - **drift** - norm of the fast weights over that of the params, ``(*batch,)``: how far the last draw's
      params were from the model's; 0 is the model itself.
    - **i** - steps done since the initial state.
    - **rng_key** - the run's key; step ``i`` draws from the key and ``i``, so it does not change.
    """

    z: dict[str, Array]
    fast: Params
    drift: Array
    i: Array
    rng_key: Array


class _FastWeights(RowKernel[RatesState]):
    """What these kernels share: a move under params plus fast weights, then the fast weights' own step.

    fast <- decay * fast + rate * (rates - statistics of the new state), where the statistics are minus the
    gradient of the energy in the params, at the model's own params. Each chain has fast weights of its own,
    and each row of a chain with clamped blocks: the papers run one chain.
    """

    caveat = "draws of a process whose params move, not of the model"

    def __init__(self, graph: FactorGraph, rate: float, decay: float, init: str) -> None:
        super().__init__(graph, init)
        name = type(self).__name__
        self.rate = checks.number(f"{name}: rate", rate, least=0)
        self.decay = checks.number(f"{name}: decay, what is left after a step,", decay, least=0, most=1)

    def _options(self) -> dict[str, Any]:
        return {"rate": self.rate, "decay": self.decay} | super()._options()

    def __repr__(self) -> str:
        return f"<{super().__repr__()}: {self.caveat}>"

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Model arguments made into a target, the rates held in :attr:`_Rated.rates`."""
        if len(model_args) != 2:
            raise ParameterError(
                f"{type(self).__name__} got {len(model_args)} positional arguments after the key, expected "
                "2, the params and the rates: "
                "mcmc.run(key, params, ebmpp.contrib.data_statistics(graph, params, data))"
            )
        made = super().target(model_args[:1], model_kwargs, check)
        rates = _checked(self.graph, model_args[1], check)
        return _Rated(made.graph, made.params, made.given, rates=rates)

    def _init_one(self, rng_key: Array, target: "_Rated", init_params: dict | None) -> RatesState:
        z = target.from_rows(self._start(target, rng_key, init_params))
        none = jax.tree.map(lambda p: jnp.zeros((*target.batch, *p.shape), p.dtype), target.params)
        return RatesState(z, none, jnp.zeros(target.batch), jnp.zeros((), jnp.int32), rng_key)

    def _sample_one(self, state: RatesState, target: "_Rated") -> RatesState:
        own = len(target.batch)
        fast = jax.tree.map(lambda f: f.reshape(target.num_rows, *f.shape[own:]), state.fast)

        def one(x: Rows, fast: Params, keep: Keep, keys: Array) -> tuple:
            x, keep = ({b: v[None] for b, v in rows.items()} for rows in (x, keep))
            params = jax.tree.map(jnp.add, target.params, fast)
            x = self._move(Target(target.graph, params, states.Clamped(target.clamped, keep=keep)), x, keys)
            return {b: v[0] for b, v in x.items()}, self._learn(target, fast, x), _size(fast)

        x, fast, size = jax.vmap(one)(target.to_rows(state.z), fast, target.keep, self._keys(state, target))
        fast = jax.tree.map(lambda f: f.reshape(*target.batch, *f.shape[1:]), fast)
        drift = size.reshape(target.batch) / jnp.maximum(_size(target.params), 1e-30)
        drift = drift.astype(state.drift.dtype)
        return RatesState(target.from_rows(x), fast, drift, state.i + 1, state.rng_key)

    def _keys(self, state: RatesState, target: "_Rated") -> Array:
        """Keys of a step's moves, ``(rows, moves, 2)``."""
        return target.keys(state.rng_key, (state.i + 1).astype(jnp.uint32))[:, None]

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        """The next state of a row under params of its own."""
        raise NotImplementedError

    def _learn(self, target: "_Rated", fast: Params, x: dict[str, Array]) -> Params:
        slope = energy.weighted_gradient(target.graph, target.params, x, jnp.ones(1))
        step = lambda f, r, g: self.decay * f + self.rate * (r + g)
        return jax.tree.map(step, fast, target.rates, slope)

    def get_diagnostics_str(self, state: RatesState) -> str:
        """Steps done, and how far the params are from the model's."""
        drift = np.max(np.asarray(state.drift))
        return f"{int(np.max(state.i))} steps, not of the model: params off by {drift:.2g} of their norm"


@dataclasses.dataclass(frozen=True)
class _Rated(Target):
    """A target, and the rates."""

    rates: Params = dataclasses.field(kw_only=True)


class RatesFPCD(_FastWeights):
    """Rates-FPCD: blocked Gibbs under params that flee from where the chain has been.

    For samples that cover the data's modes soon.

    **It does not sample the model.** Beside the params there are fast weights, which move by
    ``rate * (rates - statistics of the state)`` a step and decay by ``decay``; the chain sees the sum of
    both. A state is made less likely by having been visited, so the chain leaves modes that
    :class:`~ebmpp.BlockedGibbs` stays in, while the rates, mean statistics of training data under the model
    (:func:`ebmpp.contrib.data_statistics`), hold the visited states to those of the data. For
    expectations under the model take :class:`~ebmpp.ParallelTempering`.
    ``extra_fields=("drift",)`` tells how far the params are from the model's, draw by draw.

    The params and the rates are the first arguments of ``mcmc.run``, clamped blocks its keyword arguments.
    With a clamped block the rates should be those of rows that have its values (those of one label, say):
    otherwise the fast weights never balance.

    Each chain has fast weights of its own, so that its draws do not depend on how many chains there are; a
    chain takes the memory of the params once more, and about twice the time of plain Gibbs. Families whose
    natural parameters are restricted (exponential units, Gaussian ones of learned variance) can be carried
    out of their domain: draws are then nan.

    :param graph: the declaration.
    :param rate: step size of the fast weights, eps_F of the paper; 0 is :class:`~ebmpp.BlockedGibbs`.
    :param decay: what is left of the fast weights after a step, alpha of the paper, in [0, 1]; 1 was best
        there for trained models, and below 1 stays nearer to the model.
    :param k: sweeps a draw; the fast weights move once a draw.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), *Quickly generating representative samples from an RBM-derived
       process*, section 4 and algorithm 1.
    2. Tieleman, Hinton (2009), *Using fast weights to improve persistent contrastive divergence*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0), data)
    >>> rates = ebmpp.contrib.data_statistics(rbm, params, data)
    >>> mcmc = MCMC(ebmpp.kernels.RatesFPCD(rbm, rate=0.05), num_warmup=0, num_samples=100,
    ...             progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params, rates, extra_fields=("drift",))
    >>> mcmc.get_samples()["v"].shape, bool(mcmc.get_extra_fields()["drift"][-1] > 0)
    ((100, 9), True)
    """

    def __init__(
        self, graph: FactorGraph, rate: float = 0.01, decay: float = 1.0, k: int = 1, init: str = "uniform"
    ) -> None:
        super().__init__(graph, rate, decay, init)
        self.k = checks.count(f"{type(self).__name__}: k", k)

    def _options(self) -> dict[str, Any]:
        return super()._options() | ({} if self.k == 1 else {"k": self.k})

    def _keys(self, state: RatesState, target: "_Rated") -> Array:
        first = self.k * state.i.astype(jnp.uint32) + 1
        steps = [target.keys(state.rng_key, first + jnp.uint32(j)) for j in range(self.k)]
        return jnp.stack(steps, axis=1)

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        moves = gibbs_sweep(target.graph, target.clamped)
        if self.k == 1:
            return draw_sweep(target, x, moves, keys)[0]
        return lax.scan(lambda x, key: (draw_sweep(target, x, moves, key[None])[0], None), x, keys)[0]


class SamplePenalization(RatesFPCD):
    """Sample penalisation: :class:`RatesFPCD` with rates of 0, so that a state is only ever penalised.

    For samples that spread where no data are at hand; else :class:`RatesFPCD`.

    **It does not sample the model**, and nothing holds it to the data: the decay alone keeps the params near
    the model's, and draws are skewed (digits come out larger and bolder in the paper). It needs no data,
    which is all that speaks for it. Params are the first argument of ``mcmc.run``.

    :param graph: the declaration.
    :param rate: step size of the fast weights; 0 is :class:`~ebmpp.BlockedGibbs`.
    :param decay: what is left of the fast weights after a step, in [0, 1): without decay the draws become
        uniform.
    :param k: sweeps a draw.
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), sections 3 and 4.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> mcmc = MCMC(ebmpp.kernels.SamplePenalization(rbm), num_warmup=0, num_samples=10, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), rbm.init(jax.random.key(0)))
    >>> mcmc.get_samples()["v"].shape
    (10, 4)
    """

    def __init__(
        self, graph: FactorGraph, rate: float = 0.01, decay: float = 0.95, k: int = 1, init: str = "uniform"
    ) -> None:
        super().__init__(graph, rate, decay, k, init)
        if self.decay == 1:
            raise ArgumentError(
                "SamplePenalization: decay is below 1, as without it the draws become uniform over all "
                "states; RatesFPCD, whose rates hold it to the data, needs none"
            )

    def target(self, model_args: tuple, model_kwargs: Kwargs, check: bool) -> Target:
        """Model arguments made into a target, with rates of 0."""
        made = RowKernel.target(self, model_args, model_kwargs, check)
        rates = jax.tree.map(jnp.zeros_like, made.params)
        return _Rated(made.graph, made.params, made.given, rates=rates)


class RatesHerding(_FastWeights):
    """Rates-herding: local search to a fixed point, under params that flee from where it ended.

    For pseudo-samples with the data's moments.

    **It does not sample the model, and draws no random number** after its start. A step sets layer after
    layer to its conditional mode until the density stops rising, then moves the fast weights as
    :class:`RatesFPCD` does. With ``decay=1`` the sum of ``rates - statistics`` over T draws is the fast
    weights over ``rate``: while these stay bounded, the draws' mean statistics come to the rates as 1/T, not
    as 1/sqrt(T). ``get_diagnostics_str`` and ``extra_fields=("drift",)`` tell how large they are.

    Params and rates are the first arguments of ``mcmc.run``; chains and clamped blocks are as with
    :class:`RatesFPCD`. Draws are at modes, so units are never grey, and families need a mode.

    :param graph: the declaration.
    :param rate: step size of the fast weights; the paper found larger ones good than for rates-FPCD.
    :param decay: what is left of the fast weights after a step, in [0, 1].
    :param init: "uniform", or "local_mode": one sweep from the local mode that a search finds.
    :raises ArgumentError: for numbers out of range.

    **References**

    1. Breuleux, Bengio, Vincent (2011), section 4 and algorithm 2.
    2. Welling (2009), *Herding dynamic weights for partially observed random field models*.

    **Example**

    >>> import jax, ebmpp
    >>> from numpyro.infer import MCMC
    >>> rbm, data = ebmpp.layered(v=ebmpp.Bernoulli(9), h=ebmpp.Bernoulli(4)), ebmpp.data.bars_and_stripes(3)
    >>> params = rbm.init(jax.random.key(0), data)
    >>> mcmc = MCMC(ebmpp.kernels.RatesHerding(rbm), num_warmup=0, num_samples=1000, progress_bar=False)
    >>> mcmc.run(jax.random.key(1), params, ebmpp.contrib.data_statistics(rbm, params, data))
    >>> bool(abs(mcmc.get_samples()["v"].mean(0) - data.mean(0)).max() < 0.02)
    True
    """

    def __init__(
        self, graph: FactorGraph, rate: float = 0.1, decay: float = 1.0, init: str = "uniform"
    ) -> None:
        super().__init__(graph, rate, decay, init)

    def _move(self, target: Target, x: Blocks, keys: Array) -> Blocks:
        return search.climb(target, x).x


def _checked(graph: FactorGraph, rates: Params, values: bool) -> Params:
    """:raises ParameterError: for rates that are not shaped like params, or not finite."""
    try:
        states.check_params(graph.param_shapes, rates)
        if values:
            states.check_finite(rates)
    except ParameterError as error:
        raise ParameterError(
            f"rates, which are shaped like params (ebmpp.contrib.data_statistics makes them): {error}"
        ) from None
    return rates


@full_precision
def _size(params: Params) -> Array:
    """Euclidean norm of all of them."""
    return jnp.sqrt(sum(jnp.vdot(a, a) for a in jax.tree.leaves(params)))
