"""The process that workers are forked from: `python -m hearth.worker.template`.

It has imported everything that a worker needs, which takes seconds, so a forked worker is up in a moment. It
must have nothing that does not survive a fork: it checks for a second thread and an open device before each.

Its standard input is a socket; it ends when that closes. It answers each request for a worker with a
`TemplateAnswer`. A request carries the worker's descriptors: standard input, output, error, and its beacon.
The worker is forked by an intermediate process that ends at once, so that the kernel makes it a child of the
gateway.
"""

from __future__ import annotations

import ctypes
import gc
import itertools
import os
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import msgspec

from hearth.core.messages import FORK_WORKER, LOG_HERE, TEMPLATE_BEACON, TemplateAnswer
from hearth.system.die_with_parent import die_with_parent
from hearth.worker.process import close_all_but

#: Devices that a driver opens when it is initialised. A forked process cannot use them.
DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
#: Where numpy's BLAS reads its number of threads when it is loaded. A worker does not use it, but torch's own
#: reads the same variable, and must find the user's value.
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_CUDA_ERROR_NOT_INITIALIZED = 3
_COMMAND, _WORKER_COMMAND = b"hearth.worker.template", b"hearth.worker"


def main() -> NoReturn:
    die_with_parent()
    keep_only((0, 1, 2))
    gateway = socket.socket(fileno=0)
    if _is_abandoned(gateway):  # before `die_with_parent` took effect
        os._exit(0)
    began_s = time.perf_counter()
    become_worker = import_worker()
    import_s = time.perf_counter() - began_s
    with suppress(ConnectionError):  # the gateway has ended
        gateway.send(msgspec.json.encode(TemplateAnswer(0, obstacle(), import_s)))
        _serve(gateway, become_worker)
    os._exit(0)


def _serve(gateway: socket.socket, become_worker: Callable[[], NoReturn]) -> None:
    """Fork workers until the gateway closes the socket. Raises ConnectionError."""
    while True:
        request, descriptors, _, _ = socket.recv_fds(gateway, 16, TEMPLATE_BEACON + 1)
        if not request:
            return
        if request == FORK_WORKER:
            try:
                answer = _forked(descriptors, gateway, become_worker)
            except OSError as error:
                answer = TemplateAnswer(0, f"it cannot fork: {error}")
            gateway.send(msgspec.json.encode(answer))
        elif request == LOG_HERE:
            for number, descriptor in itertools.product((1, 2), descriptors):
                os.dup2(descriptor, number)
        for descriptor in descriptors:
            os.close(descriptor)


def _is_abandoned(gateway: socket.socket) -> bool:
    try:
        return not gateway.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # no request yet
        return False


def import_worker() -> Callable[[], NoReturn]:
    """Import everything that a worker needs without starting a thread; return a worker's main function."""
    gc.disable()  # there is no garbage, and collections would take a tenth of the time
    chosen = os.environ.get(_NUMPY_THREADS)
    os.environ[_NUMPY_THREADS] = "1"
    import numpy  # noqa: F401 # before torch, and before the variable is what it was

    if chosen is None:
        del os.environ[_NUMPY_THREADS]
    else:
        os.environ[_NUMPY_THREADS] = chosen
    from hearth.snapshot.software import own_sources
    from hearth.worker.__main__ import main as become_worker

    with suppress(OSError):  # a worker reports it
        own_sources()  # while the files are still those that were imported
    gc.freeze()  # else the first collection in each worker would copy all imported pages
    gc.enable()
    return become_worker


def obstacle() -> str | None:
    """Return why no worker can be forked from this process; None: one can."""
    import torch  # imported already

    opened = {name for name in map(_opened, os.listdir("/proc/self/fd")) if name.startswith(DEVICES)}
    if opened:
        return f"it must touch no device, and has opened {', '.join(sorted(opened))}"
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call] # torch leaves it untyped
        return "it must touch no device, and torch has initialised CUDA"
    if _is_driver_initialised():
        return "it must touch no device, and CUDA's driver is initialised"
    num_threads = len(os.listdir("/proc/self/task"))
    if num_threads != 1:
        return f"it must have one thread, and has {num_threads}"
    return None


def _is_driver_initialised() -> bool:
    """True if CUDA's driver is initialised here. Asking neither loads nor initialises it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # not loaded
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED)


def _opened(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # the descriptor of the listing itself
        return ""


def _forked(
    descriptors: Sequence[int], gateway: socket.socket, become_worker: Callable[[], NoReturn]
) -> TemplateAnswer:
    if len(descriptors) <= TEMPLATE_BEACON:  # the kernel drops those that cannot be opened
        return TemplateAnswer(0, f"it can open only {len(descriptors)} of a worker's descriptors")
    if (why := obstacle()) is not None:
        return TemplateAnswer(0, why)
    told, teller = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_end(teller, descriptors, gateway, become_worker)
        _, status = os.waitpid(between, 0)  # now the worker is the gateway's child
        if status != 0:
            return TemplateAnswer(0, "it cannot fork, the log says why")
        return TemplateAnswer(int(os.read(told, 16)))
    finally:
        os.close(told)
        os.close(teller)


def _fork_and_end(
    teller: int, descriptors: Sequence[int], gateway: socket.socket, become_worker: Callable[[], NoReturn]
) -> NoReturn:
    try:
        pid = os.fork()
        if pid:
            os.write(teller, b"%d" % pid)
            os._exit(0)
        gateway.detach()  # 0 becomes the worker's standard input: closing this object must not close it
        keep_only(descriptors)
        reseed()
        _show_as_worker()
        become_worker()
    except BaseException:  # neither process may go on as a second template
        traceback.print_exc()
    finally:
        os._exit(1)


def keep_only(descriptors: Sequence[int]) -> None:
    """Renumber descriptors from 0 on, and close all others. They must be in ascending order."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    close_all_but(range(len(descriptors)))


def reseed() -> None:
    """Seed torch's generator again; Python's `random` does that by itself."""
    import torch

    torch.default_generator.seed()


def _show_as_worker() -> None:
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    begin, num_bytes = (
        int(fields[45]),
        int(fields[46]) - int(fields[45]),
    )  # of its arguments, as proc(5) has it
    if begin:
        command = ctypes.string_at(begin, num_bytes).replace(_COMMAND, _WORKER_COMMAND)
        ctypes.memmove(begin, command.ljust(num_bytes, b"\0"), num_bytes)


if __name__ == "__main__":
    main()
