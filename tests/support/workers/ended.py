"""Whether a process has ended, for those whose starter we are not.

Who was signalled ends when it next gets a processor; and who has ended may stay as a zombie for as
long as its parent does not ask.
"""

import psutil
from support.deadlines import wait_until


def lives(process: psutil.Process) -> bool:
    """Tell whether it has not ended."""
    try:
        return process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def until_ended(process: psutil.Process, *, within: float = 60.0) -> None:
    """Return when it has ended."""
    wait_until(lambda: not lives(process), within=within, what=f"the end of {process.pid}")
