# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What a declaration must be: named blocks of families, and factors over them that can be evaluated."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ebmpp import lateral
from ebmpp.core import checks
from ebmpp.errors import DeclarationError
from ebmpp.factors import Factor
from ebmpp.families import Family
from ebmpp.probe import probe


def check_blocks(visible: Mapping[str, Family], latent: Mapping[str, Family]) -> None:
    """:raises DeclarationError: for a wrong name or family, a block declared twice, or none visible."""
    for role, given in (("visible", visible), ("latent", latent)):
        if not isinstance(given, Mapping):
            raise DeclarationError(f"{role} is a dict of families by name, not {checks.tell(given)}")
    for name, family in (*visible.items(), *latent.items()):
        checks.block_name(name)
        if not isinstance(family, Family):
            raise DeclarationError(f"block {name!r} needs a family such as Bernoulli(10), not {family!r}")
    both = sorted(set(visible) & set(latent))
    if both:
        raise DeclarationError(f"blocks {both} are declared visible and latent; choose one")
    if not visible:
        raise DeclarationError("a FactorGraph needs at least one visible block")


def check_factors(factors: tuple[Factor, ...], families: Mapping[str, Family]) -> None:
    """:raises DeclarationError: for what is not a factor, an unknown block, two factors of one name, or a
    block that no factor mentions.
    """
    seen: set[str] = set()
    for factor in factors:
        if not isinstance(factor, Factor):
            raise DeclarationError(f"factors holds {factor!r}, which is not a Factor")
        for block in factor.blocks:
            if block not in families:
                raise DeclarationError(
                    f"{factor!r} names block {block!r}, and the blocks are {list(families)}"
                )
        if factor.name in seen:
            raise DeclarationError(
                f"two factors are named {factor.name!r}; drop one, or give it another name=..."
            )
        seen.add(factor.name)
    alone = [b for b in families if not any(b in f.blocks for f in factors)]
    if alone:
        raise DeclarationError(f"no factor mentions block {alone[0]!r}; add Bias({alone[0]!r})")


def param_shapes(
    factors: tuple[Factor, ...], families: Mapping[str, Family], splits: Mapping[str, lateral.Split]
) -> dict[str, Any]:
    """Shapes of every factor's params, its energy evaluated once.

    :raises DeclarationError: for an energy that fails.
    :raises NotMultiAffineError: for one that is not affine in each unit's statistics.
    """
    made = {}
    with jax.ensure_compile_time_eval():  # the probe looks at values, also in a model that is traced
        for factor in factors:
            params = _first_params(factor, families)
            probe(factor, families, params, splits)
            made[factor.name] = jax.tree.map(lambda a: jax.ShapeDtypeStruct(jnp.shape(a), a.dtype), params)
    return made


def _first_params(factor: Factor, families: Mapping[str, Family]) -> Any:
    """:raises DeclarationError: for initial values that are no numbers, or that cannot be made."""
    try:
        return factor.init_params(jax.random.key(0), families)
    except (TypeError, ValueError) as error:
        if isinstance(error, DeclarationError):
            raise
        raise DeclarationError(
            f"{factor!r}: its params could not be made: {error}; init is a pytree of numbers, or a "
            "function of a jax key that makes one"
        ) from error
