"""The HTTP server of `hearth serve`. Imported while workers start: its imports take most of a second."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from hearth.api.app import ApiLimits, create_app
from hearth.api.connections import ConnectionLimits, Connections
from hearth.api.protocol import LimitedConfig
from hearth.control.gateway import Gateway
from hearth.core.config import ServiceConfig


class HttpServer(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_server(gateway: Gateway, service: ServiceConfig, max_open_files: int) -> HttpServer:
    limits = ApiLimits(
        max_body_bytes=service.max_body_bytes,
        stream_heartbeat_s=service.stream_heartbeat_s,
        response_store_bytes=service.response_store_bytes,
        allowed_origins=service.allowed_origins,
    )
    connections = Connections(ConnectionLimits.within(max_open_files), gateway.count_closed_connection)
    app = create_app(gateway, limits)
    return HttpServer(LimitedConfig(app, connections, service.idle_connection_s, gateway.exchange_ended))
