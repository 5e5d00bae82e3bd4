# SPDX-License-Identifier: Apache-2.0
"""docs/metrics.md, made of the catalogue: ``python -m dqplbd.metrics.reference > docs/metrics.md``."""

from dqplbd.inventory.rdma_drivers import DRIVERS, MEANINGS, Kind
from dqplbd.metrics.catalogue import CATALOGUE

__all__ = ["reference"]

_HEAD = """\
<!-- SPDX-License-Identifier: Apache-2.0 -->
<!-- Written from dqplbd/metrics/catalogue.py by `make docs`; changes made here are lost. -->
# Metrics

`dqplbd` serves Prometheus metrics at `http://127.0.0.1:9471/metrics` (keys `metrics.address` and `metrics.port`), and
beside them `/healthz` (503: restart the daemon) and `/readyz` (503: send no work to this host).

The numbers are taken every two seconds and a scrape gives out the last ones, so scraping costs next to nothing and
never waits; `dqplbd_snapshot_timestamp_seconds` says how old they are.

Labels come from closed sets: `device` (the devices of this host), `class` (host, rack, zone, building, region, unknown)
and the values named below. A host has at most 2,000 series however many peers it has: no metric has a label for peers,
except `dqplbd_top_path_*`, which cover the `metrics.top_k` (0 to 20, normally 0) paths with the largest queueing delay.
For single peers ask `dqplb paths` and `dqplb path explain PEER`.

Raw counters of the network hardware are not repeated here: node_exporter has them as `node_infiniband_*`, with bytes,
packets, link errors and waiting (`node_infiniband_port_transmit_wait_total`, in ticks). But of what tells of loss and
congestion it has what mlx5 counts, and of other drivers only files of the same name. `dqplbd_device_rdma_events_total`
sums them by kind, named alike over drivers, for the devices that dqplbd uses. What one event is differs with the driver
(a packet, a NAK, a retry), so compare a device with itself and with others of its driver. The counters are read every
5 seconds, beside scrapes; one that goes round at 32 bits, or is set to 0, does not disturb the sums.

`configs/prometheus-rules.yaml` has alerts on these metrics, `configs/grafana-dashboard.json` a dashboard.

| metric | type | labels | meaning |
|---|---|---|---|
"""


_EVENTS = """
## Events of RDMA devices

Kinds of `dqplbd_device_rdma_events_total`, which `dqplb devices --json` shows as `rdma_events`:

| kind | what happened |
|---|---|
"""

_FILES = """
They are the sums of these files of `/sys/class/infiniband/<device>/ports/<port>/hw_counters`, or of
`/sys/class/infiniband/<device>/hw_counters` where the device has one port; the driver is found by the device's link to
it, never from its name. Every driver adds `counters/port_xmit_discards` to `discard` where there
is one. `xmit_wait_ticks` is in `rdma_events` only. Of files with *or* between, one is taken. A file that is there and
cannot be read counts in `dqplbd_device_rdma_counters_unreadable` and disturbs no other; `dqplb devices --json` names it
and the reason.

| driver | kind | files |
|---|---|---|
"""


def _events() -> str:
    rows = [f"| `{kind}` | {meaning} |\n" for kind, meaning in MEANINGS.items()]
    files = []
    for driver, sources in DRIVERS.items():
        for kind in Kind:
            names = [" or ".join(f"`{file}`" for file in one.files) for one in sources if one.kind is kind]
            if names:
                files.append(f"| {driver} | `{kind}` | {', '.join(names)} |\n")
    return _EVENTS + "".join(rows) + _FILES + "".join(files)


def reference() -> str:
    """The whole page."""
    rows = [
        f"| `{one.name}` | {one.kind} | {', '.join(f'`{label}`' for label in one.labels) or '-'} | {one.help} |\n"
        for one in CATALOGUE
    ]
    return _HEAD + "".join(rows) + _events()


if __name__ == "__main__":
    print(reference(), end="")
