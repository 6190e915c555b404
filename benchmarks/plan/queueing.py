"""Closed forms of waiting: how many servers keep a wait short."""

from __future__ import annotations

import math

SMALLEST_TERM = 1e-17
"""Of a sum; a smaller falling term changes no digit of it."""


def erlang_c(servers: int, load: float) -> float:
    """Probability that an arrival waits in M/M/c with ``load`` erlangs; 1 when it does not keep up."""
    if load >= servers:
        return 1.0
    # Erlang B as one over the sum of c! / (c - k)! / load^k: its terms rise while c - k is above the load and
    # then fall off within a few square roots of it, so that thousands of servers take hundreds of terms.
    term = total = 1.0
    for free in range(servers, 0, -1):
        term *= free / load
        total += term
        if term < total * SMALLEST_TERM or total == math.inf:
            break
    blocked = 1 / total
    return blocked / (1 - load / servers * (1 - blocked))


def wait_quantile_s(
    servers: int, rate_per_s: float, mean_s: float, service_cv2: float, quantile: float
) -> float:
    """Quantile of the wait in M/G/c by Allen and Cunneen: the tail of M/M/c, times (1 + cv^2) / 2.

    Infinite when the servers do not keep up. ``service_cv2``: service variance over squared mean.
    """
    load = rate_per_s * mean_s
    if load >= servers:
        return math.inf
    waits = erlang_c(servers, load)
    if waits <= 1 - quantile:
        return 0.0
    rate = (servers - load) / mean_s / ((1 + service_cv2) / 2)
    return math.log(waits / (1 - quantile)) / rate


def mean_wait_md1_s(rate_per_s: float, service_s: float) -> float:
    """Mean wait in M/D/1, by Pollaczek and Khinchine."""
    load = rate_per_s * service_s
    return math.inf if load >= 1 else load * service_s / (2 * (1 - load))


def fewest_servers(
    rate_per_s: float, mean_s: float, service_cv2: float, longest_wait_s: float, quantile: float
) -> int:
    """Fewest servers whose wait's quantile is at most ``longest_wait_s``, which must be at least 0."""
    low = max(1, math.floor(rate_per_s * mean_s) + 1)
    high = low
    while wait_quantile_s(high, rate_per_s, mean_s, service_cv2, quantile) > longest_wait_s:
        low, high = high + 1, high * 2
    while low < high:
        middle = (low + high) // 2
        if wait_quantile_s(middle, rate_per_s, mean_s, service_cv2, quantile) <= longest_wait_s:
            high = middle
        else:
            low = middle + 1
    return low


def staffed(mean_in_system: float, slots_each: int, quantile_z: float) -> int:
    """Workers of ``slots_each`` places for a Poisson number of residents, by the square-root rule."""
    places = mean_in_system + quantile_z * math.sqrt(mean_in_system)
    return max(1, math.ceil(places / slots_each - 1e-9))
