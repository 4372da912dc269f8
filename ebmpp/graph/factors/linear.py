# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Two blocks joined by a linear map: each unit with each, or of any other kind, such as of shared weights."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor, Params


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Bilinear(Factor):
    """``-sum_ij w_ij t_i(a) t_j(b)``; ``w`` has the shapes of the two blocks' statistics, joined.

    A Gaussian of learned variance takes part with x alone; write a :class:`Factor` to couple x**2.

    :param first: a block's name.
    :param second: another block's name.
    :param name: the key of its params; ``"first:second"`` unless given.
    """

    role = "weight"

    def __init__(self, first: str, second: str, *, name: str | None = None) -> None:
        super().__init__(first, second, energy=_bilinear_energy, name=name)

    def evaluate(self, params: Array, *statistics: Array, families: tuple[Family, ...]) -> Array:
        return self.energy(params, *map(lambda f, t: f.interaction(t), families, statistics))

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        first, second = (families[b].interaction_shape for b in self.blocks)
        return jax.device_put(np.zeros(first + second, jnp.result_type(float)))  # compiles nothing

    def row_axes(self, families: Mapping[str, Family]) -> int:
        return len(families[self.blocks[0]].interaction_shape)


def _bilinear_energy(weight: Array, first: Array, second: Array) -> Array:
    matrix = weight.reshape(first.size, second.size)
    # Gradients in either block then come out row by row when vmapped; (matrix @ second) gives the transpose,
    # and reading that in a loop over rows costs a tenth of a coupled sweep at 784x500.
    return -(first.ravel() @ (second.ravel() @ matrix.T))


Forward = Callable[[Params, Array], Array]


@dataclasses.dataclass(frozen=True)
class _InnerProduct:
    """``-<forward(params, t(a)), t(b)>``; equal where ``forward`` is."""

    blocks: tuple[str, str]
    forward: Forward

    def __call__(self, params: Params, first: Array, second: Array) -> Array:
        made = self.forward(params, first)
        if jnp.shape(made) != second.shape:
            a, b = self.blocks
            raise DeclarationError(
                f"Linear({a!r}, {b!r}): forward was given params of shape {jax.tree.map(jnp.shape, params)} "
                f"and the statistics of block {a!r}, of shape {first.shape}, and returned shape "
                f"{jnp.shape(made)}; expected is the shape of the statistics of block {b!r}, {second.shape}"
            )
        return -jnp.vdot(made, second)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Linear(Factor):
    """``-<forward(params, t(a)), t(b)>``: what ``a`` adds to the natural parameter of ``b``, as a function.

    The way back, from ``b`` to ``a``, is the transpose of ``forward``, by autodiff. Write with it what
    :class:`~ebmpp.Bilinear` is too general for: weights that are shared, sparse, low-rank, or a fixed
    operator. For convolutions there is :class:`~ebmpp.Convolution`.

    ``forward`` is linear in the statistics. It may be affine: its value at zero is a bias on ``b``, of the
    same params. A Gaussian of learned variance takes part with x alone, as in :class:`~ebmpp.Bilinear`.

    :param first: a block's name, ``a``.
    :param second: another block's name, ``b``.
    :param forward: ``forward(params, statistics of a)`` returns an array of the shape of b's statistics.
        It is called with one state; the library adds the batch axes.
    :param shape: of the weights, one array that :meth:`FactorGraph.init` fills by its scheme. "orthogonal"
        makes them, as a matrix whose rows are the first axis, semi-orthogonal, which need not make the whole
        map so.
    :param init: in place of ``shape``, params that keep their own initial values whatever the scheme: a
        pytree of arrays, or a function of a jax key that returns one. With neither, ``params`` is ``()``.
    :param name: the key of its params; ``"first:second"`` unless given.
    :raises DeclarationError: both ``shape`` and ``init``, or (when a graph is made of it) a value of
        another shape than the statistics of ``b``.
    :raises NotMultiAffineError: when a graph is made of it and ``forward`` is not affine.

    **Example**

    A latent unit sees three neighbouring visible ones, by the same three weights everywhere:

    >>> import jax, jax.numpy as jnp
    >>> from ebmpp import Bernoulli, Bias, FactorGraph
    >>> from ebmpp.graph import Linear
    >>> def windows(w, v):
    ...     return jnp.convolve(v, w, mode="valid")
    >>> chain = FactorGraph(visible={"v": Bernoulli(8)}, latent={"h": Bernoulli(6)},
    ...                     factors=[Bias("v"), Bias("h"), Linear("v", "h", forward=windows, shape=(3,))])
    >>> chain.init(jax.random.key(0))["v:h"].shape
    (3,)
    """

    shape: tuple[int, ...] | None

    advice = "; forward must be affine in the statistics that it is given: no activation, no product of them"

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
        if not callable(forward):
            raise DeclarationError(f"Linear({first!r}, {second!r}): forward is a function, not {forward!r}")
        if shape is not None and init is not None:
            raise DeclarationError(
                f"Linear({first!r}, {second!r}): give shape, which leaves the values to graph.init's scheme, "
                "or init, which keeps them; not both"
            )
        if shape is not None and not _is_shape(shape):
            raise DeclarationError(
                f"Linear({first!r}, {second!r}): shape is a tuple of positive ints, not {shape!r}"
            )
        super().__init__(first, second, energy=_InnerProduct((first, second), forward), init=init, name=name)
        object.__setattr__(self, "shape", None if shape is None else tuple(shape))

    @property
    def role(self) -> str | None:
        """Weights are a scheme's; params with initial values of their own are not."""
        return None if self.shape is None else "weight"

    def evaluate(self, params: Params, *statistics: Array, families: tuple[Family, ...]) -> Array:
        return self.energy(params, *map(lambda f, t: f.interaction(t), families, statistics))

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Params:
        return super().init_params(rng_key, families) if self.shape is None else jnp.zeros(self.shape)

    def row_axes(self, families: Mapping[str, Family]) -> int | None:
        return None if self.shape is None else max(0, min(1, len(self.shape) - 1))


def _is_shape(given: Any) -> bool:
    whole = lambda n: isinstance(n, int | np.integer) and n > 0
    return isinstance(given, Sequence) and not isinstance(given, str) and all(map(whole, given))
