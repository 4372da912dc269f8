# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Factors that are linear in the statistics of each block: biases, and maps between two blocks."""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.core import backend, checks
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.factor import Factor, FactorParams, Scope, is_positive_int


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bias(Factor):
    """``-<b, t(x)>``, with ``b`` a natural parameter of the block.

    :param block: name of the block.
    :param shared: axes of the block's shape along which units share a bias, such as the
        positions of a feature map; the params have length 1 there.
    :param init: initial biases, an array or a function of a jax key; by default from
        the scheme of :meth:`ebmpp.FactorGraph.init`.
    :param name: key of its params; the block's name by default.
    :raises DeclarationError: for axes that the block lacks, or an ``init`` of another
        shape.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, Bias, FactorGraph
    >>> maps = FactorGraph({"x": Bernoulli((5, 22, 22))}, factors=[Bias("x", shared=(1, 2))])
    >>> maps.init(jax.random.key(0))["x"].shape
    (5, 1, 1)
    """

    shared: tuple[int, ...]

    role = "bias"
    always_affine = True
    is_pairwise = True

    def __init__(
        self,
        block: str,
        *,
        shared: Sequence[int] = (),
        init: Any = None,
        name: str | None = None,
    ) -> None:
        super().__init__(block, energy=_bias_energy, init=init, name=name)
        if not isinstance(shared, Sequence) or not all(
            isinstance(axis, int) for axis in shared
        ):
            raise checks.declaration_error(
                f"Bias({block!r}): shared", "a tuple of axes", shared
            )
        object.__setattr__(self, "shared", tuple(shared))

    def _options(self) -> list[str]:
        return [f"shared={self.shared}"] if self.shared else []

    def init_params(self, rng_key: Array, families: Families) -> Array:
        family = families[self.blocks[0]]
        rank = len(family.shape)
        if not all(-rank <= axis < rank for axis in self.shared):
            raise checks.declaration_error(
                f"{self!r}: shared", f"axes of {family!r}", self.shared
            )
        return self.init_checked(rng_key, self.pool(family.default_eta(), family))

    def pool(self, statistics: Array, family: Family) -> Array:
        """Average statistics over the shared axes, which keep length 1."""
        axes = tuple({axis % len(family.shape) for axis in self.shared})
        return statistics.mean(axes, keepdims=True) if axes else statistics

    def row_axes(self, families: Families) -> int:
        return 0


def _bias_energy(bias: Array, statistics: Array) -> Array:
    # Not vdot: XLA compiles a kernel of its own for a product of vectors, which takes
    # long.
    return -(jnp.broadcast_to(bias, statistics.shape) * statistics).sum()


class _Product(Factor):
    """A factor over the interacting statistics of two blocks."""

    is_pairwise = True

    def evaluate(
        self, params: FactorParams, *statistics: Array, families: Scope
    ) -> Array:
        interacting = (f.interaction(t) for f, t in zip(families, statistics))
        return self.energy(params, *interacting)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bilinear(_Product):
    """``-sum_ij w_ij t_i(a) t_j(b)``, with ``w`` of the joined shapes of both blocks' statistics.

    A Gaussian with learned variance takes part with x only; use a :class:`Factor` to
    couple x^2.

    :param first: name of a block.
    :param second: name of another block.
    :param name: key of its params; ``"first:second"`` by default.
    """

    role = "weight"
    always_affine = True
    takes_bfloat16 = True

    def __init__(self, first: str, second: str, *, name: str | None = None) -> None:
        super().__init__(first, second, energy=_bilinear_energy, name=name)

    def init_params(self, rng_key: Array, families: Families) -> Array:
        first, second = (families[b].interaction_shape for b in self.blocks)
        # compiles nothing
        return jax.device_put(np.zeros(first + second))

    def row_axes(self, families: Families) -> int:
        return len(families[self.blocks[0]].interaction_shape)


def _bilinear_energy(weight: Array, first: Array, second: Array) -> Array:
    # With this order the vmapped gradients in either block come out row by row. (weight
    # @ second) gives the transpose, and reading that in a loop over rows costs a tenth
    # of a coupled sweep at 784x500.
    matrix = weight.reshape(first.size, second.size)
    if first.dtype == jnp.bfloat16:
        image = backend.product(first.ravel(), matrix)
        return -image @ jnp.asarray(second.ravel(), float)
    return -(first.ravel() @ backend.product(second.ravel(), matrix.T))


Forward = Callable[[FactorParams, Array], Array]


@dataclasses.dataclass(frozen=True)
class InnerProduct:
    """``-<forward(params, t(a)), t(b)>``, equal to another where ``forward`` is."""

    blocks: tuple[str, str]
    forward: Forward

    def __call__(self, params: FactorParams, first: Array, second: Array) -> Array:
        image = self.forward(params, first)
        shape = jnp.shape(image)
        if shape != second.shape:
            raise checks.declaration_error(
                f"Linear{self.blocks!r}: shape of the value of forward",
                f"{second.shape}, that of the statistics of {self.blocks[1]!r}",
                shape,
            )
        return -jnp.vdot(image, second)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Linear(_Product):
    """``-<forward(params, t(a)), t(b)>``, with a custom linear map from ``a`` to ``b``.

    The map from ``b`` to ``a`` is the transpose of ``forward``, by autodiff. Use it for
    weights that are shared, sparse or low-rank, and for fixed operators; convolutions
    have :class:`~ebmpp.Convolution`. ``forward`` may be affine: its value at zero is a
    bias on ``b``. A Gaussian with learned variance takes part with x only.

    :param first: name of a block, ``a``.
    :param second: name of another block, ``b``.
    :param forward: ``forward(params, statistics of a)`` for one state, which returns an
        array of the shape of the statistics of ``b``. It must be affine in the
        statistics.
    :param shape: shape of the weights, one array filled by the scheme of
        :meth:`FactorGraph.init`. "orthogonal" makes the matrix whose rows are the first
        axis semi-orthogonal, not necessarily the whole map.
    :param init: initial params in place of ``shape`` and of a scheme: a pytree of
        arrays, or a function of a jax key that returns one. With neither, the params
        are ``()``.
    :param name: key of its params; ``"first:second"`` by default.
    :raises DeclarationError: for both ``shape`` and ``init``, or (on declaration of a
        graph) a value of the wrong shape.
    :raises NotMultiAffineError: on declaration of a graph, if ``forward`` is not
        affine.

    **Example**

    Each latent unit sees three neighbouring visible ones through the same three
    weights:

    >>> import jax, jax.numpy as jnp
    >>> from ebmpp import Bernoulli, Bias, FactorGraph
    >>> from ebmpp.graph import Linear
    >>> def windows(w, v):
    ...     return jnp.convolve(v, w, mode="valid")
    >>> linear = Linear("v", "h", forward=windows, shape=(3,))
    >>> chain = FactorGraph(visible={"v": Bernoulli(8)}, latent={"h": Bernoulli(6)},
    ...                     factors=[Bias("v"), Bias("h"), linear])
    >>> chain.init(jax.random.key(0))["v:h"].shape
    (3,)
    """

    shape: tuple[int, ...] | None

    def __init__(
        self,
        first: str,
        second: str,
        *,
        forward: Forward,
        shape: Sequence[int] | None = None,
        init: Any = None,
        name: str | None = None,
    ) -> None:
        is_shape = shape is None or (
            isinstance(shape, Sequence) and all(map(is_positive_int, shape))
        )
        who = f"Linear({first!r}, {second!r}):"
        if not callable(forward):
            raise checks.declaration_error(f"{who} forward", "a function", forward)
        if not is_shape:
            raise checks.declaration_error(f"{who} shape", "positive ints", shape)
        if shape is not None and init is not None:
            raise checks.declaration_error(
                f"{who} init", "None where shape is given", init
            )
        energy = InnerProduct((first, second), forward)
        super().__init__(first, second, energy=energy, init=init, name=name)
        object.__setattr__(self, "shape", None if shape is None else tuple(shape))

    @property
    def role(self) -> str | None:
        """Return "weight" if a scheme fills the params, None if ``init`` does."""
        return None if self.shape is None else "weight"

    def init_params(self, rng_key: Array, families: Families) -> FactorParams:
        if self.shape is None:
            return super().init_params(rng_key, families)
        return jnp.zeros(self.shape)

    def row_axes(self, families: Families) -> int | None:
        """Return 1 for weights of several axes."""
        return None if self.shape is None else int(len(self.shape) > 1)
