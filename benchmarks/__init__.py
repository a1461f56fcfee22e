"""Speed and memory of `MoHAttention` beside `keras.layers.MultiHeadAttention`.

`python -m benchmarks --help` says what there is to run; docs/how-fast.md explains what comes out.
One process measures one framework, the one that `KERAS_BACKEND` names. A measurement goes through

    cases.py        what is computed: lengths, heads, forward or training, causal or not
    competitors.py  the layers that compute it, all with the same weights
    backends/       how a framework turns a layer into a program that can be timed
    harness.py      checks every program's answer, and only then times it, in turn with the others
    suites.py       which cases and competitors, suite by suite
    report.py       the tables; plots.py the figures

so that nothing is timed that is wrong, and every program meets the same moods of the machine.
"""

import os

# The cores that this process may use, for the frameworks that take fewer unless they are told.
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
os.environ.setdefault("OMP_NUM_THREADS", str(CORES))
