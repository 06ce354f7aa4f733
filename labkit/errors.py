"""The one exception that labkit raises on purpose."""


class LabkitError(ValueError):
    """Bad input: the message says what was got, what is needed and what to write instead."""
