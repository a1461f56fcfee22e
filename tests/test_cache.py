"""Decoding with a cache: any chunks of a sequence give what the whole of it gives at once."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

from keras_moh import MoHAttention, RotaryEmbedding
from tests.helpers import compiled, gradients, to_numpy
from tests.paths import NAMES
from tests.samples import ARGUMENTS, B, D, floats, moh_attention, padding

BACKEND = keras.backend.backend()
N, SLOTS, d = 7, 11, 4
ROTARY = keras.saving.serialize_keras_object(RotaryEmbedding(50.0))
LAYERS = {
    "plain": {},
    "rotary": {"rotary_embedding": ROTARY, "qk_norm": "rms"},
    "grouped": {"num_key_value_heads": 2, "rotary_embedding": ROTARY},
    "compact": {"num_key_value_heads": 2, "routing_groups": 2},
    "window": {"sliding_window": 3, "rotary_embedding": ROTARY},
    "query norm": {
        **{"router": "query_norm", "num_key_value_heads": 3, "qk_norm": True},
        "rotary_embedding": ROTARY,
    },
    "no router": {"router": None, "num_shared_heads": None, "top_k": None},
}
CHUNKS = {"at once": (7,), "prefill, then tokens": (4, 1, 1, 1), "any": (1, 3, 2, 1)}


def decoder(**arguments: Any) -> MoHAttention:
    layer = moh_attention(key_dim=d, **arguments)
    layer.build((B, N, D))
    return layer


def empty_cache(layer: MoHAttention, slots: int = SLOTS, fill: float = np.nan) -> Any:
    shape = (B, 2, slots, layer.num_key_value_heads, layer.key_dim)
    return ops.convert_to_tensor(np.full(shape, fill, "float32"))


def parts(chunks: Sequence[int]) -> Iterator[slice]:
    stop = 0
    for length in chunks:
        yield slice(stop, stop + length)
        stop += length


def in_chunks(layer: MoHAttention, x: Any, chunks: Sequence[int], **call: Any) -> tuple[Any, Any]:
    """Outputs `(B, N, D)` and the cache. Of masks, `query_mask` goes in chunks as well."""
    cache, outputs = empty_cache(layer), []
    step = jitted(layer, **{n: v for n, v in call.items() if n != "query_mask"})
    for part in parts(chunks):
        index = ops.convert_to_tensor(part.start, "int32")
        masks = {n: v[:, part] for n, v in call.items() if n == "query_mask"}
        output, cache = step(x[:, part], cache, index, **masks)
        outputs.append(output)
    return ops.concatenate(outputs, axis=1), cache


def jitted(layer: MoHAttention, **call: Any) -> Any:
    """A step of the layer, compiled as far as the backend does."""

    def step(x: Any, cache: Any, index: Any, **masks: Any) -> Any:
        return layer(x, cache=cache, cache_update_index=index, **call, **masks)

    if BACKEND == "jax":
        import jax

        return jax.jit(step)
    if BACKEND == "tensorflow":
        import tensorflow as tf

        return tf.function(step)
    return step


# Triton's kernels serve only where they are interpreted: that process has the tests of that name.
INTERPRETED = ["torch_triton"] if BACKEND == "torch" else []


@pytest.fixture(params=[None, "reference", "first that serves", *INTERPRETED])
def implementation(request: pytest.FixtureRequest) -> str | None:
    if request.param == "first that serves":
        request.getfixturevalue("always_worth_it")
        return None
    return request.param


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("name", LAYERS)
def test_chunks_give_the_whole(
    name: str, chunks: tuple[int, ...], implementation: str | None
) -> None:
    layer = decoder(**LAYERS[name], implementation=implementation)
    x = ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))
    found, cache = in_chunks(layer, x, chunks, use_causal_mask=True)
    np.testing.assert_allclose(
        to_numpy(found), expected, rtol=0, atol=1e-5 * np.abs(expected).max()
    )

    # The cache is keras-hub's: keys as they are attended to, and values.
    values = to_numpy(layer.value_dense(x))
    np.testing.assert_allclose(to_numpy(cache)[:, 1, :N], values, atol=1e-5)
    assert np.isnan(to_numpy(cache)[:, :, N:]).all()
    if name == "plain":
        keys = to_numpy(layer.key_dense(x))
        np.testing.assert_allclose(to_numpy(cache)[:, 0, :N], keys, atol=1e-5)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="the others have one way to compile")
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.usefixtures("always_worth_it")
def test_compiled_by_xla(name: str) -> None:
    import tensorflow as tf

    layer, x = decoder(**LAYERS[name]), ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))

    @functools.partial(tf.function, jit_compile=True)
    def step(x: Any, cache: Any, index: Any) -> Any:
        return layer(x, use_causal_mask=True, cache=cache, cache_update_index=index)

    cache = empty_cache(layer)
    for part in parts(CHUNKS["any"]):
        output, cache = step(x[:, part], cache, tf.constant(part.start))
        np.testing.assert_allclose(to_numpy(output), expected[:, part], rtol=0, atol=1e-4)


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere shapes are known")
@pytest.mark.usefixtures("always_worth_it")
def test_graph_of_unknown_lengths() -> None:
    import tensorflow as tf

    layer, x = decoder(**LAYERS["grouped"]), ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))
    mask = ops.ones((B, SLOTS), dtype="bool")

    @functools.partial(
        tf.function,
        input_signature=[
            tf.TensorSpec((None, None, D)),
            tf.TensorSpec((None, 2, SLOTS, 2, d)),
            tf.TensorSpec((), tf.int32),
        ],
    )
    def step(x: Any, cache: Any, index: Any) -> Any:
        further = {"cache": cache, "cache_update_index": index, "key_mask": mask}
        return layer(x, use_causal_mask=True, **further)

    cache = empty_cache(layer)
    for part in parts(CHUNKS["any"]):
        output, cache = step(x[:, part], cache, tf.constant(part.start))
        np.testing.assert_allclose(to_numpy(output), expected[:, part], rtol=0, atol=1e-4)


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", ["key_mask", "value_mask", "attention_mask", "query_mask"])
@pytest.mark.parametrize("name", ["grouped", "query norm", "window"])
def test_left_padding(
    name: str, kind: str, chunks: tuple[int, ...], implementation: str | None
) -> None:
    """Masks of all slots; a mask of the tokens, if the whole comes at once."""
    layer = decoder(**LAYERS[name], implementation=implementation)
    x = floats(B, N, D)
    valid = padding(3, 7, length=N)[:, ::-1].copy()
    expected = to_numpy(layer(x, query_mask=valid, use_causal_mask=True))
    x[~valid] = 1e30  # whatever a padded token holds
    x = ops.convert_to_tensor(x)
    slots = np.concatenate([valid, np.ones((B, SLOTS - N), bool)], axis=1)
    call: dict[str, Any] = {kind: slots}
    if kind == "query_mask":
        if chunks != (N,):
            pytest.skip("a mask of one chunk says nothing of those before")
        call = {kind: valid}
    if kind == "attention_mask":
        if chunks != (N,):
            pytest.skip("other chunks have other masks")
        # Whole, as keras-hub passes it: causality included.
        causal = np.tril(np.ones((N, SLOTS), bool))
        call = {kind: slots[:, None] & causal}
    else:
        call["use_causal_mask"] = True
    if kind == "attention_mask":
        # It masks scores, and no token: those have to be finite.
        x = ops.where(valid[..., None], x, ops.zeros_like(x))
    found, _ = in_chunks(layer, x, chunks, **call)
    np.testing.assert_allclose(
        to_numpy(found)[valid], expected[valid], rtol=0, atol=1e-5 * np.abs(expected).max()
    )


def test_dense_masks_step_by_step(implementation: str | None) -> None:
    """Of the whole cache `(B, 1, S)`, without causality, and with indices that are numbers."""
    layer = decoder(**LAYERS["rotary"], implementation=implementation)
    with_scores = decoder(**LAYERS["rotary"])  # of whichever implementation has them
    with_scores.set_weights(layer.get_weights())
    x = ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))
    cache = empty_cache(layer)
    for index in range(N):
        mask = np.broadcast_to(np.arange(SLOTS) <= index, (B, 1, SLOTS))
        output, scores, cache, routing = with_scores(
            x[:, index : index + 1],
            attention_mask=mask,
            cache=cache,
            cache_update_index=index,
            return_attention_scores=True,
            return_routing=True,
        )
        np.testing.assert_allclose(
            to_numpy(output)[:, 0], expected[:, index], rtol=0, atol=1e-5 * np.abs(expected).max()
        )
        assert scores.shape == (B, layer.num_heads, 1, SLOTS)
        assert routing.heads.shape == (B, 1, layer.num_active_heads)
        if implementation != "reference":  # as the one that returns scores
            output, _ = layer(
                x[:, index : index + 1], attention_mask=mask, cache=cache, cache_update_index=index
            )
            np.testing.assert_allclose(to_numpy(output)[:, 0], expected[:, index], atol=1e-4)


def test_a_cache_that_is_only_read(implementation: str | None) -> None:
    """As for cross-attention: filled once, and read by queries from position 0 on."""
    layer = decoder(**LAYERS["grouped"], implementation=implementation)
    x, memory = floats(B, N, D), floats(B, SLOTS, D, seed=1)
    valid = padding(4, 9, length=SLOTS)
    expected = to_numpy(layer(x, memory, value_mask=valid))
    first, cache = layer(
        x, memory, cache=empty_cache(layer), cache_update_index=0, value_mask=valid
    )
    np.testing.assert_allclose(to_numpy(first), expected, atol=1e-5)
    output, same = layer(x, memory * np.nan, cache=cache, value_mask=valid)
    np.testing.assert_allclose(to_numpy(output), expected, atol=1e-5)
    np.testing.assert_array_equal(to_numpy(same), to_numpy(cache))
    output, _ = layer(x, cache=cache, attention_mask=valid[:, None])
    np.testing.assert_allclose(to_numpy(output), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["rotary", "query norm", "window"])
def test_gradients(name: str, implementation: str | None) -> None:
    """By inputs and weights, through the cache, from whatever it held."""
    layer = decoder(**LAYERS[name], implementation=implementation)
    x, cotangent = floats(B, N, D), floats(B, N, D, seed=1)

    def whole(x: Any) -> Any:
        return ops.sum(ops.multiply(layer(x, use_causal_mask=True), cotangent))

    def chunks(x: Any) -> Any:
        cache, total = empty_cache(layer), 0.0
        for part in parts((3, 1, 3)):
            output, cache = layer(
                x[:, part], use_causal_mask=True, cache=cache, cache_update_index=part.start
            )
            total = total + ops.sum(ops.multiply(output, cotangent[:, part]))
        return total

    if BACKEND == "tensorflow":  # where the operation that writes has no gradient
        with pytest.raises(LookupError, match="XlaDynamicUpdateSlice"):
            gradients(chunks, [x], layer)
        return
    expected, found = gradients(whole, [x], layer), gradients(chunks, [x], layer)
    assert found.weights.keys() == expected.weights.keys()
    pairs = [(found.inputs[0], expected.inputs[0])]
    pairs += [(found.weights[n], expected.weights[n]) for n in expected.weights]
    for actual, desired in pairs:
        size = max(np.abs(desired).max(), 1.0)
        np.testing.assert_allclose(actual, desired, rtol=0, atol=3e-5 * size)


def assert_any_index() -> None:
    """Tensors of all integer dtypes, with and without masks that are sliced as the cache is."""
    layer = decoder(**LAYERS["grouped"])
    x = ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))
    call = {"use_causal_mask": True}
    _, cache = layer(x[:, :4], **call, cache=empty_cache(layer), cache_update_index=0)
    for index_dtype in ("int8", "uint8", "int16", "int32", "int64"):
        index = ops.convert_to_tensor(np.array(4, index_dtype))
        for mask in (None, np.ones((B, 2), bool), np.ones((B, SLOTS), bool)):
            further = {"cache": cache, "cache_update_index": index, "key_mask": mask}
            output, _ = layer(x[:, 4:6], **call, **further)
            np.testing.assert_allclose(to_numpy(output), expected[:, 4:6], rtol=0, atol=1e-4)


def test_indices_of_every_dtype() -> None:
    assert_any_index()


@pytest.mark.float64
def test_indices_of_every_dtype_where_there_is_float64() -> None:
    """On JAX integers are of 64 bits then as well."""
    assert_any_index()


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_low_precision(policy: str) -> None:
    """The cache comes back in the compute dtype."""
    layer, x = decoder(**LAYERS["grouped"], dtype=policy), floats(B, N, D)
    expected = to_numpy(layer(x, use_causal_mask=True))
    output, cache = layer(x, use_causal_mask=True, cache=empty_cache(layer), cache_update_index=0)
    assert keras.backend.standardize_dtype(cache.dtype) == layer.compute_dtype
    np.testing.assert_allclose(
        to_numpy(output), expected, rtol=0, atol=0.05 * np.abs(expected).max()
    )


def test_symbolic_call_and_functional_model() -> None:
    layer = decoder(**LAYERS["grouped"])
    x, cache = keras.Input((None, D)), keras.Input((2, SLOTS, 2, d))
    call = {"use_causal_mask": True, "cache": cache, "cache_update_index": 0}
    results = layer(x, **call, return_attention_scores=True, return_routing=True)
    shapes = [tuple(result.shape) for result in keras.tree.flatten(results)]
    output = (None, None, D)
    scores, routing = (None, 6, None, SLOTS), [(None, None, 4)] * 3
    assert shapes == [output, scores, (None, 2, SLOTS, 2, d), *routing]
    model = keras.Model([x, cache], results[:3:2])
    sample = floats(B, N, D)
    found = model([ops.convert_to_tensor(sample), empty_cache(layer)])
    expected = layer(sample, use_causal_mask=True)
    np.testing.assert_allclose(to_numpy(found[0]), to_numpy(expected), atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_serves(name: str) -> None:
    """One that says that it leaves unseen slots alone has to prove it above."""
    layer, x = decoder(**LAYERS["compact"]), ops.convert_to_tensor(floats(B, N, D))
    expected = to_numpy(layer(x, use_causal_mask=True))
    other = decoder(**LAYERS["compact"], implementation=name)
    other.set_weights(layer.get_weights())
    call = {"use_causal_mask": True, "cache_update_index": 4}
    _, cache = layer(x[:, :4], use_causal_mask=True, cache=empty_cache(layer), cache_update_index=0)
    step = functools.partial(other, cache=cache, **call)
    output, _ = compiled(step, x[:, 4:])
    np.testing.assert_allclose(
        to_numpy(output), expected[:, 4:], atol=1e-5 * np.abs(expected).max()
    )


CACHE = np.zeros((B, 2, SLOTS, 6, d), "float32")
REFUSED = {
    "no cache": ({"cache_update_index": 3}, "`cache_update_index` needs a `cache`"),
    "no tensor": ({"cache": "full"}, "`cache`: expected a tensor.*'full'"),
    "rank": ({"cache": CACHE[0]}, r"`cache` must be .*cache.shape=\(2, 11, 6, 4\)"),
    "keys only": ({"cache": CACHE[:, :1]}, r"`cache` must be .*\(2, 1, 11, 6, 4\)"),
    "heads": ({"cache": CACHE[:, :, :, :3]}, r"`cache` must be .*\(2, 2, 11, 3, 4\)"),
    "batch": ({"cache": CACHE[:1]}, r"`cache` must be .*\(1, 2, 11, 6, 4\)"),
    "dtype": ({"cache": CACHE.astype("int32")}, "`cache` must be of a float dtype.*int32"),
    "index": ({"cache": CACHE, "cache_update_index": -1}, "`cache_update_index`.*-1"),
    "index of a dtype": ({"cache": CACHE, "cache_update_index": 1.5}, "`cache_update_index`.*1.5"),
    "indices": (
        {"cache": CACHE, "cache_update_index": np.array([1, 2])},
        "`cache_update_index`: expected an integer or a scalar tensor",
    ),
    "room": (
        {"cache": CACHE, "cache_update_index": 5},
        r"`cache` has no room .*cache_update_index=5 with 7 tokens",
    ),
    "mask": (
        {"cache": CACHE, "cache_update_index": 0, "key_mask": np.ones((B, 9), bool)},
        r"`key_mask` must have one entry .*\(2, 7\) or \(2, 11\)",
    ),
    "mask of tokens not written": (
        {"cache": CACHE, "key_mask": np.ones((B, N), bool)},
        r"`key_mask` must have one entry per token, of shape \(2, 11\)",
    ),
    "attention mask": (
        {"cache": CACHE, "attention_mask": np.ones((N, N), bool)},
        "`attention_mask` must have rank",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    arguments, message = REFUSED[name]
    with pytest.raises(ValueError, match=message):
        decoder()(floats(B, N, D), **arguments)


def test_refused_layers() -> None:
    layer = moh_attention(key_dim=4, value_dim=5)
    with pytest.raises(ValueError, match=r"as wide as keys.*value_dim=5 and key_dim=4"):
        layer(floats(B, N, D), cache=CACHE)
    layer = moh_attention(key_dim=4)
    with pytest.raises(ValueError, match=r"`cache` needs inputs of rank 3.*rank 4"):
        layer(floats(B, 3, N, D), cache=CACHE)


def test_numbers_of_numpy() -> None:
    layer, x = MoHAttention(**{**ARGUMENTS, "key_dim": d}), floats(B, N, D)
    call = {"use_causal_mask": True, "cache": CACHE}
    one, _ = layer(x, cache_update_index=2, **call)
    other, _ = layer(x, cache_update_index=np.int64(2), **call)
    np.testing.assert_array_equal(to_numpy(one), to_numpy(other))
