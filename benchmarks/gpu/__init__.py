"""Attention alone on a GPU, beside the fused attention that PyTorch has: `--device gpu`.

    cases.py        what is computed, in which order, and the speed-ups that are asked for
    data.py         random tensors of a case, and what must come of them, in float64
    competitors.py  the ways to compute it
    timing.py       times of the device
    suite.py        checks every answer, times it, and ends in time
    report.py       the tables

It needs PyTorch, Triton and a GPU. The tests run it on tiny cases on a CPU, where Triton interprets
its kernels, and some of the competitors cannot serve.
"""
