"""Calls of the Hub that wait and try again while it is busy, for a bounded time."""

import logging
import time
from collections.abc import Callable
from datetime import datetime, timezone
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

_logger = logging.getLogger(__name__)
T = TypeVar("T")

TRIES = 5
MOST_SECONDS = 300.0  # of waiting, all tries together: a Retry-After beyond that is an error at once


def patiently(call: Callable[[], T]) -> T:
    """Call, and again while the Hub answers 429 or 5xx: after its Retry-After, else after 1, 2, 4, 8 seconds.

    Example:
        >>> patiently(lambda: 3)
        3
    """
    waited = 0.0
    for turn in range(TRIES):
        try:
            return call()
        except Exception as error:
            response = getattr(error, "response", None)
            status = getattr(response, "status_code", None)
            if turn + 1 == TRIES or status is None or not (status == 429 or 500 <= status < 600):
                raise
            asked = _retry_after(response)
            seconds = 2.0**turn if asked is None else asked
            if waited + seconds > MOST_SECONDS:
                raise
            _logger.warning("the Hub answered %d; trying again in %.0f s", status, seconds)
        time.sleep(seconds)
        waited += seconds
    raise AssertionError("the last turn returns or raises")


def _retry_after(response: Any) -> float | None:
    """Seconds from now: the header holds them, or a date; None where it holds nothing of the kind."""
    text = str((getattr(response, "headers", None) or {}).get("Retry-After") or "").strip()
    if text.isdecimal() and len(text) < 10:
        return float(text)
    try:
        date = parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=timezone.utc)
    return max(0.0, (date - datetime.now(timezone.utc)).total_seconds())
