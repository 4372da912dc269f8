# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Perfect samples: draws from exactly the model, not in the limit of a long chain.

Small models are enumerated. Attractive models of any size are coupled from the past:
sweeps are monotone in their starting state, so all chains lie between those from the
lowest and from the highest state. Once these two agree at time 0, so do all, including
the one that has run forever.
"""

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

from jaxtyping import Float, Int32
import networkx as nx
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import (
    Blocks,
    Keys,
    Params,
    RowMask,
    backend,
    checks,
    random,
    select,
    sharding,
)
from ebmpp.errors import IntractableError, UnmetError
from ebmpp.exact import coupling_from_the_past as clusters, enumeration
from ebmpp.exact.coupling_from_the_past import check_graph, couple_from_the_past, slopes
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import FactorGraph, energy, states
from ebmpp.moves import Layer, Target, gibbs, where_rows

#: default number of sweeps into the past after which coupling gives up
MAX_SWEEPS = 2**16

#: Units of a block that interact: their interactions are a matrix of that size.
_MOST_UNITS = 2048


def _plan(graph: FactorGraph) -> enumeration.Plan:
    """Return the plan of a model that can be drawn by enumeration; refuse others."""
    plan = enumeration.make_plan(graph)
    if plan.integrated:
        raise IntractableError(
            f"the Gaussian blocks {list(plan.integrated)} interact, so they cannot be "
            "drawn by enumeration. Sample the model by ebmpp.BlockedGibbs."
        )
    enumeration.refuse_many(graph, plan, enumeration.MOST_LISTED)
    return plan


def _pick(
    u: Float[Array, "*draws"], log_weight: Float[Array, "*#draws values"]
) -> Int32[Array, "*draws"]:
    """Draw an index with the weights of the last axis."""
    weight = jnp.exp(log_weight - log_weight.max(-1, keepdims=True))
    return random.inverse_cdf(u, weight)


def _enumerated_rows(target: Target, keys: Keys, *_: int) -> tuple[Blocks, RowMask]:
    graph = target.graph
    plan = _plan(graph)
    count = enumeration.num_states(graph, plan.enumerated)
    summed = plan.summed
    # two stages of about the square root each: a uniform of 24 bits is too coarse for a
    # million states
    width = math.isqrt(count - 1) + 1
    numbers = jnp.arange(-(-count // width) * width, dtype=jnp.int32)

    term = partial(enumeration.log_term, graph, target.params, {}, plan)
    chunk = enumeration.states_per_chunk(graph, plan)
    value = jax.lax.map(term, jnp.minimum(numbers, count - 1), batch_size=chunk)
    table = jnp.where(numbers < count, value, -jnp.inf).reshape(-1, width)
    u = random.uniforms(random.fold_in(keys, 0), 2)
    group = _pick(u[:, 0], jax.nn.logsumexp(table, axis=-1)[None])
    index = group * width + _pick(u[:, 1], table[group])
    x = gibbs.initial_rows(graph, summed, random.fold_in(keys, 1)) if summed else {}
    x |= jax.vmap(partial(enumeration.decode, graph, plan.enumerated))(index)
    if summed:
        x |= Layer(summed).draw(target, x, random.fold_in(keys, 2))[0]
    table = energy.with_infinities(graph, table)
    is_valid = jnp.isfinite(table).any() & (table < jnp.inf).all()
    return select(x, graph.families), is_valid & jnp.ones(len(keys), bool)


def _check_ordered(graph: FactorGraph) -> None:
    """Check that blocks have a lowest and a highest state, and factors join pairs."""
    accepted = [
        b
        for b, family in graph.families.items()
        if _is_ordered(family) and (b not in graph.splits or family.size <= _MOST_UNITS)
    ]
    check_graph(
        graph,
        "coupling from the past",
        f"Bernoulli, Spin and Binomial units (in a block at most {_MOST_UNITS} that interact), "
        "Hyperedges of units that are not negative",
        accepted,
        products=True,
    )


def _is_ordered(family: Family) -> bool:
    with sharding.eager():  # under jit the values would be staged
        values = family.states()
        if values is None or family.stat_shape:
            return False
        statistics = np.asarray(family.statistics(values))
    return bool((np.diff(statistics) > 0).all())


@partial(jax.jit, static_argnames="graph")
def _orientation(
    graph: FactorGraph, params: Params
) -> tuple[Blocks, dict[tuple, Array]]:
    """Return signs of blocks that make interactions positive, and which edges then are."""
    inner = [(b, b) for b in graph.splits]
    derivatives = slopes(graph, params, [*sorted(graph.edges), *inner])
    rising = {edge: (slope >= 0).all() for edge, slope in derivatives.items()}
    falling = {edge: (slope <= 0).all() for edge, slope in derivatives.items()}
    sign = {}
    # along a spanning tree; the other edges then agree or not
    for root in graph.families:
        if root not in sign:
            sign[root] = jnp.int32(1)
            for block, other in nx.bfs_edges(graph.to_networkx(), root):
                edge = (block, other) if (block, other) in rising else (other, block)
                sign[other] = jnp.where(rising[edge], sign[block], -sign[block])
    agrees = {
        (a, b): jnp.where(sign[a] == sign[b], rising[a, b], falling[a, b])
        for a, b in derivatives
    }
    for b, split in graph.splits.items():
        for factor in split.inner_factors:
            if factor.is_increasing(graph.families):
                agrees[b, b] &= (params[factor.name] >= 0).all()
    return sign, agrees


def _check_attractive(graph: FactorGraph, params: Params) -> None:
    """Check that interactions have one sign per pair of blocks."""
    _, agrees = _orientation(graph, params)
    for (a, b), attractive in agrees.items():
        if not attractive:
            raise IntractableError(
                f"the model is not attractive: interactions of blocks {a!r} and {b!r} "
                "have both signs, even after flipping whole blocks. A small model can "
                "be enumerated, method='enumerate'."
            )


def _monotone(family: Family, words: Array, eta: Array) -> Array:
    """Draw from one word per unit, non-decreasing in ``eta``."""
    if isinstance(family, Bernoulli | Spin):  # faster, and the same distribution
        return family.sample(words, eta)
    values = enumeration.unit_values(family)
    # exponential families have monotone likelihood ratios, so their inverse
    # distribution functions rise
    base = family.log_base_measure(values)
    log_weight = eta[..., None] * family.statistics(values) + base
    return values[_pick(random.uniform(words[..., 0]), log_weight)]


def _both_sweep(target: Target, x: Blocks, keys: Keys) -> Blocks:
    """Sweep the rows from below and, after them, the rows from above, by the same words."""
    for index, blocks in enumerate(target.graph.block_layers):

        def new(
            natural,
            families,
            part,
            index=index,
        ):
            values = {}
            for place, (b, e) in enumerate(natural().items()):
                family = families[b]
                key = random.fold_in(keys, index, place)
                if part is not None:
                    key = random.fold_in(key, 0, part)
                words = random.words(key, family.size)
                words = jnp.concatenate([words, words]).reshape(-1, *family.shape, 1)
                values[b] = _monotone(family, words, e)
            return values

        x = x | gibbs.visit(target, x, blocks, new)
    return x


def _coupled_rows(
    target: Target, keys: Keys, max_sweeps: int
) -> tuple[Blocks, RowMask]:
    graph = target.graph
    rows = len(keys)
    sign, agrees = _orientation(graph, target.params)
    attractive = jnp.all(jnp.stack([jnp.bool_(True), *agrees.values()]))
    start = {}
    for b, family in graph.families.items():
        values = enumeration.unit_values(family).astype(family.dtype)
        extremes = values[jnp.array([0, -1])]
        ends = jnp.repeat(jnp.where(sign[b] > 0, extremes, extremes[::-1]), rows)
        ends = ends.reshape(-1, *(1,) * len(family.shape))
        start[b] = jnp.broadcast_to(ends, (2 * rows, *family.shape))

    def met(x):
        equal = [(v[:rows] == v[rows:]).reshape(rows, -1) for v in x.values()]
        return jnp.concatenate(equal, 1).all(1)

    def sweep(time, x):
        return _both_sweep(target, x, random.fold_in(keys, time))

    x = couple_from_the_past(sweep, met, start, max_sweeps, attractive)
    return {b: x[b][:rows] for b in graph.families}, met(x) & attractive


class _Method(NamedTuple):
    """Functions of a method: two refuse graphs and params that it does not take."""

    check_graph: Callable[[FactorGraph], Any]
    check_params: Callable[[FactorGraph, Params], None]
    draw: Callable[[Target, Keys, int], tuple[Blocks, RowMask]]


_METHODS = {
    "enumerate": _Method(_plan, lambda graph, params: None, _enumerated_rows),
    "coupling_from_the_past": _Method(_check_ordered, _check_attractive, _coupled_rows),
    "random_cluster": _Method(
        clusters.check_two_values, clusters.check_ferromagnetic, clusters.draw_by_bonds
    ),
}


def method_for(graph: FactorGraph, method: str) -> str:
    """Return the method that "auto" stands for, or the given one, if the graph allows it."""
    checks.choice("perfect_sample: method", method, ("auto", *_METHODS))
    if method != "auto":
        _METHODS[method].check_graph(graph)
        return method
    errors = []
    for name in ("enumerate", "coupling_from_the_past"):
        try:
            return method_for(graph, name)
        except IntractableError as error:
            errors.append(error)
    large, unordered = errors
    raise IntractableError(
        f"there is no perfect sample: {unordered} Nor can it be enumerated: {large}"
    )


def draw_perfect(
    target: Target, keys: Keys, method: str, max_sweeps: int = MAX_SWEEPS
) -> tuple[Blocks, RowMask]:
    """Return perfect draws by a method of :func:`method_for`.

    It is a pure function, for ``jit`` and ``vmap``.

    :return: every block, shape ``(rows, *shape)``; and which rows are perfect draws,
        shape ``(rows,)``. The others had not met, or the params are not attractive: do
        not use them.
    """
    return _METHODS[method].draw(target, keys, max_sweeps)


_draw = jax.jit(
    backend.asynchronous(draw_perfect), static_argnames=("method", "max_sweeps")
)


def perfect_sample(
    graph: FactorGraph,
    params: Params,
    num_samples: int = 1,
    *,
    rng_key: Array,
    method: str = "auto",
    max_sweeps: int = MAX_SWEEPS,
) -> Blocks:
    """Draw independent samples from exactly the model.

    "enumerate" lists the states of all blocks except an independent set of them, which
    is drawn given the others, for up to 2^20 states. "coupling_from_the_past" takes
    Bernoulli, Spin and Binomial blocks and *attractive* params: every natural parameter
    is non-decreasing in its neighbours, as in a ferromagnet, perhaps after flipping
    whole blocks, as in an antiferromagnet on a chessboard. Weights of
    :class:`~ebmpp.Hyperedges` are then at least 0, and units not Spin. Its time is random, and long
    in the ordered phase of a large model. "random_cluster" couples the bonds of
    Bernoulli or Spin units whose interactions are not negative and whose fields have
    one sign: a sweep takes time per bond, but few sweeps suffice however strong the
    couplings. "auto" enumerates where that is feasible, and otherwise couples units
    from the past.

    Works under ``jit`` and ``vmap`` (``graph`` closed over); there nothing can be
    raised, and draws that are not perfect are NaN.

    :param num_samples: number of draws.
    :param rng_key: a jax key; a draw depends on it and on its own index.
    :param method: "auto", "enumerate", "coupling_from_the_past" or "random_cluster".
    :param max_sweeps: number of sweeps into the past after which coupling gives up.
    :return: a dict of blocks, each of shape ``(num_samples, *shape)``.
    :raises IntractableError: when the model is neither small nor attractive.
    :raises UnmetError: when chains had not met after ``max_sweeps``.
    :raises ParameterError: params that do not fit, or do not normalise.

    **References**

    1. Propp, Wilson (1996), *Exact sampling with coupled Markov chains and applications
       to statistical mechanics*; section 4.2 for the random-cluster model.
    2. Fortuin, Kasteleyn (1972), *On the random-cluster model I*.

    **Example**

    >>> import jax, ebmpp
    >>> chain = ebmpp.layered(a=ebmpp.Spin(6), b=ebmpp.Spin(6))
    >>> params = chain.init(jax.random.key(0)) | {"a:b": 0.3 * jax.numpy.eye(6)}
    >>> x = ebmpp.perfect_sample(chain, params, 10, rng_key=jax.random.key(1),
    ...                          method="coupling_from_the_past")
    >>> {b: v.shape for b, v in x.items()}
    {'a': (10, 6), 'b': (10, 6)}
    """
    checks.instance("perfect_sample: graph", graph, FactorGraph)
    rng_key = checks.key("perfect_sample: rng_key", rng_key)
    num_samples = checks.count("perfect_sample: num_samples", num_samples)
    max_sweeps = checks.count("perfect_sample: max_sweeps", max_sweeps)
    graph.check(params)
    method = method_for(graph, method)
    is_known = states.is_concrete((params, rng_key))
    if is_known:
        _METHODS[method].check_params(graph, params)
    numbers = jnp.arange(num_samples, dtype=jnp.uint32)
    keys = random.fold_in(random.key_pair(rng_key), numbers)
    x, perfect = _draw(Target(graph, params), keys, method, max_sweeps)
    if not is_known:
        return {b: where_rows(perfect, v, jnp.nan) for b, v in x.items()}
    if backend.wait(perfect).all():
        return x
    if method == "enumerate":
        raise IntractableError(
            "the model has no state of finite energy, or some overflow. Check its params."
        )
    other = ""
    if method == "coupling_from_the_past":
        other = ", take method='random_cluster'"
    raise UnmetError(
        f"{int((~perfect).sum())} of {num_samples} pairs of chains had not met after "
        f"{max_sweeps} sweeps from the past. Raise max_sweeps, weaken the "
        f"interactions{other}, or enumerate a small model."
    )
