# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Ctrl-C ends calls whose pairs or chains do not meet, in a process that then ends as well."""

import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.nightly

SETUP = """
import jax, networkx, numpy as np, numpyro, optax
import ebmpp

graph = ebmpp.layered(v=ebmpp.Bernoulli(6), h=ebmpp.Bernoulli(6))
w = np.full((6, 6), 20.0, np.float32)  # all units of both layers on, or all off
params = {"v:h": w, "v": -0.5 * w.sum(1), "h": -0.5 * w.sum(0)}
key = jax.random.key(0)

def unbiased_expectation():
    mean = lambda x: x["v"].mean()
    options = {"rng_key": key, "independent_starts": True, "num_pairs": 50}
    ebmpp.unbiased_expectation(graph, params, mean, **options)

def composite_expectation():
    def model():
        z = numpyro.sample("z", numpyro.distributions.Bernoulli(0.5).expand([6]).to_event(1))
        numpyro.factor("sum", -50.0 * (z.sum() - 3) ** 2)
    block = ebmpp.GibbsBlock.from_model(model, ["z"], sequential=True)
    kernel = ebmpp.ppl.CoupledComposite([block])
    options = {"rng_key": key, "independent_starts": True, "num_pairs": 50}
    ebmpp.ppl.composite_expectation(kernel, lambda x: x["z"].mean(), **options)

def perfect_sample():
    ising = ebmpp.FactorGraph.from_networkx(networkx.grid_2d_graph(12, 12), family=ebmpp.Spin)
    cold = {name: 2.0 * (":" in name) + 0 * a for name, a in ising.init(key).items()}
    options = {"method": "coupling_from_the_past", "max_sweeps": 2**30}
    ebmpp.perfect_sample(ising, cold, rng_key=key, **options)

def fit():
    options = {"params": params, "optimizer": optax.sgd(1e-6), "progress_bar": False}
    estimator = ebmpp.UCD(init="uniform", k=1, lag=1)
    ebmpp.fit(graph, np.eye(6), rng_key=key, estimator=estimator, **options)

print("started", flush=True)
"""


@pytest.mark.parametrize(
    "call", ["unbiased_expectation", "composite_expectation", "perfect_sample", "fit"]
)
def test_ctrl_c_ends_a_call_and_its_process(call: str) -> None:
    program = [sys.executable, "-c", f"{SETUP}{call}()"]
    with subprocess.Popen(
        program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert (
                process.stdout is not None and process.stdout.readline() == "started\n"
            )
            time.sleep(15)  # for the compilation
            assert process.poll() is None
            begin = time.monotonic()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert time.monotonic() - begin < 10
    assert "KeyboardInterrupt" in errors and process.returncode in (
        130,
        -signal.SIGINT,
    ), errors
