"""Numbers as a person says them: as many digits as mean something, with a unit."""

from __future__ import annotations

__all__ = ["spoken_bytes", "spoken_rate", "spoken_seconds", "spoken_share"]


def spoken_bytes(count: int) -> str:
    """
    >>> spoken_bytes(12), spoken_bytes(3072)
    ('12 bytes', '3.0 KB')
    """
    if count < 1024:
        return f"{count} bytes"
    size, unit = float(count), "bytes"
    for unit in ("KB", "MB", "GB", "TB"):  # noqa: B007
        size /= 1024
        if size < 1000:
            break
    return f"{size:.1f} {unit}"


def spoken_rate(value: float, digits: int = 3) -> str:
    """So many digits, those behind the point too.

    >>> spoken_rate(2359.8), spoken_rate(128.04), spoken_rate(29.01), spoken_rate(1.2), spoken_rate(0.0456)
    ('2,360', '128', '29.0', '1.20', '0.0456')
    """
    decimals = max(0, digits - len(str(int(value))))
    return f"{value:,.{decimals}f}" if value >= 1 else f"{value:.{digits}g}"


def spoken_seconds(seconds: float, digits: int = 3) -> str:
    """
    >>> spoken_seconds(12.3), spoken_seconds(0.01234), spoken_seconds(0.0000051, 2), spoken_seconds(0)
    ('12.3 s', '12.3 ms', '5.1 µs', '0 s')
    """
    units = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}
    unit = next((unit for unit, size in units.items() if seconds >= size), "µs") if seconds else "s"
    return f"{spoken_rate(seconds / units[unit], digits)} {unit}"


def spoken_share(share: float) -> str:
    """A part of a whole; what is little is not called nothing.

    >>> spoken_share(0.304), spoken_share(0.001), spoken_share(0.0), spoken_share(1.0)
    ('30%', 'under 1%', '0%', '100%')
    """
    return "under 1%" if 0 < share < 0.005 else f"{share:.0%}"
