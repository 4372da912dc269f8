# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Proofs from an energy's traced form that it is affine in each block: sound, and without compilation."""

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
V, H = np.float32([0.2, 0.9, 0.4, 0.7]), np.float32([0.3, 0.1, 0.8])
MASK = np.array([True, False, True])


def convolution(w: jax.Array, v: jax.Array, h: jax.Array) -> jax.Array:
    windows = lax.conv_general_dilated(v[None, None], w[None, None, :2, 0], (1,), "VALID")
    return -jnp.vdot(windows.reshape(-1), h)


PROVEN = {
    "bilinear": lambda w, v, h: -v @ w @ h,
    "einsum": lambda w, v, h: -jnp.einsum("ij,i,j->", w, v, h),
    "sums": lambda w, v, h: (v.sum() - v.mean() / 2) * (1 - h[0]) + h[1:].sum() + w.sum(),
    "masked": lambda w, v, h: jnp.where(MASK, h, 0).sum() * v[0],
    "concatenated": lambda w, v, h: jnp.concatenate([v[::-1], h, jnp.pad(h, 1)]) @ jnp.arange(12.0),
    "outer product": lambda w, v, h: jnp.outer(v, h).reshape(-1) @ w.reshape(-1) - w[0] @ h,
    "convolution": convolution,
    "no block": lambda w, v, h: w.sum(),
    "jitted": jax.jit(lambda w, v, h: v @ w @ h),
}


@jax.custom_jvp
def custom_gradient(x: jax.Array) -> jax.Array:
    return x


custom_gradient.defjvp(lambda primals, tangents: (primals[0], 2 * tangents[0]))

NOT_PROVEN = {
    "square": lambda w, v, h: (v * v).sum(),
    "units of one block": lambda w, v, h: v[0] * v[1] * h[0],
    "product of sums": lambda w, v, h: (v.sum() + h.sum()) * h[0],
    "comparison": lambda w, v, h: jnp.where(v > 0.5, w[:, 0], 0).sum(),
    "integer": lambda w, v, h: v.astype(jnp.int32).sum() * h[0],
    "bfloat16": lambda w, v, h: v.astype(jnp.bfloat16).astype(jnp.float32).sum() * h[0],
    "division by a unit": lambda w, v, h: h[0] / v[0],
    "division by zero": lambda w, v, h: h[0] / 0.0,
    "infinite constant": lambda w, v, h: h[0] + jnp.inf,
    "nan constant": lambda w, v, h: h @ np.array([1.0, np.nan, 0.0], np.float32),
    "stopped gradient": lambda w, v, h: lax.stop_gradient(v).sum() * h[0],
    "custom gradient": lambda w, v, h: custom_gradient(v).sum(),
    "jitted square": lambda w, v, h: jax.jit(lambda a: a @ a)(v),
    "numpy": lambda w, v, h: np.asarray(v).sum(),
}


@pytest.mark.parametrize("energy", PROVEN.values(), ids=PROVEN)
def test_proven_energies_are_affine_in_each_block(energy: Callable[..., Any]) -> None:
    assert is_multi_affine(energy, W, [V, H])
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (V, H)]
    assert is_multi_affine(energy, W, shapes)
    curvature = jax.jit(lambda *args: [jax.hessian(energy, block)(*args) for block in (1, 2)])
    for curved in curvature(W, V, H):
        np.testing.assert_array_equal(curved, 0)


@pytest.mark.parametrize("energy", NOT_PROVEN.values(), ids=NOT_PROVEN)
def test_other_energies_are_not_proven(energy: Callable[..., Any]) -> None:
    assert not is_multi_affine(energy, W, [V, H])


def test_nothing_is_proven_at_params_that_are_not_finite() -> None:
    assert not is_multi_affine(PROVEN["bilinear"], np.full((4, 3), np.inf, np.float32), [V, H])


def test_usual_models_are_declared_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_measure", lambda *args: pytest.fail("compiled"))
    layered(v=Bernoulli((5, 11)), h=Bernoulli(13), g=Categorical((17,), 3))  # shapes of no other test
