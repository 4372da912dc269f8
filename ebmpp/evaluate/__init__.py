# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""How good a model is: exact sums where they are feasible, estimates where they are not."""
