# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Names of the leaves of a pytree."""

from typing import Any

import jax


def leaves_by_name(tree: Any, default: str) -> dict[str, Any]:
    """Return the leaves of a pytree by their paths, joined with dots.

    :param default: name of a tree that is a leaf itself.

    **Example**

    >>> leaves_by_name({"a": {"b": 1}, "c": (2, 3)}, "x"), leaves_by_name(4, "x")
    ({'a.b': 1, 'c.0': 2, 'c.1': 3}, {'x': 4})
    """
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator=".") or default: leaf for path, leaf in leaves}
