# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Structure of a traced function: the units that interact, and the powers that it is a sum of.

Other rooms import from the modules. There are no public names.
"""

__all__: list[str] = []
