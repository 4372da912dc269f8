# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
r"""Paths of models from independent units to a model, through knots of params and betas.

At a knot with inverse temperature :math:`\beta` and the knot's params in E the energy
is

.. math::

    E_\beta = (1 - \beta) E_0 + \beta E,

where E_0 is the energy of the reference: independent units, whose log Z is known.
Wherever both ends normalise, so does everything between them (Hoelder's inequality).
The first knot has :math:`\beta = 0`; the last has :math:`\beta = 1` and is the model. A
place on the path is a number s from 0 to the number of the last knot; between two knots
:math:`\beta` and the params are interpolated linearly. A line, the path of annealing,
has two knots with the same params, so that its places are inverse temperatures.

An independent set of blocks with as many units as possible is summed out of the weights
in closed form, and only the other blocks are kept. Natural parameters are affine in
:math:`\beta` as well, so one evaluation of a line's model serves all temperatures.
"""

from collections.abc import Iterable, Sequence
import dataclasses
from functools import lru_cache
from typing import NamedTuple

from jaxtyping import Float, Int32

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Eta,
    Keys,
    Params,
    PerRow,
    Rows,
    Scalar,
    at_index,
    is_concrete,
    omit,
    random,
    select,
    sharding,
)
from ebmpp.errors import ParameterError
from ebmpp.exact import enumeration
from ebmpp.graph import FactorGraph, energy
from ebmpp.graph.factors import zeros
from ebmpp.graph.states import Clamped
from ebmpp.moves import Move, Target, gibbs, gibbs_sweep, rungs
from ebmpp.moves.rungs import Evaluation, Place, Tempering, between


class Rung(NamedTuple):
    """Distribution at a place: ``1 - beta`` of the reference's energy, ``beta`` of a model's."""

    beta: Scalar
    params: Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, repr=False)
class Path:
    """Path of models from independent units to a model; a pytree whose graph is static.

    ``len(path)`` is the number of knots, including the reference, and
    ``path.params_at(i)`` gives the params of one; -1 is the model.
    ``fit(..., keep_path=True)`` makes the path of a training run.

    :param eta0: natural parameters of the reference, ``statistic_shape`` each.
    :param betas: inverse temperatures of the knots, from 0 to 1.
    :param knots: their params, with a leading axis of knots, or of length 1 where all
        share their params.
    :param num: number of knots that are used, from the first.
    :param moves: moves of a sweep at a rung; None for Gibbs draws of all layers.
    :param fixed: one row of clamped blocks, which the models are conditioned on.
    """

    graph: FactorGraph = dataclasses.field(metadata={"static": True})
    eta0: Eta
    betas: Float[Array, "knots"]
    knots: Params
    num: Int32[Array, ""]
    moves: tuple[Move, ...] | None = dataclasses.field(
        default=None, metadata={"static": True}
    )
    fixed: Clamped = dataclasses.field(default_factory=Clamped)

    @staticmethod
    def line(
        graph: FactorGraph,
        eta0: Eta,
        params: Params,
        moves: tuple[Move, ...] | None = None,
    ) -> "Path":
        """Return the line from the reference to a model."""
        same = jax.tree.map(lambda a: jnp.asarray(a)[None], params)
        betas = jnp.array([0.0, 1.0])
        return Path(graph, eta0, betas, same, jnp.full((), 2, jnp.int32), moves)

    @staticmethod
    def through(graph: FactorGraph, eta0: Eta, models: Sequence[Params]) -> "Path":
        """Return the line to the first of these models, continued to the others in turn."""
        knots = jax.tree.map(lambda *a: jnp.stack(a), models[0], *models)
        betas = jnp.ones(len(models) + 1).at[0].set(0.0)
        return Path(graph, eta0, betas, knots, jnp.full((), len(models) + 1, jnp.int32))

    def __repr__(self) -> str:
        num = len(self) if is_concrete(self.num) else len(self.betas)
        return f"Path({num} knots, {self.graph!r})"

    def __len__(self) -> int:
        """Return the number of knots, including the reference."""
        return int(self.num)

    def params_at(self, index: int) -> Params:
        """Return the params of a knot; at the first they do not affect the distribution.

        :raises IndexError: where there is no such knot.
        """
        return self._knot(range(len(self))[index])

    def along(self) -> Params:
        """Return the params of all knots, ``(len(path), ...)`` each."""

        def repeat(a):
            return jnp.broadcast_to(a, (len(self.betas), *a.shape[1:]))[: len(self)]

        return jax.tree.map(repeat, self.knots)

    def ends_at(self, params: Params) -> bool:
        """Return True if these are the params of its model."""
        with sharding.eager():  # known arrays may be compared under a transformation
            same = jax.tree.map(jnp.array_equal, self.params, params)
            return all(map(bool, jax.tree.leaves(same)))

    def to(self, params: Params) -> "Path":
        """Return the path continued to this model; on the host."""
        if self.ends_at(params):
            return self
        knots = jax.tree.map(
            lambda a, b: jnp.concatenate([a, jnp.asarray(b)[None]]),
            self.along(),
            params,
        )
        betas = jnp.concatenate([self.betas[: len(self)], jnp.ones(1)])
        return dataclasses.replace(self, betas=betas, knots=knots, num=self.num + 1)

    @property
    def is_line(self) -> bool:
        """True if all places share their params."""
        return len(jax.tree.leaves(self.knots)[0]) == 1

    @property
    def summed(self) -> tuple[str, ...]:
        """Blocks that are summed out of the weights."""
        return summed_blocks(self.graph, tuple(self.fixed.full))

    @property
    def sampled(self) -> tuple[str, ...]:
        """The other blocks, which particles keep."""
        return tuple(b for b in self.graph.families if b not in self.summed)

    @property
    def end(self) -> Scalar:
        """Place of the model."""
        return (self.num - 1).astype(jnp.result_type(float))

    @property
    def params(self) -> Params:
        """Params of the model."""
        # compiles no subtraction for a line
        return self._knot(0 if self.is_line else self.num - 1)

    def _knot(self, index: Array | int) -> Params:
        return at_index(self.knots, 0 if self.is_line else index)

    def at(self, s: Scalar) -> Rung:
        """Return the distribution at a place; at a knot it is exactly that of the knot."""
        low = jnp.clip(jnp.floor(s).astype(jnp.int32), 0, self.num - 1)
        high = jnp.minimum(low + 1, self.num - 1)
        share = s - low.astype(s.dtype)

        def mix(a, b):
            return jnp.where(share > 0, (1 - share) * a + share * b, a).astype(a.dtype)

        beta = mix(self.betas[low], self.betas[high])
        params = self._knot(low)
        if not self.is_line:
            params = jax.tree.map(mix, params, self._knot(high))
        return Rung(beta, energy.softened(self.graph, params, beta))

    @property
    def has_one_model(self) -> bool:
        """True if all rungs have the energy of one model, scaled."""
        return self.is_line and not self.graph.has_zeros

    def cut(self, places: Float[Array, "places"], count: Array) -> "Path":
        """Return the path whose knots are at the first ``count`` of these places."""
        rungs = lax.map(self.at, places)
        params = {name: zeros.unwrap(p)[0] for name, p in rungs.params.items()}
        num = jnp.asarray(count, jnp.int32)
        return dataclasses.replace(self, betas=rungs.beta, knots=params, num=num)

    def evaluate(self, params: Params, x: Rows) -> Evaluation:
        """Evaluate a model at rows of the kept blocks."""
        return rungs.evaluate(self.graph, params, self.eta0, x, self.summed)

    def evaluate_at(self, rung: Rung, other: Evaluation, x: Rows) -> Evaluation:
        """Evaluate a rung's model; the ``other`` evaluation, of another rung, where that is it."""
        return other if self.has_one_model else self.evaluate(rung.params, x)

    def gain(
        self, low: Rung, high: Rung, here: Evaluation, there: Evaluation
    ) -> PerRow:
        """Return the log-ratio of the unnormalised densities of ``high`` and ``low`` at rows.

        :param here: evaluation of the model of ``low``.
        :param there: evaluation of the model of ``high``.
        """
        if self.is_line:
            gain = (high.beta - low.beta) * (here.model - here.reference)
            if not self.has_one_model:  # by the violated constraints
                gain += high.beta * (there.model - here.model)
        else:
            gain = there.log_density(high.beta) - here.log_density(low.beta)
        ends = Place(low.beta, here), Place(high.beta, there)
        return rungs.add_normalizers(gain, self.graph, self.eta0, self.summed, *ends)

    def draw(self, blocks: Iterable[str], eta: Eta, beta: Scalar, keys: Keys) -> Blocks:
        """Draw blocks at ``beta``, given their natural parameters ``eta`` under the model."""
        families = select(self.graph.families, blocks)
        return gibbs.draw(
            families, {b: between(self.eta0[b], eta[b], beta) for b in families}, keys
        )

    def sweep(self, rung: Rung, x: Rows, eta: Eta | None, keys: Keys) -> Blocks:
        """Take a sweep at a rung: the summed blocks, then the moves; return the kept blocks.

        :param eta: natural parameters of the summed blocks at ``x``; None to evaluate
            them.
        """
        tempering = Tempering(rung.beta, self.eta0)
        target = Target(self.graph, rung.params, self.fixed, tempering=tempering)
        if eta is None:
            eta = energy.natural_rows(self.graph, rung.params, x, self.summed)
        x = dict(x) | self.draw(self.summed, eta, rung.beta, random.fold_in(keys, 0))
        moves = self.moves or gibbs_sweep(self.graph, (*self.summed, *target.clamped))
        for index, move in enumerate(moves, 1):
            drawn, _ = move.draw(target, x, random.fold_in(keys, index))
            x = x | drawn
        return select(x, self.sampled)


def check_models(name: str, graph: FactorGraph, models: Iterable[Params]) -> None:
    """Check that the models of a path, which ``name`` takes, fit the graph and normalise."""
    for index, params in enumerate(models, 1):
        try:
            graph.check(params)
        except ParameterError as error:
            raise type(error)(f"{name}: knot {index} of the path: {error}") from None


@lru_cache(maxsize=32)
def summed_blocks(graph: FactorGraph, clamped: tuple[str, ...] = ()) -> tuple[str, ...]:
    """Return the independent blocks of most units to sum out of the weights; one block stays."""
    free = omit(graph.families, clamped)
    best = list(enumeration.largest_independent(graph, free))
    if len(best) == len(free):  # no two blocks interact
        best.remove(min(best, key=lambda b: graph.families[b].size))
    return tuple(best)


@jax.jit
def draw_reference(path: Path, keys: Keys) -> Blocks:
    """Draw the kept blocks of the reference, one row per key."""
    count = len(keys)
    free = omit(select(path.graph.families, path.sampled), path.fixed.full)
    eta = {b: jnp.broadcast_to(e, (count, *e.shape)) for b, e in path.eta0.items()}
    clamped = Target(path.graph, {}, path.fixed).clamped_rows(count)
    return gibbs.draw(free, eta, keys) | clamped
