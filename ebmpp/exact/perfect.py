# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Perfect sampling: draws that have the model's law exactly, not in the limit of a long chain.

Small models are enumerated. Attractive ones, of any size, are coupled from the past: sweeps are monotone
in the state they start from, so all chains lie between those from the lowest and from the highest state, and
once these two agree at time 0, so do all, also the one that has been running for ever.
"""

from collections import deque
import math
from typing import Any

from jaxtyping import Float, Int32
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, random, sharding
from ebmpp.core.types import Blocks, Keys, Params, Which
from ebmpp.errors import IntractableError, UnmetError
from ebmpp.exact import enumeration, random_cluster
from ebmpp.exact.from_the_past import check_edges, from_the_past, slopes
from ebmpp.families import Bernoulli, Family, Spin
from ebmpp.graph import FactorGraph, states
from ebmpp.moves import Layer, Target, gibbs

#: sweeps into the past before coupling gives up, unless told
MAX_SWEEPS = 2**16

_MOST_UNITS = 2048  # of a block whose units interact: how they pull one another is a matrix of that size


# -- enumeration -----------------------------------------------------------------------------------


def _plan(graph: FactorGraph) -> enumeration.Plan:
    """:raises IntractableError: when the model is not small enough to be enumerated."""
    plan = enumeration.make_plan(graph)
    if plan.integrated:
        raise IntractableError(
            f"the Gaussian blocks {list(plan.integrated)} interact, so they cannot be drawn by enumeration; "
            "sample the model by ebmpp.BlockedGibbs"
        )
    enumeration.refuse_many(graph, plan.enumerated, plan.summed, enumeration.MOST_LISTED)
    return plan


def _pick(u: Float[Array, "*draws"], log_weight: Float[Array, "*#draws values"]) -> Int32[Array, "*draws"]:
    """An index drawn with the last axis' weights."""
    return random.inverse_cdf(u, jnp.exp(log_weight - log_weight.max(-1, keepdims=True)))


def _enumerated_rows(target: Target, keys: Keys) -> tuple[Blocks, Which]:
    graph, params = target.graph, target.params
    plan = _plan(graph)
    listed, drawn = plan.enumerated, plan.summed
    count = enumeration.num_states(graph, listed)
    # Two stages, of about the root each: a uniform of 24 bits is too coarse for a million states.
    width = math.isqrt(count - 1) + 1
    index = jnp.arange(-(-count // width) * width, dtype=jnp.int32)
    term = lambda i: enumeration.log_term(graph, params, {}, plan, i)
    value = jax.lax.map(term, jnp.minimum(index, count - 1), batch_size=enumeration.chunk_size(graph, plan))
    table = jnp.where(index < count, value, -jnp.inf).reshape(-1, width)
    u = random.uniform(random.words(random.fold_in(keys, 0), 2))
    group = _pick(u[:, 0], jax.nn.logsumexp(table, axis=-1)[None])
    chosen = group * width + _pick(u[:, 1], table[group])
    x = gibbs.initial_rows(graph, drawn, random.fold_in(keys, 1)) if drawn else {}
    x |= jax.vmap(lambda i: enumeration.decode(graph, listed, i))(chosen)
    if drawn:
        x |= Layer(drawn).draw(target, x, random.fold_in(keys, 2))[0]
    return {b: x[b] for b in graph.families}, jnp.isfinite(table).any() & jnp.ones(len(keys), bool)


# -- which models are attractive -------------------------------------------------------------------


def _check_ordered(graph: FactorGraph) -> None:
    """:raises IntractableError: for blocks without a lowest and a highest state, or factors of many."""
    for b, family in graph.families.items():
        if not _is_ordered(family):
            raise IntractableError(
                f"block {b!r} ({family!r}) has no lowest and highest state, which coupling from the past "
                "starts from; it takes Bernoulli, Spin and Binomial blocks"
            )
    check_edges(graph, "coupling from the past")
    for block, split in graph.splits.items():
        if split.family.size > _MOST_UNITS:
            raise IntractableError(
                f"block {block!r}, whose units interact, has {split.family.size} units; coupling from the "
                f"past takes at most {_MOST_UNITS} of such a block"
            )


def _is_ordered(family: Family) -> bool:
    with sharding.at_once():  # under jit the values would be staged, not looked at
        listed = family.states()
        if listed is None or family.stat_shape:
            return False
        return bool((np.diff(np.asarray(family.statistics(listed))) > 0).all())


def _orientation(graph: FactorGraph, params: Params) -> tuple[dict[str, Array], dict[tuple, Array]]:
    """Blocks turned upside down (-1) so that neighbours pull the same way, and which edges then do."""
    pulls = slopes(graph, params, [*sorted(graph.edges), *((b, b) for b in graph.splits)])
    rising = {edge: (slope >= 0).all() for edge, slope in pulls.items()}
    falling = {edge: (slope <= 0).all() for edge, slope in pulls.items()}
    sign: dict[str, Array] = {}
    for root in graph.families:  # along a spanning tree; the other edges can but agree or not
        queue = deque([root] if root not in sign else [])
        sign.setdefault(root, jnp.int32(1))
        while queue:
            block = queue.popleft()
            for other in graph.neighbours([block]):
                if other not in sign:
                    edge = (block, other) if (block, other) in rising else (other, block)
                    sign[other] = jnp.where(rising[edge], sign[block], -sign[block])
                    queue.append(other)
    fine = {(a, b): jnp.where(sign[a] == sign[b], rising[a, b], falling[a, b]) for a, b in pulls}
    return sign, fine


_orientation_jit = jax.jit(_orientation, static_argnames=("graph",))


def _check_attractive(graph: FactorGraph, params: Params) -> None:
    """:raises IntractableError: naming two blocks whose units pull in both directions."""
    _, fine = _orientation_jit(graph, params)
    for (a, b), attractive in fine.items():
        if not bool(attractive):
            raise IntractableError(
                f"the model is not attractive: the interactions of blocks {a!r} and {b!r} are of both signs "
                "(also with whole blocks turned upside down), so chains do not keep their order, and cannot "
                "be coupled from the past; a small model can be enumerated, method='enumerate'"
            )


# -- coupling from the past ------------------------------------------------------------------------


def _monotone(family: Family, words: Array, eta: Array) -> Array:
    """A draw that does not fall when ``eta`` grows, from one word a unit."""
    if type(family) in (Bernoulli, Spin):
        return family.sample(words, eta)
    values = enumeration.values_of(family)
    stats = family.statistics(values)
    # exponential families have monotone likelihood ratios, so their inverse distribution functions rise
    log_weight = eta[..., None] * stats + family.log_base_measure(values)
    return values[_pick(random.uniform(words[..., 0]), log_weight)]


def _both_sweep(target: Target, x: Blocks, keys: Keys) -> Blocks:
    """One sweep of the rows from below and, after them, of those from above, by the same words."""
    for index, blocks in enumerate(target.graph.block_layers):

        def new(eta: dict[str, Array], view: Any, part: Any, index: int = index) -> Blocks:
            made = {}
            for place, (b, e) in enumerate(eta.items()):
                family, own = view.families[b], random.fold_in(keys, index, place)
                words = random.words(own if part is None else random.fold_in(own, 0, part), family.size)
                words = jnp.concatenate([words, words]).reshape(-1, *family.shape, 1)
                made[b] = _monotone(family, words, e)
            return made

        x = x | gibbs.visit(target, x, blocks, new)
    return x


def _coupled_rows(target: Target, keys: Keys, max_sweeps: int) -> tuple[Blocks, Which]:
    graph = target.graph
    sign, fine = _orientation(graph, target.params)
    attractive = jnp.all(jnp.stack([jnp.bool_(True), *fine.values()]))
    rows = len(keys)
    start = {}
    for b, family in graph.families.items():
        values = enumeration.values_of(family).astype(family.dtype)
        ends = jnp.where(sign[b] > 0, values[jnp.array([0, -1])], values[jnp.array([-1, 0])])
        ends = jnp.repeat(ends, rows).reshape(-1, *(1,) * len(family.shape))
        start[b] = jnp.broadcast_to(ends, (2 * rows, *family.shape))

    def met(x: Blocks) -> Array:
        same = [(v[:rows] == v[rows:]).reshape(rows, -1).all(-1) for v in x.values()]
        return jnp.stack(same).all(0)

    sweep = lambda time, x: _both_sweep(target, x, random.fold_in(keys, time))
    x = from_the_past(sweep, met, start, max_sweeps, attractive)
    return {b: x[b][:rows] for b in graph.families}, met(x) & attractive


# -- all of them together --------------------------------------------------------------------------

_GRAPH_CHECKS = {
    "enumerate": _plan,
    "coupling_from_the_past": _check_ordered,
    "random_cluster": random_cluster.check_graph,
}
METHODS = ("auto", *_GRAPH_CHECKS)


def method_for(graph: FactorGraph, method: str) -> str:
    """The method that "auto" stands for, or the one that is given, if the graph allows it.

    :raises ArgumentError: for an unknown method.
    :raises IntractableError: when the graph does not allow it.
    """
    checks.choice("perfect_sample: method", method, METHODS)
    if method != "auto":
        _GRAPH_CHECKS[method](graph)
        return method
    refused = []
    for name in ("enumerate", "coupling_from_the_past"):
        try:
            return method_for(graph, name)
        except IntractableError as error:
            refused.append(error)
    large, unordered = refused
    raise IntractableError(
        f"there is no perfect sample of this model: {unordered}; and it cannot be enumerated: {large}"
    )


def check(graph: FactorGraph, params: Params, method: str) -> None:
    """:raises IntractableError: when a resolved ``method`` does not take these params."""
    if method == "coupling_from_the_past":
        _check_attractive(graph, params)
    elif method == "random_cluster":
        random_cluster.check_params(graph, params)


def draw_rows(target: Target, keys: Keys, method: str, max_sweeps: int = MAX_SWEEPS) -> tuple[Blocks, Which]:
    """Perfect draws as a pure function, for use under ``jit`` and ``vmap``.

    :param keys: shape ``(rows, 2)``.
    :param method: what :func:`method_for` returned.
    :param max_sweeps: how far into the past to go.
    :return: every block, shape ``(rows, *shape)``; and which rows are perfect draws, shape ``(rows,)``. The
        others had not met, or the params are not attractive: they must not be used.
    """
    if method == "enumerate":
        return _enumerated_rows(target, keys)
    if method == "random_cluster":
        return random_cluster.draw_rows(target, keys, max_sweeps)
    return _coupled_rows(target, keys, max_sweeps)


_draw = jax.jit(draw_rows, static_argnames=("method", "max_sweeps"))


def perfect_sample(
    graph: FactorGraph,
    params: Params,
    rng_key: Array,
    num_samples: int = 1,
    method: str = "auto",
    max_sweeps: int = MAX_SWEEPS,
) -> Blocks:
    """Independent draws from the model's law, exactly.

    "enumerate" lists the states of all blocks but an independent set of them, which is drawn given the
    others; up to 2**20 states. "coupling_from_the_past" takes Bernoulli, Spin and Binomial blocks and
    *attractive* params: every natural parameter is non-decreasing in its neighbours, as in a ferromagnet,
    perhaps after whole blocks are turned upside down, as in an antiferromagnet on a chessboard. Its
    time is random, and long in the ordered phase of a large model. "random_cluster" couples the bonds of
    Bernoulli or Spin units whose pairs all pull alike and whose fields are of one sign: it takes a while for
    each bond, and few sweeps however strong the pull. "auto" enumerates where that is feasible, and else
    couples from the past unit by unit.

    Works under ``jit`` and ``vmap`` (``graph`` closed over); where params are traced nothing can be raised,
    and what is no perfect draw is NaN.

    :param graph: the declaration.
    :param params: a dict keyed by factor name.
    :param rng_key: a jax key; a draw depends on it and on its own index alone.
    :param num_samples: how many draws.
    :param method: "auto", "enumerate", "coupling_from_the_past" or "random_cluster".
    :param max_sweeps: how many sweeps into the past to go before giving up.
    :return: a dict of blocks, each of shape ``(num_samples, *shape)``.
    :raises IntractableError: when the model is neither small nor attractive.
    :raises UnmetError: when chains had not met after ``max_sweeps``.
    :raises ParameterError: params that do not fit, or do not normalise.

    **References**

    1. Propp, Wilson (1996), *Exact sampling with coupled Markov chains and applications to statistical
       mechanics*; section 4.2 for the random-cluster model.
    2. Fortuin, Kasteleyn (1972), *On the random-cluster model I*.

    **Example**

    >>> import jax, ebmpp
    >>> chain = ebmpp.layered(a=ebmpp.Spin(6), b=ebmpp.Spin(6))
    >>> params = chain.init(jax.random.key(0)) | {"a:b": 0.3 * jax.numpy.eye(6)}
    >>> x = ebmpp.perfect_sample(chain, params, jax.random.key(1), 10, method="coupling_from_the_past")
    >>> {b: v.shape for b, v in x.items()}
    {'a': (10, 6), 'b': (10, 6)}
    """
    checks.instance("perfect_sample: graph", graph, FactorGraph, "a FactorGraph")
    rng_key = checks.key("perfect_sample: rng_key", rng_key)
    num_samples = checks.count("perfect_sample: num_samples", num_samples)
    max_sweeps = checks.count("perfect_sample: max_sweeps", max_sweeps)
    graph.check(params)
    chosen = method_for(graph, method)
    known = all(map(states.is_concrete, jax.tree.leaves((params, rng_key))))
    if known:
        check(graph, params, chosen)
    keys = random.fold_in(random.key_pair(rng_key), jnp.arange(num_samples, dtype=jnp.uint32))
    x, perfect = _draw(Target(graph, params), keys, chosen, max_sweeps)
    if not known:
        each = lambda v: perfect.reshape(-1, *(1,) * (v.ndim - 1))
        return {b: jnp.where(each(v), v, jnp.nan) for b, v in x.items()}
    if bool(perfect.all()):
        return x
    if chosen == "enumerate":
        raise IntractableError("no state of the model has a finite energy; look at its params")
    other = ", take method='random_cluster'" if chosen == "coupling_from_the_past" else ""
    raise UnmetError(
        f"{int((~perfect).sum())} of {num_samples} pairs of chains had not met after {max_sweeps} sweeps "
        f"from the past; raise max_sweeps, weaken the interactions{other}, or enumerate, if the model is "
        "small"
    )
