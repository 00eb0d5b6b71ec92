"""What this machine lets a client do: open files, local ports, memory for sockets. No fault of a target's."""

import errno
import resource

from llm_bench.errors import ClientLimit

OTHER_FILES = 64  # descriptors beside the connections: libraries, records, timers, the loop's own
_LIMITS = {  # what a failed connect says of this machine, and how to raise it
    errno.EMFILE: "this process may open {files} files; `ulimit -n` with a larger number, or fewer requests in flight",
    errno.ENFILE: "this machine may open no more files; a larger `sysctl fs.file-max`",
    errno.EADDRNOTAVAIL: "this machine has no local port left; a wider `sysctl net.ipv4.ip_local_port_range`, a minute "
    "until closed connections are forgotten, or a server that keeps connections alive",
    errno.ENOBUFS: "this machine has no memory left for sockets; a larger `sysctl net.ipv4.tcp_mem`",
    errno.ENOMEM: "this machine has no memory left for sockets; more of it, or fewer requests in flight",
}


def raise_file_limit(need: int, *, strict: bool = True) -> None:
    """Let this process open `need` files in all: for a cell, its requests in flight and OTHER_FILES.

    Raises ClientLimit where the hard limit is lower; not `strict`: goes as far as that, for an open loop, whose number
    in flight nobody knows beforehand.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= need:
        return
    if hard != resource.RLIM_INFINITY and hard < need:
        if strict:
            raise ClientLimit(
                f"{need} open files are needed, one for each request in flight; the hard limit of this process is "
                f"{hard}: raise it with `ulimit -n {need}`, as root where that is refused, or ask for fewer "
                "requests in flight"
            )
        need = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))


def client_limit(error: OSError, host: str, has_connected: bool) -> ClientLimit | None:
    """What to raise for a failed connect to `host`; None where the other side, or the way to it, has failed.

    An IPv6 address on a machine without IPv6 gives EADDRNOTAVAIL too: it counts where one has connected before.
    """
    if error.errno not in _LIMITS or (error.errno == errno.EADDRNOTAVAIL and ":" in host and not has_connected):
        return None
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return ClientLimit(f"no connection to {host}: {error.strerror}: {_LIMITS[error.errno].format(files=files)}")
