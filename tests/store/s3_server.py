"""A real S3 server with authentication, on loopback, while the test session lasts. Knows no models."""

from __future__ import annotations

import json
import socket
import subprocess
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from random import SystemRandom

import pytest
from obstore.exceptions import BaseError
from obstore.store import S3Store

KEY_ID = "hearth-tests"
SECRET = "not-a-secret/with+signs%"
READY_S = 120.0
#: Every service of the server listens somewhere, on fixed ports unless told otherwise.
PORTS = ("master.port", "volume.port", "filer.port", "s3.port")

#: Below those that Linux gives out by itself, from 32768 on.
PORT_RANGE = (12_000, 32_000)
#: Not the generator that every test begins anew, in all processes with the same numbers.
_chance = SystemRandom()


@dataclass(frozen=True, slots=True)
class S3Server:
    endpoint: str

    @property
    def environment(self) -> Mapping[str, str]:
        """What a client needs to be let in."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    def bucket(self, name: str) -> S3Store:
        """To write into; the server makes the bucket when the first object arrives."""
        return S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id=KEY_ID,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
            retry_config={
                "max_retries": 1000,
                "retry_timeout": timedelta(seconds=READY_S),
                "backoff": {"init_backoff": timedelta(seconds=0.05), "max_backoff": timedelta(seconds=0.2)},
            },
        )


@pytest.fixture(scope="session", name="s3")
def start_s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    directory = tmp_path_factory.mktemp("s3")
    ports = free_ports(2 * len(PORTS))
    server = S3Server(f"http://127.0.0.1:{ports[2 * PORTS.index('s3.port')]}")
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command(directory, ports), cwd=directory, stdout=log, stderr=log)
        try:
            server.bucket("ready").put("ready", b"ready")
            yield server
        except BaseError as error:
            raise RuntimeError((directory / "log").read_text(encoding="utf-8")[-2000:]) from error
        finally:
            process.kill()
            process.wait()


def command(directory: Path, ports: list[int]) -> list[str]:
    identity = {
        "name": "tests",
        "credentials": [{"accessKey": KEY_ID, "secretKey": SECRET}],
        "actions": ["Admin", "Read", "Write", "List"],
    }
    config = directory / "identities.json"
    config.write_text(json.dumps({"identities": [identity]}), encoding="utf-8")
    return [
        str(Path(sysconfig.get_path("scripts")) / "weed"),
        *("-logtostderr=true", "server", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"),
        *("-s3", f"-s3.config={config}", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false"),
        *("-master.telemetry=false", "-master.volumeSizeLimitMB=256", "-volume.max=16"),
        *(f"-{name}={port}" for name, port in zip(PORTS, ports[::2], strict=True)),
        *(f"-{name}.grpc={port}" for name, port in zip(PORTS, ports[1::2], strict=True)),
    ]


def free_ports(num_ports: int) -> list[int]:
    """Ports that nobody listens on, all held at once, so that they differ.

    None is one that the kernel gives to whoever asks for any port, or a test in another process might get it
    before the server does.
    """
    ports: list[int] = []
    with ExitStack() as stack:
        while len(ports) < num_ports:
            held = stack.enter_context(socket.socket())
            port = _chance.randrange(*PORT_RANGE)
            with suppress(OSError):  # it is taken
                held.bind(("127.0.0.1", port))
                ports.append(port)
    return ports
