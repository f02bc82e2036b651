"""The one exception for a mistake that the user can mend.

The command line prints its message as a single line and exits with status 1; anything else is a bug and keeps its traceback.
"""


class UserError(ValueError):
    """A wrong setting, file or combination. The message names what, where, its value and what is allowed, in one line."""
