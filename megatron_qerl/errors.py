"""Errors that a user can act on.

Every message names the key, the value, the rule that the value breaks and the remedy. The command line prints it on
one line and exits with the class's ``exit_code``: 2 when the user can mend it, 1 when something failed underneath, 75
when the run was asked to stop and can go on.
"""

from __future__ import annotations


class QerlError(Exception):
    """Base of every error this package raises on purpose."""

    exit_code = 1


class UserError(QerlError):
    """The request cannot be met as written.

    Args:
        key: config key, flag or path that is wrong, as the user wrote it.
        value: the value found there.
        rule: what must hold.
        remedy: what to do about it.
    """

    exit_code = 2

    def __init__(self, key: str, value: object, rule: str, remedy: str) -> None:
        self.key, self.value, self.rule, self.remedy = key, value, rule, remedy
        super().__init__(f"{key} = {value!s}: {rule}. {remedy}.")


class ConfigError(UserError):
    """A config key is unknown, missing, or has a value that breaks a rule."""


class DataError(UserError):
    """A dataset or one of its problems cannot be used."""


class CheckpointError(UserError):
    """A model, adapter or training checkpoint cannot be used."""


class BackendUnavailableError(UserError):
    """A backend that the config names cannot run here."""


class FaultError(QerlError):
    """Something failed that the user did not ask for: a full disk, a dead process, a broken invariant.

    Args:
        what: the operation that failed, with the names needed to find it.
        rule: what should have held.
        remedy: what to try.
    """

    def __init__(self, what: str, rule: str, remedy: str) -> None:
        self.what, self.rule, self.remedy = what, rule, remedy
        super().__init__(f"{what}: {rule}. {remedy}.")


class NoiseProofError(FaultError):
    """The noise did not do what its state says it does."""


class NonFiniteError(FaultError):
    """A loss or gradient was not finite; raised before the optimizer step."""


class ParityError(FaultError):
    """The engine's log-probabilities and the trainer's differ by more than the stated bound."""


class StoppedError(FaultError):
    """The run was asked to stop, has saved its last finished step, and can be resumed (75: try again later)."""

    exit_code = 75
