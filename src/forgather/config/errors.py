"""Usage errors: an unusable configuration, option or command."""


class UsageError(Exception):
    """Unusable command, option or configuration; the program exits with code 2."""
