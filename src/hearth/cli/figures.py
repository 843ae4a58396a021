"""Formats sizes, counts and durations."""

from __future__ import annotations

SIZES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
SPANS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def size(num_bytes: int) -> str:
    """Format a size: 1.5 GiB, 129 MiB, 12 B."""
    for unit, unit_bytes in SIZES:
        if num_bytes >= unit_bytes:
            value = num_bytes / unit_bytes
            return f"{value:.1f} {unit}" if value < 100 else f"{value:.0f} {unit}"
    return f"{num_bytes} B"


def count(number: int) -> str:
    """Format a count: 7.2B, 135M."""
    for unit, unit_count in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= unit_count:
            value = number / unit_count
            return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"
    return str(number)


def duration(seconds: float) -> str:
    """Format whole seconds in their two largest units: 4m12s, 2h5m, 0s."""
    left = max(0, round(seconds))
    parts = []
    for unit, unit_s in SPANS:
        if left >= unit_s:
            parts.append(f"{left // unit_s}{unit}")
            left %= unit_s
    return "".join(parts[:2]) or "0s"


def precise(seconds: float) -> str:
    """Format seconds: 0.4 ms, 12 ms, 1.234 s, 75.2 s."""
    if seconds < 0.01:
        return f"{seconds * 1000:.1f} ms"
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    return f"{seconds:.3f} s" if seconds < 10 else f"{seconds:.1f} s"
