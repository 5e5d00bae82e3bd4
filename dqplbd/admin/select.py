# SPDX-License-Identifier: Apache-2.0
"""Which paths to show, and in which order.  Pure."""

from collections.abc import Callable, Sequence
from typing import Final

from dqplbd.admin.model import AdminError, Path, PathClass

__all__ = ["SORT_KEYS", "select_paths"]

_UNKNOWN: Final = -1.0


def _number(value: float | None) -> float:
    return _UNKNOWN if value is None else float(value)


# Names of the orders; numbers sort the largest first, because the interesting paths are there.
SORT_KEYS: Final[dict[str, Callable[[Path], tuple[float | str, ...]]]] = {
    "class": lambda p: (p.path_class.distance, p.peer, p.device),
    "peer": lambda p: (p.peer, p.device),
    "device": lambda p: (p.device, p.path_class.distance, p.peer),
    "rtt": lambda p: (-_number(p.estimate.rtt_ns), p.peer, p.device),
    "loss": lambda p: (-_number(p.estimate.loss_ratio), p.peer, p.device),
    "tx": lambda p: (-_number(p.live.tx_bps), -p.live.tx_bytes, p.peer, p.device),
    "rx": lambda p: (-_number(p.live.rx_bps), -p.live.rx_bytes, p.peer, p.device),
    "inflight": lambda p: (-p.live.inflight_bytes, p.peer, p.device),
    "delay": lambda p: (-p.live.queue_delay_ns, p.peer, p.device),
    "window": lambda p: (-p.profile.window_bytes, p.peer, p.device),
}


def select_paths(
    paths: Sequence[Path],
    *,
    path_class: str | None = None,
    peer: str | None = None,
    device: str | None = None,
    sort: str = "class",
    top: int | None = None,
) -> list[Path]:
    """The paths of a class, peer or device, in an order, at most ``top`` of them (>= 1).

    :param sort: a key of :data:`SORT_KEYS`.
    :raises AdminError: 400, a name that is none.
    """
    if sort not in SORT_KEYS:
        raise AdminError(f"sort {sort!r} is no order", f"one of {', '.join(SORT_KEYS)}")
    if path_class is not None and path_class not in set(PathClass):
        raise AdminError(f"class {path_class!r} is no path class", f"one of {', '.join(PathClass)}")
    if top is not None and top < 1:
        raise AdminError(f"top {top} is below 1", "a number of paths to show, from 1 on")
    chosen = [
        p
        for p in paths
        if (path_class is None or p.path_class == path_class)
        and (peer is None or p.peer == peer)
        and (device is None or p.device == device)
    ]
    chosen.sort(key=SORT_KEYS[sort])
    return chosen[:top]
