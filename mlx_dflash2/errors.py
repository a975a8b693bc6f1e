"""The one exception of this package."""


class DFlash2Error(Exception):
    """Something the user can put right.

    The message says where, what was found, what was expected and what to do.
    """
