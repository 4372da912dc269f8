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

from collections.abc import Mapping
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from jax import lax
import jax.numpy as jnp

from ebmpp.dependence.program import Equation, Program, scan_body
from ebmpp.dependence.rules import ELEMENTWISE, LINEAR, MOVING

LOG = "log"
LOG1M = "log1m"
Powers = frozenset[Any]
_SIGN_KEEPING = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p integer_pow mul pow reshape "
    "rsqrt sqrt squeeze square".split()
)
_CONVERSIONS = ("convert_element_type", "copy", "copy_p")
_EXPONENTS = {"square": 2.0, "sqrt": 0.5, "rsqrt": -0.5}
_COMPARISONS = ("eq", "ne", "gt", "ge")
_CLIPS = ("max", "min")
_TRUTH_KEEPING = ("reduce_and", "reduce_or", "convert_element_type", "copy")
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
    origin: int | None = (
        None  # elements at one place of values of one origin are of the same unit
    )
    truth: bool | None = None
    """A truth value that is the same for all values of the units, such as being in the support."""
    is_power: bool = (
        False  # each element is one of the powers of one unit, times any factor
    )
    lines: frozenset[tuple[float, float]] = frozenset()
    """Pairs (a, b), one of which makes each element x into a + b x; (0, 0) for any without units."""


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
    """Return the powers of the units in a program's result; or the name of a primitive that makes others.

    :return: the powers, and True if the result is a sum of functions of one unit each.
    """
    slots = program.sites.values()
    x = frozenset([1.0])
    units = {
        s: _Sum(x, True, True, facts.positive, s, None, True, frozenset([_X]))
        for s in slots
    }
    facts = facts._replace(
        one_unit=sum(math.prod(program.shapes[slot]) for slot in slots) == 1
    )
    value = _propagate(program, units, facts).get(program.output, _CONSTANT)
    return value if isinstance(value, str) else (value.powers, value.separable)


def _propagate(
    program: Program, units: Mapping[int, _Sum], facts: Facts
) -> dict[int, _Sum | str]:
    """Return the sums that the slots are which depend on units."""
    values: dict[int, _Sum | str] = dict(units)
    for eqn in program.equations:
        eqn = _as_selection(program, eqn, facts.indicators) if facts.positive else eqn
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
        values |= {
            o: r for o, r in zip(eqn.outputs, results, strict=True) if r is not None
        }
    return values


def _loop(at: _Operands) -> list[_Sum | None] | None:
    """Return the results of a scan, whose carry is one sum in all rounds; None where there is no such sum."""
    params = at.eqn.params
    facts = at.facts._replace(indicators=frozenset())
    body = scan_body(at.eqn)
    slots = list(body.sites.values())
    first = params["num_consts"]
    count = params["num_carry"]
    carried = slots[first : first + count]
    inputs = {slots[i]: at.sums[i] for i in at.depends}
    for _ in range(_MOST_ROUNDS):
        inputs = {slot: value._replace(origin=slot) for slot, value in inputs.items()}
        values = _propagate(body, inputs, facts)
        sums = [
            value
            for o in body.outputs
            if isinstance(value := values.get(o), _Sum | None)
        ]
        if len(sums) < len(body.outputs) or any(
            value and value.truth is not None for value in sums
        ):
            break
        pairs = [(i, value) for i, value in zip(carried, sums, strict=False) if value]
        joined = inputs | {
            i: _join(inputs.get(i, _CONSTANT), value) for i, value in pairs
        }
        if all(joined[i]._replace(origin=i) == inputs.get(i) for i in joined):
            results = zip(
                [*map(inputs.get, carried), *sums[count:]],
                at.eqn.outputs,
                strict=True,
            )
            return [value and value._replace(origin=o) for value, o in results]
        inputs = joined
    return None


def _join(a: _Sum, b: _Sum) -> _Sum:
    """Return a sum that is one of two."""
    both = [x and y for x, y in zip(a[1:4], b[1:4], strict=True)]
    lines = a.lines | b.lines if a.lines and b.lines else frozenset[Any]()
    return _Sum(
        a.powers | b.powers, *both, is_power=a.is_power and b.is_power, lines=lines
    )


def _sum_of(at: _Operands) -> _Sum | str | None:
    """Return an equation's result, or the equation's name; None where it does not depend on the units after all."""
    eqn = at.eqn
    sums = at.sums
    if any(s.truth is not None for s in sums) or eqn.name in _COMPARISONS:
        return _truth(at)
    dependent = [sums[i] for i in at.depends]
    dtypes = [at.program.dtypes[eqn.inputs[i]] for i in at.depends]
    if not all(jnp.issubdtype(dtype, np.floating) for dtype in dtypes):
        return eqn.name
    powers = _powers(at)
    has_roots = powers is not None and any(
        isinstance(p, str) or p < 0 or p % 1 for p in powers
    )
    if (
        powers is None
        or len(powers) > _MOST_POWERS
        or (has_roots and not at.facts.positive)
    ):
        return eqn.name
    origins = {s.origin for s in dependent}
    moves = eqn.name in MOVING
    is_scaling = len(dependent) == 1 and eqn.name in ("mul", "dot_general")
    inside = eqn.name in ELEMENTWISE and len(origins) == 1 and None not in origins
    single = at.facts.one_unit or (
        all(s.single for s in dependent) and (inside or moves)
    )
    linear = moves or is_scaling or eqn.name in LINEAR
    separable = single or (linear and all(s.separable for s in dependent))
    origin = (next(iter(origins)) if inside else eqn.outputs[0]) if single else None
    origin = 0 if at.facts.one_unit else origin
    signed = sums[:1] if eqn.name == "pow" else sums
    positive = eqn.name in _SIGN_KEEPING and all(s.positive for s in signed)
    keeps = moves or eqn.name in (*_SIGN_KEEPING, "div", "neg", *_CLIPS)
    is_power = single and (
        len(powers) == 1 or (keeps and all(s.is_power for s in sums))
    )
    is_power = is_power and not any(isinstance(p, str) for p in powers)
    return _Sum(powers, single, separable, positive, origin, None, is_power, _lines(at))


def _truth(at: _Operands) -> _Sum | str | None:
    """Return a comparison with a known outcome, or the result of an operation on such; or the equation's name."""
    name = at.eqn.name
    truths = [s.truth for s in at.sums]
    if name in _COMPARISONS:
        outcome = _outcome(at)
        # as is each element without units
        is_free = outcome is not None and _FREE in at.sums[0].lines
        return name if outcome is None else None if is_free else _TRUTH[outcome]
    if at.program.dtypes[at.eqn.outputs[0]] != np.bool_ or any(
        truths[i] is None for i in at.depends
    ):
        return name
    if name in ("or", "and"):
        # the truth value that decides, whatever the other one is
        decisive = name == "or"
        if decisive in truths:
            return _TRUTH[decisive]
        return None if None in truths else _TRUTH[not decisive]
    if name == "not":
        return _TRUTH[not truths[0]]
    keeps = (
        name in (*_TRUTH_KEEPING, *MOVING)
        and name != "select_n"
        and len(set(truths)) == 1
    )
    return at.sums[0] if keeps else name


def _outcome(at: _Operands) -> bool | None:
    """Return the outcome of a comparison for all values of the units; None where there is none."""
    left, right = at.eqn.inputs
    if left == right:
        return at.eqn.name in ("eq", "ge")
    bound = at.program.constants.get(right)
    if at.depends != [0] or bound is None:
        return None
    inside = at.facts.probability and _is_probability(at.sums[0])
    beyond = np.isinf(bound).all() or (inside and ((bound <= 0) | (bound >= 1)).all())
    if at.eqn.name in ("eq", "ne"):
        return at.eqn.name == "ne" if beyond else None
    above = (inside or at.sums[0].positive) and np.max(bound, initial=-np.inf) <= 0
    return True if above else None


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
            exponent = (
                at.constant(1)
                if name == "pow"
                else _EXPONENTS.get(name) or float(at.eqn.params["y"])
            )
            return (
                None
                if exponent is None or at.depends != [0]
                else _power(first, exponent, positive)
            )
        case "log" | "log1p":
            return _logarithm(first, float(name == "log1p"))
        case "abs":  # of a power that is never negative
            return (
                sets[0]
                if first.is_power and (positive or all(p % 2 == 0 for p in sets[0]))
                else None
            )
        case "max" | "min":
            return sets[at.depends[0]] if _is_rounding(at) else None
        case "triangular_solve":
            return sets[1] if at.depends == [1] else None
    values = _values(at.eqn)
    if (name not in MOVING and name not in LINEAR) or not {*values}.issuperset(
        at.depends
    ):
        return None
    return frozenset[Any]().union(*(sets[i] for i in values))


def _values(eqn: Equation) -> list[int]:
    """Return the positions of operands that do not say where others move to."""
    where = MOVING[eqn.name](len(eqn.inputs)) if eqn.name in MOVING else ()
    return [i for i in range(len(eqn.inputs)) if i not in where]


def _logarithm(base: _Sum, offset: float) -> Powers | None:
    """Return the powers of the logarithm of a value plus an offset."""
    lines = {(a + offset, b) for a, b in base.lines if (a, b) != _FREE}
    if lines and all(a in (0, -b) and a >= 0 and a + b >= 0 for a, b in lines):
        return frozenset([0.0, *(LOG1M if a else LOG for a, b in lines)])
    return frozenset([0.0, LOG]) if base.is_power and not offset else None


def _lines(at: _Operands) -> frozenset[tuple[float, float]]:
    """Return the lines of an equation's result; none where they are unknown."""
    name = at.eqn.name
    lines = [s.lines for s in at.sums]
    if name in MOVING or name in (*_CONVERSIONS, "neg", *_CLIPS):
        values = [lines[i] for i in (at.depends if name in _CLIPS else _values(at.eqn))]
        joined = frozenset[Any]().union(*values) if all(values) else frozenset[Any]()
        return frozenset((-a, -b) for a, b in joined) if name == "neg" else joined
    if name not in ("add", "sub", "mul") or len(at.depends) != 1:
        return frozenset()
    i = at.depends[0]
    if name == "mul" and _is_indicator(
        at.program, at.eqn.inputs[1 - i], at.facts.indicators
    ):
        return lines[i] | {_FREE} if lines[i] else lines[i]
    if (c := at.constant(1 - i)) is None:
        return frozenset()
    scale = c if name == "mul" else -1.0 if name == "sub" and i else 1.0
    shift = 0.0 if name == "mul" else -c if name == "sub" and not i else c

    def moved(line):
        return line if line == _FREE else (shift + scale * line[0], scale * line[1])

    return frozenset(map(moved, lines[i]))


def _is_probability(value: _Sum) -> bool:
    return bool(value.lines) and value.lines <= {_FREE, _X, _COMPLEMENT}


def _is_rounding(at: _Operands) -> bool:
    """Return True for probabilities that are kept from 0 and 1."""
    if (
        not at.facts.probability
        or len(at.depends) != 1
        or not _is_probability(at.sums[at.depends[0]])
    ):
        return False
    bound = at.constant(1 - at.depends[0])
    return bound is not None and (
        bound <= _LEAST if at.eqn.name == "max" else bound >= _MOST
    )


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
    """Return ``x * (1 - z) + y * z`` as a selection where z is 0 or 1; other equations as they are."""
    makers = [program.makers.get(slot) for slot in eqn.inputs]
    if eqn.name == "add" and all(maker and maker.name == "mul" for maker in makers):
        (a, x), (b, y) = (maker.inputs for maker in makers if maker)
        for (z, value), (other, last) in itertools.product(
            ((a, x), (x, a)), ((b, y), (y, b))
        ):
            is_binary = any(
                _is_indicator(program, slot, indicators) for slot in (z, other)
            )
            if is_binary and _add_up_to(program, 1, z, other):
                return eqn._replace(primitive=lax.select_n_p, inputs=(z, last, value))
    return eqn


def _add_up_to(program: Program, total: int, a: int, b: int) -> bool:
    """Return True where a + b = 1 by the equations that compute them, or a = b if ``total`` is 0."""
    first, second = (program.makers.get(slot) for slot in (a, b))
    for eqn, other in ((first, b), (second, a)):
        if (
            eqn
            and eqn.name in _CONVERSIONS
            and program.dtypes[eqn.outputs[0]] != np.bool_
        ):
            return _add_up_to(program, total, eqn.inputs[0], other)
        if (
            eqn
            and eqn.name == "sub"
            and np.all(np.asarray(program.constants.get(eqn.inputs[0])) == 1)
        ):
            return _add_up_to(program, 1 - total, eqn.inputs[1], other)
    if (
        first
        and second
        and len(first.inputs) == 1
        and first.name in MOVING
        and first[:2] == second[:2]
    ):
        return _add_up_to(program, total, first.inputs[0], second.inputs[0])
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
    """Return the powers of a power: any of one power of positive units, else only whole exponents."""
    if base.is_power and (positive or exponent % 1 == 0):
        return frozenset(p * exponent for p in base.powers)
    if exponent < 0 or exponent % 1 or exponent > _HIGHEST:
        return None
    powers: Powers | None = _ONE
    for _ in range(int(exponent)):
        powers = None if powers is None else _product(powers, base.powers)
    return powers
