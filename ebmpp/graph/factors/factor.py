# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a factor is: a term of the energy over one or more blocks."""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, ClassVar

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.lateral import Constant, Local, Pairs, Split

Params = Any


@dataclasses.dataclass(frozen=True, repr=False)
class _Frozen:
    """A pytree of arrays that compares and hashes by value."""

    structure: Any
    leaves: tuple[Constant, ...]

    @classmethod
    def of(cls, tree: Params) -> "_Frozen":
        """The arrays as they are now."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(map(Constant.of, leaves)))

    def unflatten(self) -> Params:
        """As numpy arrays, bit by bit."""
        return jax.tree.unflatten(self.structure, [leaf.array for leaf in self.leaves])

    def __repr__(self) -> str:
        return repr(jax.tree.map(np.shape, self.unflatten()))


@dataclasses.dataclass(frozen=True, init=False)
class Factor:
    """A term of the energy over one or more blocks.

    :param blocks: the names of the blocks in its scope.
    :param energy: ``energy(params, *statistics)``, a scalar for one state; statistics come in the
        order of ``blocks``, each of shape ``shape + stat_shape``. It must be affine in each unit's
        statistics, the others held fixed, and units of one block may interact in it where ``lateral`` says.
    :param init: the factor's initial params: a pytree of arrays, or a function of a jax key that
        returns one, or None for a factor without parameters.
    :param name: the key of its params; the blocks joined by ":" unless given.
    :param lateral: which units of one block interact: by block, pairs of units or a networkx graph over
        them. A unit is its number in the flattened block, or its index in a block of several axes.
    :raises DeclarationError: no block, a block named twice, an energy that is not callable, or lateral
        pairs that are not pairs of units.

    **Example**

    >>> import jax.numpy as jnp, ebmpp
    >>> gate = ebmpp.Factor("x", "y", "h", init=jnp.ones((2, 2, 3)),
    ...     energy=lambda w, x, y, h: -jnp.einsum("ijk,i,j,k", w, x, y, h))
    >>> blocks = {"x": ebmpp.Bernoulli(2), "y": ebmpp.Bernoulli(2)}
    >>> ebmpp.FactorGraph(visible=blocks, latent={"h": ebmpp.Bernoulli(3)}, factors=[gate]).layers
    (('x',), ('y',), ('h',))
    """

    blocks: tuple[str, ...]
    energy: Callable[..., Array]
    init: Any
    name: str
    lateral: tuple[tuple[str, Pairs], ...] = ()

    #: what an initialisation scheme may do with it: "bias", "weight", or nothing.
    role: ClassVar[str | None] = None
    #: what the refusal of an energy that is not multi-affine says besides.
    advice: ClassVar[str] = ""

    def __init__(
        self,
        *blocks: str,
        energy: Callable[..., Array],
        init: Any = None,
        name: str | None = None,
        lateral: Mapping[str, Any] | None = None,
    ) -> None:
        if not blocks or not all(isinstance(b, str) and b for b in blocks):
            raise DeclarationError(f"a factor's blocks are one or more names, not {blocks!r}")
        if len(set(blocks)) < len(blocks):
            raise DeclarationError(
                f"factor over {blocks} names a block twice: units of one block would interact; name it once, "
                "and say which of its units do (Pairwise, or Factor(..., lateral=...)), or split the block"
            )
        if not callable(energy):
            raise DeclarationError(f"factor over {blocks}: energy is a function, not {energy!r}")
        set_field = lambda field, value: object.__setattr__(self, field, value)
        set_field("blocks", tuple(blocks))
        set_field("energy", energy)
        set_field("init", init if callable(init) or init is None else _Frozen.of(init))
        set_field("name", ":".join(blocks) if name is None else name)
        set_field("lateral", _as_lateral(blocks, lateral or {}))

    def name_over(self, blocks: tuple[str, ...]) -> str:
        """The name of such a factor over ``blocks`` where it is given none."""
        return ":".join(blocks)

    @property
    def interacts(self) -> bool:
        """Whether units interact in it, those of different blocks or of one."""
        return len(self.blocks) > 1 or bool(self.lateral)

    def edges(self, families: Mapping[str, Family]) -> dict[str, np.ndarray]:
        """The pairs of units of one block that interact in it, ``(edges, 2)`` a block.

        :raises DeclarationError: for a unit that a block does not have, or pairs that join a unit to itself
            or are there twice.
        """
        return {b: pairs.edges(repr(self), b, families[b]) for b, pairs in self.lateral}

    def local(self, families: Mapping[str, Family], split: Split) -> Local | None:
        """A quicker way to the natural parameters of a few units of a block; None for autodiff's."""
        del families, split
        return None

    def __repr__(self) -> str:
        kind = type(self).__name__
        named = "" if self.name == ":".join(self.blocks) else f", name={self.name!r}"
        return f"{kind}({', '.join(map(repr, self.blocks))}{named})"

    def evaluate(self, params: Params, *statistics: Array, families: tuple[Family, ...]) -> Array:
        """The energy of one state, a scalar."""
        del families
        return self.energy(params, *statistics)

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Params:
        """Initial params without a scheme."""
        del families
        if self.init is None:
            return ()
        made = self.init(rng_key) if callable(self.init) else self.init.unflatten()
        as_float = lambda a: jnp.asarray(a, jnp.result_type(float))
        return jax.tree.map(as_float, made)

    def row_axes(self, families: Mapping[str, Family]) -> int | None:
        """How many leading axes of its params are the rows of a matrix: 0 for a vector, None if unknown."""
        del families
        return None


def _as_lateral(blocks: tuple[str, ...], given: Mapping[str, Any]) -> tuple[tuple[str, Pairs], ...]:
    for b in (b for b in given if b not in blocks):
        raise DeclarationError(f"factor over {blocks}: lateral names block {b!r}, which it is not over")
    return tuple((b, Pairs.read(b, pairs)) for b, pairs in given.items())
