# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""A scikit-learn transformer whose features a harmonium learns."""

from ebmpp.sklearn.transformer import HarmoniumTransformer

__all__ = ["HarmoniumTransformer"]
