"""A fingerprint of no machine, and keys. Has no tests."""

from __future__ import annotations

from hearth.snapshot.file import KEY_BYTES
from hearth.snapshot.fingerprint import Fingerprint

KEY, OTHER_KEY = bytes(range(KEY_BYTES)), bytes(KEY_BYTES)
FINGERPRINT = Fingerprint(
    manifest="model-1",
    layers="0-32",
    addresses="weights=0x18000000000",
    dtype="bfloat16",
    limits="max_batch_tokens=8192",
    engine="graphs=on",
    device="NVIDIA H200",
    device_bytes=141 << 30,
    driver="570.86",
    cuda="13.0",
    cublas="13.1.0",
    torch="2.11.0",
    triton="3.6.0",
    sources="abc",
)
