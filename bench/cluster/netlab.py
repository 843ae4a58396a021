"""Network namespaces on one bridge, each behind a link of its own speed. Needs root, `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from shutil import which
from socket import create_server, socket

_CLONE_NEWNET = 0x40000000
_LIBC = ctypes.CDLL(None, use_errno=True)
_LINK = "cable"  #: of a node, in its namespace


@contextmanager
def shaped_links(mbit_by_node: Mapping[str, int | None]) -> Iterator[Mapping[str, str]]:
    """Make a namespace `hearth-NAME` for each node, with links shaped both ways; yield their addresses.

    None: a link that is not shaped.
    """
    with ExitStack() as stack:
        hub = _namespace(f"{next(iter(mbit_by_node))}-hub", stack)
        _run(f"ip -n {hub} link add br0 type bridge", f"ip -n {hub} link set br0 up")
        addresses = {}
        for number, (node, mbit) in enumerate(mbit_by_node.items(), 1):
            name, port = _namespace(node, stack), f"p{number}"
            addresses[node] = f"10.77.0.{number}"
            _run(
                f"ip link add {_LINK} netns {name} type veth peer name {port} netns {hub}",
                f"ip -n {name} addr add {addresses[node]}/24 dev {_LINK}",
                f"ip -n {name} link set {_LINK} up",
                f"ip -n {name} link set lo up",
                f"ip -n {hub} link set {port} master br0",
                f"ip -n {hub} link set {port} up",
            )
            if mbit is None:
                continue
            shape = f"root tbf rate {mbit}mbit burst 256kb latency 50ms"
            _run(
                f"ip netns exec {name} tc qdisc add dev {_LINK} {shape}",
                f"ip netns exec {hub} tc qdisc add dev {port} {shape}",
            )
        yield addresses


def obstacle() -> str | None:
    """Say why namespaces cannot be made here; None: they can."""
    if (missing := next((name for name in ("ip", "tc") if which(name) is None), None)) is not None:
        return f"`{missing}` is not installed"
    try:
        with ExitStack() as stack:
            _namespace(f"probe-{os.getpid()}", stack)
    except subprocess.CalledProcessError as error:
        return f"network namespaces are not permitted: {error.stderr}"
    return None


def inside(node: str) -> tuple[str, ...]:
    """Return how a command is started in the namespace of a node."""
    return ("ip", "netns", "exec", f"hearth-{node}")


@contextmanager
def entered(node: str) -> Iterator[None]:
    """Have this thread open connections and start processes in the namespace of a node."""
    with open("/proc/thread-self/ns/net") as ours, open(f"/run/netns/hearth-{node}") as theirs:
        _enter(theirs.fileno())
        try:
            yield
        finally:
            _enter(ours.fileno())


def _enter(namespace: int) -> None:
    if _LIBC.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "the network namespace cannot be entered")


def listen_inside(node: str, host: str) -> socket:
    """Listen in the namespace of a node: a socket stays where it was made."""
    with entered(node):
        return create_server((host, 0))


@contextmanager
def cut(node: str) -> Iterator[None]:
    """Take the link of a node down while the context lasts: no connection is told."""
    _run(f"ip -n hearth-{node} link set {_LINK} down")
    try:
        yield
    finally:
        _run(f"ip -n hearth-{node} link set {_LINK} up")


def slow(node: str, mbit: int, delay_ms: int) -> None:
    """Limit what a node sends from now on, behind a queue that takes up to `delay_ms`."""
    shape = f"root tbf rate {mbit}mbit burst 32kb latency {delay_ms}ms"
    _run(f"ip netns exec hearth-{node} tc qdisc replace dev {_LINK} {shape}")


def narrow(node: str, mbit: int) -> None:
    """Limit what a node sends from now on, behind the queue that a network device has by default."""
    _run(
        f"ip netns exec hearth-{node} tc qdisc add dev {_LINK} root handle 1: tbf rate {mbit}mbit burst 32kb "
        "latency 50ms",
        f"ip netns exec hearth-{node} tc qdisc add dev {_LINK} parent 1:1 pfifo_fast",
    )


def end_processes(node: str) -> None:
    """Kill what runs in the namespace of a node."""
    for pid in pids_in(node):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def pids_in(node: str) -> list[int]:
    found = subprocess.run(["ip", "netns", "pids", f"hearth-{node}"], check=True, capture_output=True)
    return [int(pid) for pid in found.stdout.split()]


def _namespace(node: str, stack: ExitStack) -> str:
    name = f"hearth-{node}"
    _run(f"ip netns add {name}")
    stack.callback(_run, f"ip netns del {name}")
    return name


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True, text=True)
