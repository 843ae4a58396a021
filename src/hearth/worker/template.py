"""The process that workers are forked from: `python -m hearth.worker.template`.

It has imported torch and all else that a worker needs, which takes seconds, and done nothing with it, so that
a worker forked from it is up in a moment. What would not survive a fork it must not have: a second thread, or
a device that was opened; it looks before each. It logs nothing and starts no pool of threads, so a worker has
those as a new process does; random numbers are seeded anew there. Hosts nothing.

Its standard input is a socket, with which it ends. It says there that it is ready, and answers each request
for a worker, both by a `TemplateAnswer`. A request brings the descriptors of a worker: standard input,
output, error, and its beacon. The worker is forked by a process between that ends at once, whereupon the
kernel makes it a child of the gateway, which has asked for that. So a worker is nothing to the template any
more, and to the gateway it is as if spawned. One that was started before its service is told where to log.
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

#: Devices that a driver opens when it is initialised, and that a forked process cannot go on with.
DEVICES = ("/dev/nvidia", "/dev/dxg", "/dev/kfd")
#: Where numpy's library of products reads how many threads to start when it is loaded. A worker computes
#: nothing with it; torch's own reads the same variable, and has to find what the user has chosen.
_NUMPY_THREADS = "OPENBLAS_NUM_THREADS"
_CUDA_ERROR_NOT_INITIALIZED = 3
_COMMAND, _WORKER_COMMAND = b"hearth.worker.template", b"hearth.worker"


def main() -> NoReturn:
    die_with_parent()
    keep_only((0, 1, 2))
    gateway = socket.socket(fileno=0)
    if _is_abandoned(gateway):  # before the kernel could be told to end this one, too
        os._exit(0)
    began_s = time.perf_counter()
    become_worker = import_worker()
    import_s = time.perf_counter() - began_s
    gateway.send(msgspec.json.encode(TemplateAnswer(0, obstacle(), import_s)))
    while True:
        request, descriptors, _, _ = socket.recv_fds(gateway, 16, TEMPLATE_BEACON + 1)
        if not request:
            os._exit(0)
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
    """True if nobody will ask for workers any more."""
    try:
        return not gateway.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:  # nobody has asked for anything yet
        return False


def import_worker() -> Callable[[], NoReturn]:
    """Import all that a worker needs, without a thread being started, and return what a worker runs."""
    gc.disable()  # there is no garbage, and looking for it takes a tenth of the time
    chosen = os.environ.get(_NUMPY_THREADS)
    os.environ[_NUMPY_THREADS] = "1"
    import numpy  # noqa: F401 # before torch, and before the variable is what it was

    if chosen is None:
        del os.environ[_NUMPY_THREADS]
    else:
        os.environ[_NUMPY_THREADS] = chosen
    from hearth.snapshot.software import own_sources
    from hearth.worker.__main__ import main as become_worker

    with suppress(OSError):  # a worker tells of it
        own_sources()  # while the files are those that were imported
    gc.freeze()  # or the first collection of every worker would copy the pages of all that is imported
    gc.enable()
    return become_worker


def obstacle() -> str | None:
    """Say why no worker can be forked from this process; None: one can."""
    import torch  # it is there already

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
    """True if CUDA's driver is up in this process. Asking neither loads nor initialises it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1", os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:  # nobody has loaded it
        return False
    return bool(driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_ERROR_NOT_INITIALIZED)


def _opened(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:  # that of the list itself
        return ""


def _forked(
    descriptors: Sequence[int], gateway: socket.socket, become_worker: Callable[[], NoReturn]
) -> TemplateAnswer:
    """Fork a worker that becomes a child of the gateway, and return what is to be said of it."""
    if len(descriptors) <= TEMPLATE_BEACON:  # of those that cannot be opened the kernel leaves the last out
        return TemplateAnswer(0, f"it can open only {len(descriptors)} of a worker's descriptors")
    if (why := obstacle()) is not None:
        return TemplateAnswer(0, why)
    told, teller = os.pipe()
    try:
        between = os.fork()
        if between == 0:
            _fork_and_end(teller, descriptors, gateway, become_worker)
        _, status = os.waitpid(between, 0)  # from here on the worker is the gateway's
        if status != 0:
            return TemplateAnswer(0, "it cannot fork, the log says why")
        return TemplateAnswer(int(os.read(told, 16)))
    finally:
        os.close(told)
        os.close(teller)


def _fork_and_end(
    teller: int, descriptors: Sequence[int], gateway: socket.socket, become_worker: Callable[[], NoReturn]
) -> NoReturn:
    """Fork the worker, tell its number and end, in the process between."""
    try:
        pid = os.fork()
        if pid:
            os.write(teller, b"%d" % pid)
            os._exit(0)
        gateway.detach()  # 0 is to be the standard input of the worker, which nobody else may close
        keep_only(descriptors)
        seed_anew()
        _show_as_worker()
        become_worker()
    except BaseException:  # whatever it is: neither of the two may go on as a second template
        traceback.print_exc()
    finally:
        os._exit(1)


def keep_only(descriptors: Sequence[int]) -> None:
    """Number descriptors from 0 on, and close all others.

    They come in the order in which the kernel numbered them, so none of them is written over unread.
    """
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    close_all_but(range(len(descriptors)))


def seed_anew() -> None:
    """Have torch draw other numbers than in all other workers. Python's `random` sees to that by itself."""
    import torch

    torch.default_generator.seed()


def _show_as_worker() -> None:
    """Have the command of this process read as that of any worker, where `ps` and others look."""
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
