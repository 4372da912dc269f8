# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The factor of convolutional machines."""

from collections.abc import Sequence
import contextlib
import dataclasses
from functools import partial
from typing import Any

import jax
from jax import Array, lax
import jax.numpy as jnp

from ebmpp.core import checks
from ebmpp.families.family import Families, Family
from ebmpp.graph.factors.factor import Factor, Scope, is_positive_int
from ebmpp.graph.factors.linear import InnerProduct

Padding = str | int | Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class _Correlation:
    """``w * a`` for images with channels first."""

    stride: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]

    def __call__(self, filters: Array, image: Array) -> Array:
        return lax.conv_general_dilated(
            image[None], filters, self.stride, self.padding
        )[0]


@dataclasses.dataclass(frozen=True, init=False, repr=False)
class Convolution(Factor):
    """``-<w * t(a), t(b)>`` with filters ``w`` that are shared by all positions.

    The last axes of both blocks are positions, as many as ``window`` has; axes before
    them, and the statistics of a unit (the categories of a Categorical), are channels.
    The params are filters of shape ``(channels of b, channels of a, *window)``, and
    ``*`` is a cross-correlation, as in deep learning. ``Bias(b, shared=...)`` shares a
    bias over positions.

    The scheme "orthogonal" of :meth:`ebmpp.FactorGraph.init` makes the filters
    orthonormal, not the whole map. Gaussian units with learned variance take part with
    x only.

    :param first: the image block, ``a``.
    :param second: the block of feature maps, ``b``.
    :param window: extent of a filter along each axis of positions.
    :param stride: distance between windows, an int or one per axis.
    :param padding: "VALID", "SAME", a number of zeros at every border, or a pair per
        axis.
    :param name: key of its params; ``"first:second"`` by default.
    :raises DeclarationError: for an invalid window, stride or padding, or (on
        declaration of a graph) feature maps whose positions differ from the positions
        of ``b``.

    **References**

    1. Lee, Grosse, Ranganath, Ng (2009), *Convolutional deep belief networks*, section
       3.1.

    **Example**

    >>> import jax
    >>> from ebmpp import Bernoulli, Bias, Convolution, FactorGraph
    >>> machine = FactorGraph(
    ...     visible={"v": Bernoulli((28, 28))}, latent={"h": Bernoulli((32, 22, 22))},
    ...     factors=[Bias("v"), Bias("h", shared=(1, 2)), Convolution("v", "h", window=(7, 7))])
    >>> jax.tree.map(jax.numpy.shape, machine.init(jax.random.key(0)))
    {'h': (32, 1, 1), 'v': (28, 28), 'v:h': (32, 1, 7, 7)}
    """

    window: tuple[int, ...]
    stride: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]

    role = "weight"
    always_affine = True
    is_pairwise = True

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
        sizes = tuple(window) if isinstance(window, Sequence) else ()
        strides = (
            tuple(stride) if isinstance(stride, Sequence) else (stride,) * len(sizes)
        )

        def are_sizes(parsed):
            return 0 < len(parsed) == len(sizes) and all(map(is_positive_int, parsed))

        who = f"Convolution({first!r}, {second!r}):"
        expected = "positive ints, one per axis of positions"
        if not are_sizes(sizes):
            raise checks.declaration_error(f"{who} window", expected, window)
        if not are_sizes(strides):
            raise checks.declaration_error(f"{who} stride", expected, stride)
        pads = _as_padding(f"{who} padding", padding, len(sizes))
        energy = InnerProduct((first, second), _Correlation(strides, pads))
        super().__init__(first, second, energy=energy, name=name)
        for field, value in (("window", sizes), ("stride", strides), ("padding", pads)):
            object.__setattr__(self, field, value)

    def _options(self) -> list[str]:
        options = [f"window={self.window}"]
        if set(self.stride) != {1}:
            options.append(f"stride={self.stride}")
        if self.padding != "VALID":
            options.append(f"padding={self.padding!r}")
        return options

    def evaluate(self, params: Array, *statistics: Array, families: Scope) -> Array:
        return self.energy(params, *map(self._image, families, statistics))

    def init_params(self, rng_key: Array, families: Families) -> Array:
        """Return zero filters after checking that the positions of both blocks agree."""
        first, second = (self._image_shape(b, families[b]) for b in self.blocks)
        shape = (second[0], first[0], *self.window)
        correlate = _Correlation(self.stride, self.padding)
        floats = jnp.result_type(float)
        arguments = (jax.ShapeDtypeStruct(s, floats) for s in (shape, first))
        maps = jax.eval_shape(correlate, *arguments).shape
        if maps != second:
            raise checks.declaration_error(
                f"{self!r}: last axes of block {self.blocks[1]!r}",
                f"{maps[1:]} for this window",
                second[1:],
            )
        return jnp.zeros(shape)

    def row_axes(self, families: Families) -> int:
        """Return 1: a row of the weight matrix is a filter."""
        return 1

    def _image_shape(self, block: str, family: Family) -> tuple[int, ...]:
        if len(family.shape) < len(self.window):
            raise checks.declaration_error(
                f"{self!r}: block {block!r}", "of at least the axes of window", family
            )
        floats = jnp.result_type(float)
        statistics = jax.ShapeDtypeStruct(family.statistic_shape, floats)
        return jax.eval_shape(partial(self._image, family), statistics).shape

    def _image(self, family: Family, statistics: Array) -> Array:
        """Return the interacting statistics with channels first."""
        t = family.interaction(statistics)
        extra = t.ndim - len(family.shape)
        t = jnp.moveaxis(t, range(t.ndim - extra, t.ndim), range(extra))
        return t.reshape(-1, *t.shape[t.ndim - len(self.window) :])


def _as_padding(
    name: str, padding: Any, rank: int
) -> str | tuple[tuple[int, int], ...]:
    """Return padding as lax takes it."""
    if isinstance(padding, str) and padding.upper() in ("VALID", "SAME"):
        return padding.upper()
    pairs = ((padding, padding),) * rank if isinstance(padding, int) else padding
    with contextlib.suppress(TypeError, ValueError):
        result = tuple((int(a), int(b)) for a, b in pairs)
        if len(result) == rank and min(map(min, result)) >= 0:
            return result
    raise checks.declaration_error(
        name, '"VALID", "SAME", an int >= 0 or a pair of them per axis', padding
    )
