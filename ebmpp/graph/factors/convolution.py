# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Convolutional machines: filters that are the same at every position."""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
from functools import partial
from typing import Any

import numpy as np

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.errors import DeclarationError
from ebmpp.families import Family
from ebmpp.graph.factors.factor import Factor

Padding = str | int | Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Correlation:
    """``-<w * a, b>`` for images with channels first."""

    stride: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]

    def forward(self, filters: Array, image: Array) -> Array:
        return lax.conv_general_dilated(image[None], filters, self.stride, self.padding)[0]

    def __call__(self, filters: Array, first: Array, second: Array) -> Array:
        return -jnp.vdot(self.forward(filters, first), second)


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Convolution(Factor):
    """``-<w * t(a), t(b)>``: maps of ``b`` see ``a`` through filters that are the same at every position.

    Positions are the last axes of both blocks, as many as ``window`` has; axes before them are channels, and
    so are a unit's own statistics (the categories of a Categorical). The params are filters of shape
    ``(channels of b, channels of a, *window)``, and ``*`` is the correlation that deep learning calls a
    convolution. The way back is its transpose, by autodiff. A bias that is the same at every position is
    ``Bias(b, shared=...)``.

    "orthogonal" makes the filters orthonormal, which does not make the whole map so. Gaussian units of
    learned variance take part with x alone.

    :param first: the block that is looked at, ``a``.
    :param second: the block of maps, ``b``.
    :param window: a filter's extent along each axis of positions.
    :param stride: how far a window is from the next, an int or one an axis.
    :param padding: "VALID", "SAME", a number of zeros at every border, or a pair an axis.
    :param name: the key of its params; ``"first:second"`` unless given.
    :raises DeclarationError: for a window, stride or padding that is none, or (when a graph is made of it)
        maps whose positions are not those of ``b``.

    **References**

    1. Lee, Grosse, Ranganath, Ng (2009), *Convolutional deep belief networks*, section 3.1.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, Bias, Convolution, FactorGraph
    >>> machine = FactorGraph(
    ...     visible={"v": Bernoulli((28, 28))}, latent={"h": Bernoulli((32, 22, 22))},
    ...     factors=[Bias("v"), Bias("h", shared=(1, 2)), Convolution("v", "h", window=(7, 7))])
    >>> jax.tree.map(jax.numpy.shape, machine.init(jax.random.key(0)))
    {'h': (32, 1, 1), 'v': (28, 28), 'v:h': (32, 1, 7, 7)}
    """

    energy: _Correlation
    window: tuple[int, ...]

    role = "weight"

    def __init__(
        self,
        first: str,
        second: str,
        *,
        window: Sequence[int],
        stride: int | Sequence[int] = 1,
        padding: Padding = "VALID",
        name: str | None = None,
    ) -> None:
        here = f"Convolution({first!r}, {second!r})"
        if not isinstance(window, Sequence) or not window or not _positive(window):
            raise DeclarationError(
                f"{here}: window is a tuple of positive ints, an axis of positions each, not {window!r}"
            )
        rank = len(window)
        single = isinstance(stride, int | np.integer)
        strides = [int(stride)] * rank if single else checks.sequence(f"{here}: stride", stride, "ints")
        if len(strides) != rank or not _positive(strides):
            raise DeclarationError(f"{here}: stride is a positive int or {rank} of them, not {stride!r}")
        energy = _Correlation(tuple(strides), _padding(here, padding, rank))
        super().__init__(first, second, energy=energy, name=name)
        object.__setattr__(self, "window", tuple(window))

    def __repr__(self) -> str:
        said = f", window={self.window}"
        if set(self.energy.stride) != {1}:
            said += f", stride={self.energy.stride}"
        if self.energy.padding != "VALID":
            said += f", padding={self.energy.padding!r}"
        return super().__repr__().removesuffix(")") + said + ")"

    def evaluate(self, params: Array, *statistics: Array, families: tuple[Family, ...]) -> Array:
        return self.energy(params, *map(self._image, families, statistics))

    def init_params(self, rng_key: Array, families: Mapping[str, Family]) -> Array:
        """Zero filters, once the positions are found to agree."""
        first, second = (self._image_shape(b, families[b]) for b in self.blocks)
        shape = (second[0], first[0], *self.window)
        made = jax.eval_shape(
            self.energy.forward, *(jax.ShapeDtypeStruct(s, jnp.result_type(float)) for s in (shape, first))
        ).shape
        if made != second:
            b, positions = self.blocks[1], made[1:]
            raise DeclarationError(
                f"{self!r}: maps of {self.blocks[0]!r} have positions {positions}, and block {b!r} "
                f"({families[b]!r}) has {second[1:]}; the last axes of its shape should be {positions}"
            )
        return jnp.zeros(shape)

    def row_axes(self, families: Mapping[str, Family]) -> int:
        return 1

    def _image_shape(self, block: str, family: Family) -> tuple[int, ...]:
        rank = len(self.window)
        if len(family.shape) < rank:
            raise DeclarationError(
                f"{self!r}: a window of {rank} axes needs blocks of at least {rank} axes, and block "
                f"{block!r} is {family!r}"
            )
        statistics = jax.ShapeDtypeStruct(family.statistic_shape, jnp.result_type(float))
        return jax.eval_shape(partial(self._image, family), statistics).shape

    def _image(self, family: Family, statistics: Array) -> Array:
        """The statistics that interact, channels first."""
        t = family.interaction(statistics)
        own = t.ndim - len(family.shape)
        t = jnp.moveaxis(t, range(t.ndim - own, t.ndim), range(own))
        return t.reshape(-1, *t.shape[t.ndim - len(self.window) :])


def _positive(numbers: Iterable[Any]) -> bool:
    return all(isinstance(n, int | np.integer) and n > 0 for n in numbers)


def _padding(here: str, given: Padding, rank: int) -> str | tuple[tuple[int, int], ...]:
    if isinstance(given, str) and given.upper() in ("VALID", "SAME"):
        return given.upper()
    if isinstance(given, int) and given >= 0:
        return ((given, given),) * rank
    if isinstance(given, Sequence) and not isinstance(given, str) and len(given) == rank:
        pairs = tuple(tuple(pair) if isinstance(pair, Sequence) else () for pair in given)
        if all(len(p) == 2 and all(isinstance(n, int) and n >= 0 for n in p) for p in pairs):
            return pairs
    raise DeclarationError(
        f'{here}: padding is "VALID", "SAME", an int of at least 0 or {rank} pairs of them, not {given!r}'
    )
