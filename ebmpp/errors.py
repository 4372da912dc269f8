# Copyright Contributors to the ebmpp Project.
# SPDX-License-Identifier: Apache-2.0
"""Exceptions raised by ebmpp."""


class ArgumentError(ValueError, TypeError):
    """An argument of a wrong type or out of range; both a ValueError and a TypeError."""


class DeclarationError(ValueError):
    """An invalid declaration of a graph or a factor."""


class NotMultiAffineError(DeclarationError):
    """A factor whose energy is not affine in the statistics of each unit."""


class StateError(ValueError):
    """A state, data set or clamped value with a wrong name, shape or value."""


class ParameterError(ValueError):
    """Params with a wrong name, shape or value."""


class DomainError(ParameterError):
    """Params at which the model does not normalise."""


class IntractableError(ValueError):
    """An exact computation that is not feasible."""


class CheckpointError(RuntimeError):
    """Checkpoints that cannot be used: of another run, damaged or in use, or a failing disk."""


class SavedFileError(ValueError):
    """A model that cannot be saved, or a file that cannot be read."""


class UnmetError(RuntimeError):
    """Coupled pairs that had not met when they were needed."""


class TrainingError(RuntimeError):
    """Training that cannot continue, with the last good state.

    :param message: description of the error.
    :param params: the last params that were finite and known to normalise.
    :param history: history of the steps before, as from :func:`ebmpp.fit`.
    :param step: number of the failed step, from 0.
    """

    def __init__(
        self, message: str, params: object, history: object, step: int
    ) -> None:
        super().__init__(message)
        self.params = params
        self.history = history
        self.step = step

    def __reduce__(self) -> tuple:
        """Return a call and attributes that pickle restores, as in a worker's parent process."""
        return (
            type(self),
            (str(self), self.params, self.history, self.step),
            self.__dict__,
        )


class DivergenceError(TrainingError):
    """Params or a gradient that are no longer finite, or a pair that did not meet."""


class NormalizationError(DivergenceError, DomainError):
    """Training that reached params at which the model does not normalise.

    ``step`` is the number of completed steps when this was detected.
    """


class DataError(TrainingError, StateError):
    """Data that ended during training, or turned out invalid."""


class CheckpointWriteError(TrainingError, CheckpointError):
    """A checkpoint that could not be written; ``params`` are those after ``step`` steps."""


def clash(a: str, b: str) -> str:
    """Describe the interaction of two blocks, or of the units of one block if they are the same."""
    return (
        f"units of block {a!r} interact"
        if a == b
        else f"blocks {a!r} and {b!r} interact"
    )
