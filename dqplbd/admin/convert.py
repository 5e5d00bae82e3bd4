# SPDX-License-Identifier: Apache-2.0
"""From the values of the policy modules to those of the API.  Pure."""

from typing import Final

from dqplbd.admin.model import Device, Explanation, ExplanationStep, Path, Profile
from dqplbd.admin.rdma_hints import diagnose, events_text, span_text
from dqplbd.profiles import bdp
from dqplbd.profiles.retry import Retry
from dqplbd.units import format_ns, format_rate

__all__ = ["explanation_view", "profile_view"]

# The rule of dqplbd.profiles.bdp in short; what it says with the numbers of a path comes from there.
_FORMULAS: Final = {
    "rtt_ns": "windowed minimum of the samples, else class_rtt_ns",
    "rate_bps": "min(local, peer, class cap, path) x mtu / (mtu + header)",
    "bdp_bytes": "rate_bps x rtt_ns / 8",
    "segment_bytes": "power of two nearest to sqrt(gain x bdp_bytes x 32 KiB)",
    "window_bytes": "gain x bdp_bytes + segment_bytes, in whole segments",
    "qps": "max(rate_bps / per_qp_rate_bps, entropy_target)",
    "outstanding_per_qp": "ceil(window_bytes / (segment_bytes x qps))",
}


def profile_view(profile: bdp.Profile, *, grants: bool, retry: Retry | None = None) -> Profile:
    """A computed profile as the API tells it.

    :param retry: of the path, where its provider lets it be set.
    """
    return Profile(
        rtt_ns=profile.rtt_ns,
        rtt_source=profile.rtt_by,
        rate_bps=profile.rate_bps,
        bdp_bytes=profile.bdp_bytes,
        window_bytes=profile.window_bytes,
        segment_bytes=profile.segment_bytes,
        qps=profile.qps,
        outstanding_per_qp=profile.outstanding_per_qp,
        adapt=profile.adapt,
        grants=grants,
        limited_by=profile.limited_by,
        limits={
            "rtt_ns": profile.rtt_by,
            "rate_bps": profile.rate_by,
            "segment_bytes": profile.segment_by,
            "window_bytes": profile.limited_by,
            "qps": profile.qps_by,
            "outstanding_per_qp": profile.outstanding_by,
            **({"ack_timeout_ns": retry.timeout_by} if retry is not None else {}),
        },
        ack_timeout_ns=retry.ack_timeout_ns if retry is not None else None,
        retries=retry.retries if retry is not None else None,
    )


def _goodput_note(path: Path) -> str:
    """Where the goodput comes from, and what bandwidth bursts said."""
    seen = path.estimate
    notes = []
    if seen.goodput_source is not None:
        notes.append(f"from {'a bandwidth burst' if seen.goodput_source == 'burst' else 'traffic'}")
    tried = seen.bursts_ok + seen.bursts_busy + seen.bursts_refused + seen.bursts_failed
    if tried:
        best = f", best of the last {format_rate(seen.burst_bps)}" if seen.burst_bps is not None else ""
        notes.append(
            f"{tried} bursts: {seen.bursts_ok} good, {seen.bursts_busy} peer busy, {seen.bursts_refused} refused, "
            f"{seen.bursts_failed} failed{best}"
        )
    return "; ".join(notes)


def _measured(path: Path) -> list[ExplanationStep]:
    seen = path.estimate
    probes = seen.probes_ok + seen.probes_timeout + seen.probes_send_error + seen.probes_invalid
    source = "probed by this host" if seen.probed else "not probed by this host"
    return [
        ExplanationStep(
            topic="measured",
            name="rtt_ns",
            value=seen.rtt_ns,
            formula="windowed minimum of the samples",
            note=f"{source}; {seen.probes_ok} good samples, {seen.windows} full windows",
        ),
        ExplanationStep(topic="measured", name="rtt_p50_ns", value=seen.rtt_p50_ns),
        ExplanationStep(topic="measured", name="rtt_p99_ns", value=seen.rtt_p99_ns),
        ExplanationStep(
            topic="measured",
            name="loss_ratio",
            value=seen.loss_ratio,
            formula="timeouts / (ok + timeouts), of the last windows",
            note=f"since the path began: {probes} probes, {seen.probes_timeout} timed out, "
            f"{seen.probes_send_error} not sent, {seen.probes_invalid} invalid",
        ),
        ExplanationStep(
            topic="measured",
            name="goodput_bps",
            value=seen.goodput_bps,
            formula="best rate that acknowledged data had",
            note=_goodput_note(path),
        ),
    ]


def _class(path: Path) -> list[ExplanationStep]:
    found = path.classification
    return [
        ExplanationStep(
            topic="class",
            name="labels_class",
            value=found.labels_class,
            note=f"location from {found.location_source}" if found.location_source else "",
        ),
        ExplanationStep(
            topic="class",
            name="rtt_class",
            value=found.rtt_class,
            note=f"{found.pending_windows} windows already speak for {found.pending_class}"
            if found.pending_class is not None
            else "",
        ),
        ExplanationStep(
            topic="class",
            name="path_class",
            value=found.path_class,
            limited_by=found.source,
            note="labels and RTT disagree: check the labels, the cabling and the route" if found.mismatch else "",
        ),
    ]


def _device(device: Device) -> list[ExplanationStep]:
    """What the path's device counted lately: of all its paths, as it does not tell them apart."""
    if device.rdma_counters is None or not device.rdma_events:
        return []
    found = "; ".join(f"{what}: {fix}" for what, fix in diagnose(device))
    return [
        ExplanationStep(
            topic="measured",
            name="rdma_events",
            value=events_text(device.rdma_counters.recent),
            formula=f"of {device.name}, all its paths, in the last {span_text(device.rdma_counters.recent_seconds)}",
            note=found,
        )
    ]


def _retry(retry: Retry) -> list[ExplanationStep]:
    return [
        ExplanationStep(
            topic="profile",
            name="ack_timeout_ns",
            value=retry.ack_timeout_ns,
            formula="1024 x rtt_ns, 16 ms to 1 s, at least 8 x rtt_ns + window_bytes / rate_bps",
            substituted=retry.formula,
            limited_by=retry.timeout_by,
        ),
        ExplanationStep(
            topic="profile",
            name="give_up_ns",
            value=retry.give_up_ns,
            formula="ack_timeout_ns x (retries + 1)",
            substituted=f"{format_ns(retry.ack_timeout_ns)} x ({retry.retries} + 1)",
            note="silence after which a queue pair made now fails",
        ),
    ]


def explanation_view(
    path: Path, explained: bdp.Explanation, device: Device | None = None, retry: Retry | None = None
) -> Explanation:
    """Measured, class, and each number of the profile with its formula, for one path.

    :param path: the path as the API tells it.
    :param explained: :func:`dqplbd.profiles.bdp.explain_profile` for the same path.
    :param device: its local device.
    :param retry: how patient its queue pairs are, where its provider lets that be set.
    """
    steps = _measured(path) + (_device(device) if device is not None else []) + _class(path)
    for name, limit in explained.why.items():
        steps.append(
            ExplanationStep(
                topic="profile",
                name=name,
                value=limit.value,
                formula=_FORMULAS.get(name, ""),
                substituted=limit.formula,
                limited_by=limit.limiter or "",
            )
        )
    if retry is not None:
        steps += _retry(retry)
    live = path.live
    if live.window_bytes and live.profile_window_bytes and live.window_bytes < live.profile_window_bytes:
        steps.append(
            ExplanationStep(
                topic="profile",
                name="window_now_bytes",
                value=live.window_bytes,
                formula="shrunk while the path's delay exceeds its base RTT",
                limited_by="delay",
                note=f"queueing delay {format_ns(live.queue_delay_ns)}",
            )
        )
    return Explanation(path=path, steps=steps, summary=explained.summary)
