"""The one exception that the command line turns into a line instead of a traceback."""


class UserError(Exception):
    """A mistake of the user: one line that names the field, the value and the fix.

    `tstar` prints it as `tstar: error: <message>` and exits with 2, without a traceback. Whatever
    else is raised is a bug and flies.
    """
