"""A collector of traces that counts them: a process that takes POSTs over HTTP. Keeps nothing.

python -m bench.service.collector PORT_FILE
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.request import urlopen

START_S = 30.0
SENT_S = 60.0
_LOOK_S = 0.05
_COUNTED = "POST /v1/completions"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # or each batch would need a connection of its own
    counts: ClassVar[list[int]] = []  # of traced completions in each batch

    def do_POST(self) -> None:
        self.counts.append(_num_completions(self.rfile.read(int(self.headers["content-length"]))))
        self._answer(b"")

    def do_GET(self) -> None:
        self._answer(b"%d" % sum(self.counts))

    def _answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def _num_completions(body: bytes) -> int:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    scopes = [
        one for each in ExportTraceServiceRequest.FromString(body).resource_spans for one in each.scope_spans
    ]
    return sum(span.name == _COUNTED for scope in scopes for span in scope.spans)


@dataclass(frozen=True, slots=True)
class Collector:
    url: str

    def wait_for(self, num_completions: int) -> None:
        """Wait until so many completions in all were told of. Raises RuntimeError if they never are."""
        deadline_s = time.monotonic() + SENT_S
        while (num_told := self._num_completions()) < num_completions:
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{num_told} of {num_completions} completions traced after {SENT_S:.0f} s")
            time.sleep(_LOOK_S)

    def _num_completions(self) -> int:
        with urlopen(self.url) as answer:
            return int(answer.read())


@contextmanager
def collecting(place: Path) -> Iterator[Collector]:
    """Run a collector until the context ends."""
    port_file = place / "collector"
    process = subprocess.Popen([sys.executable, "-m", "bench.service.collector", str(port_file)])
    try:
        deadline_s = time.monotonic() + START_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the collector of traces did not start within {START_S:.0f} s")
            time.sleep(_LOOK_S)
        yield Collector(f"http://127.0.0.1:{port_file.read_text()}")
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    path = Path(sys.argv[1])
    path.with_suffix(".new").write_text(str(server.server_port))
    path.with_suffix(".new").rename(path)
    server.serve_forever()


if __name__ == "__main__":
    main()
