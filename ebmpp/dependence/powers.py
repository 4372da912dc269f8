# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""The powers of a site that a traced log density is a sum of.

Each value is represented by a set of exponents: ``{0, 1, 2}`` is a polynomial of degree
two in all units of the site jointly, ``log`` a logarithm of one of them, ``log1m`` one
of 1 - x. A value that is no such sum (an ``exp``, a maximum) is represented by the name
of its primitive. The result holds for all values of everything else. Where a value
selects between units and others, as ``where(t < tau, x, y)`` or ``x * (1 - z) + y * z``
of a binary z do, each element is one of them, and so still a power of one unit.
"""

from collections.abc import Mapping, Sequence
import itertools
import operator
from typing import Any, NamedTuple

import numpy as np

from jax import lax
import jax.numpy as jnp

from ebmpp.dependence.program import Equation, Program, scan_body
from ebmpp.dependence.rules import ELEMENTWISE, LINEAR, MOVING, index_operands

LOG = "log"
LOG1M = "log1m"
Powers = frozenset[Any]
#: Pairs (a, b), one of which makes each element x into a + b x; (0, 0) for any without
#: units.
Lines = frozenset[tuple[float, float]]
_SIGN_KEEPING = frozenset(
    """
    broadcast_in_dim convert_element_type copy copy_p reshape squeeze
    integer_pow mul pow rsqrt sqrt square
    """.split()
)
_CONVERSIONS = ("convert_element_type", "copy", "copy_p")
_EXPONENTS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}
_COMPARISONS = "eq ne gt ge".split()
_CLIPS = ("max", "min")
_TRUTH_KEEPING = "reduce_and reduce_or convert_element_type copy".split()
_MOST_POWERS = 64
_HIGHEST = 8
_MOST_ROUNDS = 8  # of a loop
_FREE = (0.0, 0.0)
_X = (0.0, 1.0)
_COMPLEMENT = (1.0, -1.0)
# bounds of probabilities that are no more than rounding
_LEAST = 1e-30
_MOST = 1 - 2e-7


class Facts(NamedTuple):
    """Known facts on the values of units and siblings."""

    positive: bool = False  # units are positive
    probability: bool = False  # units are between 0 and 1
    indicators: frozenset[int] = frozenset()  # slots of siblings that are 0 or 1
    one_unit: bool = False  # there is one unit, of which all elements are functions


class _Sum(NamedTuple):
    """A value as a sum of powers."""

    powers: Powers
    single: bool = True  # each element is a function of one unit
    separable: bool = True  # each element is a sum of functions of one unit each
    positive: bool = False  # known to be positive
    origin: int = -1
    """Single elements at one place of values of one origin are functions of the same unit."""
    truth: bool | None = None
    """A truth value that is the same for all values of the units, such as being in the support."""
    is_power: bool = False
    """Each element is one of the powers of one unit, times any factor."""
    lines: Lines = frozenset()
    """None where they are unknown."""


_ONE = frozenset([0.0])
_CONSTANT = _Sum(_ONE, is_power=True, lines=frozenset([_FREE]))
_TRUTH = {truth: _Sum(_ONE, truth=truth) for truth in (True, False)}


class _Operands(NamedTuple):
    """A equation with the sums that its operands are."""

    program: Program
    eqn: Equation
    sums: list[_Sum]
    depends: list[int]
    facts: Facts

    def constant(self, i: int) -> float | None:
        """Return the value of all elements of an operand, if it is one constant."""
        value = self.program.constants.get(self.eqn.inputs[i])
        values = np.unique(np.asarray(value, float)) if value is not None else ()
        return float(values[0]) if len(values) == 1 else None


def powers_of(program: Program, facts: Facts) -> tuple[Powers, bool] | str:
    """Return the powers of the units in a program's result, or a primitive that makes others.

    :return: the powers, and True if the result is a sum of functions of one unit each.
    """
    slots = program.sites.values()
    unit = _Sum(
        frozenset([1.0]), positive=facts.positive, is_power=True, lines=frozenset([_X])
    )
    facts = facts._replace(one_unit=sum(map(program.size, slots)) == 1)
    units = {slot: unit._replace(origin=slot) for slot in slots}
    value = _propagate(program, units, facts).get(program.output, _CONSTANT)
    return value if isinstance(value, str) else (value.powers, value.separable)


def _propagate(
    program: Program, units: Mapping[int, _Sum], facts: Facts
) -> dict[int, _Sum | str]:
    """Return the sums that the slots are which depend on units."""
    values: dict[int, _Sum | str] = dict(units)
    for eqn in program.equations:
        if facts.positive:
            eqn = _as_selection(program, eqn, facts.indicators)
        depends = [i for i, slot in enumerate(eqn.inputs) if slot in values]
        if not depends:
            continue
        operands = [values.get(slot, _CONSTANT) for slot in eqn.inputs]
        names = [value for value in operands if isinstance(value, str)]
        sums = [value for value in operands if isinstance(value, _Sum)]
        at = _Operands(program, eqn, sums, depends, facts)
        truth = getattr(operands[0], "truth", None)
        if eqn.name == "select_n" and truth is not None:
            results = [values.get(eqn.inputs[2 if truth else 1])]
        elif eqn.name != "scan" or names or not (results := _loop(at)):
            results = [names[0] if names else _sum_of(at)] * len(eqn.outputs)
        values |= {o: r for o, r in zip(eqn.outputs, results) if r is not None}
    return values


def _loop(at: _Operands) -> list[_Sum | None] | None:
    """Return the results of a scan if its carry is one sum in all rounds, else None."""
    params = at.eqn.params
    facts = at.facts._replace(indicators=frozenset())
    body = scan_body(at.eqn)
    slots = list(body.sites.values())
    count = params["num_carry"]
    carried = slots[params["num_consts"] :][:count]
    inputs = {slots[i]: at.sums[i]._replace(origin=slots[i]) for i in at.depends}
    for _ in range(_MOST_ROUNDS):
        values = _propagate(body, inputs, facts)
        outputs = [values.get(o) for o in body.outputs]
        sums = [value for value in outputs if not isinstance(value, str)]
        has_truths = any(value and value.truth is not None for value in sums)
        if has_truths or len(sums) < len(outputs):
            return None
        joined = dict(inputs)
        for slot, value in zip(carried, sums):
            if value:
                value = _join(inputs.get(slot, _CONSTANT), value)
                joined[slot] = value._replace(origin=slot)
        if joined == inputs:
            results = zip([*map(inputs.get, carried), *sums[count:]], at.eqn.outputs)
            return [value and value._replace(origin=o) for value, o in results]
        inputs = joined
    return None


def _join(a: _Sum, b: _Sum) -> _Sum:
    """Return a sum that is one of two."""
    return _Sum(
        a.powers | b.powers,
        a.single and b.single,
        a.separable and b.separable,
        a.positive and b.positive,
        is_power=a.is_power and b.is_power,
        lines=_union([a.lines, b.lines]),
    )


def _union(lines: Sequence[Lines]) -> Lines:
    """Return lines of which one is that of each element; none where some are unknown."""
    return frozenset[Any]().union(*lines) if all(lines) else frozenset()


def _sum_of(at: _Operands) -> _Sum | str | None:
    """Return an equation's result, or its name; None where it does not depend on the units."""
    name = at.eqn.name
    sums = at.sums
    if any(s.truth is not None for s in sums) or name in _COMPARISONS:
        return _truth(at)
    dtypes = [at.program.dtypes[at.eqn.inputs[i]] for i in at.depends]
    if not all(jnp.issubdtype(dtype, np.floating) for dtype in dtypes):
        return name
    powers = _powers(at)
    if powers is None or len(powers) > _MOST_POWERS:
        return name
    has_logs = any(isinstance(p, str) for p in powers)
    has_roots = has_logs or any(p < 0 or p % 1 for p in powers)
    if has_roots and not at.facts.positive:
        return name
    moves = name in MOVING
    dependent = [sums[i] for i in at.depends]
    origins = {s.origin for s in dependent}
    inside = name in ELEMENTWISE and len(origins) == 1
    all_single = all(s.single for s in dependent)
    single = at.facts.one_unit or (all_single and (inside or moves))
    is_scaling = len(dependent) == 1 and name in ("mul", "dot_general")
    is_linear = moves or is_scaling or name in LINEAR
    signed = sums[:1] if name == "pow" else sums
    keeps_power = moves or name in (*_SIGN_KEEPING, "div", "neg", *_CLIPS)
    is_power = len(powers) == 1 or (keeps_power and all(s.is_power for s in sums))
    return _Sum(
        powers,
        single,
        separable=single or (is_linear and all(s.separable for s in dependent)),
        positive=name in _SIGN_KEEPING and all(s.positive for s in signed),
        origin=origins.pop() if inside else at.eqn.outputs[0],
        is_power=single and is_power and not has_logs,
        lines=_lines(at),
    )


def _truth(at: _Operands) -> _Sum | str | None:
    """Return the result of a comparison or of truth values where it is known, else the name."""
    name = at.eqn.name
    truths = [s.truth for s in at.sums]
    if name in _COMPARISONS:
        outcome = _outcome(at)
        if outcome is None:
            return name
        # each element without units has the same outcome
        return None if _FREE in at.sums[0].lines else _TRUTH[outcome]
    is_truth = at.program.dtypes[at.eqn.outputs[0]] == np.bool_
    if not is_truth or any(truths[i] is None for i in at.depends):
        return name
    if name in ("or", "and"):
        # the truth value that decides, whatever the other one is
        decisive = name == "or"
        if decisive in truths:
            return _TRUTH[decisive]
        return None if None in truths else _TRUTH[not decisive]
    if name == "not":
        return _TRUTH[not truths[0]]
    keeps = name != "select_n" and name in (*_TRUTH_KEEPING, *MOVING)
    return at.sums[0] if keeps and len(set(truths)) == 1 else name


def _outcome(at: _Operands) -> bool | None:
    """Return the outcome of a comparison for all values of the units; None where there is none."""
    left, right = at.eqn.inputs
    if left == right:
        return at.eqn.name in ("eq", "ge")
    bound = at.program.constants.get(right)
    if at.depends != [0] or bound is None:
        return None
    inside = at.facts.probability and _is_probability(at.sums[0])
    if at.eqn.name in ("eq", "ne"):
        is_outside = inside and ((bound <= 0) | (bound >= 1)).all()
        return at.eqn.name == "ne" if is_outside or np.isinf(bound).all() else None
    is_positive = inside or at.sums[0].positive
    return True if is_positive and np.max(bound, initial=-np.inf) <= 0 else None


def _powers(at: _Operands) -> Powers | None:
    """Return the powers in an equation's result; None where it is no sum of powers."""
    name = at.eqn.name
    first = at.sums[0]
    sets = [s.powers for s in at.sums]
    positive = at.facts.positive
    match name:
        case "mul" | "dot_general":
            return _product(*sets)
        case "div":
            inverse = _power(at.sums[1], -1.0, positive)
            return None if inverse is None else _product(sets[0], inverse)
        case "square" | "sqrt" | "rsqrt" | "integer_pow" | "pow":
            exponent = _exponent(at)
            return None if exponent is None else _power(first, exponent, positive)
        case "log" | "log1p":
            return _logarithm(first, float(name == "log1p"))
        case "abs":  # of a power that is never negative
            keeps = first.is_power and (positive or all(p % 2 == 0 for p in sets[0]))
            return sets[0] if keeps else None
        case "max" | "min":
            return sets[at.depends[0]] if _is_rounding(at) else None
        case "triangular_solve":
            return sets[1] if at.depends == [1] else None
    values = _values(at.eqn)
    if name not in (*MOVING, *LINEAR) or not set(at.depends).issubset(values):
        return None
    return frozenset[Any]().union(*(sets[i] for i in values))


def _exponent(at: _Operands) -> float | None:
    """Return the exponent of a power; None where it is no constant."""
    if at.eqn.name == "pow":
        return at.constant(1) if at.depends == [0] else None
    return _EXPONENTS.get(at.eqn.name) or float(at.eqn.params["y"])


def _values(eqn: Equation) -> list[int]:
    """Return the positions of operands that do not say where others move to."""
    where = index_operands(eqn) if eqn.name in MOVING else ()
    return [i for i in range(len(eqn.inputs)) if i not in where]


def _logarithm(base: _Sum, offset: float) -> Powers | None:
    """Return the powers of the logarithm of a value plus an offset."""
    lines = [(a + offset, b) for a, b in base.lines if (a, b) != _FREE]

    def is_multiple(a, b):
        """Return True for a positive multiple of x or of 1 - x."""
        return a in (0, -b) and min(a, a + b) >= 0

    if lines and all(itertools.starmap(is_multiple, lines)):
        logs = {LOG1M if a else LOG for a, b in lines}
        return frozenset([0.0, *logs])
    return frozenset([0.0, LOG]) if base.is_power and not offset else None


def _lines(at: _Operands) -> Lines:
    """Return the lines of an equation's result; none where they are unknown."""
    name = at.eqn.name
    if name in (*MOVING, *_CONVERSIONS, "neg", *_CLIPS):
        values = at.depends if name in _CLIPS else _values(at.eqn)
        lines = _union([at.sums[i].lines for i in values])
        return frozenset((-a, -b) for a, b in lines) if name == "neg" else lines
    if name not in ("add", "sub", "mul") or len(at.depends) != 1:
        return frozenset()
    (i,) = at.depends
    lines = at.sums[i].lines
    other = at.eqn.inputs[1 - i]
    if name == "mul" and _is_indicator(at.program, other, at.facts.indicators):
        return lines | {_FREE} if lines else lines
    constant = at.constant(1 - i)
    if constant is None:
        return frozenset()
    apply = getattr(operator, name)

    def result_at(value):
        return apply(constant, value) if i else apply(value, constant)

    moved = {
        (result_at(a), result_at(a + b) - result_at(a)) for a, b in lines - {_FREE}
    }
    return frozenset(moved) | (lines & {_FREE})


def _is_probability(value: _Sum) -> bool:
    return bool(value.lines) and value.lines <= {_FREE, _X, _COMPLEMENT}


def _is_rounding(at: _Operands) -> bool:
    """Return True for probabilities that are kept from 0 and 1."""
    if not at.facts.probability or len(at.depends) != 1:
        return False
    (i,) = at.depends
    bound = at.constant(1 - i)
    if bound is None or not _is_probability(at.sums[i]):
        return False
    return bound <= _LEAST if at.eqn.name == "max" else bound >= _MOST


def _is_indicator(program: Program, slot: int, indicators: frozenset[int]) -> bool:
    """Return True for values that are 0 or 1."""
    if slot in indicators or program.dtypes[slot] == np.bool_:
        return True
    eqn = program.makers.get(slot)
    if eqn is None or eqn.name not in (*MOVING, *_CONVERSIONS):
        return False
    return all(_is_indicator(program, eqn.inputs[i], indicators) for i in _values(eqn))


def _as_selection(
    program: Program, eqn: Equation, indicators: frozenset[int]
) -> Equation:
    """Return ``x * (1 - z) + y * z`` as a selection where z is 0 or 1, others as they are."""
    makers = [program.makers.get(slot) for slot in eqn.inputs]
    products = [maker.inputs for maker in makers if maker and maker.name == "mul"]
    if eqn.name != "add" or len(products) < 2:
        return eqn
    for (z, x), (other, y) in itertools.product(*map(itertools.permutations, products)):
        is_binary = any(_is_indicator(program, slot, indicators) for slot in (z, other))
        if is_binary and _add_up_to(program, 1, z, other):
            return eqn._replace(primitive=lax.select_n_p, inputs=(z, y, x))
    return eqn


def _add_up_to(program: Program, total: int, a: int, b: int) -> bool:
    """Return True where a + b = 1 by their equations, or a = b if ``total`` is 0."""
    makers = [program.makers.get(slot) for slot in (a, b)]
    for maker, other in zip(makers, (b, a)):
        if maker is None:
            continue
        is_bool = program.dtypes[maker.outputs[0]] == np.bool_
        if maker.name in _CONVERSIONS and not is_bool:
            return _add_up_to(program, total, maker.inputs[0], other)
        start = program.constants.get(maker.inputs[0]) if maker.name == "sub" else None
        if np.all(np.asarray(start) == 1):
            return _add_up_to(program, 1 - total, maker.inputs[1], other)
    first, second = makers
    if first and second and first.name in MOVING and first[:2] == second[:2]:
        inputs = (*first.inputs, *second.inputs)
        return len(inputs) == 2 and _add_up_to(program, total, *inputs)
    return a == b and not total


def _product(a: Powers, b: Powers) -> Powers | None:
    powers = set()
    for p, q in itertools.product(a, b):
        has_log = isinstance(p, str) or isinstance(q, str)
        if has_log and 0.0 not in (p, q):
            return None
        powers.add((p or q) if has_log else p + q)
    return frozenset(powers)


def _power(base: _Sum, exponent: float, positive: bool) -> Powers | None:
    """Return the powers of a power; broken exponents need one power of positive units."""
    if base.is_power and (positive or exponent % 1 == 0):
        return frozenset(p * exponent for p in base.powers)
    if exponent < 0 or exponent % 1 or exponent > _HIGHEST:
        return None
    powers: Powers | None = _ONE
    for _ in range(int(exponent)):
        powers = powers and _product(powers, base.powers)
    return powers
