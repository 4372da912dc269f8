# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which units interact: primitive by primitive against mixed differences over all states."""

from collections.abc import Callable
import itertools
from typing import Any

from hypothesis import given, settings, strategies as st
import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp.ppl.dependence import Program, Terms, UnitSets

N = 6
CHAIN = {(i, i + 1) for i in range(N - 1)}
RING = CHAIN | {(0, N - 1)}
ALL = set(itertools.combinations(range(N), 2))
ADJACENT = np.diag(np.ones(N - 1), 1) + np.diag(np.ones(N - 1), -1)
INDEX = np.array([3, 0, 5])
ROWS = np.arange(12.0).reshape(2, 6)
TABLE = np.sin(np.arange(16.0)).reshape(4, 4)


def running(z: Any) -> Any:
    """Pairs of neighbours, by a scan that carries the last unit."""
    return jax.lax.scan(lambda last, new: (new, jnp.exp(last * new)), 0.0, z)[1].sum()


def accumulating(z: Any) -> Any:
    """A scan whose carry reads ever more."""
    return jax.lax.scan(lambda total, new: (total + new, jnp.exp(total * new)), 0.0, z)[1].sum()


def backward(z: Any) -> Any:
    """Pairs of neighbours from the end, picked by a counter."""

    def one(carry: Any, _: Any) -> Any:
        i, last = carry
        return (i - 1, z[i]), jnp.cos(last + z[i])

    return jax.lax.scan(one, (N - 1, 0.0), None, N)[1].sum()


#: A function of units in {0, 1}, as floats, and which of them interact.
FUNCTIONS: dict[str, tuple[Callable, set]] = {
    "sum": (lambda z: 2 * z.sum() - z.mean(), set()),
    "elementwise": (lambda z: (jnp.exp(z) * jnp.arange(6.0) + jnp.maximum(z, 0.3)).sum(), set()),
    "square": (lambda z: (z * z).sum(), set()),
    "slices": (lambda z: (z[1:] * z[:-1]).sum(), CHAIN),
    "roll": (lambda z: jnp.cos(z + jnp.roll(z, 1)).sum(), RING),
    "strides": (lambda z: jnp.exp(z[::2] + z[1::2]).sum(), {(0, 1), (2, 3), (4, 5)}),
    "reverse": (lambda z: jnp.exp(z * z[::-1]).sum(), {(0, 5), (1, 4), (2, 3)}),
    "flip and split": (
        lambda z: jnp.exp(jnp.split(z, 2)[0] * jnp.split(z, 2)[1]).sum(),
        {(0, 3), (1, 4), (2, 5)},
    ),
    "pad": (lambda z: jnp.exp(jnp.pad(z, (1, 0)) * jnp.pad(z, (0, 1), constant_values=2.0)).sum(), CHAIN),
    "reshape and transpose": (
        lambda z: jnp.exp(z.reshape(2, 3) * z.reshape(3, 2).T).sum(),
        {(1, 2), (2, 4), (1, 3), (3, 4)},
    ),
    "reduce": (lambda z: jnp.exp(z.reshape(3, 2).sum(1)).sum(), {(0, 1), (2, 3), (4, 5)}),
    "maximum along": (lambda z: z.reshape(3, 2).max(1).sum(), {(0, 1), (2, 3), (4, 5)}),
    "stack": (lambda z: jax.nn.logsumexp(jnp.stack([z[:3], z[3:]]), 0).sum(), {(0, 3), (1, 4), (2, 5)}),
    "gather": (lambda z: jnp.exp(z[INDEX] * z[INDEX - 1]).sum(), {(2, 3), (0, 5), (4, 5)}),
    "take": (
        lambda z: jnp.exp(jnp.take(z, INDEX, mode="fill", fill_value=0.0) + z[:3]).sum(),
        {(0, 3), (0, 1), (2, 5)},
    ),
    "set": (lambda z: jnp.exp(z[:3].at[1].set(0.5) * z[3:]).sum(), {(0, 3), (2, 5)}),
    "segments": (
        lambda z: jnp.exp(jax.ops.segment_sum(z, np.array([0, 1, 2, 0, 1, 0]), 3)).sum(),
        {(0, 3), (0, 5), (3, 5), (1, 4)},
    ),
    "known zeros": (lambda z: z @ ADJACENT @ z, CHAIN),
    "zeros times what is not known": (lambda z: z @ (jnp.exp(z[:1].sum() * 0 + 0.5) * ADJACENT) @ z, CHAIN),
    "masked": (lambda z: (jnp.outer(z, z) * np.triu(ADJACENT)).sum(), CHAIN),
    "regression": (lambda z: (jnp.asarray(ROWS @ np.eye(6)) @ z - 1.0) @ (jnp.asarray(ROWS) @ z), ALL),
    "dummies": (lambda z: jnp.exp(np.kron(np.eye(3), np.ones((1, 2))) @ z).sum(), {(0, 1), (2, 3), (4, 5)}),
    "cumulative": (
        lambda z: jnp.exp(jnp.cumsum(z.reshape(2, 3), 1)).sum(),
        {(0, 1), (0, 2), (1, 2), (3, 4), (3, 5), (4, 5)},
    ),
    "linear cumulative": (lambda z: jnp.cumsum(z).sum(), set()),
    "where": (lambda z: jnp.where(z[1:] > 0, z[:-1], 0.0).sum(), CHAIN),
    "lookup": (lambda z: jnp.asarray(TABLE)[z[1:].astype(int), z[:-1].astype(int)].sum(), CHAIN),
    "lookup in rows": (
        lambda z: jnp.take_along_axis(
            jnp.asarray(TABLE)[z[:-1].astype(int)], z[1:, None].astype(int), 1
        ).sum(),
        CHAIN,
    ),
    "convolution": (lambda z: (jnp.convolve(z, jnp.array([1.0, 0, 1]), "same") * z).sum(), CHAIN),
    "scan": (running, CHAIN),
    "a scan with a counter": (backward, CHAIN),
    "a scan that accumulates": (accumulating, ALL),
    "jit and custom derivatives": (lambda z: jax.jit(jax.nn.relu)(z[1:] - z[:-1]).sum(), CHAIN),
    "products of three": (
        lambda z: (z[2:] * z[1:-1] * z[:-2]).sum(),
        CHAIN | {(i, i + 2) for i in range(N - 2)},
    ),
    "a mean in every element": (lambda z: ((z - z.mean()) ** 2).sum(), ALL),
    "whole numbers": (lambda z: (z.astype(int)[1:] * z.astype(int)[:-1]).sum() * 0.5, CHAIN),
    "equal neighbours": (lambda z: (z[1:] == z[:-1]).sum() * 0.5, CHAIN),
    "numbers that wrap": (lambda z: (z.astype(jnp.int8) * jnp.int8(100)).sum(dtype=jnp.int8) * 0.5, ALL),
    "division that rounds": (lambda z: (z.astype(int).sum() // 2) * 0.5, ALL),
    "rounding": (lambda z: jnp.floor(z.sum() / 2), ALL),
    "sorting": (lambda z: (jnp.sort(z) * jnp.arange(6.0)).sum(), ALL),
    "a loop": (lambda z: jax.lax.fori_loop(0, N, lambda i, a: a + z[i] * z[i - 1], 0.0), RING),
    "a loop until": (lambda z: jax.lax.while_loop(lambda a: a < z.sum(), lambda a: a + 1.0, 0.0), ALL),
    "a branch": (lambda z: jax.lax.cond(z[0] > 0, lambda: z[1] * 2, lambda: z[1] * 0), {(0, 1)}),
    "nothing": (lambda z: jnp.zeros(()), set()),
}
#: Conservative on purpose: what is found may be more than what interacts.
WIDE = {"a loop", "a branch", "division that rounds"}


def terms(fn: Callable) -> Terms:
    return Terms(Program(lambda own, others, arguments: fn(own["z"]), {"z": jnp.zeros(N)}, {}, []), [])


def mixed_differences(fn: Callable) -> set[tuple[int, int]]:
    """Pairs for which f(11) - f(10) - f(01) + f(00) is not 0 somewhere."""
    states = np.array(list(itertools.product([0.0, 1.0], repeat=N)), np.float32)
    values = np.asarray(jax.jit(jax.vmap(fn))(states), float).reshape((2,) * N)
    found = set()
    for a, b in itertools.combinations(range(N), 2):
        each = np.moveaxis(values, (a, b), (0, 1))
        if np.abs(each[1, 1] - each[1, 0] - each[0, 1] + each[0, 0]).max() > 1e-4:
            found.add((a, b))
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_units_that_interact_are_found(name: str) -> None:
    fn, expected = FUNCTIONS[name]
    found = {tuple(pair) for pair in terms(fn).edges.tolist()}
    exact = mixed_differences(fn)
    assert exact <= found, "an interaction was missed"
    if name not in WIDE:
        assert found == expected, "more than expected was found"


def test_what_shows_at_other_values_only_is_found() -> None:
    fn = lambda own, others, arguments: jnp.where(others["s"] > 1e9, own["z"][1:] * own["z"][:-1], 0.0).sum()
    found = Terms(Program(fn, {"z": jnp.zeros(N)}, {"s": jnp.zeros(())}, []), [])
    assert {tuple(pair) for pair in found.edges.tolist()} == CHAIN


def test_zeros_of_arguments_are_relied_upon_and_masks_are_not() -> None:
    product = lambda own, others, arguments: own["z"] @ (others["s"] * arguments[0]) @ own["z"]
    found = Terms(Program(product, {"z": jnp.zeros(N)}, {"s": jnp.zeros(())}, [ADJACENT]), [ADJACENT])
    assert {tuple(pair) for pair in found.edges.tolist()} == CHAIN
    assert found.relied == {0}
    masked = lambda own, others, arguments: (own["z"][1:] * own["z"][:-1] * arguments[0]).sum()
    found = Terms(Program(masked, {"z": jnp.zeros(N)}, {}, [np.zeros(N - 1)]), [np.zeros(N - 1)])
    assert {tuple(pair) for pair in found.edges.tolist()} == CHAIN
    assert not found.relied


def test_a_lookup_at_places_that_are_not_known_reads_all() -> None:
    fn = lambda own, others, arguments: jnp.exp(own["z"][others["i"]] * own["z"][:2]).sum()
    found = Terms(Program(fn, {"z": jnp.zeros(N)}, {"i": jnp.zeros(2, int)}, []), [])
    assert len(found.edges) == len(ALL)


def test_many_units_take_no_pairwise_loop() -> None:
    size = 200_000
    fn = lambda own, others, arguments: jnp.exp(own["z"][1:] - own["z"][:-1]).sum()
    found = Terms(Program(fn, {"z": jnp.zeros(size)}, {}, []), [])
    assert len(found.edges) == size - 1
    fn = lambda own, others, arguments: ((own["z"] - own["z"].mean()) ** 2).sum()
    found = Terms(Program(fn, {"z": jnp.zeros(size)}, {}, []), [])
    assert found.edges is None and found.most_together == size


@given(st.lists(st.lists(st.sets(st.integers(0, 40)), min_size=2, max_size=2), min_size=1, max_size=20))
@settings(max_examples=50)
def test_sets_are_sets(pairs: list) -> None:
    sets = UnitSets(41)
    number = lambda s: int(sets.of_groups(np.zeros(len(s), int), np.array(sorted(s), int) + 1, 1)[0])
    a, b = (np.array([number(pair[side]) for pair in pairs]) for side in range(2))
    for made, (left, right) in zip(sets.union(a, b), pairs, strict=True):
        assert set(sets.members(np.array([made]))[1].tolist()) == left | right
        assert made == number(left | right)  # equal sets have equal numbers
