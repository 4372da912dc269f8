# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proof by form: what is proven is affine, what is not affine is not proven, and nothing is compiled."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import jax
from jax import lax
import jax.numpy as jnp

from ebmpp import Bernoulli, Categorical, layered
from ebmpp.graph import probe
from ebmpp.graph.form import is_multi_affine

W = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
V, H = jnp.array([0.2, 0.9, 0.4, 0.7], jnp.float32), jnp.array([0.3, 0.1, 0.8], jnp.float32)
MASK = np.array([True, False, True])


def windows(w: jax.Array, v: jax.Array, h: jax.Array) -> jax.Array:
    made = lax.conv_general_dilated(v[None, None], w[None, None, :2, 0], (1,), "VALID")
    return -jnp.vdot(made.reshape(-1), h)


PROVEN = {
    "bilinear": lambda w, v, h: -v @ w @ h,
    "einsum": lambda w, v, h: -jnp.einsum("ij,i,j->", w, v, h),
    "sums": lambda w, v, h: (v.sum() - v.mean() / 2) * (1 - h[0]) + h[1:].sum() + w.sum(),
    "masked": lambda w, v, h: jnp.where(MASK, h, 0).sum() * v[0],
    "joined": lambda w, v, h: jnp.concatenate([v[::-1], h, jnp.pad(h, 1)]) @ jnp.arange(12.0),
    "two factors": lambda w, v, h: jnp.outer(v, h).reshape(-1) @ w.reshape(-1) - w[0] @ h,
    "a convolution": windows,
    "no block": lambda w, v, h: w.sum(),
    "a program inside": jax.jit(lambda w, v, h: v @ w @ h),
}


@jax.custom_jvp
def odd(x: jax.Array) -> jax.Array:
    return x


odd.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))

NOT_PROVEN = {
    "a square": lambda w, v, h: (v * v).sum(),
    "units of one block": lambda w, v, h: v[0] * v[1] * h[0],
    "a product of sums": lambda w, v, h: (v.sum() + h.sum()) * h[0],
    "a function": lambda w, v, h: jnp.tanh(v @ w) @ h,
    "a power": lambda w, v, h: v.sum() ** 2,
    "a branch on a unit": lambda w, v, h: jnp.where(v > 0.5, w[:, 0], 0).sum(),
    "rounded": lambda w, v, h: v.astype(jnp.int32).sum() * h[0],
    "rounded to fewer bits": lambda w, v, h: v.astype(jnp.bfloat16).astype(jnp.float32).sum() * h[0],
    "a product of fewer bits": lambda w, v, h: jnp.dot(v @ w, h, preferred_element_type=jnp.bfloat16),
    "over a unit": lambda w, v, h: h[0] / v[0],
    "over a param": lambda w, v, h: h[0] / w[0, 0],
    "over zero": lambda w, v, h: h[0] / 0.0,
    "an infinite constant": lambda w, v, h: h[0] + jnp.inf,
    "a constant that is no number": lambda w, v, h: h @ np.array([1.0, np.nan, 0.0], np.float32),
    "a gradient that is held back": lambda w, v, h: lax.stop_gradient(v).sum() * h[0],
    "a gradient of one's own": lambda w, v, h: odd(v).sum(),
    "hidden in a program": lambda w, v, h: jax.jit(lambda a: a @ a)(v),
    "no scalar": lambda w, v, h: v,
    "a list": lambda w, v, h: [v.sum()],
    "a whole number": lambda w, v, h: 3,
    "an error": lambda w, v, h: v @ h,
    "numpy": lambda w, v, h: np.asarray(v).sum(),
}


@pytest.mark.parametrize("energy", PROVEN.values(), ids=PROVEN)
def test_what_is_proven_is_affine_in_each_block(energy: Callable[..., Any]) -> None:
    assert is_multi_affine(energy, jnp.asarray(W), [V, H])
    for argument in (1, 2):
        curved = jax.hessian(energy, argument)(jnp.asarray(W), V, H)
        np.testing.assert_array_equal(curved, 0)


@pytest.mark.parametrize("energy", NOT_PROVEN.values(), ids=NOT_PROVEN)
def test_what_is_not_affine_or_not_known_is_not_proven(energy: Callable[..., Any]) -> None:
    assert not is_multi_affine(energy, jnp.asarray(W), [V, H])


def test_params_that_are_not_finite_prove_nothing() -> None:
    assert not is_multi_affine(PROVEN["bilinear"], jnp.full((4, 3), jnp.inf), [V, H])


def test_usual_machines_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes that no other test declares: what was found before is not looked at again."""
    monkeypatch.setattr(probe, "_measure", lambda *given: pytest.fail("compiled"))
    layered(v=Bernoulli((5, 11)), h=Bernoulli(13), g=Categorical((17,), 3))


def test_shapes_of_statistics_are_enough() -> None:
    each = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (V, H)]
    assert is_multi_affine(PROVEN["bilinear"], W, each)
