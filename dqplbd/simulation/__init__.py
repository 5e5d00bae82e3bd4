# SPDX-License-Identifier: Apache-2.0
"""The fabric simulator: what would these profiles do to my switch buffers and to my collectives?

=================  ===================================================================================================
module             concern
=================  ===================================================================================================
``scenario.py``    models of the YAML file: region, fabric, workload, senders
``workloads.py``   the messages of collectives, in the order in which a library posts them.  Pure
``senders.py``     the profiles of the senders that are compared.  Pure
``measures.py``    bounds, bandwidths, percentiles, fairness.  Pure
``simulator.py``   the only wrapper of the compiled simulator, ``native/sim``
``compare.py``     runs a scenario for each sender
``charts.py``      charts as SVG.  Pure
``report.py``      the result as one HTML page.  Pure
=================  ===================================================================================================

The compiled part runs the daemon's own core in virtual time; see ``native/sim/sim.h`` for the model.
"""
