# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Numerical proof, at declaration, that a factor is what the design needs: multi-affine."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np

import jax
from jax import Array
import jax.numpy as jnp

from ebmpp.errors import DeclarationError, NotMultiAffineError
from ebmpp.factors import Factor, Params
from ebmpp.families import Family
from ebmpp.lateral import Split

_TOLERANCE = 1e-3  # relative; float32 sums over a thousand units agree to about 1e-5


def probe(
    factor: Factor,
    families: Mapping[str, Family],
    params: Params,
    splits: Mapping[str, Split] = MappingProxyType({}),
) -> None:
    """Check that the energy is affine in the statistics of each block of ``factor``, or of each of its parts.

    The gradient in one block's statistics is compared between random points that differ in this block
    alone, and the energy's change with the gradient's; a smooth function that passes is affine there
    with probability one.

    :param splits: how blocks whose units interact are split.

    :raises DeclarationError: when the energy fails, is not a scalar or not finite.
    :raises NotMultiAffineError: when it is not affine, or units of one block interact.
    """
    scope = tuple(families[b] for b in factor.blocks)
    generator = np.random.default_rng(0)
    draw = lambda f: jnp.asarray(generator.uniform(0.1, 0.9, f.statistic_shape), jnp.result_type(float))  # noqa: E731
    noisy = jax.tree.map(lambda a: a + jnp.asarray(generator.normal(size=a.shape), a.dtype), params)
    base, other = [draw(f) for f in scope], [draw(f) for f in scope]
    if not jnp.isfinite(_call(factor, scope, noisy, base)):
        noisy = params  # an energy that restricts its params (a logarithm, say) is probed at its init
    value = _call(factor, scope, noisy, base)
    if not jnp.isfinite(value):
        raise DeclarationError(f"{factor!r}: energy is {value} at its initial params")
    for i, (block, family) in enumerate(zip(factor.blocks, scope, strict=True)):
        if block in splits and any(b == block for b, _ in factor.lateral):
            _probe_parts(factor, scope, noisy, base, i, other[i], splits[block])
        else:
            _probe_block(factor, scope, noisy, base, i, other[i], (block, family))


def _call(factor: Factor, scope: tuple[Family, ...], params: Params, stats: list[Array]) -> Array:
    try:
        value = factor.evaluate(params, *stats, families=scope)
    except DeclarationError:
        raise
    except Exception as error:
        shapes = {b: s.shape for b, s in zip(factor.blocks, stats, strict=True)}
        raise DeclarationError(
            f"{factor!r}: its energy failed when called with params of shape "
            f"{jax.tree.map(jnp.shape, params)} and statistics of shape {shapes}: {error}"
        ) from error
    if jnp.shape(value) != ():
        raise DeclarationError(
            f"{factor!r}: energy returned shape {jnp.shape(value)}, expected a scalar; it is called "
            "with one state, and the library adds the batch axes"
        )
    return value


def _probe_block(
    factor: Factor,
    scope: tuple[Family, ...],
    params: Params,
    base: list[Array],
    i: int,
    moved: Array,
    named: tuple[str, Family],
) -> None:
    at = lambda t: factor.evaluate(params, *base[:i], t, *base[i + 1 :], families=scope)  # noqa: E731
    value_here, here = jax.value_and_grad(at)(base[i])
    value_there, there = jax.value_and_grad(at)(moved)
    scale = jnp.abs(here).max() + jnp.abs(there).max() + jnp.abs(value_here) / moved.size + 1e-6
    curved = jnp.abs(here - there).max() > _TOLERANCE * scale
    step = moved - base[i]
    predicted, size = jnp.vdot(here, step), jnp.vdot(jnp.abs(here), jnp.abs(step))
    size = size + jnp.abs(value_here) + jnp.abs(value_there) + 1e-6
    jumps = jnp.abs(value_there - value_here - predicted) > _TOLERANCE * size
    if not (curved or jumps):
        return
    block, family = named
    if curved and not jumps_alone(at, base[i], moved, family):
        raise NotMultiAffineError(
            f"{factor!r}: units of block {block!r} interact with one another, so they cannot be drawn "
            "together; say which do (Factor(..., lateral=...) or Pairwise), or split the block"
            + factor.advice
        )
    raise NotMultiAffineError(
        f"{factor!r}: its energy is not affine in the sufficient statistics of block {block!r} "
        f"({family!r}); accepted is an energy in which each unit's statistics enter linearly, the "
        "other units held fixed (products of different blocks' statistics are fine; for x**2 use "
        "Gaussian(..., variance='learned'), whose statistics are x and x**2)" + factor.advice
    )


def _probe_parts(
    factor: Factor,
    scope: tuple[Family, ...],
    params: Params,
    base: list[Array],
    i: int,
    moved: Array,
    split: Split,
) -> None:
    """The same for each part: its units' gradients must not change when all of its units are moved."""
    if factor.local(dict(zip(factor.blocks, scope, strict=True)), split) is not None:
        return  # affine by its form
    family = split.family
    at = lambda t: factor.evaluate(params, *base[:i], t, *base[i + 1 :], families=scope)  # noqa: E731
    colors = jnp.asarray(split.colors).reshape(*family.shape, *(1,) * len(family.stat_shape))
    value, here = jax.value_and_grad(at)(base[i])

    def change(part: Array) -> tuple[Array, Array]:
        inside = colors == part
        step = jnp.where(inside, moved - base[i], 0)
        value_there, there = jax.value_and_grad(at)(base[i] + step)
        curved = jnp.where(inside, jnp.abs(there - here), 0).max()
        return curved, jnp.abs(value_there - value - jnp.vdot(here, step))

    curved, jumps = jax.lax.map(change, jnp.arange(split.num_parts))
    scale = jnp.abs(here).max() + jnp.abs(value) / moved.size + 1e-6
    size = jnp.vdot(jnp.abs(here), jnp.abs(moved - base[i])) + jnp.abs(value) + 1e-6
    wrong = (curved > _TOLERANCE * scale) | (jumps > _TOLERANCE * size)
    if bool(wrong.any()):
        raise NotMultiAffineError(
            f"{factor!r}: its energy is not affine in the statistics of units of block {split.block!r} "
            f"({family!r}) that its lateral pairs say do not interact; name every pair of units of this "
            "block whose product is in the energy, and let each unit's statistics enter linearly, the others "
            "held fixed"
        )


def jumps_alone(at, here: Array, there: Array, family: Family) -> bool:  # noqa: ANN001
    """Whether moving one unit's statistics changes that same unit's own gradient."""
    per_unit = max(1, int(np.prod(family.stat_shape)))
    flat, moved = here.reshape(-1, per_unit), there.reshape(-1, per_unit)
    gradient = lambda t: jax.grad(at)(t.reshape(here.shape)).reshape(-1, per_unit)  # noqa: E731
    before = gradient(flat)
    for unit in range(min(len(flat), 8)):
        after = gradient(flat.at[unit].set(moved[unit]))
        if jnp.abs(after - before)[unit].max() > _TOLERANCE * (jnp.abs(before).max() + 1e-6):
            return True
    return False
