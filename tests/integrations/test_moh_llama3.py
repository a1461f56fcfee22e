"""The authors' MoH-LLaMA3: their numbers (see `goldens/README.md`), and checkpoints of theirs."""

import pickle
from typing import Any

import keras
import keras_hub
import numpy as np
import pytest
from keras import ops

import keras_moh
from keras_moh.models import load_moh_llama3
from tests.checkpoints import write_safetensors
from tests.helpers import to_numpy
from tests.integrations.checkpoints import (
    FILES,
    Golden,
    write_folder,
    write_tokenizer,
)
from tests.integrations.models import DECODER, adapters, with_noise

TOLERANCE = 2e-5
STEPS = 8


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


@pytest.fixture
def model(golden: Golden, tmp_path) -> keras.Model:
    return load_moh_llama3(write_folder(tmp_path / "checkpoint", golden.config, golden.weights))


def heads_taken(heads: Any, num_heads: int) -> np.ndarray:
    """The 0/1 mask `(B, T, H)` of head numbers `(B, T, K)`."""
    return np.eye(num_heads, dtype="int8")[to_numpy(heads)].sum(-2)


def test_heads_are_the_authors(golden, model):
    for layer in adapters(model):
        assert layer.num_shared_heads == golden.meta["shared_head"]
        assert layer.top_k == golden.meta["routed_head"]
        assert layer.num_key_value_heads == golden.config["num_key_value_heads"]


@pytest.mark.parametrize("side", ["", "_left", "_right"])
def test_logits(golden, model, side):
    ids = golden[f"in/ids{side}"]
    mask = golden[f"in/mask{side}"] if side else np.ones_like(ids)
    logits = to_numpy(model.predict_on_batch({"token_ids": ids, "padding_mask": mask}))
    np.testing.assert_allclose(
        logits * mask[..., None], golden[f"f64/logits{side}"], rtol=TOLERANCE, atol=TOLERANCE
    )


@pytest.mark.parametrize("side", ["", "_left", "_right"])
def test_head_masks_of_each_layer(golden, model, side):
    ids = golden[f"in/ids{side}"]
    mask = golden[f"in/mask{side}"] if side else np.ones_like(ids)
    x = model.backbone.token_embedding(ids)
    for layer, expected in zip(
        model.backbone.transformer_layers, golden[f"head_mask{side}"], strict=True
    ):
        attention = layer._self_attention_layer
        normed = layer._self_attention_layernorm(x)
        _, routing = attention(normed, return_routing=True)
        taken = heads_taken(routing.heads, attention.num_heads)
        np.testing.assert_array_equal(np.where(mask[..., None], taken, -1), expected)
        x = layer(x, decoder_padding_mask=mask)


def test_attention_of_each_layer(golden, model):
    length = golden["in/ids"].shape[1]
    causal = np.tril(np.ones((1, length, length), bool))
    for i, attention in enumerate(adapters(model)):
        x = ops.convert_to_tensor(golden[f"f32/layer{i}/attn_in"])
        output, routing = attention(x, attention_mask=causal, return_routing=True)
        expected = golden[f"f64/layer{i}/attn_out"]
        np.testing.assert_allclose(to_numpy(output), expected, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose(
            to_numpy(routing.probabilities), golden["f64/router_probs"][i], atol=TOLERANCE
        )


def test_generate(golden, model):
    """Through keras-hub's own `generate`, with its cache."""
    ids, expected = golden["in/ids"], golden["gen_tokens"]
    tokens, mask = np.zeros_like(expected), np.zeros(expected.shape, bool)
    tokens[:, : ids.shape[1]], mask[:, : ids.shape[1]] = ids, True
    model.compile(sampler="greedy")
    inputs = {"token_ids": tokens, "padding_mask": mask}
    generated = model.generate(inputs, stop_token_ids=None)["token_ids"]
    np.testing.assert_array_equal(to_numpy(generated), expected)


@pytest.mark.parametrize("side", ["", "_left"])
def test_greedy_decoding_with_cache_and_mask(golden, model, side):
    """Left-padded prompts need the mask in the prefill, where keras-hub's `generate` drops it."""
    ids = golden[f"in/ids{side}"]
    mask = golden[f"in/mask{side}"] if side else np.ones_like(ids)
    batch, length = ids.shape
    backbone = model.backbone
    width = backbone.hidden_dim // backbone.num_query_heads
    shape = (batch, 2, length + STEPS, backbone.num_key_value_heads, width)
    caches = [ops.zeros(shape) for _ in backbone.transformer_layers]
    visible = np.concatenate([mask, np.ones((batch, STEPS), mask.dtype)], axis=1)

    def step(tokens: np.ndarray, start: int) -> tuple[np.ndarray, list[np.ndarray]]:
        x, taken = backbone.token_embedding(tokens), []
        for i, layer in enumerate(backbone.transformer_layers):
            attention = layer._self_attention_layer
            normed = layer._self_attention_layernorm(x)
            *_, routing = attention(normed, return_routing=True)
            taken.append(heads_taken(routing.heads, attention.num_heads))
            x, caches[i] = layer(
                x,
                decoder_padding_mask=visible,
                self_attention_cache=caches[i],
                self_attention_cache_update_index=start,
            )
        logits = backbone.token_embedding(backbone.layer_norm(x), reverse=True)
        return to_numpy(logits)[:, -1], taken

    logits, _ = step(ids, 0)
    generated, all_logits, all_taken = [ids], [], []
    for i in range(STEPS):
        all_logits.append(logits)
        generated.append(logits.argmax(-1)[:, None])
        if i < STEPS - 1:
            logits, taken = step(generated[-1], length + i)
            all_taken.append(taken)
    np.testing.assert_array_equal(np.concatenate(generated, 1), golden[f"gen_tokens{side}"])
    np.testing.assert_allclose(
        np.stack(all_logits, 1), golden[f"f64/gen_logits{side}"], rtol=1e-4, atol=TOLERANCE
    )
    # (steps, layers, B, 1, H) as (layers, B, steps, H)
    taken = np.moveaxis(np.array(all_taken)[:, :, :, 0], 0, 2)
    np.testing.assert_array_equal(taken, golden[f"gen_step_head_mask{side}"])


# Checkpoints --------------------------------------------------------------------------------------

GOLDEN = Golden(FILES[0])
IDS = {"token_ids": GOLDEN["in/ids"], "padding_mask": np.ones_like(GOLDEN["in/ids"])}


def logits_of(model: keras.Model) -> np.ndarray:
    return to_numpy(model.predict_on_batch(IDS))


@pytest.mark.parametrize("files", [1, 3])
def test_loads_from_one_file_or_several(files, tmp_path):
    model = load_moh_llama3(write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights, files))
    assert type(model) is keras_hub.models.Llama3CausalLM
    assert model.preprocessor is None
    np.testing.assert_allclose(logits_of(model), GOLDEN["f64/logits"], atol=TOLERANCE)


def test_numbers_of_heads_can_be_others(tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights)
    model = load_moh_llama3(folder, num_shared_heads=2, top_k=lambda layer: 1)
    assert [layer.num_active_heads for layer in adapters(model)] == [3, 3]


def test_bfloat16(tmp_path):
    rounded = {
        name: (array.view("uint32") >> 16).astype("uint16")
        for name, array in GOLDEN.weights.items()
    }
    model = load_moh_llama3(write_folder(tmp_path / "it", GOLDEN.config, rounded), 1.0, 0)
    widened = {
        name: (array.view("uint32") & np.uint32(0xFFFF0000)).view("float32")
        for name, array in GOLDEN.weights.items()
    }
    expected = load_moh_llama3(write_folder(tmp_path / "as", GOLDEN.config, widened), 1.0, 0)
    np.testing.assert_array_equal(logits_of(model), logits_of(expected))
    model = load_moh_llama3(tmp_path / "it", dtype="bfloat16")
    assert {weight.dtype for weight in model.weights} == {"bfloat16"}


def test_tied_embeddings_and_computed_buffers(tmp_path):
    weights = dict(GOLDEN.weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    plain = write_folder(tmp_path / "plain", GOLDEN.config, weights)
    expected = logits_of(load_moh_llama3(plain))
    del weights["lm_head.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, "float32")
    tied = write_folder(tmp_path / "tied", GOLDEN.config | {"tie_word_embeddings": True}, weights)
    np.testing.assert_allclose(logits_of(load_moh_llama3(tied)), expected, atol=1e-5)


def test_rope_scaling_of_llama_31(tmp_path):
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    config = GOLDEN.config | {"rope_scaling": scaling}
    model = load_moh_llama3(write_folder(tmp_path / "it", config, GOLDEN.weights))
    assert np.abs(logits_of(model) - GOLDEN["f64/logits"]).max() > 1e-3
    assert type(adapters(model)[0].rotary_embedding).__name__ == "LlamaRotaryEmbedding"


@pytest.mark.parametrize("merges_as_lists", [False, True])
def test_tokenizer(merges_as_lists, tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights)
    write_tokenizer(folder, merges_as_lists)
    model = load_moh_llama3(folder)
    tokenizer = model.preprocessor.tokenizer
    assert [int(i) for i in tokenizer("the cat")] == [28, 26, 2, 0, 19]
    assert (tokenizer.start_token_id, tokenizer.end_token_id) == (29, 30)
    assert isinstance(model.generate("the cat", max_length=12, stop_token_ids=None), str)


def test_tasks_with_a_tokenizer_are_converted(tmp_path):
    """Its vocabulary is in no config: the copy of the model has to be given it."""
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights)
    write_tokenizer(folder)
    preprocessor = load_moh_llama3(folder, 1.0, 0).preprocessor
    backbone = with_noise(keras_hub.models.Llama3Backbone(**DECODER | {"vocabulary_size": 97}))
    model = keras_hub.models.Llama3CausalLM(backbone, preprocessor=preprocessor)
    converted, _ = keras_moh.convert_to_moh(model, 1.0, 0)
    assert converted.preprocessor is not preprocessor
    assert converted.preprocessor.tokenizer.end_token_id == 30
    texts = []
    for each in (model, converted):
        each.compile(sampler="greedy")
        texts.append(each.generate("the cat", max_length=12, stop_token_ids=None))
    assert texts[0] == texts[1]


def test_saved_and_loaded(tmp_path):
    model = load_moh_llama3(write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights))
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(logits_of(again), logits_of(model), atol=1e-6)


def test_every_wrong_weight_is_listed(tmp_path, monkeypatch):
    weights = dict(GOLDEN.weights)
    del weights["model.norm.weight"]
    weights["model.layers.9.mlp.up_proj.weight"] = np.ones((2, 2), "float32")
    name = "model.layers.0.self_attn.q_proj.weight"
    weights[name] = weights[name][:-1]
    folder = write_folder(tmp_path / "it", GOLDEN.config, weights)

    def never(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was made")

    monkeypatch.setattr(keras_hub.models, "Llama3Backbone", never)
    with pytest.raises(ValueError, match=r"not those that config\.json describes") as error:
        load_moh_llama3(folder)
    assert str(error.value).splitlines()[1:] == [
        "  missing: model.norm.weight",
        "  unexpected: model.layers.9.mlp.up_proj.weight",
        f"  of the wrong shape: {name} is (63, 64), not (64, 64)",
    ]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu'.*'gelu'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"head_dim": 5}, "head_dim must be 8"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_type must be .*'yarn'"),
        ({"rope_theta": None}, "Missing: .'rope_theta'"),
        ({"vocab_size": None, "rms_norm_eps": None}, "Missing: .'vocab_size', 'rms_norm_eps'"),
        ({"num_attention_heads": 0}, "not describe a LLaMA.*positive integer.*_heads=0"),
        ({"hidden_size": "64"}, "not describe a LLaMA.*positive integer.*hidden_size='64'"),
        ({"rms_norm_eps": "small"}, "not describe a LLaMA.*rms_norm_eps='small'"),
        ({"rope_scaling": "llama3"}, "an object as rope_scaling. Received: 'llama3'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8}},
            "Missing: .'low_freq_factor', 'high_freq_factor', 'original_max_position_embeddings'",
        ),
    ],
)
def test_other_configs_are_refused(change, match, tmp_path):
    config = {k: v for k, v in (GOLDEN.config | change).items() if v is not None}
    with pytest.raises(ValueError, match=match):
        load_moh_llama3(write_folder(tmp_path / "it", config, GOLDEN.weights))


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("config.json", b"{", "config.json must hold a JSON object"),
        ("config.json", b"\xff\xfe", "config.json must hold a JSON object"),
        ("config.json", b"[]", "config.json must hold a JSON object. Received: list"),
        ("model.safetensors.index.json", b"{}", "`weight_map` of file names. Received: None"),
        ("model.safetensors.index.json", b'{"weight_map": {"a": 3}}', "`weight_map` of file names"),
        ("tokenizer.json", b"{", "tokenizer.json must hold a JSON object"),
        ("tokenizer.json", b"{}", "not those of a LLaMA 3: KeyError: 'added_tokens'"),
        ("tokenizer_config.json", b"{}", "not those of a LLaMA 3: KeyError: 'bos_token'"),
    ],
)
def test_damaged_files_are_named(file, content, match, tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights)
    write_tokenizer(folder)
    (folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=match):
        load_moh_llama3(folder)


def test_pickles_are_not_read(tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights, files=1)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(GOLDEN.weights))
    with pytest.raises(FileNotFoundError, match=r"lacks weights: model\.safetensors.*pickled"):
        load_moh_llama3(folder)


def test_index_stays_in_its_folder(tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights, files=1)
    index = folder / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "../elsewhere.safetensors"}}')
    with pytest.raises(ValueError, match=r"files of its own folder.*\.\./elsewhere"):
        load_moh_llama3(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        (1 << 40).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{x",
    ],
)
def test_files_that_are_no_safetensors_are_refused(content, tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights, files=1)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file of weights"):
        load_moh_llama3(folder)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "I64", "shape": [1], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        {"dtype": "F32", "shape": ["two"], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
    ],
)
def test_tensors_that_do_not_fit_their_file_are_refused(entry, tmp_path):
    import json

    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights, files=1)
    header = json.dumps({"model.norm.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + bytes(8)
    )
    with pytest.raises(ValueError, match="is not a safetensors file of weights"):
        load_moh_llama3(folder)


def test_a_weight_stored_twice_is_refused(tmp_path):
    folder = write_folder(tmp_path / "it", GOLDEN.config, GOLDEN.weights)
    extra = {"model.norm.weight": GOLDEN.weights["model.norm.weight"]}
    for file in folder.glob("*.safetensors"):
        if b'"model.norm.weight"' not in file.read_bytes():
            write_safetensors(file, extra)
    with pytest.raises(ValueError, match="stored twice"):
        load_moh_llama3(folder)


def test_keras_moh_models_is_there():
    assert keras_moh.models.load_moh_llama3 is load_moh_llama3
