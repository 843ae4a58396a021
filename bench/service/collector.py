"""A collector of traces that throws them away: a process that takes POSTs over HTTP. Decodes nothing.

python -m bench.service.collector PORT_FILE
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

START_S = 30.0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"  # or each batch would need a connection of its own

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def collecting(place: Path) -> Iterator[str]:
    """Run a collector until the context ends; yields its address."""
    port_file = place / "collector"
    process = subprocess.Popen([sys.executable, "-m", "bench.service.collector", str(port_file)])
    try:
        deadline_s = time.monotonic() + START_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the collector of traces did not start within {START_S:.0f} s")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}"
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
