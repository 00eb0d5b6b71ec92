"""What a user can get wrong, printed without a traceback.

    BenchError            the user's mistake: bad file, bad flag, impossible request      exit code 2
    ├── ClientLimit       this machine gives the client no more files, ports or memory    exit code 2
    └── TargetError       the target cannot be reached, or is not what was declared       exit code 4

A failed *request* is no exception: it is data, kept in its Record. A failed harness stops with whatever Python raises.
"""


class BenchError(Exception):
    """Where, what was found, what would be right, in one line."""

    exit_code = 2


class ClientLimit(BenchError):  # noqa: N818 - a limit, reached by no mistake of code or user
    """A limit of the machine that measures: its name, its value and how to raise it. No fault of the target's."""


class TargetError(BenchError):
    """The target is unreachable, gone, or refuses what every measurement needs."""

    exit_code = 4
