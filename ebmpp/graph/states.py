# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Checks of states and params: every mistake gets a message with a name, a value and a remedy."""

from collections.abc import Collection, Iterable, Mapping
import dataclasses
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import checks, sharding
from ebmpp.core.types import Blocks, Numbers, Params, StateLike
from ebmpp.errors import IntractableError, ParameterError, StateError, clash
from ebmpp.families import Family
from ebmpp.families.values import as_array, is_concrete, settle
from ebmpp.graph.declaration import Declaration


def check_names(given: Iterable[str], known: Iterable[str], what: str = "block") -> None:
    """:raises StateError: for a name that is not among ``known``."""
    checks.names(what, given, known, StateError)


def as_visible(graph: Declaration, data: StateLike) -> dict[str, Any]:
    """Data as a dict of visible blocks; a bare array (or the like) stands for the only one.

    :raises StateError: for a bare array when there are several visible blocks.
    """
    if isinstance(data, Mapping):
        check_names(data, graph.visible, "visible block")
        return dict(data)
    if len(graph.visible) != 1:
        raise StateError(
            f"data is one array, and there are visible blocks {list(graph.visible)}: give a dict"
        )
    return {next(iter(graph.visible)): data}


def batch_shape(families: Mapping[str, Family], x: Mapping[str, Numbers]) -> tuple[int, ...]:
    """The leading axes that the blocks of ``x`` share (broadcast).

    :raises StateError: unknown block, wrong trailing shape, or axes that do not broadcast.
    """
    check_names(x, families)
    leading = {}
    for name, value in x.items():
        shape = families[name].shape
        split = value.ndim - len(shape)
        if split < 0 or value.shape[split:] != shape:
            wanted = ", ".join(["...", *map(str, shape)])
            raise StateError(f"block {name!r} got shape {value.shape}, expected ({wanted})")
        leading[name] = value.shape[:split]
    try:
        return np.broadcast_shapes(*leading.values())
    except ValueError:
        raise StateError(f"leading axes of the blocks do not broadcast: {leading}") from None


def check_present(given: Iterable[str], needed: Iterable[str]) -> None:
    """:raises StateError: for a block of ``needed`` that is not given."""
    given, needed = sorted(given), tuple(needed)
    missing = [name for name in needed if name not in given]
    if missing:
        raise StateError(
            f"block {missing[0]!r} is missing: got {given}, and expected a value for "
            f"{', '.join(repr(n) for n in needed)}, in a dict"
        )


def as_rows(
    families: Mapping[str, Family], x: Mapping[str, Any], needed: Iterable[str] = ()
) -> tuple[Blocks, tuple[int, ...]]:
    """A checked state as rows: every block of shape ``(rows, *shape)``, and the batch shape.

    :raises StateError: a block of ``needed`` that is missing, or anything the checks above refuse.
    """
    if not isinstance(x, Mapping):
        raise StateError(
            f"a state is a dict of the blocks {', '.join(map(repr, families))}, not {checks.tell(x)}"
        )
    x = {name: as_array(name, value) for name, value in x.items()}
    batch = batch_shape(families, x)
    check_present(x, needed)
    rows = {}
    for name, value in x.items():
        made, shape = settle(name, families[name], value), families[name].shape
        rows[name] = jnp.broadcast_to(made, batch + shape).reshape(-1, *shape)
    return rows, batch


def as_partial_rows(
    families: Mapping[str, Family], x: Mapping[str, Any], needed: Iterable[str] = ()
) -> tuple[Blocks, Blocks, tuple[int, ...]]:
    """:func:`as_rows` of a state that may hold :class:`Observed` blocks.

    :return: rows, masks of the blocks that lack units, and the batch shape.
    """
    if not any(isinstance(v, Observed) for v in x.values()):
        rows, batch = as_rows(families, x, needed)
        return rows, {}, batch
    check_names(x, families)
    check_present(x, needed)
    given = as_clamped(families, x)
    known = {b: k for b, k in given.keep.items() if not (is_concrete(k) and bool(k.all()))}
    return given.whole | given.partial, known, given.batch


def refuse_together(graph: Declaration, blocks: Iterable[str], known: Collection[str] = ()) -> None:
    """Whether blocks, and the units that are not known of others, can be summed out together.

    :raises IntractableError: where two of them interact.
    """
    for a, b in graph.interacting((*blocks, *known)):
        give = f"{'its value' if a == b else 'a value for one of them'} (the layers are {graph.block_layers})"
        if known:
            lacking = ", ".join(repr(n) for n in dict.fromkeys((a, b)) if n in known)
            give = (
                f"every unit of {lacking}, or call exact.log_likelihood, which lists what small models lack, "
                "or ebmpp.complete, which draws it"
            )
        raise IntractableError(f"{clash(a, b)}, so they cannot be summed out in closed form; give {give}")


class Observed(NamedTuple):
    """Values of a block of which only some units are known: give it where a clamped block is taken.

    The other units are free. So half an image is completed, or a table's missing entries.

    :param values: shape ``(*batch, *shape)``; what stands at unknown units is ignored (nan will do).
    :param known: which units are known, of the same shape or one that broadcasts to it.

    **Example**

    >>> import jax, jax.numpy as jnp, ebmpp
    >>> rbm = ebmpp.layered(v=ebmpp.Bernoulli(4), h=ebmpp.Bernoulli(3))
    >>> v = jnp.array([1.0, 0.0, jnp.nan, jnp.nan])
    >>> made = ebmpp.local_search(rbm, rbm.init(jax.random.key(0)), rng_key=jax.random.key(1),
    ...                           v=ebmpp.Observed(v, ~jnp.isnan(v)))
    >>> made.state["v"][:2].tolist()
    [1.0, 0.0]
    """

    values: Any
    known: Any

    def __getitem__(self, rows: Any) -> Any:
        """Some rows, of both: a slice, numbers or a mask.

        **Example**

        >>> table = Observed.where_finite(np.array([[1.0, np.nan], [0.0, 1.0]]))
        >>> table[1:].known.tolist()
        [[True, True]]
        """
        values, known = as_array("values", self.values), as_array("known", self.known)
        # what is known of every row may be said once
        once = known.ndim < values.ndim or len(known) < len(values)
        return Observed(values[rows], known if once else known[rows])

    @classmethod
    def where_finite(cls, values: Any) -> "Observed":
        """What is known of a table whose missing entries are nan (or infinite).

        :param values: numbers, shape ``(*batch, *shape)``.

        **Example**

        >>> Observed.where_finite([1.0, float("nan")]).known.tolist()
        [True, False]
        """
        values = as_array("values", values)
        return cls(values, np.isfinite(values) if isinstance(values, np.ndarray) else jnp.isfinite(values))


@partial(jax.tree_util.register_dataclass, data_fields=["whole", "partial", "keep"], meta_fields=["batch"])
@dataclasses.dataclass(frozen=True)
class Clamped:
    """What a call holds fixed, as rows of shape ``(rows, *shape)``; one row where nothing has an axis.

    :param whole: blocks that are clamped.
    :param partial: blocks of which some units are observed.
    :param keep: which units those are.
    :param batch: the leading axes, of which ``rows`` is the product.
    """

    whole: Blocks = dataclasses.field(default_factory=dict)
    partial: Blocks = dataclasses.field(default_factory=dict)
    keep: Blocks = dataclasses.field(default_factory=dict)
    batch: tuple[int, ...] = ()

    def take(self, rows: Numbers) -> "Clamped":
        """Some rows, by their numbers; one row stands for all."""
        return jax.tree.map(lambda v: v if len(v) == 1 else v[rows], self)


def merge_clamped(given: Mapping[str, Any]) -> dict[str, Any]:
    """Clamped blocks by name: those given by keyword, and those in ``clamped={...}``.

    So a block is clamped whose name is that of an argument of the call, such as "k" or "init".

    :raises StateError: for a ``clamped`` that is no dict, or a block that is given twice.
    """
    given = dict(given)
    named = given.pop("clamped", {})
    if not isinstance(named, Mapping):
        raise StateError(f"clamped is a dict of blocks, such as {{'v': v}}, not {checks.tell(named)}")
    twice = sorted(set(given) & set(named))
    if twice:
        raise StateError(f"block {twice[0]!r} is given by keyword and in clamped: give it once")
    return {**given, **named}


def as_clamped(families: Mapping[str, Family], given: Mapping[str, Any], check: bool = True) -> Clamped:
    """Clamped blocks and :class:`Observed` ones, checked.

    :param check: whether to look at values also (names and shapes are checked anyway).
    :raises StateError: for a wrong name, shape or value.
    """
    given = merge_clamped(given)
    check_names(given, families)
    values, known = as_arrays(families, given)
    batch = batch_shape(families, values)
    if 0 in batch:
        shapes = {b: v.shape for b, v in values.items()}
        raise StateError(f"clamped blocks have no rows: shapes {shapes}; give at least one row")

    def rows(b: str, v: Numbers) -> Array:
        return jnp.broadcast_to(v, batch + families[b].shape).reshape(-1, *families[b].shape)

    settled = lambda b, v: settle(b, families[b], fill(families[b], v, known.get(b)), check)
    made = {b: rows(b, settled(b, v)) for b, v in values.items()}
    whole = {b: v for b, v in made.items() if b not in known}
    return Clamped(whole, {b: made[b] for b in known}, {b: rows(b, k) for b, k in known.items()}, batch)


def as_arrays(
    families: Mapping[str, Family], given: Mapping[str, Any]
) -> tuple[dict[str, Numbers], dict[str, Numbers]]:
    """Values as they are given, and of :class:`Observed` ones which are known.

    :raises StateError: for what does not hold numbers, or a mask that does not fit.
    """
    values, known = {}, {}
    for b, v in given.items():
        if isinstance(v, Observed):
            values[b], known[b] = as_observed(b, families[b], v)
        else:
            values[b] = as_array(b, v)
    return values, known


def as_observed(name: str, family: Family, given: Observed) -> tuple[Numbers, Numbers]:
    value, known = as_array(name, given.values), as_array(name, given.known)
    if known.dtype != bool:
        raise StateError(f"block {name!r}: known is an array of booleans, not of {known.dtype}")
    batch_shape({name: family}, {name: value})
    try:
        known = (np if isinstance(known, np.ndarray) else jnp).broadcast_to(known, value.shape)
    except ValueError:
        raise StateError(
            f"block {name!r}: known has shape {known.shape}, which does not broadcast to that of the "
            f"values, {value.shape}"
        ) from None
    return value, known


def fill(family: Family, value: Numbers, known: Numbers | None) -> Numbers:
    """Values with something harmless at unknown units; as they are where ``known`` is None."""
    if known is None:
        return value
    if isinstance(value, np.ndarray) and is_concrete(known):
        return np.where(np.asarray(known), value, _harmless(family).astype(value.dtype))
    return jnp.where(known, settle("", family, value, check=False), _harmless(family))


@lru_cache(maxsize=128)
def _harmless(family: Family) -> np.ndarray:
    with sharding.at_once():
        return np.asarray(family.initial(jnp.zeros((*family.shape, family.num_words), jnp.uint32)))


def check_params(expected: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Compare names, structure and shapes with those of the declaration.

    :param expected: a dict of pytrees of ``jax.ShapeDtypeStruct``, keyed by factor name.
    :raises ParameterError: naming the factor.
    """
    check_factors(expected, params)
    for name, tree in expected.items():
        for leaf in jax.tree.leaves(params[name]):
            checks.placeable(f"factor {name!r}", leaf, ParameterError)
            if hasattr(leaf, "__array__") and not isinstance(leaf, Array | np.ndarray | np.generic):
                raise ParameterError(
                    f"factor {name!r}: params are a {type(leaf).__module__}.{type(leaf).__name__}, expected "
                    "an array of jax or numpy; jax.tree.map(jax.numpy.asarray, params) converts them"
                )
        wanted, given = jax.tree.map(np.shape, tree), jax.tree.map(np.shape, params[name])
        if wanted != given:
            raise ParameterError(f"factor {name!r}: params have shape {given}, expected {wanted}")


def check_factors(expected: Mapping[str, Any], params: Mapping[str, Any]) -> None:
    """Compare names with those of the declaration.

    :raises ParameterError: naming the factor.
    """
    if not isinstance(params, Mapping):
        raise ParameterError(f"params is a dict keyed by factor name, not {type(params).__name__}")
    for name in params:
        if name not in expected:
            raise ParameterError(f"params has {name!r}, and the factors are {sorted(expected)}")
    for name in expected:
        if name not in params:
            raise ParameterError(f"params lacks factor {name!r}; it has {sorted(params)}")


def named(graph: Declaration, params: Params) -> dict[str, Any]:
    """The params in the order of the factors.

    :raises ParameterError: for a factor that lacks them, or params of none.
    """
    check_factors(graph.param_shapes, params)
    return {f.name: params[f.name] for f in graph.factors}


def check_finite(params: Mapping[str, Any]) -> None:
    """:raises ParameterError: for NaN or infinity in params, naming the factor."""
    for name, tree in params.items():
        for leaf in jax.tree.leaves(tree):
            checks.numbers(f"factor {name!r}", leaf, ParameterError)
            if is_concrete(leaf) and not np.isfinite(np.asarray(leaf)).all():
                bad = int((~np.isfinite(np.asarray(leaf))).sum())
                raise ParameterError(f"factor {name!r}: {bad} of {leaf.size} params are not finite")
