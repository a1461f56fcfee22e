"""Every way to mask, in every path: what is masked has no influence, and no warning is given."""

import itertools

import keras
import numpy as np
import pytest
from helpers import gradients, to_numpy
from keras import ops
from samples import B, D, S, T, floats, moh_attention, padding

from keras_moh.keras_internals import attach_mask, attached_mask

H = 6
# On PyTorch it needs a C++ compiler: see test_training.py.
JIT_COMPILE = [False] if keras.backend.backend() == "torch" else [False, True]
WITH_LOSSES = {"balance_loss_weight": 0.2, "z_loss_weight": 0.1}
QUERY_MASK = padding(3, 5, length=T)
VALUE_MASK = padding(7, 4, length=S)
KEY_MASK = np.random.default_rng(3).random((B, S)) < 0.8


def attention_mask(*shape):
    return np.random.default_rng(4).random(shape) < 0.7


PADDINGS = {
    "no padding": {},
    "query_mask": {"query_mask": QUERY_MASK},
    "value_mask": {"value_mask": VALUE_MASK},
    "key_mask": {"key_mask": KEY_MASK},
    "all padded": {"query_mask": QUERY_MASK, "value_mask": VALUE_MASK, "key_mask": KEY_MASK},
}
ATTENTION_MASKS = [None, (T, S), (B, T, S), (1, T, S), (B, 1, T, S), (B, H, T, S), (1, H, 1, S)]


def allowed(
    query_mask=None, value_mask=None, key_mask=None, attention_mask=None, causal=False, window=None
):
    """Where a query may attend to a key, `(B, H, T, S)`, in NumPy."""
    mask = np.ones((B, H, T, S), bool)
    for padded, axes in ((query_mask, (1, 3)), (value_mask, (1, 2)), (key_mask, (1, 2))):
        if padded is not None:
            mask &= np.expand_dims(padded, axes)
    if attention_mask is not None:
        mask &= attention_mask[:, None] if attention_mask.ndim == 3 else attention_mask
    distance = np.arange(T)[:, None] - np.arange(S)
    if causal:
        mask &= distance >= 0
    if window is not None:
        mask &= abs(distance) < window
    return mask


@pytest.mark.parametrize("window", [None, 2])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", ATTENTION_MASKS, ids=str)
@pytest.mark.parametrize("padded", PADDINGS.values(), ids=PADDINGS)
def test_all_masks_hold_together(padded, shape, causal, window):
    masks = {**padded, "attention_mask": None if shape is None else attention_mask(*shape)}
    mask = allowed(**masks, causal=causal, window=window)
    query, value = floats(B, T, D), floats(B, S, D, seed=1)
    output, scores = moh_attention(sliding_window=window)(
        query, value, use_causal_mask=causal, return_attention_scores=True, **masks
    )
    scores = to_numpy(scores)
    assert (scores[~mask] == 0).all()
    assert (scores[mask] > 0).all()
    np.testing.assert_allclose(scores.sum(-1), mask.any(-1), atol=1e-6)

    # With scores it is the reference. Another implementation rounds in another way.
    for implementation, rtol in ("reference", 1e-7), (None, 1e-6):
        layer = moh_attention(sliding_window=window, implementation=implementation)
        without_scores = layer(query, value, use_causal_mask=causal, **masks)
        layer = moh_attention(implementation=implementation)
        by_one_mask = layer(query, value, attention_mask=mask)
        for other in without_scores, by_one_mask:
            np.testing.assert_allclose(to_numpy(other), to_numpy(output), rtol=rtol, atol=1e-6)


@pytest.mark.parametrize("dtype", ["int32", "float32"])
def test_masks_of_zeros_and_ones(dtype):
    query, value = floats(B, T, D), floats(B, S, D, seed=1)
    masks = {**PADDINGS["all padded"], "attention_mask": attention_mask(B, T, S)}
    layer = moh_attention()
    expected = layer(query, value, **masks)
    output = layer(query, value, **{name: mask.astype(dtype) for name, mask in masks.items()})
    np.testing.assert_array_equal(to_numpy(output), to_numpy(expected))


# The paths: constructor and call arguments.
PATHS = {
    "plain": ({}, {}),
    "scores": ({}, {"return_attention_scores": True}),
    "dropout": ({"dropout": 0.5, "seed": 7}, {}),
    "dropout and scores": ({"dropout": 0.5, "seed": 7}, {"return_attention_scores": True}),
    "grouped": ({"num_key_value_heads": 2, "qk_norm": True}, {}),
    "mixed_float16": ({"dtype": "mixed_float16"}, {}),
    "mixed_bfloat16": ({"dtype": "mixed_bfloat16"}, {"return_attention_scores": True}),
    "float16": ({"dtype": "float16", "qk_norm": "rms"}, {}),
}
CROSS_ATTENTION = {
    **{name: (masks, False, None) for name, masks in PADDINGS.items() if masks},
    "all masks": (
        {**PADDINGS["all padded"], "attention_mask": attention_mask(B, 1, T, S)},
        True,
        4,
    ),
}


def fill(x, mask, content):
    """`x (..., D)` with this content at the padded tokens."""
    return x if mask is None else np.where(mask[..., None], x, np.float32(content))


def contents(arguments):
    """What padded tokens may hold: the largest numbers that the dtype's projections are given."""
    return (-3.0, 6e4 if "float16" in arguments.get("dtype", "").split("_") else 1e30)


def results_of(layer, *inputs, **arguments):
    """Everything that a call in training gives, as NumPy: its results and its losses."""
    results = layer(*inputs, training=True, return_routing=True, **arguments)
    *tensors, routing = results
    return [to_numpy(x) for x in (*tensors, *routing)], [to_numpy(x) for x in layer.losses]


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize(
    ("masks", "causal", "window"), CROSS_ATTENTION.values(), ids=CROSS_ATTENTION
)
def test_padded_token_has_no_influence_in_cross_attention(path, masks, causal, window):
    constructor, call = path
    query, value = floats(B, T, D), floats(B, S, D, seed=1)
    values_kept = None
    for name in ("value_mask", "key_mask"):
        if name in masks:
            values_kept = masks[name] if values_kept is None else values_kept & masks[name]

    def results(content):
        layer = moh_attention(sliding_window=window, **constructor, **WITH_LOSSES)
        inputs = query, value
        if content is not None:
            inputs = (
                fill(query, masks.get("query_mask"), content),
                fill(value, values_kept, content),
            )
        return results_of(layer, *inputs, use_causal_mask=causal, **call, **masks)

    check_same_at_valid_queries(results, masks.get("query_mask"), constructor)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("attached", [False, True], ids=["query_mask", "attached mask"])
def test_padded_token_has_no_influence_in_self_attention(path, attached):
    constructor, call = path
    x = floats(B, T, D)

    def results(content):
        layer = moh_attention(**constructor, **WITH_LOSSES)
        query = ops.convert_to_tensor(x if content is None else fill(x, QUERY_MASK, content))
        if not attached:
            return results_of(layer, query, query_mask=QUERY_MASK, **call)
        attach_mask(query, ops.convert_to_tensor(QUERY_MASK))
        return results_of(layer, query, **call)

    check_same_at_valid_queries(results, QUERY_MASK, constructor)


def check_same_at_valid_queries(results, query_mask, constructor):
    expected, expected_losses = results(None)
    valid = np.ones((B, T), bool) if query_mask is None else query_mask
    assert len(expected_losses) == 2
    for content in contents(constructor):
        found, losses = results(content)
        assert losses == expected_losses
        for x, y in zip(found, expected, strict=True):
            if x.ndim == 4:  # scores (B, H, T, S)
                x, y = x.swapaxes(1, 2), y.swapaxes(1, 2)
            np.testing.assert_array_equal(x[valid], y[valid])
            assert np.isfinite(y[valid]).all()
        np.testing.assert_array_equal(found[0][~valid], expected[0][~valid])


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_query_that_may_attend_to_nothing(path):
    """By its own padding, by the keys' padding, or by an attention mask."""
    constructor, call = path
    query, value = floats(B, T, D), floats(B, S, D, seed=1)
    mask = attention_mask(B, T, S)
    mask[0, 2] = False
    masks = {"query_mask": padding(3, 5, length=T), "value_mask": padding(0, 4, length=S)}
    for arguments in (masks, {"attention_mask": mask}):
        layer = moh_attention(**constructor, **WITH_LOSSES)
        layer.build(query.shape, value.shape)
        content = contents(constructor)[1]
        inputs = (
            fill(query, arguments.get("query_mask"), content),
            fill(value, arguments.get("value_mask"), content),
        )

        def total(query, value, layer=layer, arguments=arguments):
            tensors = {name: ops.convert_to_tensor(mask) for name, mask in arguments.items()}
            output = layer(query, value, training=True, **call, **tensors)
            output = output[0] if call else output
            return ops.sum(ops.square(ops.cast(output, "float32"))) + sum(layer.losses)

        by = gradients(total, inputs, layer)
        for gradient in (*by.inputs, *by.weights.values()):
            assert np.isfinite(gradient).all()
        output = layer(*inputs, **call, **arguments)
        output = to_numpy(output[0] if call else output)
        nothing = ~allowed(**arguments).any((1, 3))
        assert nothing.any()
        bias = to_numpy(ops.cast(layer.output_dense.bias, layer.compute_dtype))
        np.testing.assert_array_equal(output[nothing], np.broadcast_to(bias, (nothing.sum(), D)))
        assert (np.abs(output[~nothing] - bias).max(-1) > 0).all()


def sequential(embedding, layer):
    return keras.Sequential([embedding, layer, keras.layers.GlobalAveragePooling1D()])


def functional(embedding, layer):
    tokens = keras.Input((None,), dtype="int32")
    return keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(layer(embedding(tokens))))


def functional_with_value(embedding, layer):
    tokens = keras.Input((None,), dtype="int32")
    x = embedding(tokens)
    return keras.Model(tokens, keras.layers.GlobalAveragePooling1D()(layer(x, x)))


def nested(embedding, layer):
    """The mask goes into an inner model and comes out of it, through several layers."""
    inputs = keras.Input((None, D))
    inner = keras.Model(inputs, moh_attention(weights=5)(keras.layers.Dropout(0.1)(layer(inputs))))
    return keras.Sequential([embedding, inner, keras.layers.GlobalAveragePooling1D()])


# Keras says so of every nested model, whatever its layers do with masks; the mask does get through.
@pytest.mark.filterwarnings("ignore:Layer 'functional.*was passed an input with a mask:UserWarning")
@pytest.mark.parametrize("jit_compile", JIT_COMPILE)
@pytest.mark.parametrize("build", [sequential, functional, functional_with_value, nested])
def test_mask_of_an_embedding(build, jit_compile):
    """A sequence gives the same with and without padding: attention and pooling ignore it."""
    model = build(keras.layers.Embedding(13, D, mask_zero=True), moh_attention())
    model.compile(jit_compile=jit_compile)
    padded = model.predict_on_batch(np.array([[5, 8, 2, 0, 0], [3, 12, 4, 1, 7]]))
    short = model.predict_on_batch(np.array([[5, 8, 2]]))
    np.testing.assert_allclose(padded[:1], short, atol=1e-6)


def test_mask_is_handed_on_and_stays_where_it_was():
    x, value = ops.convert_to_tensor(floats(B, T, D)), ops.convert_to_tensor(floats(B, S, D))
    attach_mask(x, ops.convert_to_tensor(QUERY_MASK))
    attach_mask(value, ops.convert_to_tensor(VALUE_MASK))
    layer = moh_attention()
    for output in (
        layer(x, value),
        layer(x, value, return_attention_scores=True)[0],
        layer(x, value, return_routing=True)[0],
    ):
        np.testing.assert_array_equal(to_numpy(attached_mask(output)), QUERY_MASK)
    np.testing.assert_array_equal(to_numpy(attached_mask(x)), QUERY_MASK)
    np.testing.assert_array_equal(to_numpy(attached_mask(value)), VALUE_MASK)


def test_explicit_mask_is_handed_on_and_goes_before_the_attached_one():
    x = ops.convert_to_tensor(floats(B, T, D))
    attach_mask(x, ops.convert_to_tensor(~QUERY_MASK))
    layer = moh_attention()
    output = layer(x, query_mask=QUERY_MASK)
    np.testing.assert_array_equal(to_numpy(attached_mask(output)), QUERY_MASK)
    expected = layer(floats(B, T, D), query_mask=QUERY_MASK)
    np.testing.assert_array_equal(to_numpy(output), to_numpy(expected))


def test_no_mask_no_mask():
    assert attached_mask(moh_attention()(floats(B, T, D))) is None


def test_every_combination_was_meant():
    """The tables above have all kinds of masks, and the masks leave and take something."""
    for masks, shape in itertools.product(PADDINGS.values(), ATTENTION_MASKS):
        if masks or shape:
            mask = allowed(**masks, attention_mask=shape and attention_mask(*shape))
            assert 0 < mask.mean() < 1
