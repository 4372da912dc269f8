# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The powers of a site that a traced log density is a sum of.

Each value is represented by a set of exponents: ``{0, 1, 2}`` is a polynomial of degree two in all units of
the site jointly, ``log`` a logarithm of one of them. A value that is no such sum (an ``exp``, a maximum) is
represented by the name of its primitive. The result holds for all values of everything else.
"""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

import jax.numpy as jnp

from ebmpp.traced.dependence.program import Program, Step
from ebmpp.traced.dependence.rules import ELEMENTWISE, LINEAR, MOVING

LOG = "log"
Powers = frozenset[Any]
_SIGN_KEEPING = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p integer_pow mul pow reshape rsqrt sqrt squeeze "
    "square".split()
)
_COMPARISONS = ("eq", "ne", "gt", "ge")
_TRUTH_KEEPING = ("reduce_and", "reduce_or", "convert_element_type", "copy")
_MOST_POWERS = 64
_HIGHEST = 8


class _Sum(NamedTuple):
    """A value as a sum of powers."""

    powers: Powers
    single: bool = True  # each element is a function of one unit
    separable: bool = True  # each element is a sum of functions of one unit each
    positive: bool = False  # known to be positive
    origin: int | None = None  # elements at one place of values of one origin are of the same unit
    truth: bool | None = None
    """A truth value that is the same for all values of the units, such as being in the support."""


_ONE = frozenset([0.0])
_TRUTH = {truth: _Sum(_ONE, truth=truth) for truth in (True, False)}


class _Operands(NamedTuple):
    """A step with the sums that its operands are."""

    program: Program
    step: Step
    sums: list[_Sum]
    depends: list[int]
    positive: bool


def powers_of(program: Program, positive: bool) -> tuple[Powers, bool] | str:
    """Return the powers of the units in a program's result; or the name of a primitive that makes others.

    :param positive: True if units are positive numbers, which have roots and logarithms.
    :return: the powers, and True if the result is a sum of functions of one unit each.
    """
    slots = program.sites.values()
    values: dict[int, _Sum | str] = {s: _Sum(frozenset([1.0]), True, True, positive, s) for s in slots}
    is_one_unit = sum(math.prod(program.shapes[slot]) for slot in slots) == 1
    for step in program.steps:
        depends = [i for i, slot in enumerate(step.inputs) if slot in values]
        operands = [values.get(slot, _Sum(_ONE)) for slot in step.inputs]
        names = [value for value in operands if isinstance(value, str)]
        sums = [value for value in operands if isinstance(value, _Sum)]
        value = names[0] if names else _sum_of(_Operands(program, step, sums, depends, positive))
        if not depends or value is None:
            continue
        if is_one_unit and isinstance(value, _Sum):
            value = value._replace(single=True, separable=True, origin=0)
        values |= dict.fromkeys(step.outputs, value)
    value = values.get(program.output, _Sum(_ONE))
    return value if isinstance(value, str) else (value.powers, value.separable)


def _sum_of(at: _Operands) -> _Sum | str | None:
    """Return a step's result, or the step's name; None where it does not depend on the units after all."""
    step, sums = at.step, at.sums
    if not at.depends:
        return None
    if any(s.truth is not None for s in sums) or step.name in _COMPARISONS:
        return _truth(at)
    dependent, dtypes = [sums[i] for i in at.depends], [at.program.dtypes[step.inputs[i]] for i in at.depends]
    if not all(jnp.issubdtype(dtype, np.floating) for dtype in dtypes):
        return step.name
    powers = _powers(at)
    has_roots = powers is not None and any(p == LOG or p < 0 or p % 1 for p in powers)
    if powers is None or len(powers) > _MOST_POWERS or (has_roots and not at.positive):
        return step.name
    origins, moves = {s.origin for s in dependent}, step.name in MOVING
    is_scaling = len(dependent) == 1 and step.name in ("mul", "dot_general")
    inside = step.name in ELEMENTWISE and len(origins) == 1 and None not in origins
    single = all(s.single for s in dependent) and (inside or moves)
    linear = moves or is_scaling or step.name in LINEAR
    separable = single or (linear and all(s.separable for s in dependent))
    origin = (next(iter(origins)) if inside else step.outputs[0]) if single else None
    positive = step.name in _SIGN_KEEPING and all(
        s.positive for s in sums[: 1 if step.name == "pow" else None]
    )
    return _Sum(powers, single, separable, positive, origin)


def _truth(at: _Operands) -> _Sum | str | None:
    """Return a comparison with a known outcome, or the result of an operation on such; or the step's name."""
    name, truths = at.step.name, [s.truth for s in at.sums]
    if name in _COMPARISONS:
        outcome = _outcome(at)
        return name if outcome is None else _TRUTH[outcome]
    if name == "select_n" and at.depends[0] == 0 and truths[0] is not None and truths[1:] == [None, None]:
        return at.sums[2 if truths[0] else 1]
    if at.program.dtypes[at.step.outputs[0]] != np.bool_ or any(truths[i] is None for i in at.depends):
        return name
    if name in ("or", "and"):
        decisive = name == "or"  # the truth value that decides, whatever the other one is
        if decisive in truths:
            return _TRUTH[decisive]
        return None if None in truths else _TRUTH[not decisive]
    if name == "not":
        return _TRUTH[not truths[0]]
    keeps = name in (*_TRUTH_KEEPING, *MOVING) and name != "select_n" and len(set(truths)) == 1
    return at.sums[0] if keeps else name


def _outcome(at: _Operands) -> bool | None:
    """Return the outcome of a comparison for all values of the units; None where there is none."""
    left, right = at.step.inputs
    if left == right:
        return at.step.name in ("eq", "ge")
    bound = at.program.constants.get(right)
    if at.depends != [0] or bound is None:
        return None
    beyond = at.step.name == "ne" and np.isinf(bound).all()
    above = at.step.name in ("gt", "ge") and at.sums[0].positive and np.max(bound, initial=-np.inf) <= 0
    return True if beyond or above else None


def _powers(at: _Operands) -> Powers | None:
    """Return the powers in a step's result; None where it is no sum of powers."""
    name, first, sets = at.step.name, at.sums[0], [s.powers for s in at.sums]
    one_power = len(first.powers) == 1 and LOG not in first.powers and first.single
    match name:
        case "mul" | "dot_general":
            return _product(*sets)
        case "div":
            inverse = _power(at.sums[1], -1.0, at.positive)
            return None if inverse is None else _product(sets[0], inverse)
        case "square" | "sqrt" | "rsqrt" | "integer_pow" | "pow":
            exponent = _exponent(at)
            return None if exponent is None or at.depends != [0] else _power(first, exponent, at.positive)
        case "log":
            return frozenset([0.0, LOG]) if one_power else None
        case "abs":  # of a power that is never negative
            return sets[0] if one_power and (at.positive or next(iter(sets[0])) % 2 == 0) else None
        case "triangular_solve":
            return sets[1] if at.depends == [1] else None
    where = MOVING[name](len(sets)) if name in MOVING else range(0)
    if (name not in MOVING and name not in LINEAR) or set(where) & set(at.depends):
        return None
    return frozenset[Any]().union(*(powers for i, powers in enumerate(sets) if i not in where))


def _exponent(at: _Operands) -> float | None:
    name = at.step.name
    if name != "pow":
        return {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}.get(name) or float(at.step.params["y"])
    value = at.program.constants.get(at.step.inputs[1])
    values = np.unique(np.asarray(value, float)) if value is not None else ()
    return float(values[0]) if len(values) == 1 else None


def _product(a: Powers, b: Powers) -> Powers | None:
    powers = set()
    for p, q in itertools.product(a, b):
        if LOG in (p, q) and 0.0 not in (p, q):
            return None
        powers.add((p or q) if LOG in (p, q) else p + q)
    return frozenset(powers)


def _power(base: _Sum, exponent: float, positive: bool) -> Powers | None:
    """Return the powers of a power: any of one power of positive units, else only whole exponents."""
    one_power = len(base.powers) == 1 and LOG not in base.powers and base.single
    if one_power and (positive or exponent % 1 == 0):
        return frozenset(p * exponent for p in base.powers)
    if exponent < 0 or exponent % 1 or exponent > _HIGHEST:
        return None
    powers: Powers | None = _ONE
    for _ in range(int(exponent)):
        powers = None if powers is None else _product(powers, base.powers)
    return powers
