# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Training and transforming with custom families."""

import numpy as np
from own_families import Ordinal, Ternary
import pytest
import zoo

from ebmpp import Bernoulli, Family, fit, layered, local_search
from ebmpp.estimators import PCD


@pytest.mark.parametrize("family", [Ternary(4), Ordinal((2, 2))], ids=repr)
def test_training_with_a_custom_visible_family(family: Family) -> None:
    graph = layered(v=family, h=Bernoulli(2))
    data = np.random.default_rng(0).integers(0, 3, (40, *family.shape)).astype(np.float32)
    options = {"num_steps": 5, "batch_size": 20, "rng_key": zoo.KEY, "progress_bar": False}
    params = fit(graph, data, estimator=PCD(num_chains=20), **options).params
    graph.check(params)
    state = local_search(graph, params, rng_key=zoo.KEY).state
    assert np.asarray(family.in_support(state["v"])).all()
