# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""What goes wrong, by name."""


class ArgumentError(ValueError, TypeError):
    """An argument of a wrong kind or out of range: a ValueError and a TypeError at once."""


class DeclarationError(ValueError):
    """A graph or factor that cannot be what it says."""


class NotMultiAffineError(DeclarationError):
    """A factor whose energy is not affine in each unit's statistics, or whose units interact."""


class StateError(ValueError):
    """A state, data set or clamped value with a wrong name, shape or value."""


class ParameterError(ValueError):
    """Parameters with a wrong name, shape or value."""


class DomainError(ParameterError):
    """Parameters under which the model does not normalise."""


class IntractableError(ValueError):
    """An exact computation that was asked for where none is feasible."""


class CheckpointError(RuntimeError):
    """Checkpoints that cannot be used: another run's, damaged, in use or in the way, or a failing disk."""


class SavedFileError(ValueError):
    """A model that cannot be saved, or a file that does not hold one that can be read."""


class UnmetError(RuntimeError):
    """Coupled pairs that had not met when they were needed."""


class TrainingError(RuntimeError):
    """Training that cannot go on; it carries the last good state.

    :param message: what happened.
    :param params: the last params that were good: finite, and seen to normalise.
    :param history: the steps before, as from :func:`ebmpp.fit`.
    :param step: the step that failed, counted from 0.
    """

    def __init__(self, message: str, params: object, history: object, step: int) -> None:
        super().__init__(message)
        self.params, self.history, self.step = params, history, step


class DivergenceError(TrainingError):
    """Params or a gradient that stopped being finite, or a pair that was unmet."""


class NormalizationError(DivergenceError, DomainError):
    """Params that were trained to where the model does not normalise.

    ``step`` is how many steps were done when that was seen.
    """


class DataError(TrainingError, StateError):
    """Data that ended in the middle of training, or turned out wrong."""


class CheckpointWriteError(TrainingError, CheckpointError):
    """A checkpoint that the disk did not take; nothing of the run is lost.

    ``params`` are those that were to be written, after ``step`` steps.
    """


def clash(a: str, b: str) -> str:
    """That blocks ``a`` and ``b`` interact, in words; or the units of one block, where they are the same."""
    return f"units of block {a!r} interact" if a == b else f"blocks {a!r} and {b!r} interact"
