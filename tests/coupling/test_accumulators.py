# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Weighted sums of a function over the states of pairs.

Tests coupling/accumulators.py.
"""

from typing import Any

import numpy as np
import pytest
import zoo

import jax
import jax.numpy as jnp

from ebmpp.coupling import accumulators
from ebmpp.coupling.accumulators import Function
from ebmpp.moves.target import Target

STATE = (("v", (4,), "float32"),)


def products(x: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {"square": jnp.outer(x["v"], x["v"]), "one": jnp.ones(())}


@pytest.mark.parametrize("rows", [None, 5])
@pytest.mark.parametrize(
    "wide", [None, 1, 10**9], ids=["at once", "singly", "in parts"]
)
def test_sums_match_numpy(
    wide: int | None, rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    v = generator.normal(size=(50, 4)).astype(np.float32)
    weights = np.where(np.arange(50) % 7 == 0, 0.0, np.linspace(-1, 2, 50)).astype(
        np.float32
    )
    v[7] = np.nan  # has no weight
    jobs = np.arange(50, dtype=np.int32) * 5 % 23
    target = Target(zoo.graph("rbm"), zoo.params("rbm"))
    if wide is not None:
        monkeypatch.setattr(accumulators, "WIDE", wide)
        # eight rows at a time, and two at last
        monkeypatch.setattr(accumulators, "_MAX_VALUES", 17 * 8)

    @jax.jit
    def sums(x: Any, weights: Any, jobs: Any) -> Any:
        function = Function(products, STATE, rows)
        return function.add(target, function.init(target, 23), x, weights, jobs)

    result = jax.device_get(sums({"v": v}, weights, jobs))
    where = jobs if rows is None else jobs % rows
    expected = {"one": np.zeros(rows or 23), "square": np.zeros((rows or 23, 4, 4))}
    square = np.nan_to_num(np.einsum("ni,nj->nij", v, v)) * weights[:, None, None]
    np.add.at(expected["one"], where, weights)
    np.add.at(expected["square"], where, square)
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, rtol=1e-5, atol=1e-5)


def test_memory_does_not_grow_with_the_number_of_pairs() -> None:
    function = Function(lambda x: jnp.outer(x["v"], jnp.ones(1000)), STATE)
    target = Target(zoo.graph("rbm"), zoo.params("rbm"))
    for num in (2000, 10**6):
        blocks = function.in_blocks(num)
        assert not blocks.per_job
        (total,) = jax.tree.leaves(
            jax.eval_shape(lambda b=blocks, n=num: b.init(target, n))
        )
        assert total.shape == (accumulators.BLOCKS, 4, 1000)
        assert blocks.pairs(np.ones(num, bool)).sum() == num
    assert function.in_blocks(1000) == function
