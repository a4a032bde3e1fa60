"""The errors a person can cause or meet, each with the exit code of the command line."""

from __future__ import annotations


class DpcflError(Exception):
    """Base of every error with a message for a person: printed without a traceback."""

    exit_code = 4
    told = False  # whether the person has read it already


class ConfigError(DpcflError):
    """Bad configuration or arguments: `problems` holds every one that was found, a sentence each."""

    exit_code = 2

    def __init__(self, problems: str | list[str]) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


class DataMissing(ConfigError):
    """A data set was not found: says where it was looked for and how to get it."""


class Refused(DpcflError):
    """Something asked for what privacy or security forbids. `code` is a short word for machines."""

    exit_code = 3

    def __init__(self, code: str, reason: str) -> None:
        self.code, self.reason = code, reason
        super().__init__(f"{code}: {reason}")


class LedgerError(Refused):
    """A privacy ledger that was edited, rolled back, or is held by another process."""


class RunFailed(DpcflError):
    """A run could not go on: quorum lost, a process over its crash limit."""

    exit_code = 4


class StopRun(Exception):
    """Raised by a callback to stop its run early; the run can be resumed."""
