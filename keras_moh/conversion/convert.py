"""`convert_to_moh`: a trained model's attention as Mixture-of-Head attention."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np

from keras_moh.conversion.adapter import Adapter, build_like, class_name, replace
from keras_moh.conversion.adapters import ADAPTERS, is_attention, unsupported_reason
from keras_moh.conversion.copying import copy_model
from keras_moh.conversion.remembering import parent, remember, walk
from keras_moh.conversion.report import (
    ConversionReport,
    ConvertedLayer,
    LeftLayer,
    OutputChange,
)
from keras_moh.conversion.selection import (
    Budget,
    Found,
    check_keys,
    layer_path,
    num_heads_of,
    selected,
)
from keras_moh.errors import integer, invalid_argument, number_in

ROUTERS = ("query_norm", "two_stage")


def convert_to_moh(
    model: keras.Model,
    num_shared_heads: Budget,
    top_k: Budget,
    router: str = "query_norm",
    layers: Any = None,
    sample: Any = None,
    *,
    routing_groups: int = 1,
    balance_loss_weight: float = 0.01,
    z_loss_weight: float = 0.0,
    implementation: str | None = None,
) -> tuple[keras.Model, ConversionReport]:
    """A new model like `model`, whose attention is Mixture-of-Head attention.

    It has the same weights, inputs and outputs; `model` stays as it is. Its attention layers are
    adapters: `MoHAttention` layers that are called as the ones they stand for, so that the rest of
    the model need not know. It trains, generates, takes LoRA, and is saved and loaded as any model;
    the process that loads it has to `import keras_moh`.

    This is the beginning of the paper's continue-tuning (arXiv 2410.11842, "MoH-LLaMA3-8B"): with
    fewer heads active, outputs move, and some training brings them back.

    Converted are `keras.layers.MultiHeadAttention` and `GroupQueryAttention`, wherever they are,
    and of keras-hub `CachedMultiHeadAttention` and the attention of Llama, Mistral and Qwen3.

    Args:
        model: A built model that Keras can save and load: functional, `Sequential`, of a class of
            its own, nested, or a backbone or task of keras-hub.
        num_shared_heads: Heads that every token takes, the first ones of each layer. An integer is
            a number of heads; a float between 0.0 and 1.0 a share of the layer's heads, rounded
            down; a function gives either of a source layer; a dict has either by layer, its keys as
            in `layers`.
        top_k: Heads that a token takes beside these, likewise: `0.5` is half of *all* heads of the
            layer, not of the routed ones.
        router: `"query_norm"` (`QueryNormRouter`, without weights) or `"two_stage"`
            (`TwoStageRouter`, with weights that have to be trained first). Defaults to
            `"query_norm"`.
        layers: Which attention layers to convert: a function of the layer that says whether, or one
            or several names or numbers. A name is one of a layer, or several that follow each other
            in its path (`"transformer_layer_3/self_attention"`), and stands for every attention
            layer below it. A number counts all attention layers from the model's first, negative
            ones from its last. Defaults to `None`: all that can be.
        sample: A batch of inputs, as `model.predict` takes. The report says how far the outputs
            move on it. Defaults to `None`.
        routing_groups: As of `MoHAttention`. Defaults to 1.
        balance_loss_weight: Weight of the load-balancing loss of the whole model: each layer's is
            this divided by the number of layers that route, as the authors average them. Defaults
            to 0.01.
        z_loss_weight: Weight of the router z-loss, likewise. Defaults to 0.
        implementation: As of `MoHAttention`. Defaults to `None`.

    Returns:
        A tuple of the new model, which is not compiled unless its constructor compiles it, and a
        `ConversionReport`, to be printed.

    Raises:
        ValueError: if there is nothing to convert, if a layer that is named in `layers` cannot be,
            if a number of heads does not fit a layer, or if the model cannot be copied. Nothing is
            ever converted in part.

    Example:
    >>> import numpy as np, keras, keras_moh
    >>> x = inputs = keras.Input((None, 16))
    >>> for i in range(2):
    ...     attention = keras.layers.MultiHeadAttention(num_heads=4, key_dim=4, name=f"block_{i}")
    ...     x = x + attention(x, x)
    >>> model = keras.Model(inputs, x)
    >>> new_model, report = keras_moh.convert_to_moh(
    ...     model, num_shared_heads=0.5, top_k=0.25, sample=np.ones((1, 3, 16), "float32")
    ... )
    >>> [layer.top_k for layer in report.converted], round(report.active_share, 2)
    ([1, 1], 0.75)
    """
    adapters, left = plan(
        model,
        num_shared_heads,
        top_k,
        layers,
        router=router,
        routing_groups=routing_groups,
        balance_loss_weight=balance_loss_weight,
        z_loss_weight=z_loss_weight,
        implementation=implementation,
    )
    new_model = copy_model(model)
    put(adapters, new_model)
    found = attention_layers(model)
    report = ConversionReport(
        router,
        tuple(_converted(found[i].layer, adapter) for i, adapter in adapters.items()),
        tuple(left),
        None if sample is None else _change(model, new_model, sample),
    )
    return new_model, report


def plan(
    model: keras.Model,
    num_shared_heads: Budget,
    top_k: Budget,
    layers: Any = None,
    *,
    router: str = "query_norm",
    routing_groups: int = 1,
    balance_loss_weight: float = 0.01,
    z_loss_weight: float = 0.0,
    implementation: str | None = None,
) -> tuple[dict[int, Adapter], list[LeftLayer]]:
    """What to do with `model`: unbuilt adapters by the number of the layer, and layers left.

    The arguments are those of `convert_to_moh`. Whatever is wrong with them is found here, before
    anything is done.
    """
    if not isinstance(model, keras.Model):
        raise invalid_argument("model", "a keras.Model", model)
    if not model.built:
        raise invalid_argument("model", "a built model: call it once on data", model)
    if router not in ROUTERS:
        raise invalid_argument("router", " or ".join(map(repr, ROUTERS)), router)
    routing_groups = integer("routing_groups", routing_groups, 1)
    balance_loss_weight = number_in("balance_loss_weight", balance_loss_weight, 0)
    z_loss_weight = number_in("z_loss_weight", z_loss_weight, 0)

    found = attention_layers(model)
    chosen, left = _choose(model, found, layers)
    budgets = {"num_shared_heads": num_shared_heads, "top_k": top_k}
    for name, budget in budgets.items():
        check_keys(name, budget, found)
    numbers = {
        i: tuple(
            num_heads_of(name, budget, i, found, _num_heads(found[i].layer))
            for name, budget in budgets.items()
        )
        for i in chosen
    }
    routed = max(1, sum(k > 0 for _, k in numbers.values()))
    common = {
        "router": router,
        "routing_groups": routing_groups,
        "balance_loss_weight": balance_loss_weight / routed,
        "z_loss_weight": z_loss_weight / routed,
        "implementation": implementation,
    }
    adapters = {
        i: _adapter(model, found[i].layer, {"num_shared_heads": shared, "top_k": k, **common})
        for i, (shared, k) in numbers.items()
    }
    return adapters, left


def put(adapters: dict[int, Adapter], model: keras.Model) -> None:
    """Put the unbuilt `adapters` of a plan in the places of the layers of `model`, for good."""
    found = attention_layers(model)
    for i, adapter in adapters.items():
        layer = found[i].layer
        build_like(adapter, layer)
        adapter.take_weights_of(layer)
        replace(layer, adapter)
    remember(model)


def attention_layers(model: keras.Model) -> list[Found]:
    """All attention layers of `model` that could be converted, or that a report would list."""
    found: list[Found] = []
    inside: list[tuple[str, ...]] = []
    at = dict(walk(model))
    for path, layer in at.items():
        # Attention in attention is a part of it, not a layer of the model.
        if any(path[: len(outer)] == outer for outer in inside):
            continue
        if is_attention(layer):
            names = "/".join(at[path[: depth + 1]].name for depth in range(len(path)))
            found.append(Found(layer, names))
            inside.append(path)
    return found


def _choose(
    model: keras.Model, found: list[Found], selection: Any
) -> tuple[list[int], list[LeftLayer]]:
    """The numbers of the layers to convert, and those that stay, with the reason."""
    reasons = {i: unsupported_reason(layer) for i, (layer, _) in enumerate(found)}
    if selection is None:
        chosen = [i for i, reason in reasons.items() if reason is None]
    else:
        chosen = selected(found, selection)
        for i in chosen:
            if reasons[i] is not None:
                raise ValueError(
                    f"Argument `layers` names the layer '{layer_path(found[i].layer)}', which "
                    f"cannot be converted: {reasons[i]}. Nothing was converted"
                )
    left = [
        LeftLayer(layer_path(layer), type(layer).__name__, reasons[i] or "it is not among `layers`")
        for i, (layer, _) in enumerate(found)
        if i not in chosen
    ]
    if not chosen:
        listed = "; ".join(f"'{layer.path}', {layer.source}: {layer.reason}" for layer in left)
        raise ValueError(
            f"There is nothing to convert in the model '{model.name}': "
            f"{listed or 'it has no attention layer'}"
        )
    return chosen, left


def _num_heads(layer: keras.Layer) -> int:
    return int(ADAPTERS[class_name(layer)].arguments_of(layer)["num_heads"])


def _adapter(model: keras.Model, layer: keras.Layer, recipe: dict[str, Any]) -> Adapter:
    """The unbuilt adapter for `layer` of `model`."""
    adapter = ADAPTERS[class_name(layer)]
    arguments = adapter.arguments_of(layer)
    if adapter.causal_in:
        arguments["always_causal"] = class_name(parent(model, layer)) in adapter.causal_in
    try:
        return adapter(
            **arguments,
            **recipe,
            name=layer.name,
            dtype=layer.dtype_policy,
            trainable=layer.trainable,
        )
    except ValueError as error:
        raise ValueError(
            f"The layer '{layer_path(layer)}' of the model '{model.name}' cannot be converted. "
            f"{error}"
        ) from error


def _converted(layer: keras.Layer, adapter: Adapter) -> ConvertedLayer:
    return ConvertedLayer(
        layer_path(layer),
        type(layer).__name__,
        adapter.num_heads,
        adapter.num_key_value_heads,
        adapter.num_shared_heads,
        adapter.top_k,
    )


def _change(model: keras.Model, new_model: keras.Model, sample: Any) -> OutputChange:
    outputs = [_float_outputs(m, sample) for m in (model, new_model)]
    if not outputs[0]:
        raise ValueError(
            "Argument `sample` needs a model with outputs of a float dtype. Received: a sample for "
            f"the model '{model.name}', which has none"
        )
    old, new = (np.concatenate([np.ravel(x).astype("float64") for x in o]) for o in outputs)
    change = np.abs(new - old)
    size = math.sqrt(np.mean(np.square(old)))
    moved = math.sqrt(np.mean(np.square(change)))
    return OutputChange(moved / size if size else moved, float(change.max()))


def _float_outputs(model: keras.Model, sample: Any) -> list[np.ndarray]:
    outputs = keras.tree.flatten(model.predict(sample, verbose=0))
    return [np.asarray(x, "float32") for x in outputs if keras.backend.is_float_dtype(str(x.dtype))]
