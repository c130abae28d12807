"""Errors that are the user's to mend."""


class UserError(Exception):
    """Its message names the setting, file or sample and says what to change; the command line shows the
    message alone, without a traceback, and ends with exit code 2."""

    @property
    def faults(self) -> list[str]:
        """What is wrong, a line each."""
        return str(self).splitlines()
