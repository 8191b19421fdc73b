"""The one exception that users are meant to see."""


class UserError(Exception):
    """A mistake the user can mend. The message is one line: what went wrong, where, how to mend it."""
