"""What storage options mean: for the store, for its HTTP client, for our own reads.

Pure. Names are those that obstore and lance users know.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from fluxon_gop.errors import InvalidRequestError

CLIENT_NAMES = frozenset(
    [
        "allow_http",
        "allow_invalid_certificates",
        "connect_timeout",
        "default_content_type",
        "default_headers",
        "http1_only",
        "http2_keep_alive_interval",
        "http2_keep_alive_timeout",
        "http2_keep_alive_while_idle",
        "http2_only",
        "pool_idle_timeout",
        "pool_max_idle_per_host",
        "proxy_url",
        "proxy_ca_certificate",
        "proxy_excludes",
        "root_certificate",
        "randomize_addresses",
        "user_agent",
    ]
)
"""Options of the HTTP client. Source: obstore 0.12, ``ClientConfig``."""
_UNITS = {
    "ms": 1e-3,
    "s": 1.0,
    "sec": 1.0,
    "second": 1.0,
    "seconds": 1.0,
    "m": 60.0,
    "min": 60.0,
    "h": 3600.0,
}
_SPAN = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)")

Renew = Callable[[str], "str | Mapping[str, Any]"]
"""Called with a source's name; returns a fresh address, or fresh storage options."""


@dataclass(frozen=True)
class RemoteOptions:
    """Storage options, taken apart."""

    store: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For the store: credentials, region, endpoint."""
    client: Mapping[str, Any] = field(default_factory=dict, repr=False)
    """For its HTTP client."""
    credential_provider: Any = field(default=None, repr=False)
    renew: Renew | None = field(default=None, repr=False)
    attempt_seconds: float = 30.0
    """``timeout``: of one request, from its start to the last byte of its answer."""
    connect_seconds: float = 5.0
    """``connect_timeout``."""
    max_retries: int = 4
    """``max_retries`` or ``client_max_retries``: further tries of a request that failed for the moment."""
    retry_seconds: float = 60.0
    """``retry_timeout`` or ``client_retry_timeout``: of one read, all its tries together."""
    max_requests: int = 64
    """``max_requests_in_flight``, per host."""
    max_bytes: int = 256 * 1024 * 1024
    """``max_bytes_in_flight``, per host."""
    latency_seconds: float | None = None
    """``latency_ms`` of a request, None to measure it."""
    bandwidth: float | None = None
    """``bandwidth_mbps`` (megabytes a second) as bytes a second, None to measure it."""


def parse_options(given: Mapping[str, Any] | None) -> RemoteOptions:
    """Return storage options taken apart.

    Raises:
        InvalidRequestError: one of ours has a value that makes no sense; the message shows no value of the others.
    """
    rest = dict(given or {})
    ours: dict[str, Any] = {}

    def take(*names: str) -> Any:
        found = [rest.pop(name) for name in names if name in rest]
        return found[0] if found else None

    for target, names, read in (
        ("attempt_seconds", ("timeout",), _seconds),
        ("connect_seconds", ("connect_timeout",), _seconds),
        ("max_retries", ("max_retries", "client_max_retries"), _count),
        ("retry_seconds", ("retry_timeout", "client_retry_timeout"), _seconds),
        ("max_requests", ("max_requests_in_flight",), _positive),
        ("max_bytes", ("max_bytes_in_flight",), _positive),
        ("latency_seconds", ("latency_ms",), lambda name, value: _number(name, value) / 1000),
        ("bandwidth", ("bandwidth_mbps",), lambda name, value: _number(name, value) * 1e6),
    ):
        value = take(*names)
        if value is not None:
            ours[target] = read(names[0], value)
    provider, renew = take("credential_provider"), take("renew")
    if renew is not None and not callable(renew):
        text = f"renew is a {type(renew).__name__}: want a callable"
        raise TypeError(text)
    client = {name: rest.pop(name) for name in list(rest) if name in CLIENT_NAMES}
    client = {name: _flag(value) for name, value in client.items()}
    return RemoteOptions(rest, client, provider, renew, **ours)


def _flag(value: Any) -> Any:
    """Return lance's ``"true"`` and ``"false"`` as what obstore takes too."""
    return {"true": True, "false": False}.get(value.lower(), value) if isinstance(value, str) else value


def _seconds(name: str, value: Any) -> float:
    """Return a duration: seconds, a timedelta, or text such as ``"1m 30s"`` or ``"500ms"``."""
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        spans = _SPAN.findall(value)
        if (
            not spans
            or _SPAN.sub("", value).strip()
            or any(unit and unit not in _UNITS for _, unit in spans)
        ):
            text = f"{name} is {value!r}: want seconds, or text such as '30s' or '500ms'"
            raise InvalidRequestError(text)
        seconds = sum(float(number) * _UNITS.get(unit, 1.0) for number, unit in spans)
    else:
        seconds = _number(name, value)
    if not seconds > 0:
        text = f"{name} is {value!r}: want more than 0 seconds"
        raise InvalidRequestError(text)
    return seconds


def _number(name: str, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if isinstance(value, bool) or not 0 < number < 1e15:
        text = f"{name} is {value!r}: want a positive number"
        raise InvalidRequestError(text)
    return number


def _positive(name: str, value: Any) -> int:
    number = _count(name, value)
    if not number:
        text = f"{name} is {value!r}: want 1 or more"
        raise InvalidRequestError(text)
    return number


def _count(name: str, value: Any) -> int:
    text = f"{name} is {value!r}: want a whole number from 0"
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    if type(value) is not int or value < 0:
        raise InvalidRequestError(text)
    return value
