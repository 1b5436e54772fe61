"""The limit of the open files of this process."""

import logging
import resource

log = logging.getLogger("aiorpc_torch")

FILES_OF_PEER = 40  # two pipes of torch on another host, and connections (benchmarks.descriptors)
OTHER_FILES = 1024  # of torch, of this library and of the program: the usual limit


def allow_files(peers: int) -> None:
    """Raise the soft limit of open files to what so many peers need, at most to the hard limit.

    torch ends a process that has no files left. The usual soft limit of 1,024 is for programs that
    use `select`, for which files beyond it are an error as well.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OTHER_FILES + FILES_OF_PEER * peers
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        log.debug("the limit of open files is %d now, for %d peers", wanted, peers)
