# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Programs for wide vectors, from the host and inside a caller's."""

import numpy as np
import pytest

import jax
import jax.numpy as jnp

from ebmpp.core import backend, programs


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list:
    """Options of each program that is made."""
    made, jit = [], jax.jit

    def told(fn: object, **options: object) -> object:
        made.append(options.get("compiler_options"))
        return jit(fn, **options)

    monkeypatch.setattr(jax, "jit", told)
    return made


def test_from_the_host_a_program_is_wide_and_compiled_once(traces: list) -> None:
    seen = []
    program = programs.Program(lambda x: seen.append(x) or x + 1)
    np.testing.assert_array_equal([program(jnp.arange(3.0)) for _ in range(3)], [[1, 2, 3]] * 3)
    assert len(seen) == program._cache_size() == 1
    assert {"xla_cpu_prefer_vector_width": "512"} in traces
    program.clear_cache()
    assert program._cache_size() == 0


def test_inside_a_callers_program_it_is_a_part_of_it() -> None:
    program = programs.Program(lambda x: jnp.sin(x) ** 2)
    x = np.linspace(0, 1, 7, dtype=np.float32)
    outside = program(x)
    np.testing.assert_allclose(jax.jit(lambda y: program(y))(x), outside, rtol=1e-6)
    # nothing that it is given is traced here, and yet it is in another program
    np.testing.assert_allclose(jax.jit(lambda y: y + program(x))(0 * x), outside, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(program)(x), outside, rtol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(program))(x), np.sin(2 * x), rtol=1e-6)


def test_where_it_is_not_for_us_to_say(traces: list, monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> bool:
        traces.clear()
        assert programs.Program(lambda x: 2 * x)(1.0) == 2
        return any(traces)

    assert made()
    with monkeypatch.context() as patch:
        patch.setattr(backend, "accelerated", lambda: True)
        assert not made()
    with monkeypatch.context() as patch:
        patch.setenv("XLA_FLAGS", "--xla_cpu_prefer_vector_width=256")
        assert not made()
    with monkeypatch.context() as patch:
        patch.setattr(programs, "_known", lambda *_: False)
        assert not made()


def test_an_option_that_xla_does_not_know_is_left_out() -> None:
    assert programs._known("xla_cpu_prefer_vector_width", "512")
    assert not programs._known("xla_cpu_no_such_option", False)


@pytest.mark.skipif(not programs._known(*programs._QUICK), reason="this XLA has the usual emitters alone")
def test_what_is_given_decides_whether_it_is_compiled_quick(
    traces: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_known", lambda *_: True)
    program = programs.Program(lambda x: 2 * x, quick=lambda x: len(x) > 2)
    for size in (2, 3, 2, 3):
        np.testing.assert_array_equal(program(jnp.ones(size)), np.full(size, 2))
    assert ["xla_cpu_use_fusion_emitters" in asked for asked in traces if asked] == [False, True]
    assert program._cache_size() == 2
    several = programs.compiled(statics=1, quick=lambda power, x: power == 3)(lambda power, x: x**power)
    traces.clear()
    assert [float(several(power, 2.0)) for power in (2, 3, 2)] == [4, 8, 4]
    assert ["xla_cpu_use_fusion_emitters" in asked for asked in traces if asked] == [False, True]


def test_values_may_stand_anywhere_and_what_else_tells_programs_apart() -> None:
    made: list[tuple[int, str]] = []

    def fn(x: jax.Array, power: int, y: jax.Array, name: str) -> jax.Array:
        made.append((power, name))
        return x**power - y

    several = programs.compiled(statics=(1, 3), kept=2, also=lambda x, *_: x.ndim)(fn)
    for x in (2.0, 3.0):
        assert float(several(jnp.asarray(x), 3, 1.0, "a")) == x**3 - 1
    assert made == [(3, "a")] and len(several) == 1
    assert several(jnp.full(2, 2.0), 3, 1.0, "a").tolist() == [7, 7] and len(several) == 2
    several(jnp.asarray(2.0), 2, 1.0, "b")  # two are kept: the first of all is forgotten
    assert len(several) == several._cache_size() == 2
    several(jnp.asarray(2.0), 3, 1.0, "a")
    assert made == [(3, "a"), (3, "a"), (2, "b"), (3, "a")]
    several.clear_cache()
    assert len(several) == several._cache_size() == 0


@pytest.mark.parametrize(
    ("asked", "flags", "graphs"),
    [("1", "", True), (None, "", False), ("1", "--xla_gpu_enable_command_buffer=FUSION", False)],
)
def test_loops_lie_in_cuda_graphs_where_that_is_asked_for(monkeypatch, asked, flags, graphs):
    monkeypatch.setattr(programs.backend, "accelerated", lambda: True)
    monkeypatch.setattr(programs.backend, "cuda", lambda: True)
    monkeypatch.setattr(programs, "_known", lambda *option: True)
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.delenv("EBMPP_CUDA_GRAPHS", raising=False)
    if asked is not None:
        monkeypatch.setenv("EBMPP_CUDA_GRAPHS", asked)
    names = [name for name, _ in programs._asked(quick=True)]
    assert names == (["xla_gpu_enable_command_buffer"] if graphs else [])
    monkeypatch.setattr(programs.backend, "cuda", lambda: False)
    assert programs._asked(quick=True) == ()
