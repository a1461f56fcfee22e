"""The measured rule by which `implementation=None` chooses.

What skipping saves is the attention of the heads not taken: for each of the `B H` lists of rows, on
average `(1 - K / H) T S (d + dv)` products. What it costs is a fixed time for each list, to cut its
rows out and to start its products, whatever their size. So there is a number of products saved in a
list above which skipping pays, and it differs by backend.

Measured on two cores of an AMD EPYC (Zen 5), float32, `H = 12`, `d = 64`, half of the heads active,
as milliseconds of a forward pass of the layer, the reference and the implementation on rows; in
brackets the products saved in a list:

| B, T = S | torch_sdpa | jax_xla | tensorflow_xla |
| --- | --- | --- | --- |
| 16, 64 (0.26 M) | 36.6, 41.6 | 13.7, 14.6 | 14.8, 27.0 |
| 8, 128 (1.0 M) | 40.4, 36.1 | | |
| 8, 256 (4.2 M) | 79.9, 64.9 | 66.6, 37.3 | 33.7, 41.0 |
| 4, 512 (16.8 M) | | | 37.2, 40.2 (training step: 119.2, 120.0) |
| 1, 1024 (67 M) | 82.7, 40.2 | 76.3, 28.7 | 23.5, 20.6 |

On PyTorch the worst of forward and training, causal or not, decides, as times of the implementation
over the reference: 1.14 at `1, 128` with half of the heads (1.0 M), 1.26 and 1.21 at `1, 256` and
`4, 256` with three quarters (2.1 M), 1.02 and 0.99 there with half (4.2 M).

Where no head is skipped, PyTorch's own attention kernel on all heads is at least as fast as the
reference, which makes all scores: a forward pass of `4, 256` takes 32.0 against 33.4 ms, forward
and backward of `32, 128` with 8 heads of 12 features 39 against 88. On TensorFlow `fused` goes over
the scores less often: in 24 cases from `1, 16` to `4, 512` it took 0.86 to 1.03 of the reference's
time in graphs, 0.94 to 1.05 under XLA. Keras's attention on JAX makes the scores on a CPU as the
reference does: 0.88 to 1.08 of its time.

With one query, a step of decoding, time goes into reading keys and values. What is saved are those
of heads not taken, so nothing where query heads share them: then some head of each group is taken.
PyTorch saves more where causality or a mask hides some of a cache: its implementation does not read
them, while for the others all slots that no query sees are first replaced by zeros.

Nothing was measured on other devices. Where a head is to be skipped the kernels made for them,
Triton's and Pallas's, serve, since they read and compute no more than the heads taken; on JAX
without them `jax_xla` does, unless `compact` can. Else it is the framework's fused attention.
"""

from __future__ import annotations

import math

import keras

from keras_moh.implementations import compact
from keras_moh.implementations.spec import AttentionSpec

# What is made of kernels for GPUs or TPUs.
_KERNELS = ("torch_triton", "jax_triton", "jax_pallas_tpu")
# Products saved in a list from which on skipping pays, in the table between loss and gain.
_WORTH_IT = {"torch_sdpa": 2.2e6, "jax_xla": 0.4e6, "tensorflow_xla": 17e6}
# The same with one query, where they stand for numbers read: `python -m benchmarks --suite decode`.
_WORTH_READING = {"torch_sdpa": 0.25e6, "jax_xla": 0.5e6, "tensorflow_xla": 0.25e6}
# From this many numbers of a head on, Keras's attention on PyTorch, by which `compact` attends,
# takes several times as long for one query, even where no head is skipped: with 12 heads and 16384
# slots of 64 + 64 numbers 39 ms against 10, with 4 key/value heads 36 against 5.
_READS_LONG_CACHES = {"torch_sdpa": 2**21}
# From this many scores of a head on, dense attention on a CPU has left the caches: in tiles all the
# heads are faster too (JAX at `T = S = 1024`: 24 against 68 ms; TensorFlow at 4096: 231, 273).
_TILES_WIN = {"jax_xla": 512**2, "tensorflow_xla": 4096**2}
# Up to this many scores of a head `compact` is faster than the implementation on rows, where it can
# serve and no key is hidden. With 4 + 4 of 16 heads in 4 groups and `D = 1024`, the rows took, of
# the time of `compact`: on PyTorch 0.95 to 1.26 at 256 and 1024 (with one key/value head 1.00 to
# 1.28), on JAX 0.98 to 1.08 at 256 and 0.78 to 1.01 at 512, on TensorFlow 0.81 to 1.25 at 256 and
# 0.70 to 0.88 at 1024.
_COMPACT_WINS = {"torch_sdpa": math.inf, "jax_xla": 256**2, "tensorflow_xla": 256**2}
# Share of active heads up to which products for each head are faster than one for all. PyTorch's
# are 15 % slower for each head computed, of the gathers and the narrower products. TensorFlow's
# product for all runs at twice the rate: at 1024 tokens products for each head took 0.86 of the
# layer's time with a quarter of the heads, 1.02 with half and 1.18 with three quarters (training
# steps 0.89, 0.98, 1.08; at 4096 with half 1.01, training steps 0.96).
_SKIPPED_SHARE = {"tensorflow": 0.5, "torch": 0.8}


def is_worth_it(name: str, spec: AttentionSpec) -> bool:
    """Whether the implementation is expected to be faster than those after it in the table."""
    if name in _KERNELS:
        return spec.device != "cpu" and spec.num_active_heads < spec.num_heads
    if name == "fused":
        backend = keras.backend.backend()
        # PyTorch's kernel lacks second derivatives, which may be taken of a traced graph.
        is_faster = backend == "tensorflow" or (backend == "torch" and not spec.is_traced)
        return is_faster and spec.query_length != 1
    if name not in _WORTH_IT:
        return True
    if spec.device != "cpu":
        skips = spec.num_active_heads < spec.num_heads
        return name == "jax_xla" and skips and compact.unsupported_reason(spec) is not None
    if spec.query_length is None or spec.key_length is None:
        return True  # Lengths that vary may be long ones, where much is to be lost.
    if spec.query_length == 1:
        is_long = _of_head(spec) >= _READS_LONG_CACHES.get(name, math.inf)
        return is_long or _unread(name, spec) >= _WORTH_READING[name]
    scores = spec.query_length * spec.key_length
    hides_no_key = spec.mask_shape is None and spec.sliding_window is None
    if hides_no_key and scores <= _COMPACT_WINS[name] and not compact.unsupported_reason(spec):
        return False
    if name in _TILES_WIN and scores >= _TILES_WIN[name]:
        return True
    skipped = 1 - spec.num_active_heads / spec.num_heads
    return skipped * scores * (spec.key_dim + spec.value_dim) >= _WORTH_IT[name]


def _unread(name: str, spec: AttentionSpec) -> float:
    """Numbers of keys and values that one query does not read, for each of its heads."""
    of_head = _of_head(spec)
    if name == "torch_sdpa" and (spec.is_causal or spec.mask_shape is not None):
        return of_head
    shared = spec.num_key_value_heads < spec.num_heads
    return 0 if shared else (1 - spec.num_active_heads / spec.num_heads) * of_head


def _of_head(spec: AttentionSpec) -> int:
    """Numbers of the keys and values of a head, whose length is known."""
    return (spec.key_length or 0) * (spec.key_dim + spec.value_dim)


def skips_projections(spec: AttentionSpec) -> bool:
    """Whether projecting only the heads taken is expected to be faster than projecting all."""
    most = _SKIPPED_SHARE[keras.backend.backend()]
    return spec.device == "cpu" and spec.num_active_heads / spec.num_heads <= most
