"""From a checkpoint's weights to a model's: every name matched, or nothing changed.

Files of PyTorch's (`.pt`, `.pth`) are pickles, and a pickle can run code. `torch_checkpoint.py`
reads them with PyTorch's own weights-only reader, which refuses what is no weight; so they need
PyTorch, whatever backend the model is on. safetensors files need nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_moh.models.safetensors import stored_tensors
from keras_moh.routing import TwoStageRouter


class Place(NamedTuple):
    """Where a stored weight belongs."""

    name: str
    """The weight's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its shape there."""
    values: Callable[[np.ndarray], Iterable[tuple[Any, np.ndarray]]]
    """The variables that it fills, each with its values, for the stored numbers."""


def check_weights(
    stored: Mapping[str, tuple[int, ...]], expected: Mapping[str, tuple[int, ...]], whose: str
) -> None:
    """Refuse weights that are not exactly the expected ones, naming all that are wrong.

    Args:
        stored: The shapes of a checkpoint's weights, by name.
        expected: What they should be.
        whose: Of the error's message: whose weights the expected ones are.

    Raises:
        ValueError: if a weight is missing, unexpected, or of another shape.
    """
    wrong = [f"missing: {name}" for name in expected if name not in stored]
    wrong += [f"unexpected: {name}" for name in stored if name not in expected]
    wrong += [
        f"of the wrong shape: {name} is {stored[name]}, not {shape}"
        for name, shape in expected.items()
        if name in stored and stored[name] != shape
    ]
    if wrong:
        listed = "\n  ".join(wrong)
        raise ValueError(f"The weights are not those {whose}:\n  {listed}")


def read_checkpoint(path: str | Path, entries: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The weights of a checkpoint by name.

    Args:
        path: A file `.pt` or `.pth`, or with the same names `.safetensors`.
        entries: Names of entries that hold the weights where the file holds other things too, the
            first one that is there counts. Without any the file holds the weights alone.

    Raises:
        FileNotFoundError: if there is no such file.
        ImportError: if PyTorch is needed and is not installed.
        ValueError: if the file is of another kind, or has other things in it than weights.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"There is no file {path}")
    if path.suffix == ".safetensors":
        return {name: tensor.read() for name, tensor in stored_tensors([path]).items()}
    if path.suffix not in (".pt", ".pth"):
        raise ValueError(
            f"A checkpoint must be a file .pt, .pth or .safetensors. Received: path={str(path)!r}"
        )
    try:
        from keras_moh.models import torch_checkpoint
    except ImportError as error:
        raise ImportError(
            f"Reading {path.name} needs PyTorch, on every backend: `pip install keras-moh[torch]`"
        ) from error
    return torch_checkpoint.read(path, entries)


def fill(places: Iterable[Place], weights: Mapping[str, np.ndarray], whose: str) -> None:
    """Assign the `weights` of a checkpoint, once all of them are known to fit.

    Raises:
        ValueError: as `check_weights`, or if a model's own weights are quantized or have LoRA.
    """
    places = list(places)
    shapes = {name: tuple(array.shape) for name, array in weights.items()}
    check_weights(shapes, {place.name: place.shape for place in places}, whose)
    pairs = [pair for place in places for pair in place.values(weights[place.name])]
    for variable, _ in pairs:
        # With LoRA a kernel is computed, quantized it holds integers.
        is_variable = isinstance(variable, keras.Variable)
        if not is_variable or not keras.backend.is_float_dtype(variable.dtype):
            raise ValueError(f"The weights {whose} cannot be loaded after quantization or LoRA")
    for variable, values in pairs:
        variable.assign(np.reshape(values, variable.shape))


# The places of PyTorch's usual modules. Its kernels have the outputs first, Keras's have them last.


def array(name: str, variable: Any, shape: tuple[int, ...] | None = None) -> Place:
    """A stored array in the layout of `variable`, up to axes of length 1 or merged ones."""
    stored = tuple(variable.shape) if shape is None else shape
    return Place(name, stored, lambda numbers: [(variable, numbers)])


def linear(name: str, layer: Any, inputs: int = 1) -> list[Place]:
    """`Linear` for a `Dense` or `EinsumDense`, whose kernel has that many input axes first."""
    lengths = tuple(layer.kernel.shape)
    shape = (math.prod(lengths[inputs:]), math.prod(lengths[:inputs]))
    places = [Place(f"{name}.weight", shape, lambda numbers: [(layer.kernel, numbers.T)])]
    if layer.bias is not None:
        places.append(array(f"{name}.bias", layer.bias, (math.prod(layer.bias.shape),)))
    return places


def stacked(name: str, layers: list[Any]) -> list[Place]:
    """One `Linear` for several `EinsumDense` of the same input, one after the other."""
    parts = [part for layer in layers for part in linear(name, layer)]
    places = []
    for kind in dict.fromkeys(part.name for part in parts):
        of_kind = [part for part in parts if part.name == kind]
        lengths = [part.shape[0] for part in of_kind]
        shape = (sum(lengths), *of_kind[0].shape[1:])
        places.append(Place(kind, shape, _split(of_kind, lengths)))
    return places


def _split(
    parts: list[Place], lengths: list[int]
) -> Callable[[np.ndarray], list[tuple[Any, np.ndarray]]]:
    def values(numbers: np.ndarray) -> list[tuple[Any, np.ndarray]]:
        arrays = np.split(numbers, np.cumsum(lengths)[:-1])
        return [
            pair for part, array in zip(parts, arrays, strict=True) for pair in part.values(array)
        ]

    return values


def convolution(name: str, layer: Any) -> list[Place]:
    """`Conv2d` for a `Conv2D`, or for a `DepthwiseConv2D` of as many groups as channels."""
    height, width, inputs, outputs = layer.kernel.shape
    depthwise = isinstance(layer, keras.layers.DepthwiseConv2D)
    shape = (inputs, 1, height, width) if depthwise else (outputs, inputs, height, width)
    order = (2, 3, 0, 1) if depthwise else (2, 3, 1, 0)
    return [
        Place(
            f"{name}.weight",
            shape,
            lambda numbers: [(layer.kernel, np.transpose(numbers, order))],
        ),
        array(f"{name}.bias", layer.bias),
    ]


def patches(name: str, layer: Any, patch_size: int) -> list[Place]:
    """`Conv2d` of a patch's size and stride for a `Dense` on patches `(row, column, channel)`."""
    inputs, outputs = layer.kernel.shape
    shape = (outputs, inputs // patch_size**2, patch_size, patch_size)
    return [
        Place(
            f"{name}.weight",
            shape,
            lambda numbers: [(layer.kernel, np.transpose(numbers, (2, 3, 1, 0)))],
        ),
        array(f"{name}.bias", layer.bias),
    ]


def layer_norm(name: str, layer: Any) -> list[Place]:
    """`LayerNorm` with weight and bias."""
    return [array(f"{name}.weight", layer.gamma), array(f"{name}.bias", layer.beta)]


def router(prefix: str, layer: Any) -> list[Place]:
    """The authors' kernels of a `TwoStageRouter`, by their names after `prefix`; none of others."""
    if not isinstance(layer, TwoStageRouter):
        return []
    kernels = {"wg": layer.routed_scores, "wg_0": layer.group_scores, "wg_1": layer.shared_scores}
    return [
        place
        for theirs, dense in kernels.items()
        if dense is not None
        for place in linear(f"{prefix}{theirs}", dense)
    ]
