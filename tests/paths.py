"""What the tests of `test_paths*.py` share: models and calls of attention, to see what ran."""

import functools
import math
import re
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import Routing, implementations, routed_attention
from keras_moh.implementations.triton_blocks import Blocks
from tests.samples import D, floats, moh_attention, padding

NAMES = [
    name
    for name, (backend, _) in implementations.IMPLEMENTATIONS.items()
    if backend in (None, keras.backend.backend())
]

# Those for GPUs and TPUs.
OF_KERNELS = ("torch_triton", "jax_triton", "jax_pallas_tpu")
# Those by Keras's own fused attention, which is not for every dtype.
OF_KERAS = ("compact", "fused")


def model_of(layer: keras.Layer, *unknown: None) -> keras.Model:
    inputs = keras.Input((*(unknown or (None,)), D))
    output = layer(inputs, use_causal_mask=not unknown)
    readout = keras.layers.Dense(1, kernel_initializer=keras.initializers.Constant(0.1))
    return keras.Model(inputs, readout(output))


def train_and_predict(
    layer: keras.Layer, mode: dict[str, Any], ran: list[str], *lengths: tuple[int, ...]
) -> tuple[list[set[str]], list[np.ndarray]]:
    """What runs in `fit`, `evaluate` and `predict`, and all that comes of it."""
    model = model_of(layer, *[None] * (len(lengths[0]) - 1 if len(lengths[0]) > 2 else 0))
    model.compile(keras.optimizers.SGD(0.01), "mse", **mode)
    seen, results = [], []
    for step in (model.fit, model.evaluate, model.predict):
        ran.clear()
        for shape in lengths:
            x = floats(*shape, D)
            y = [] if step == model.predict else [np.tanh(x[..., :1])]
            result = step(x, *y, verbose=0)
            result = result.history["loss"] if step == model.fit else result
            results.append(np.asarray(result))
        seen.append(set(ran))
    return seen, [*results, *model.get_weights()]


def assert_all_close(actual: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)


# Steps of changing batch and length.
SHAPES = ((2, 5), (3, 7))


@functools.cache
def expected_of_model(*lengths: tuple[int, ...], **arguments: Any) -> list[np.ndarray]:
    layer = moh_attention(**arguments, implementation="reference")
    return train_and_predict(layer, {}, [], *lengths)[1]


# Calls of the function, long enough that no array of a tile is as large as all scores -------------

LENGTH, HEADS, TAKEN, WIDTH = 1531, 4, 2, 3


def inputs_of_length(*batch: int, length: int = LENGTH) -> tuple[list[Any], Any, Any]:
    """Query, key, value and gates; heads; and the cotangent."""
    tensors = [floats(*batch, length, HEADS, WIDTH, seed=seed) for seed in range(3)]
    random = np.random.default_rng(4).random((*batch, length, HEADS))
    heads = np.sort(random.argsort(axis=-1)[..., :TAKEN], axis=-1).astype("int32")
    gates = 2 + floats(*batch, length, TAKEN, seed=5)
    tensors = [ops.convert_to_tensor(x) for x in (*tensors, gates)]
    cotangent = ops.convert_to_tensor(floats(*batch, length, HEADS, WIDTH, seed=6))
    return tensors, ops.convert_to_tensor(heads), cotangent


def attention(name: str | None, heads: Any, **options: Any) -> Callable[..., Any]:
    def attend(query: Any, key: Any, value: Any, gates: Any) -> Any:
        return routed_attention(
            *(query, key, value, Routing(heads, gates, gates[..., :0])),
            **options,
            implementation=name,
        )

    return attend


def largest_array(program: str) -> int:
    """Number of entries of the largest array in a program of XLA's, of either dialect."""
    shapes = re.findall(r"tensor<((?:\d+x)+)[a-z]|\b[a-z]+\d+\[([\d,]+)\]", program)
    assert shapes
    return max(math.prod(map(int, re.findall(r"\d+", "".join(shape)))) for shape in shapes)


OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True},
    "window": {"sliding_window": 100, "is_causal": True},
    "padding": {"mask": np.arange(LENGTH).reshape(1, 1, 1, LENGTH) < 1000},
}


# Heads of several widths that share keys, unevenly taken ------------------------------------------

OPTIONS_OF_HEADS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True, "causal_offset": -3},  # the first rows see no key
    "padding": {"mask": padding(19, 0, length=41)[:, None, None]},
    "causal, padding": {
        "is_causal": True,
        "causal_offset": 4,
        "mask": padding(30, 41, length=41)[:, None, None],
    },
}


def shape_of_heads(groups: int, width: int) -> dict[str, Any]:
    return {
        **{"queries": 23, "keys": 41, "heads": 8, "taken": 3, "groups": groups},
        **{"widths": (width, width), "load": "uneven", "some_gates_are_0": True},
    }


# Steps of decoding, whose keys are split: here in 4 parts, of tiles of 16 -------------------------

OPTIONS_OF_DECODING: dict[str, dict[str, Any]] = {
    "nothing": {},
    "causal": {"is_causal": True, "causal_offset": 56},
    "no key": {"is_causal": True, "causal_offset": -1},  # for the first row, or the only one
    "one key": {"is_causal": True, "causal_offset": 0},
    "window": {"is_causal": True, "causal_offset": 50, "sliding_window": 20},
    "beyond": {"sliding_window": 3, "causal_offset": 70},
    "lengths": {"mask": padding(17, 0, length=59)[:, None, None]},  # 2 and 4 empty parts
    "lengths, causal": {
        "is_causal": True,
        "causal_offset": 40,
        "mask": padding(3, 59, length=59)[:, None, None],
    },
    "holes": {"mask": (np.arange(59) // 16 % 2 == 1)[None, None, None]},  # not one key of a part
}


def shape_of_decoding(queries: int, groups: int) -> dict[str, Any]:
    return {
        **{"queries": queries, "keys": 59, "heads": 8, "taken": 3, "groups": groups},
        "some_gates_are_0": True,
    }


def recorded_launches(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[str, tuple[int, ...]]]:
    """The kernels that the module launches, and their grids, with keys split in 4."""
    launches: list[tuple[str, tuple[int, ...]]] = []
    launch = module._launch

    def record(name: str, grid: tuple[int, ...], *rest: Any, **more: Any) -> Any:
        launches.append((name, grid))
        return launch(name, grid, *rest, **more)

    monkeypatch.setattr(module, "_launch", record)
    monkeypatch.setattr(module, "blocks", lambda *_: Blocks(16, 16, 4, 1))
    monkeypatch.setattr(module, "splits", lambda *_: 4)
    return launches
