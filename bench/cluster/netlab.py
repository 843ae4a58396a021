"""Network namespaces on one bridge, each behind a link of its own speed. Needs root, `ip` and `tc`."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import create_server, socket

_CLONE_NEWNET = 0x40000000


@contextmanager
def shaped_links(mbit_by_node: Mapping[str, int]) -> Iterator[Mapping[str, str]]:
    """Make a namespace `hearth-NAME` for each node, with links shaped both ways; yield their addresses."""
    with ExitStack() as stack:
        hub = _namespace("hub", stack)
        _run(f"ip -n {hub} link add br0 type bridge", f"ip -n {hub} link set br0 up")
        addresses = {}
        for number, (node, mbit) in enumerate(mbit_by_node.items(), 1):
            name, link, port = _namespace(node, stack), f"v{number}", f"p{number}"
            addresses[node] = f"10.77.0.{number}"
            _run(
                f"ip link add {link} netns {name} type veth peer name {port} netns {hub}",
                f"ip -n {name} addr add {addresses[node]}/24 dev {link}",
                f"ip -n {name} link set {link} up",
                f"ip -n {name} link set lo up",
                f"ip -n {hub} link set {port} master br0",
                f"ip -n {hub} link set {port} up",
            )
            shape = f"root tbf rate {mbit}mbit burst 256kb latency 50ms"
            _run(
                f"ip netns exec {name} tc qdisc add dev {link} {shape}",
                f"ip netns exec {hub} tc qdisc add dev {port} {shape}",
            )
        yield addresses


def inside(node: str) -> tuple[str, ...]:
    """Return how a command is started in the namespace of a node."""
    return ("ip", "netns", "exec", f"hearth-{node}")


def listen_inside(node: str, host: str) -> socket:
    """Listen in the namespace of a node, whose thread it takes: a socket stays where it was made."""

    def listen() -> socket:
        fd = os.open(Path("/run/netns") / f"hearth-{node}", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"the namespace of `{node}` cannot be entered")
        finally:
            os.close(fd)
        return create_server((host, 0))

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(listen).result()


def _namespace(node: str, stack: ExitStack) -> str:
    name = f"hearth-{node}"
    _run(f"ip netns add {name}")
    stack.callback(_run, f"ip netns del {name}")
    return name


def _run(*commands: str) -> None:
    for command in commands:
        subprocess.run(command.split(), check=True)
