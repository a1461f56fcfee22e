"""The authors' MoH-LLaMA3-8B from a local folder in Hugging Face's layout.

Of the checkpoint only numbers and names are read: `config.json`, the safetensors files and the
tokenizer's JSON files. The Python code that comes with it is neither needed nor run, and pickled
weights are not read.
"""

from __future__ import annotations

import json
import operator
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from keras_moh.conversion.convert import plan, put
from keras_moh.conversion.selection import Budget
from keras_moh.errors import integer, number_in
from keras_moh.models.checkpoints import check_weights
from keras_moh.models.keras_hub_models import keras_hub_models
from keras_moh.models.safetensors import StoredTensor, stored_tensors

PURPOSE = "Loading MoH-LLaMA3"
INDEX = "model.safetensors.index.json"

# Buffers of rotary embedding, which some versions of `transformers` stored: computed, not learned.
COMPUTED = ".rotary_emb.inv_freq"


def load_moh_llama3(
    path_or_preset: str | Path,
    num_shared_heads: Budget = 0.5,
    top_k: Budget = 0.25,
    dtype: Any = None,
) -> Any:
    """The authors' MoH-LLaMA3-8B, or another LLaMA 3 in that layout, ready to generate.

    The heads are the authors': the first half of each layer is shared, and of the others a token
    takes as many as a quarter of all, by the length of its query vectors (arXiv 2410.11842, "MoH-
    LLaMA3-8B"; the numbers are in their code, not in the checkpoint).

    Args:
        path_or_preset: A local folder with `config.json`, the weights in `model.safetensors`, or in
            several files that `model.safetensors.index.json` lists, and, for text, `tokenizer.json`
            and `tokenizer_config.json`. Nothing is downloaded.
        num_shared_heads: As of `convert_to_moh`. Defaults to 0.5.
        top_k: As of `convert_to_moh`. Defaults to 0.25.
        dtype: Dtype or policy of the model; `"bfloat16"` halves its memory. Defaults to Keras's
            global policy.

    Returns:
        A `keras_hub.models.Llama3CausalLM` with MoH attention. Without a `tokenizer.json` it has no
        preprocessor, and takes token numbers.

    Raises:
        ImportError: if keras-hub is not installed.
        FileNotFoundError: if the folder lacks a file.
        ValueError: if a file is damaged, the config is not of a model that this can be, or a weight
            is missing, unexpected or of another shape: all of these are listed.

    Example:
    ```python
    model = keras_moh.models.load_moh_llama3("MoH-LLaMA3-8B", dtype="bfloat16")
    model.generate("Attention is", max_length=50)
    ```
    """
    models = keras_hub_models(PURPOSE)
    folder = Path(path_or_preset)
    arguments = backbone_arguments(_read_json(folder / "config.json"))
    tensors = stored_tensors(_weight_files(folder))
    # Before the model, which may take minutes to make: what is wrong is known by the headers.
    _check_weights(tensors, arguments)
    preprocessor = _preprocessor(folder)

    backbone = models.Llama3Backbone(**arguments, dtype=dtype)
    for place in weight_places(arguments):
        place.fill(backbone, tensors[place.name].read())
    model = models.Llama3CausalLM(backbone, preprocessor=preprocessor)
    adapters, _ = plan(model, num_shared_heads, top_k)
    put(adapters, model)
    return model


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} must hold a JSON object. {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file} must hold a JSON object. Received: {type(content).__name__}")
    return content


ARGUMENTS = {
    "vocabulary_size": "vocab_size",
    "num_layers": "num_hidden_layers",
    "num_query_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "hidden_dim": "hidden_size",
    "intermediate_dim": "intermediate_size",
}
EPSILON = "rms_norm_eps"
ROPE_SCALING = {
    "rope_frequency_adjustment_factor": "factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
    "rope_pretraining_sequence_length": "original_max_position_embeddings",
}


def backbone_arguments(config: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `keras_hub.models.Llama3Backbone` for a Hugging Face config of LLaMA.

    Raises:
        ValueError: if the config lacks a number, or has what the backbone does not.
    """
    _check_entries(config, [*ARGUMENTS.values(), EPSILON])
    try:
        arguments: dict[str, Any] = {
            name: integer(theirs, config[theirs], 1) for name, theirs in ARGUMENTS.items()
        }
        arguments["layer_norm_epsilon"] = number_in(EPSILON, config[EPSILON], 0)
    except ValueError as error:
        raise ValueError(f"config.json does not describe a LLaMA. {error}") from error
    valid = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "head_dim": config["hidden_size"] // config["num_attention_heads"],
    }
    for name, value in valid.items():
        if config.get(name) not in (None, value):
            raise ValueError(
                f"config.json has an entry that keras-hub's Llama3Backbone does not support: "
                f"{name} must be {value!r}. Received: {name}={config[name]!r}"
            )
    rope = {"rope_theta": config.get("rope_theta")}
    for name in ("rope_parameters", "rope_scaling"):
        entries = config.get(name) or {}
        if not isinstance(entries, dict):
            raise ValueError(f"config.json must have an object as {name}. Received: {entries!r}")
        rope |= entries
    _check_entries(rope, ["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "llama3"):
        raise ValueError(
            "config.json has an entry that keras-hub's Llama3Backbone does not support: "
            f"rope_type must be 'default' or 'llama3'. Received: rope_type={kind!r}"
        )
    if kind == "llama3":
        _check_entries(rope, ROPE_SCALING.values())
        arguments |= {name: rope[theirs] for name, theirs in ROPE_SCALING.items()}
    return {
        **arguments,
        "rope_max_wavelength": rope["rope_theta"],
        "tie_word_embeddings": bool(config.get("tie_word_embeddings", False)),
    }


def _check_entries(config: dict[str, Any], names: Iterable[str]) -> None:
    missing = [name for name in names if config.get(name) is None]
    if missing:
        raise ValueError(f"config.json must have the entries of LLaMA. Missing: {missing}")


class WeightPlace(NamedTuple):
    """Where a stored weight belongs."""

    name: str
    """The weight's name in the checkpoint."""
    shape: tuple[int, ...]
    """Its shape there."""
    variable: Callable[[Any], Any]
    """The variable of a `Llama3Backbone`."""
    transposed: bool = True
    """Whether the variable has the output axes last, where the checkpoint has them first."""

    def fill(self, backbone: Any, numbers: np.ndarray) -> None:
        """Assign the stored `numbers`."""
        variable = self.variable(backbone)
        numbers = np.transpose(numbers) if self.transposed else numbers
        variable.assign(np.reshape(numbers, variable.shape))


def weight_places(arguments: dict[str, Any]) -> list[WeightPlace]:
    """All weights of the backbone that these arguments make, by their Hugging Face names."""
    width, inner = arguments["hidden_dim"], arguments["intermediate_dim"]
    vocabulary = arguments["vocabulary_size"]
    keys = width // arguments["num_query_heads"] * arguments["num_key_value_heads"]
    of_layer = {
        "self_attn.q_proj": ((width, width), "_self_attention_layer._query_dense.kernel"),
        "self_attn.k_proj": ((keys, width), "_self_attention_layer._key_dense.kernel"),
        "self_attn.v_proj": ((keys, width), "_self_attention_layer._value_dense.kernel"),
        "self_attn.o_proj": ((width, width), "_self_attention_layer._output_dense.kernel"),
        "mlp.gate_proj": ((inner, width), "_feedforward_gate_dense.kernel"),
        "mlp.up_proj": ((inner, width), "_feedforward_intermediate_dense.kernel"),
        "mlp.down_proj": ((width, inner), "_feedforward_output_dense.kernel"),
        "input_layernorm": ((width,), "_self_attention_layernorm.scale"),
        "post_attention_layernorm": ((width,), "_feedforward_layernorm.scale"),
    }
    embeddings = operator.attrgetter("token_embedding.embeddings")
    places = [
        WeightPlace("model.embed_tokens.weight", (vocabulary, width), embeddings, transposed=False),
        WeightPlace("model.norm.weight", (width,), operator.attrgetter("layer_norm.scale")),
    ]
    if not arguments["tie_word_embeddings"]:
        head = operator.attrgetter("token_embedding.reverse_embeddings")
        places.append(WeightPlace("lm_head.weight", (vocabulary, width), head))
    for i in range(arguments["num_layers"]):
        for name, (shape, attribute) in of_layer.items():
            variable = _of_layer(i, attribute)
            places.append(WeightPlace(f"model.layers.{i}.{name}.weight", shape, variable))
    return places


def _of_layer(number: int, attribute: str) -> Callable[[Any], Any]:
    get = operator.attrgetter(attribute)
    return lambda backbone: get(backbone.transformer_layers[number])


def _check_weights(tensors: Mapping[str, StoredTensor], arguments: dict[str, Any]) -> None:
    """Refuse a checkpoint whose weights are not exactly those of the backbone, naming all of them.

    Raises:
        ValueError: if a weight is missing, unexpected, or of another shape.
    """
    computed = {name for name in tensors if name.endswith(COMPUTED)}
    if arguments["tie_word_embeddings"]:
        computed.add("lm_head.weight")  # the embeddings again
    check_weights(
        {name: tensor.shape for name, tensor in tensors.items() if name not in computed},
        {place.name: place.shape for place in weight_places(arguments)},
        "that config.json describes",
    )


def _weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        places = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not all(isinstance(x, str) for x in places.values()):
            raise ValueError(f"{INDEX} must have a `weight_map` of file names. Received: {places}")
        names = sorted(set(places.values()))
        files = [folder / name for name in names]
        outside = [name for name in names if Path(name).name != name]
        if outside:
            raise ValueError(f"{INDEX} must name files of its own folder. Received: {outside}")
    else:
        files = [folder / "model.safetensors"]
    absent = [file.name for file in files if not file.exists()]
    if absent:
        raise FileNotFoundError(
            f"{folder} lacks weights: {', '.join(absent)}. Only safetensors files are read: "
            "pickled ones (.bin, .pt) can run code"
        )
    return files


def _preprocessor(folder: Path) -> Any:
    """The preprocessor with the folder's tokenizer, or `None` if it has none."""
    if not (folder / "tokenizer.json").exists():
        return None
    models = keras_hub_models(PURPOSE)
    content = _read_json(folder / "tokenizer.json")
    config = _read_json(folder / "tokenizer_config.json")
    try:
        added = [token for token in content["added_tokens"] if not _is_reserved(token["content"])]
        arguments = {
            "vocabulary": content["model"]["vocab"]
            | {token["content"]: token["id"] for token in added},
            "merges": [
                merge if isinstance(merge, str) else " ".join(merge)
                for merge in content["model"]["merges"]
            ],
            "bos_token": _token(config["bos_token"]),
            "eos_token": _token(config["eos_token"]),
            "misc_special_tokens": {token["content"] for token in added},
        }
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            "tokenizer.json and tokenizer_config.json are not those of a LLaMA 3: "
            f"{type(error).__name__}: {error}"
        ) from error
    return models.Llama3CausalLMPreprocessor(models.Llama3Tokenizer(**arguments))


def _is_reserved(token: str) -> bool:
    return token.startswith("<|reserved_special_token_")


def _token(entry: str | dict[str, Any]) -> str:
    return entry if isinstance(entry, str) else entry["content"]
