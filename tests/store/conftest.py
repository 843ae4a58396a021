"""One real S3 server for all tests of the store: the fixture `s3`. No helpers."""

from __future__ import annotations

from tests.store.s3_server import start_s3

__all__ = ["start_s3"]
