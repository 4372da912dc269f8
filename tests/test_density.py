# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Density of the package's code: one thought per line.

Size is counted in tokens of code, without comments, docstrings and layout, so that
joining two lines gains nothing.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache
import io
from pathlib import Path
import tokenize

import numpy as np

PACKAGE = Path(__file__).parents[1] / "ebmpp"
FILES = [p for p in sorted(PACKAGE.rglob("*.py")) if "contrib" not in p.parts]
LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef
#: Functions of fewer code lines are dense by nature.
SHORT = 6


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def docstring_lines(path: Path) -> set[int]:
    owners = [n for n in ast.walk(parsed(path)) if isinstance(n, DOCUMENTED)]
    docstrings = [n.body[0] for n in owners if ast.get_docstring(n) is not None]
    return {i for n in docstrings for i in range(n.lineno, n.end_lineno + 1)}


@cache
def tokens_per_line(path: Path) -> Counter[int]:
    """Count the tokens that start in each line of code; a line inside of one has none."""
    counts: Counter[int] = Counter()
    docstrings = docstring_lines(path)
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type not in LAYOUT and token.start[0] not in docstrings:
            counts[token.start[0]] += 1
            counts.update(dict.fromkeys(range(token.start[0] + 1, token.end[0] + 1), 0))
    return counts


def assignments() -> Iterator[ast.Assign]:
    for path in FILES:
        yield from (n for n in ast.walk(parsed(path)) if isinstance(n, ast.Assign))


def num_code_lines() -> int:
    return sum(len(tokens_per_line(path)) for path in FILES)


def test_a_code_line_has_few_tokens() -> None:
    tokens = sum(tokens_per_line(path).total() for path in FILES)
    assert tokens <= 9.5 * num_code_lines()


def test_few_assignments_are_parallel() -> None:
    parallel = [
        n
        for n in assignments()
        if isinstance(n.targets[0], ast.Tuple) and isinstance(n.value, ast.Tuple)
    ]
    assert len(parallel) <= 3 * num_code_lines() / 1000


def test_few_lambdas_have_names() -> None:
    assert sum(isinstance(n.value, ast.Lambda) for n in assignments()) <= 60


def test_few_functions_are_dense() -> None:
    densities = {}
    for path in FILES:
        counts = tokens_per_line(path)
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.FunctionDef):
                lines = range(node.lineno, node.end_lineno + 1)
                code = [counts[i] for i in lines if i in counts]
                if len(code) >= SHORT:
                    densities[f"{path.name}:{node.lineno} {node.name}"] = np.mean(code)
    dense = [name for name, density in densities.items() if density > 18]
    assert len(dense) <= 0.02 * len(densities), dense


def test_files_have_at_most_600_lines() -> None:
    lengths = {str(p): len(p.read_text().splitlines()) for p in FILES}
    assert [path for path, length in lengths.items() if length > 600] == []
