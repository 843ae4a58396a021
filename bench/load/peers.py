"""How fast do others load safetensors to the device? Each in a process of its own. Says nothing of Hearth.

python -m bench.load.peers NAME DEVICE

The process imports the peer, makes its CUDA context, loads a small file to warm up, and says that it is
ready. Then it loads each directory that a line of its input names and answers with the seconds that took.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 90.0
LOAD_TIMEOUT_S = 60.0

Tensors = Mapping[str, "torch.Tensor"]


def with_safetensors(paths: Sequence[str], device: str) -> Tensors:
    from safetensors.torch import load_file

    return {name: tensor for path in paths for name, tensor in load_file(path, device=device).items()}


def with_fastsafetensors(paths: Sequence[str], device: str) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader

    loader = SafeTensorsFileLoader(None, device, nogds=True)
    loader.add_filenames({0: list(paths)})
    buffers = loader.copy_files_to_device()
    tensors = {name: buffers.get_tensor(name) for name in loader.get_keys()}
    buffers.close()  # the tensors own the memory now
    loader.close()
    return tensors


def with_instanttensor(paths: Sequence[str], device: str) -> Tensors:
    from instanttensor import safe_open

    with safe_open(list(paths), framework="pt", device=device) as file:
        return dict(file.tensors())


def with_runai_streamer(paths: Sequence[str], device: str) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_files(list(paths), device=device)
        return dict(streamer.get_tensors())


@dataclass(frozen=True, slots=True)
class Peer:
    package: str
    load: Callable[[Sequence[str], str], Tensors]


PEERS = {
    "safetensors": Peer("safetensors", with_safetensors),
    "fastsafetensors": Peer("fastsafetensors", with_fastsafetensors),
    "InstantTensor": Peer("instanttensor", with_instanttensor),
    "Run:ai streamer": Peer("runai_model_streamer", with_runai_streamer),
}


class PeerFailed(Exception):
    """A peer cannot be imported, or broke, or took too long."""


class PeerProcess:
    """A peer that waits for work. Mutable in nothing but its process."""

    def __init__(self, name: str, device: str) -> None:
        self.name = name
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - `close` closes it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.load.peers", name, device],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def wait_ready(self) -> str:
        """Wait until the peer is ready and return its version."""
        return str(self._answer(START_TIMEOUT_S)["version"])

    def load_s(self, directory: Path, num_bytes: int) -> float:
        """Return the seconds to load a directory's safetensors files, which hold so many bytes of tensors."""
        assert self._process.stdin is not None
        try:
            print(directory, file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise PeerFailed(self._last_words()) from None
        answer = self._answer(LOAD_TIMEOUT_S)
        if answer["num_bytes"] != num_bytes:
            raise PeerFailed(f"it loaded {answer['num_bytes']} bytes of {num_bytes}")
        seconds = answer["seconds"]
        assert isinstance(seconds, float)
        return seconds

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            assert stream is not None
            stream.close()

    def _answer(self, timeout_s: float) -> Mapping[str, object]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout_s)[0]:
            self._process.kill()
            raise PeerFailed(f"no answer within {timeout_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise PeerFailed(self._last_words())
        answer: Mapping[str, object] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Return the last line that the process wrote about its end."""
        code = self._process.wait()
        self._errors.seek(0)
        lines = [line for line in self._errors.read().splitlines() if line.strip()]
        return lines[-1].strip() if lines else f"it ended with status {code}"


@dataclass(frozen=True, slots=True)
class Started:
    """Peers that wait for work, and why others do not; both by name."""

    processes: Mapping[str, PeerProcess]
    versions: Mapping[str, str]
    errors: Mapping[str, str]


@contextmanager
def started(device: str) -> Iterator[Started]:
    """Start all peers, each in a process that ends with the context."""
    processes = {name: PeerProcess(name, device) for name in PEERS}
    versions, errors = {}, {}
    try:
        for name, process in processes.items():
            try:
                versions[name] = process.wait_ready()
            except PeerFailed as error:
                errors[name] = str(error)
        yield Started({name: processes[name] for name in versions}, versions, errors)
    finally:
        for process in processes.values():
            process.close()


def serve(name: str, device: str) -> None:
    """Be the process of a peer, until its input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    peer = PEERS[name]
    import_module(peer.package)  # before torch: one that is missing is missed at once
    with tempfile.TemporaryDirectory() as directory:
        _write_small(Path(directory))
        _load_s(peer, Path(directory), device)
    print(json.dumps({"version": version(peer.package)}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(_load_s(peer, Path(line.strip()), device)), file=answers, flush=True)


def _load_s(peer: Peer, directory: Path, device: str) -> dict[str, float]:
    import torch

    paths = sorted(str(path) for path in directory.glob("*.safetensors"))
    began_s = time.perf_counter()
    tensors = peer.load(paths, device)
    if device != "cpu":
        torch.cuda.synchronize()
    seconds = time.perf_counter() - began_s
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    if device != "cpu":
        torch.cuda.empty_cache()  # as new for the next one
    return {"seconds": seconds, "num_bytes": num_bytes}


def _write_small(directory: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"warm_up": torch.zeros(1024, 1024)}, directory / "model.safetensors")


if __name__ == "__main__":
    serve(*sys.argv[1:])
