"""Inputs of every rank and length, known or not; symbolic calls tell what real ones give."""

import keras
import numpy as np
import pytest
from helpers import to_numpy
from samples import B, D, S, T, floats, moh_attention, padding

from keras_moh import MoHAttention, TwoStageRouter

H, K, E = 6, 4, 4


def numpy_results(results):
    """Output, scores and routing, as many as there are, as a flat list of NumPy arrays."""
    return [to_numpy(x) for x in keras.tree.flatten(results)]


def assert_same(actual, expected, atol=1e-5):
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(x, y, atol=atol)


# (batch, 3, 5, 2, features) by axes to attend over: how to make it (batch', length, features).
AXES = {
    "all": (None, (0,), (1, 2, 3)),
    "one": (2, (0, 1, 3), (2,)),
    "negative": (-2, (0, 1, 2), (3,)),
    "several": ((1, 3), (0, 2), (1, 3)),
    "out of order": ([3, -4], (0, 2), (3, 1)),
}


@pytest.mark.parametrize(("attention_axes", "batch", "attended"), AXES.values(), ids=AXES)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_axes_as_one_sequence(attention_axes, batch, attended, masked):
    """Attention over some axes is that over one, of length their product, with further batches."""
    lengths = (B, 3, 5, 2)
    order = (*batch, *attended)
    x, mask = floats(*lengths, D), np.random.default_rng(1).random(lengths) < 0.7
    mask = mask if masked else None
    layer, plain = moh_attention(attention_axes=attention_axes), moh_attention()
    arguments = {"return_attention_scores": True, "return_routing": True}

    def sequence(array):
        rest = tuple(range(4, array.ndim))
        length = int(np.prod([lengths[axis] for axis in attended]))
        return array.transpose(*order, *rest).reshape(-1, length, *array.shape[4:])

    output, scores, routing = layer(x, query_mask=mask, **arguments)
    expected = plain(sequence(x), query_mask=mask if mask is None else sequence(mask), **arguments)
    output, *routing = numpy_results([output, routing])
    assert [output.shape, routing[0].shape] == [(*lengths, D), (*lengths, K)]
    attended_lengths = [lengths[axis] for axis in attended]
    scores_shape = (*(lengths[axis] for axis in batch), H, *attended_lengths, *attended_lengths)
    assert tuple(scores.shape) == scores_shape
    scores = to_numpy(scores).reshape(np.shape(expected[1]))
    assert_same(
        [sequence(output), scores, *map(sequence, routing)], numpy_results(expected), atol=1e-5
    )


@pytest.mark.parametrize(
    "mask_lengths", [(5, 7), (B, 5, 7), (B, 3, 5, 7), (B, 3, H, 5, 7), (1, 3, 1, 5, 1)]
)
def test_attention_mask_of_higher_rank(mask_lengths):
    """As in Keras: axes that the mask leaves out stand before its query and key axes."""
    query, value = floats(B, 3, 5, D), floats(B, 3, 7, D, seed=1)
    mask = np.random.default_rng(2).random(mask_lengths) < 0.6
    output, scores = moh_attention(attention_axes=2)(
        query, value, attention_mask=mask, return_attention_scores=True
    )
    missing = 5 - len(mask_lengths)
    full = mask.reshape(*mask_lengths[:-2], *(1,) * missing, *mask_lengths[-2:])
    full = np.broadcast_to(full, (B, 3, H, 5, 7))
    expected = moh_attention()(
        query.reshape(-1, 5, D),
        value.reshape(-1, 7, D),
        attention_mask=full.reshape(-1, H, 5, 7),
        return_attention_scores=True,
    )
    assert_same(
        [to_numpy(output).reshape(-1, 5, D), to_numpy(scores).reshape(-1, H, 5, 7)],
        numpy_results(expected),
    )


def test_attention_mask_over_several_axes():
    query, value = floats(B, 3, 5, D), floats(B, 2, 7, D, seed=1)
    mask = np.random.default_rng(2).random((B, 3, 5, 2, 7)) < 0.6
    output = moh_attention()(query, value, attention_mask=mask)
    expected = moh_attention()(
        query.reshape(B, -1, D), value.reshape(B, -1, D), attention_mask=mask.reshape(B, 15, 14)
    )
    assert_same([to_numpy(output).reshape(B, 15, D)], [to_numpy(expected)])


@pytest.mark.parametrize("axes", [{"use_causal_mask": True}, {"sliding_window": 2}], ids=str)
def test_causality_and_window_along_one_of_several_axes(axes):
    x = floats(B, 3, 5, D)
    call = {key: value for key, value in axes.items() if key == "use_causal_mask"}
    constructor = {key: value for key, value in axes.items() if key == "sliding_window"}
    output = moh_attention(attention_axes=2, **constructor)(x, **call)
    expected = moh_attention(**constructor)(x.reshape(-1, 5, D), **call)
    assert_same([to_numpy(output).reshape(-1, 5, D)], [to_numpy(expected)])


RETURNS = [
    {},
    {"return_attention_scores": True},
    {"return_routing": True},
    {"return_attention_scores": True, "return_routing": True},
]
SYMBOLIC = {
    "plain": ({}, [(B, T, D)]),
    "one query": ({}, [(B, 1, D), (B, S, D)]),
    "no batch": ({}, [(0, T, D)]),
    "cross": ({"value_dim": 2, "num_key_value_heads": 3}, [(B, T, D), (B, S, 13), (B, S, 17)]),
    "groups of heads": ({"routing_groups": 2}, [(B, T, D)]),
    "output_shape": ({"output_shape": (3, 2)}, [(B, T, D)]),
    "higher rank": ({}, [(B, 3, T, D), (B, 2, S, D)]),
    "one axis": ({"attention_axes": -2}, [(B, 3, T, D), (B, 3, S, D)]),
    "no router": ({"router": None, "num_shared_heads": None, "top_k": None}, [(B, T, D)]),
    "mixed_bfloat16": ({"dtype": "mixed_bfloat16"}, [(B, T, D)]),
    "float16": ({"dtype": "float16"}, [(B, T, D)]),
}


def shapes_and_dtypes(results):
    return [
        (tuple(x.shape), keras.backend.standardize_dtype(x.dtype))
        for x in keras.tree.flatten(results)
    ]


@pytest.mark.parametrize("returns", RETURNS, ids=lambda returns: " ".join(returns) or "output")
@pytest.mark.parametrize(("arguments", "shapes"), SYMBOLIC.values(), ids=SYMBOLIC)
def test_symbolic_call_as_eager(arguments, shapes, returns):
    layer = moh_attention(**arguments)
    inputs = [floats(*shape) for shape in shapes]
    symbolic = layer(*(keras.Input(batch_shape=shape) for shape in shapes), **returns)
    eager = layer(*inputs, **returns)
    assert shapes_and_dtypes(symbolic) == shapes_and_dtypes(eager)
    assert all(np.isfinite(x).all() for x in numpy_results(eager))
    output = eager[0] if returns else eager
    assert layer.compute_output_shape(*shapes) == tuple(output.shape)
    assert layer.compute_output_shape(*map(list, shapes)) == tuple(output.shape)


@pytest.mark.parametrize("returns", RETURNS, ids=lambda returns: " ".join(returns) or "output")
def test_symbolic_call_of_unknown_lengths(returns):
    layer = moh_attention()
    symbolic = layer(keras.Input((None, D)), keras.Input((None, D)), **returns)
    shapes = [shape for shape, _ in shapes_and_dtypes(symbolic)]
    expected = [(None, None, D)]
    if "return_attention_scores" in returns:
        expected.append((None, H, None, None))
    if "return_routing" in returns:
        expected += [(None, None, K), (None, None, K), (None, None, E)]
    assert shapes == expected
    assert layer.compute_output_shape((None, None, D), (None, None, D)) == (None, None, D)


@pytest.mark.parametrize(
    "inputs",
    [[(None, D)], [(None, D), (S, D)], [(T, D), (None, D)], [(None, D), (None, D)]],
    ids=str,
)
def test_unknown_lengths_then_real_ones(inputs):
    """One functional model, several lengths and batches: as a fresh layer gives for them."""
    known_inputs = [keras.Input(shape) for shape in inputs]
    model = keras.Model(
        known_inputs,
        moh_attention()(*known_inputs, return_attention_scores=True, return_routing=True),
    )
    for batch, lengths in ((2, (5, 7)), (1, (1, 3)), (3, (2, 1))):
        arrays = [
            floats(batch, known or length, D, seed=length)
            for (known, _), length in zip(inputs, lengths, strict=False)
        ]
        expected = moh_attention()(*arrays, return_attention_scores=True, return_routing=True)
        assert_same(numpy_results(model.predict_on_batch(arrays)), numpy_results(expected))


@pytest.mark.parametrize("routing_groups", [1, 2])
def test_fit_with_unknown_length(routing_groups):
    """Lengths change from step to step, and with them the masks that positions give."""
    inputs = keras.Input((None, D))
    layer = moh_attention(sliding_window=3, dropout=0.1, routing_groups=routing_groups)
    model = keras.Model(inputs, layer(inputs, use_causal_mask=True))
    model.compile("sgd", "mse")
    for length in (5, 2, 1):
        x = floats(B, length, D)
        assert np.isfinite(model.train_on_batch(x, 0 * x))


def test_single_token():
    """Its attention is all on itself, so it is the value, through the output projection."""
    layer = moh_attention(router=None, num_shared_heads=None, top_k=None)
    x = floats(B, 1, D)
    output = layer(x)
    expected = layer.output_dense(layer.value_dense(x))
    np.testing.assert_allclose(to_numpy(output), to_numpy(expected), atol=1e-6)


@pytest.mark.parametrize("shapes", [[(0, T, D)], [(B, 0, D)], [(0, T, D), (0, S, D)]], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_nothing_in_gives_nothing_out(shapes, training):
    layer = moh_attention(z_loss_weight=0.1, dropout=0.5)
    output = layer(*(floats(*shape) for shape in shapes), training=training)
    assert tuple(output.shape) == shapes[0]
    assert [float(to_numpy(loss)) for loss in layer.losses] == [0.0, 0.0] * training


def test_no_keys():
    """Every head's output is 0 where there is nothing to attend to."""
    layer = moh_attention()
    output = layer(floats(B, T, D), floats(B, 0, D))
    bias = np.broadcast_to(to_numpy(layer.output_dense.bias), (B, T, D))
    np.testing.assert_array_equal(to_numpy(output), bias)


def test_built_from_unknown_lengths():
    layer = moh_attention()
    layer.build((None, None, D), (None, None, 13))
    shapes = {weight.path.split("/", 1)[1]: tuple(weight.shape) for weight in layer.weights}
    assert shapes == {
        "query/kernel": (D, H, 3),
        "query/bias": (H, 3),
        "key/kernel": (13, H, 3),
        "key/bias": (H, 3),
        "value/kernel": (13, H, 3),
        "value/bias": (H, 3),
        "attention_output/kernel": (H, 3, D),
        "attention_output/bias": (D,),
        "router/routed_scores/kernel": (D, E),
        "router/shared_scores/kernel": (D, 2),
        "router/group_scores/kernel": (D, 2),
    }


def test_summary(capsys):
    model = keras.Sequential([keras.Input((None, D)), moh_attention(name="attention")])
    model.summary(expand_nested=True)
    printed = capsys.readouterr().out
    assert "attention" in printed
    assert f"(None, None, {D})" in printed
    count = sum(int(np.prod(weight.shape)) for weight in model.weights)
    assert f"Total params: {count:,}" in printed


@pytest.mark.parametrize("shape", [(B, T, D), (B, 3, T, D), (B, D)], ids=str)
@pytest.mark.parametrize("return_scores", [False, True])
def test_router_alone(shape, return_scores):
    router = TwoStageRouter(H, 2, 2)
    symbolic = router(keras.Input(batch_shape=shape), return_scores=return_scores)
    eager = router(floats(*shape), return_scores=return_scores)
    assert shapes_and_dtypes(symbolic) == shapes_and_dtypes(eager)


def test_router_in_a_functional_model():
    inputs = keras.Input((None, D))
    router = TwoStageRouter(H, 2, 2)
    model = keras.Model(inputs, list(router(inputs)))
    x = floats(B, T, D)
    assert_same(model.predict_on_batch(x), numpy_results(router(x)), atol=1e-6)


def test_masked_functional_model_of_two_inputs():
    """Masks as inputs of the model, of unknown lengths."""
    query, value = keras.Input((None, D)), keras.Input((None, D))
    mask = keras.Input((None, None), dtype="bool")
    valid = keras.Input((None,), dtype="bool")
    outputs = moh_attention()(query, value, value_mask=valid, attention_mask=mask)
    model = keras.Model([query, value, mask, valid], outputs)
    arrays = [floats(B, T, D), floats(B, S, D, seed=1)]
    masks = [np.random.default_rng(3).random((B, T, S)) < 0.6, padding(4, 7, length=S)]
    expected = moh_attention()(*arrays, value_mask=masks[1], attention_mask=masks[0])
    found = model.predict_on_batch([*arrays, *masks])
    assert_same([found], [to_numpy(expected)])


@pytest.mark.float64
def test_symbolic_routing_has_the_routers_dtype():
    """A router of one's own keeps its precision, whatever the layer's."""
    router = TwoStageRouter(5, num_shared_heads=1, top_k=2, dtype="float32")
    layer = MoHAttention(5, 3, router=router, dtype="float64")
    _, symbolic = layer(keras.Input((7, 11), dtype="float64"), return_routing=True)
    _, eager = layer(np.ones((2, 7, 11)), return_routing=True)
    for spec, real in zip(symbolic, eager, strict=True):
        assert spec.dtype == keras.backend.standardize_dtype(real.dtype)
