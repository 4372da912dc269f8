# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Base class of factors: a term of the energy over one or more blocks."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, ClassVar

from jaxtyping import PyTree
import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import HashableArray, Statistics, checks
from ebmpp.errors import DeclarationError
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.lateral import Local, Pairs, Split

#: Params of one factor: arrays.
FactorParams = PyTree
#: Families of the blocks of a factor, in order.
Scope = tuple[Family, ...]


@dataclasses.dataclass(frozen=True)
class _Frozen:
    """A pytree of arrays that compares and hashes by value."""

    structure: Any
    leaves: tuple[HashableArray, ...]

    @classmethod
    def copy(cls, tree: FactorParams) -> "_Frozen":
        """Copy the arrays of a tree."""
        leaves, structure = jax.tree.flatten(tree)
        checks.refuse_mask("init", leaves, DeclarationError)
        return cls(structure, tuple(map(HashableArray.copy, leaves)))

    def unflatten(self) -> FactorParams:
        """Return the tree as numpy arrays, bit by bit."""
        return jax.tree.unflatten(self.structure, [leaf.array for leaf in self.leaves])


@dataclasses.dataclass(frozen=True, init=False)
class Factor:
    """A term of the energy over one or more blocks.

    :param blocks: names of the blocks in its scope.
    :param energy: function ``energy(params, *statistics)`` of one state that returns a
        scalar. Statistics come in the order of ``blocks``, with shapes
        ``shape + stat_shape``. It must be affine in the statistics of each unit while
        all other units are held fixed, unless ``affine`` is False; units of one block
        may interact only as ``lateral`` declares.
    :param init: initial params: a pytree of arrays, a function of a jax key that
        returns one, or None for a factor without params.
    :param name: key of its params; the blocks joined by ":" by default.
    :param lateral: pairs of interacting units by block, as an array or a networkx
        graph. A unit is its number in the flattened block, or its index in a block of
        several axes. If ``affine`` is False, by default the pairs are read from the
        traced energy.
    :param affine: False for any other energy, such as a network: conditionals of its
        units are evaluated, not differentiated. Its blocks are Bernoulli, Spin or
        Categorical, or real-valued; the latter have no conditional in closed form.
    :raises DeclarationError: for missing or repeated blocks, an energy that is not
        callable, or invalid pairs.

    **Example**

    >>> import jax.numpy as jnp, ebmpp
    >>> gate = ebmpp.Factor("x", "y", "h", init=jnp.ones((2, 2, 3)),
    ...     energy=lambda w, x, y, h: -jnp.einsum("ijk,i,j,k", w, x, y, h))
    >>> blocks = {"x": ebmpp.Bernoulli(2), "y": ebmpp.Bernoulli(2)}
    >>> ebmpp.FactorGraph(visible=blocks, latent={"h": ebmpp.Bernoulli(3)}, factors=[gate]).layers
    (('x',), ('y',), ('h',))
    >>> network = ebmpp.Factor("x", init=jnp.ones(2), affine=False, name="network",
    ...     energy=lambda w, x: jnp.tanh(x @ w))
    >>> ebmpp.FactorGraph(visible={"x": ebmpp.Bernoulli(2)}, factors=[network]).layers
    (('x[0]',), ('x[1]',))
    """

    blocks: tuple[str, ...]
    energy: Callable[..., Array]
    init: Any
    name: str
    lateral: tuple[tuple[str, Pairs], ...] = ()
    affine: bool = True

    #: which entry of an initialisation scheme fills the params: "weight", "bias",
    #: "lateral" or None.
    role: ClassVar[str | None] = None
    #: True if the energy of this very class is multi-affine; a subclass, which may
    #: change it, says so again.
    always_affine: ClassVar[bool] = False
    #: True if each term joins at most two units, so that second derivatives of the
    #: energy are constant.
    is_pairwise: ClassVar[bool] = False
    #: True if the energy of this very class multiplies exact statistics in bfloat16.
    takes_bfloat16: ClassVar[bool] = False
    #: the argument of initial params.
    init_name: ClassVar[str] = "init"

    def __init__(
        self,
        *blocks: str,
        energy: Callable[..., Array],
        init: Any = None,
        name: str | None = None,
        lateral: Mapping[str, Any] | None = None,
        affine: bool = True,
    ) -> None:
        lateral = lateral or {}
        are_names = bool(blocks) and all(isinstance(b, str) and b for b in blocks)
        who = f"factor over {blocks}:"
        if not are_names or len(set(blocks)) != len(blocks):
            raise checks.declaration_error(
                f"{who} blocks",
                "different names",
                blocks,
                hint="Units of one block interact in a Pairwise, or in a Factor with lateral=...",
            )
        if not callable(energy):
            raise checks.declaration_error(f"{who} energy", "a function", energy)
        if not set(lateral) <= set(blocks):
            raise checks.declaration_error(
                f"{who} lateral", "pairs by block of the factor", list(lateral)
            )
        put = super().__setattr__  # that of a frozen dataclass raises
        put("blocks", tuple(blocks))
        put("energy", energy)
        put("init", init if callable(init) or init is None else _Frozen.copy(init))
        put("name", self.default_name(blocks) if name is None else name)
        put("lateral", tuple((b, Pairs.read(b, pairs)) for b, pairs in lateral.items()))
        put("affine", checks.flag("affine", affine))

    @property
    def interacts(self) -> bool:
        """True if units of different blocks or of one block may interact in it."""
        return len(self.blocks) > 1 or bool(self.lateral) or not self.affine

    def splits(self, block: str) -> bool:
        """Return True if units of a block are drawn in parts because of this factor."""
        is_lateral = any(b == block and len(pairs.array) for b, pairs in self.lateral)
        is_evaluated = self.has_zeros or not self.affine
        return is_lateral or (is_evaluated and block in self.blocks)

    @property
    def has_zeros(self) -> bool:
        """True if states of infinite energy, probability zero, are declared."""
        return bool(getattr(self.energy, "has_zeros", False))

    @property
    def is_always_affine(self) -> bool:
        """True if the energy is multi-affine by construction, so that it need not be probed."""
        return vars(type(self)).get("always_affine", False) or bool(
            getattr(self.energy, "is_always_affine", False)
        )

    @property
    def accepts_bfloat16(self) -> bool:
        """True if statistics may be in bfloat16; other energies would round in it."""
        return vars(type(self)).get("takes_bfloat16", False)

    def edges(self, families: Families) -> dict[str, np.ndarray]:
        """Return the pairs of interacting units of each block, ``(edges, 2)``.

        :raises DeclarationError: for a unit that the block lacks, or a pair of one
            unit.
        """
        return {b: pairs.edges(repr(self), b, families[b]) for b, pairs in self.lateral}

    def local(self, families: Families, split: Split) -> Local | None:
        """Return a fast path to the natural parameters of parts of a block; None for autodiff."""
        return None

    def pair_weights(self, params: FactorParams) -> Array:
        """Return one weight per pair of :meth:`edges`, if the energy is a sum over these pairs.

        A factor of one block defines it if its energy is
        ``-sum_p weights[p] <t_i, t_j>`` over the pairs p = (i, j). Cluster moves and
        coupling from the past then accept it.
        """
        raise NotImplementedError(f"the energy of {self!r} is no sum over pairs")

    def is_increasing(self, families: Families) -> bool:
        """Return True if natural parameters rise with other units where no param is negative.

        Coupling from the past then accepts a factor of one block.
        """
        return False

    @property
    def has_pair_weights(self) -> bool:
        """True if :meth:`pair_weights` is defined."""
        return type(self).pair_weights is not Factor.pair_weights

    def default_name(self, blocks: tuple[str, ...]) -> str:
        """Return the name of this factor over ``blocks`` if it is declared without one."""
        return ":".join(blocks)

    def __repr__(self) -> str:
        parts = [*map(repr, self.blocks), *self._options()]
        if self.name != self.default_name(self.blocks):
            parts.append(f"name={self.name!r}")
        return f"{type(self).__name__}({', '.join(parts)})"

    def _options(self) -> list[str]:
        """Return the arguments that are shown between the blocks and the name."""
        return [] if self.affine else ["affine=False"]

    def scope(self, families: Families) -> Scope:
        """Return the families of its blocks."""
        return tuple(families[b] for b in self.blocks)

    def evaluate(
        self, params: FactorParams, *statistics: Array, families: Scope
    ) -> Array:
        """Return the energy of one state, a scalar."""
        return self.energy(params, *statistics)

    def energy_at(
        self, params: FactorParams, statistics: Statistics, families: Families
    ) -> Array:
        """Return the energy of one state, given its statistics by block."""
        inputs = (statistics[b] for b in self.blocks)
        return self.evaluate(params, *inputs, families=self.scope(families))

    def init_params(self, rng_key: Array, families: Families) -> FactorParams:
        """Return initial params without a scheme."""
        if self.init is None:
            return ()
        values = self.init(rng_key) if callable(self.init) else self.init.unflatten()
        return jax.tree.map(lambda a: jnp.asarray(a, float), values)

    def effective_params(self, params: FactorParams) -> FactorParams:
        """Return params with 0 at entries that have no effect, whatever they hold."""
        return params

    def init_checked(self, rng_key: Array, default: Array) -> Array:
        """Return ``init`` as one array of the shape of ``default``, or the default for None.

        :raises DeclarationError: for an ``init`` of another shape.
        """
        if self.init is None:
            return default
        values = jnp.asarray(Factor.init_params(self, rng_key, {}))
        shape = values.shape
        if shape != default.shape:
            expected = f"of shape {default.shape}"
            raise checks.declaration_error(f"{self!r}: init", expected, shape)
        return values

    def row_axes(self, families: Families) -> int | None:
        """Return how many leading axes of the params index matrix rows: 0 for a vector, or None."""
        return None


def call_cached(fn: Any, *arguments: Any) -> Any:
    """Call a function with an ``lru_cache``, which cannot hold custom families with lists."""
    try:
        hash(arguments)
    except TypeError:
        return fn.__wrapped__(*arguments)
    return fn(*arguments)


def is_positive_int(value: Any) -> bool:
    """Return True for a positive int of Python or numpy."""
    return isinstance(value, int | np.integer) and value > 0
