# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Which powers of a site a traced log density is a sum of.

From the inputs on, every value is told as a set of exponents: ``{0, 1, 2}`` is a polynomial of degree two
in all units of the site together, ``log`` a logarithm of one of them. What is no such sum (an ``exp``, a
maximum, a choice that looks at the site) is told by the name of the primitive. The answer holds whatever the
values of everything else are: nothing is probed.
"""

from collections.abc import Callable, Mapping
import itertools
import math
from typing import Any, NamedTuple

import numpy as np

import jax.numpy as jnp

from ebmpp.traced.dependence.program import Program, Step
from ebmpp.traced.dependence.rules import MOVING

LOG = "log"
Powers = frozenset[Any]
_LINEAR = frozenset(
    "add add_any convert_element_type copy copy_p cumsum name neg reduce_sum reduce_precision sub".split()
)
_ELEMENTWISE = frozenset(
    "abs add add_any convert_element_type copy copy_p div integer_pow log mul name neg pow reduce_precision "
    "rsqrt sqrt square sub".split()
)

_SIGN_KEEPING = frozenset(
    "broadcast_in_dim convert_element_type copy copy_p integer_pow mul pow reshape rsqrt sqrt squeeze "
    "square".split()
)
_COMPARISONS = ("eq", "ne", "gt", "ge")
#: The truth value that decides, whatever the other one is.
_DECIDED = {"or": True, "and": False}
_KEEPING_TRUTH = ("reduce_and", "reduce_or", "convert_element_type", "copy")
_MANY = 64  # different powers, beyond which nobody needs more
_HIGHEST = 8


def powers_of(program: Program, positive: bool) -> tuple[Powers, bool] | str:
    """The powers of the program's own units in its result; or the name of the primitive that makes others.

    :param positive: whether the units are positive numbers, so that they have roots and logarithms.
    :return: the powers, and whether the result is a sum of functions of one unit each.

    **Example**

    >>> import jax.numpy as jnp
    >>> from ebmpp.traced.dependence.program import Program
    >>> normal = lambda own, others, _: -(((3.0 - own["x"]) / others["s"]) ** 2).sum()
    >>> made = Program(normal, {"x": jnp.zeros(4)}, {"s": jnp.ones(())}, [])
    >>> powers, apart = powers_of(made, positive=False)
    >>> sorted(powers), apart
    ([0.0, 1.0, 2.0], True)
    >>> powers_of(Program(lambda own, *_: jnp.exp(own["x"]), {"x": jnp.zeros(())}, {}, []), positive=False)
    'exp'
    """
    own = program.own.values()
    single = lambda slot: _Sum(frozenset([1.0]), True, True, positive, slot)
    found: dict[int, _Sum | str] = {slot: single(slot) for slot in own}
    few = sum(math.prod(program.shapes[slot]) for slot in own) == 1
    for step in program.steps:
        if any(i in found for i in step.inputs):
            made = _of_step(program, step, found, positive)
            if made is None:
                continue
            if few and not isinstance(made, str):
                made = made._replace(single=True, apart=True, origin=0)
            found |= dict.fromkeys(step.outputs, made)
    made = found.get(program.output, _CONSTANT)
    return made if isinstance(made, str) else (made.powers, made.apart)


class _Sum(NamedTuple):
    """What a value is a sum of."""

    powers: Powers
    single: bool = True
    """Whether each element is a function of one unit."""
    apart: bool = True
    """Whether each element is a sum of functions of one unit each."""
    positive: bool = False
    """Whether it is known to be so."""
    origin: int | None = None
    """Elements at one place of values of one origin are of the same unit."""
    truth: bool | None = None
    """Of a truth value that is the same for all values of the units: that one, as of being in the support."""


class _At(NamedTuple):
    """A step, and what its operands are."""

    program: Program
    step: Step
    sums: list[_Sum]
    depends: list[int]
    positive: bool

    @property
    def sets(self) -> list[Powers]:
        """The operands' powers."""
        return [s.powers for s in self.sums]


_CONSTANT = _Sum(frozenset([0.0]))
_TRUTH = {truth: _Sum(frozenset([0.0]), truth=truth) for truth in (True, False)}


def _of_step(
    program: Program, step: Step, found: Mapping[int, _Sum | str], positive: bool
) -> _Sum | str | None:
    """What a step makes, or why it is none; None where it does not depend on the units after all."""
    sums: list[_Sum] = []
    for slot in step.inputs:
        value = found.get(slot, _CONSTANT)
        if isinstance(value, str):
            return value
        sums.append(value)
    depends = [i for i, slot in enumerate(step.inputs) if slot in found]
    at = _At(program, step, sums, depends, positive)
    if any(s.truth is not None for s in sums) or step.name in _COMPARISONS:
        return _truth(at)
    if not all(jnp.issubdtype(program.dtypes[step.inputs[i]], np.floating) for i in depends):
        return step.name
    made = _RULES.get(step.name, _other)(at)
    if made is None or len(made) > _MANY or (not positive and any(p == LOG or p < 0 or p % 1 for p in made)):
        return step.name
    own = [sums[i] for i in depends]
    origins = {s.origin for s in own}
    moves, linear = (
        step.name in MOVING,
        step.name in _LINEAR or len(own) == 1 and step.name in ("mul", "dot_general"),
    )
    inside = step.name in _ELEMENTWISE and len(origins) == 1 and None not in origins
    single = all(s.single for s in own) and (inside or moves)
    apart = single or ((moves or linear) and all(s.apart for s in own))
    origin = next(iter(origins)) if inside else step.outputs[0]
    every = all(s.positive for s in (sums[:1] if step.name == "pow" else sums))
    return _Sum(made, single, apart, step.name in _SIGN_KEEPING and every, origin if single else None)


def _truth(at: _At) -> _Sum | str | None:
    """Of a comparison whose outcome is known, and of what is done with such; or the step's name."""
    name, known = at.step.name, [s.truth for s in at.sums]
    if name in _COMPARISONS:
        holds = _compared(at)
        return name if holds is None else _TRUTH[holds]
    if name == "select_n" and at.depends[0] == 0 and known[0] is not None and known[1:] == [None, None]:
        return at.sums[2 if known[0] else 1]
    if at.program.dtypes[at.step.outputs[0]] != np.bool_ or any(known[i] is None for i in at.depends):
        return name
    if name in _DECIDED:
        if _DECIDED[name] in known:
            return _TRUTH[_DECIDED[name]]
        return None if None in known else _TRUTH[not _DECIDED[name]]
    if name == "not":
        return _TRUTH[not known[0]]
    same = name in (*_KEEPING_TRUTH, *MOVING) and name != "select_n" and len(set(known)) == 1
    return at.sums[0] if same else name


def _compared(at: _At) -> bool | None:
    """The outcome for all values of the units, which are numbers; None where there is no such."""
    left, right = at.step.inputs
    if left == right:
        return at.step.name in ("eq", "ge")
    bound = at.program.constants.get(right)
    if at.depends != [0] or bound is None:
        return None
    beyond = at.step.name == "ne" and np.isinf(bound).all()
    above = at.step.name in ("gt", "ge") and at.sums[0].positive and np.max(bound, initial=-np.inf) <= 0
    return True if beyond or above else None


def _other(at: _At) -> Powers | None:
    name, where = at.step.name, range(0)
    if name in MOVING:
        where = MOVING[name](len(at.step.inputs))
    elif name not in _LINEAR:
        return None
    moved = [powers for i, powers in enumerate(at.sets) if i not in where]
    return None if set(where) & set(at.depends) else frozenset[Any]().union(*moved)


def _times(a: Powers, b: Powers) -> Powers | None:
    made = set()
    for p, q in itertools.product(a, b):
        if LOG in (p, q) and 0.0 not in (p, q):
            return None
        made.add((p or q) if LOG in (p, q) else p + q)
    return frozenset(made)


def _to_power(base: _Sum, exponent: float, positive: bool) -> Powers | None:
    """A sum has whole powers only; a single power all, but of negative numbers the whole ones."""
    single = len(base.powers) == 1 and LOG not in base.powers and base.single
    if single and (positive or exponent % 1 == 0):
        return frozenset(p * exponent for p in base.powers)
    if exponent < 0 or exponent % 1 or exponent > _HIGHEST:
        return None
    made: Powers | None = _CONSTANT.powers
    for _ in range(int(exponent)):
        made = None if made is None else _times(made, base.powers)
    return made


def _quotient(at: _At) -> Powers | None:
    below = _to_power(at.sums[1], -1.0, at.positive)
    return None if below is None else _times(at.sets[0], below)


def _raised(exponent: Callable[[_At], float | None]) -> Callable[[_At], Powers | None]:
    def rule(at: _At) -> Powers | None:
        by = exponent(at)
        return None if by is None or at.depends != [0] else _to_power(at.sums[0], by, at.positive)

    return rule


def _constant_exponent(at: _At) -> float | None:
    value = at.program.constants.get(at.step.inputs[1])
    each = np.unique(np.asarray(value, float)) if value is not None else ()
    return float(each[0]) if len(each) == 1 else None


def _logarithm(at: _At) -> Powers | None:
    (of,) = at.sums
    return frozenset([0.0, LOG]) if len(of.powers) == 1 and LOG not in of.powers and of.single else None


def _size(at: _At) -> Powers | None:
    """Of a single power that is never negative, but for a constant."""
    (of,) = at.sums
    (power, *others) = of.powers
    even = power != LOG and (at.positive or power % 2 == 0)
    return of.powers if not others and even and of.single else None


_RULES: dict[str, Callable[[_At], Powers | None]] = {
    "mul": lambda at: _times(*at.sets),
    "dot_general": lambda at: _times(*at.sets),
    "div": _quotient,
    "square": _raised(lambda at: 2.0),
    "sqrt": _raised(lambda at: 0.5),
    "rsqrt": _raised(lambda at: -0.5),
    "integer_pow": _raised(lambda at: float(at.step.params["y"])),
    "pow": _raised(_constant_exponent),
    "log": _logarithm,
    "abs": _size,
    "triangular_solve": lambda at: at.sets[1] if at.depends == [1] else None,
}
