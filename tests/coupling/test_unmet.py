# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Pairs that did not meet, run again.

Tests coupling/unmet.py.
"""

import re

import numpy as np
import pytest

import jax
import jax.numpy as jnp

import ebmpp
from ebmpp.core import random
from ebmpp.coupling.accumulators import EnergyGradient
from ebmpp.coupling.engine import Window, run_pairs
from ebmpp.coupling.unmet import _ends, describe_unmet
from ebmpp.moves.sweeps import resolve_moves
from ebmpp.moves.target import Target

RING = ebmpp.layered(v=ebmpp.Spin(6), h=ebmpp.Spin(6))


@pytest.mark.parametrize("lag", [1, 3])
def test_pairs_that_run_again_end_as_they_did(lag: int) -> None:
    # two modes, of energies -21.6 and -13.4
    field = {"v": 0.7 * jnp.ones(6), "h": jnp.zeros(6)}
    params = field | {"v:h": 0.4 * jnp.ones((6, 6))}
    target = Target(RING, params)
    moves = resolve_moves(RING, None, ())
    starts = jax.random.split(jax.random.key(0))
    x, y = (
        {b: jnp.where(jax.random.bernoulli(k, shape=(40, 6)), 1.0, -1.0) for b in "vh"}
        for k in starts
    )
    key = np.uint32([1, 2])
    window = Window(k=lag, m=lag, lag=lag, max_sweeps=lag + 3)
    outcome = run_pairs(target, moves, EnergyGradient(), None, x, y, key, window)
    met = np.asarray(outcome.meeting_time) >= 0
    assert 3 < met.sum() < 37
    limits = np.uint32([lag]), np.uint32([window.max_sweeps])
    keys = random.fold_in(key, np.arange(40))
    z = _ends(target, moves, x, y, keys, np.concatenate(limits))
    are_equal = np.all([np.all(v[0] == v[1], axis=-1) for v in z.values()], axis=0)
    assert (are_equal == met).all()
    text = describe_unmet(target, moves, x, y, key, window, met)
    names, *energies = re.findall(r"\[.*\]|-?\d+\.\d+|-\d+", text)
    assert "'h'" in names or "'v'" in names
    assert len(energies) == 2 and all(-22 < float(e) < 0 for e in energies)
    assert describe_unmet(target, moves, x, y, key, window, met | True) == ""
