# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Moves of units of any energy, proposed from gradients of it and accepted by its values."""

from ebmpp.moves.gradients.hamiltonian import Hamiltonian
from ebmpp.moves.gradients.informed import Informed, informed_sweep

__all__ = ["Hamiltonian", "Informed", "informed_sweep"]
