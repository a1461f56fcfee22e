"""The authors' MoH-DiT: their numbers (see `goldens/README.md`) and files, training, sampling."""

import argparse
import importlib.util
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import keras_moh
from keras_moh.models import DiffusionSampler, DiffusionTrainer, MoHDiT
from tests.checkpoints import write_safetensors
from tests.helpers import compiled, to_numpy

FILES = sorted(Path(__file__).parent.joinpath("goldens", "dit_model").glob("*.npz"))
TOLERANCE = 2e-5
needs_torch = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None,
    reason="writes files of PyTorch's; reading them is the same code on every backend",
)


class Golden:
    """One golden file."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))
        self.meta = json.loads(str(self.arrays.pop("meta")))
        self.config: dict[str, Any] = self.meta["config"]
        prefix = "param/"
        self.weights = {k[6:]: v for k, v in self.arrays.items() if k.startswith(prefix)}

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    def model(self, **kwargs: Any) -> MoHDiT:
        config = self.config
        return MoHDiT(
            config["input_size"],
            config["patch_size"],
            config["num_classes"],
            config["hidden_size"],
            config["depth"],
            config["num_heads"],
            config["shared_head"],
            config["routed_head"],
            key_dim=config.get("head_dim"),
            mlp_ratio=config["mlp_ratio"],
            num_channels=config["in_channels"],
            **kwargs,
        )

    def inputs(self, suffix: str = "", count: int | None = None) -> dict[str, np.ndarray]:
        return {
            "images": channels_last(self[f"in/x{suffix}"])[:count],
            "times": self[f"in/t{suffix}"][:count],
            "labels": self[f"in/y{suffix}"][:count],
        }


def channels_last(images: np.ndarray) -> np.ndarray:
    return np.moveaxis(images, 1, -1)


@pytest.fixture(params=FILES, ids=lambda path: path.stem)
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.param)


def loaded(golden: Golden, folder: Path) -> MoHDiT:
    model = golden.model()
    model.load_official(write_safetensors(folder / "official.safetensors", golden.weights))
    return model


def assert_close(actual: Any, expected: np.ndarray, tolerance: float = TOLERANCE) -> None:
    np.testing.assert_allclose(to_numpy(actual), expected, rtol=tolerance, atol=tolerance)


def test_goldens(golden, tmp_path):
    """One test for all numbers of a file: on JAX most of its time is one compilation."""
    model = loaded(golden, tmp_path)
    depth = golden.config["depth"]
    tokens = [model.get_layer(f"block_{i}_attention").input for i in range(depth)]
    blocks = [model.get_layer(f"block_{i}").output for i in range(depth)]
    inner = keras.Model(model.input, [model.output, *blocks, *tokens])
    model.get_layer("label_dropout").rate = 0.0

    def call(inputs, of_guided, scale):
        output, *inside = inner(inputs)
        model(inputs, training=True)
        loss = sum(model.losses)
        return output, inside, loss, model.guided(of_guided, scale)

    output, inside, loss, guided = compiled(
        call, golden.inputs(), golden.inputs("_cfg", 2), golden["in/cfg_scale"]
    )
    assert_close(output, channels_last(golden["f64/out"]))
    assert_close(output, channels_last(golden["f64exact/out"]))
    expected = channels_last(golden["f64exact/out_cfg"])
    # The authors' second half is the same noise again, beside channels of no class.
    np.testing.assert_array_equal(expected[:2, ..., :3], expected[2:, ..., :3])
    assert_close(guided, expected[:2])
    np.testing.assert_allclose(to_numpy(loss), golden["f64/moh_loss"], rtol=2e-5)
    for i in range(depth):
        assert_close(inside[i], golden[f"f64/block{i}"])
        routing = model.get_layer(f"block_{i}_attention").router(inside[depth + i])
        gates = np.zeros_like(golden[f"f64/gates{i}"])
        np.put_along_axis(gates, to_numpy(routing.heads), to_numpy(routing.gates), axis=-1)
        assert_close(gates, golden[f"f64/gates{i}"])


def test_frozen_positions_are_the_authors():
    """The table of sines and cosines, where the golden model has it and not a random one."""
    for golden in map(Golden, FILES):
        if golden.meta["pos_embed"] == "official sin-cos":
            table = golden.model().get_layer("position_embedding").embeddings
            assert not table.trainable
            np.testing.assert_allclose(to_numpy(table), golden["param/pos_embed"][0], atol=1e-7)


GOLDEN = Golden(FILES[0])


def test_a_new_model_gives_zeros():
    assert np.all(to_numpy(GOLDEN.model()(GOLDEN.inputs())) == 0)


def test_labels_are_dropped_in_training_only():
    labels = np.arange(1000, dtype="int32") % 5
    layer = GOLDEN.model(label_dropout=0.3).get_layer("label_dropout")
    np.testing.assert_array_equal(to_numpy(layer(labels, training=False)), labels)
    dropped = to_numpy(layer(labels, training=True))
    assert set(dropped[dropped != labels]) == {5}
    assert 0.2 < np.mean(dropped == 5) < 0.4
    assert GOLDEN.model(label_dropout=0.0).get_layer("label_embedding").input_dim == 5


def test_steps_are_told_apart_in_bfloat16():
    model = GOLDEN.model(dtype="bfloat16")
    waves = keras.Model(model.input, model.get_layer("time_embedding_1").input)
    inputs = {**GOLDEN.inputs(), "times": np.array([998, 999, 1000])}
    first, second, third = to_numpy(waves(inputs))
    assert np.abs(first - second).max() > 0.5
    assert np.abs(second - third).max() > 0.5


@pytest.mark.parametrize(
    ("name", "percent", "layers"),
    [
        ("S/2-90", 88.89, 12),
        ("S/2-75", 75.0, 12),
        ("B/2-90", 89.58, 12),
        ("B/2-75", 75.0, 12),
        ("L/2-90", 89.58, 24),
        ("L/2-75", 75.0, 24),
        ("XL/2-90", 89.96, 28),
        ("MoH-DiT-XL/2-75", 75.0, 28),
    ],
)
def test_names(name, percent, layers, monkeypatch):
    """The shares are those that the authors' code reports of its own configurations."""
    made = {}
    monkeypatch.setattr(MoHDiT, "__init__", lambda self, *args, **kwargs: made.update(kwargs))
    MoHDiT.from_name(name)
    active = np.array(made["num_shared_heads"]) + np.array(made["top_k"])
    assert len(active) == made["depth"] == layers
    assert round(100 * active.sum() / np.sum(made["num_heads"]), 2) == percent
    routed = np.array(made["num_heads"]) - made["num_shared_heads"]
    assert np.all((np.array(made["top_k"]) > 0) == (routed > 0))
    width = np.array(made["num_heads"]) * made.get("key_dim", 64)
    assert width.min() <= made["hidden_size"] <= width.max()


@pytest.mark.parametrize("name", ["XL/3-90", "M/2-75", "S/2", 2])
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match=r"Invalid value for argument `name`.*XL/2-90"):
        MoHDiT.from_name(name)


def test_names_are_of_models_that_route():
    with pytest.raises(ValueError, match=r"`router`.*name of a router.*router=None"):
        MoHDiT.from_name("S/8-75", router=None)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"image_size": 9}, "image_size.*multiple of patch_size=2.*9"),
        ({"hidden_size": 30}, "hidden_size.*multiple of 4.*30"),
        ({"num_heads": [4]}, r"num_heads.*list of 2 integers.*\[4\]"),
        ({"top_k": [1, 5]}, "top_k=5 with 2 routed heads"),
        ({"label_dropout": 1.0}, "label_dropout.*1.0"),
        ({"top_k": None}, "top_k.*None"),
        ({"router": None}, "num_shared_heads.*None with router=None.*2"),
        ({"router": None, "num_shared_heads": None}, "top_k.*None with router=None.*1"),
        ({"router": "one_stage"}, "router.*one_stage"),
        ({"router": keras_moh.TwoStageRouter(4, 2, 1)}, "router.*name of a router.*TwoStage"),
    ],
)
def test_arguments_out_of_range_are_refused(changes, match):
    arguments = {
        "image_size": 8,
        "patch_size": 2,
        "num_classes": 5,
        "hidden_size": 16,
        "depth": 2,
        "num_heads": 4,
        "num_shared_heads": 2,
        "top_k": 1,
    }
    with pytest.raises(ValueError, match=match):
        MoHDiT(**arguments | changes)


# The authors' files -------------------------------------------------------------------------------


def weights_of(model: keras.Model) -> list[np.ndarray]:
    return [to_numpy(weight) for weight in model.weights]


def assert_loaded(model: MoHDiT, folder: Path) -> None:
    for actual, expected in zip(weights_of(model), weights_of(loaded(GOLDEN, folder)), strict=True):
        np.testing.assert_array_equal(actual, expected)


@needs_torch
@pytest.mark.parametrize("suffix", [".pt", ".pth"])
@pytest.mark.parametrize("content", ["weights", "of training", "without average", "old format"])
def test_files_of_pytorch(content, suffix, tmp_path):
    import torch

    weights = {name: torch.from_numpy(array) for name, array in GOLDEN.weights.items()}
    other = {name: torch.zeros_like(array) for name, array in weights.items()}
    saved = {
        "weights": weights,
        "of training": {
            "model": other,
            "ema": weights,
            "opt": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 1e-4}]},
            "args": argparse.Namespace(model="MoH-DiT-XL/2-90", epochs=1400),
        },
        "without average": {"model": weights, "epoch": 3},
        "old format": weights,
    }[content]
    path = tmp_path / f"checkpoint{suffix}"
    torch.save(saved, path, _use_new_zipfile_serialization=content != "old format")
    model = GOLDEN.model()
    model.load_official(path)
    assert_loaded(model, tmp_path)


@needs_torch
def test_half_precision_is_widened(tmp_path):
    import torch

    weights = {name: torch.from_numpy(array) for name, array in GOLDEN.weights.items()}
    torch.save({name: array.bfloat16() for name, array in weights.items()}, tmp_path / "it.pt")
    model = GOLDEN.model()
    model.load_official(tmp_path / "it.pt")
    kernel = to_numpy(model.get_layer("final").kernel)
    expected = weights["final_layer.linear.weight"].bfloat16().float().numpy().T
    np.testing.assert_array_equal(kernel, expected)


class RunsCode:
    """What an attacker would put into a pickle."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


@needs_torch
@pytest.mark.parametrize("how", ["archive", "old format", "plain pickle"])
def test_pickles_that_run_code_are_refused(how, tmp_path):
    import torch

    path, trace = tmp_path / "it.pt", tmp_path / "trace"
    content = {"model": RunsCode(str(trace))}
    if how == "plain pickle":
        path.write_bytes(pickle.dumps(content, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "archive")
    model = GOLDEN.model()
    before = weights_of(model)
    with pytest.raises(ValueError, match=r"it\.pt is not a file of weights alone"):
        model.load_official(path)
    assert not trace.exists()
    for actual, expected in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


@needs_torch
@pytest.mark.parametrize("content", [3, {"model": [1, 2]}, {"step": 3}, b""])
def test_files_without_weights_are_refused(content, tmp_path):
    import torch

    path = tmp_path / "it.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match=r"it\.pt (is not a file of|must hold) weights"):
        GOLDEN.model().load_official(path)


def test_files_of_pytorch_need_it(tmp_path, monkeypatch):
    path = tmp_path / "it.pt"
    path.write_bytes(b"")
    model = GOLDEN.model()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "keras_moh.models.torch_checkpoint", raising=False)
    monkeypatch.delattr(keras_moh.models, "torch_checkpoint", raising=False)
    with pytest.raises(ImportError, match=r"on every backend: `pip install keras-moh\[torch\]`"):
        model.load_official(path)


def test_other_files_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*absent\.pt"):
        GOLDEN.model().load_official(tmp_path / "absent.pt")
    (tmp_path / "it.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a file \.pt, \.pth or \.safetensors.*it\.bin"):
        GOLDEN.model().load_official(tmp_path / "it.bin")


def test_every_wrong_weight_is_listed_and_nothing_changed(tmp_path):
    weights = dict(GOLDEN.weights)
    del weights["pos_embed"]
    weights["blocks.7.mlp.fc1.bias"] = np.ones(3, "float32")
    name = "blocks.1.attn.qkv.weight"
    weights[name] = weights[name][:-1]
    model = GOLDEN.model()
    before = weights_of(model)
    with pytest.raises(ValueError, match="not those of this MoHDiT") as error:
        model.load_official(write_safetensors(tmp_path / "it.safetensors", weights))
    assert str(error.value).splitlines()[1:] == [
        "  missing: pos_embed",
        "  unexpected: blocks.7.mlp.fc1.bias",
        f"  of the wrong shape: {name} is (143, 48), not (144, 48)",
    ]
    for actual, expected in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


def plain_dit() -> MoHDiT:
    """The golden model without routers."""
    config = GOLDEN.model().get_config()
    return MoHDiT.from_config(config | {"num_shared_heads": None, "top_k": None, "router": None})


def test_without_routers_it_is_the_dit(tmp_path):
    """Of the same names but for the routers', and each attention is Keras's."""
    model = plain_dit()
    path = write_safetensors(tmp_path / "official.safetensors", GOLDEN.weights)
    with pytest.raises(ValueError, match="unexpected") as error:
        model.load_official(path)
    unexpected = [line.split()[-1] for line in str(error.value).splitlines()[1:]]
    assert unexpected
    assert all(".attn.wg" in name for name in unexpected)
    weights = {k: v for k, v in GOLDEN.weights.items() if k not in unexpected}
    model.load_official(write_safetensors(tmp_path / "plain.safetensors", weights))

    names = [f"block_{i}_attention" for i in range(GOLDEN.config["depth"])]
    inside = [tensor for x in map(model.get_layer, names) for tensor in (x.input, x.output)]
    inside = keras.Model(model.input, inside)(GOLDEN.inputs())
    for name, tokens, output in zip(names, inside[::2], inside[1::2], strict=True):
        layer = model.get_layer(name)
        attention = keras.layers.MultiHeadAttention(layer.num_heads, layer.key_dim)
        attention.build(tokens.shape, tokens.shape)
        attention.set_weights(layer.get_weights())
        assert_close(output, to_numpy(attention(tokens, tokens)))

    model.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras")
    assert again.get_config() == model.get_config()


def test_the_router_of_query_norms_has_no_weights_to_load(tmp_path):
    config = GOLDEN.model().get_config() | {"router": "query_norm"}
    weights = {k: v for k, v in GOLDEN.weights.items() if ".attn.wg" not in k}
    model = MoHDiT.from_config(config)
    model.load_official(write_safetensors(tmp_path / "plain.safetensors", weights))
    assert np.isfinite(to_numpy(model(GOLDEN.inputs()))).all()


def test_not_after_lora(tmp_path):
    model = GOLDEN.model()
    model.get_layer("block_1_mlp_2").enable_lora(2)
    before = weights_of(model)
    with pytest.raises(ValueError, match="of this MoHDiT cannot be loaded after quantization or"):
        model.load_official(write_safetensors(tmp_path / "it.safetensors", GOLDEN.weights))
    for actual, expected in zip(weights_of(model), before, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_saved_and_loaded(tmp_path):
    model = loaded(GOLDEN, tmp_path)
    trainer = DiffusionTrainer(model, seed=3)
    trainer.save(tmp_path / "trainer.keras")
    again = keras.saving.load_model(tmp_path / "trainer.keras")
    assert again.get_config() == trainer.get_config()
    for actual, expected in zip(weights_of(again.network), weights_of(model), strict=True):
        np.testing.assert_array_equal(actual, expected)


# Diffusion: an oracle in NumPy that knows one step at a time --------------------------------------

BETAS = np.linspace(1e-4, 0.02, 1000)
KEPT = np.cumprod(1 - BETAS)


class Respaced:
    """The constants of some of the 1000 steps, as the formulas of the papers have them."""

    def __init__(self, num_steps: int) -> None:
        self.times = np.round(np.linspace(0, 999, num_steps)).astype(int)
        self.kept = KEPT[self.times]
        self.before = np.append(1.0, self.kept[:-1])
        self.beta = 1 - self.kept / self.before
        self.posterior = self.beta * (1 - self.before) / (1 - self.kept)

    def mean(self, i: int, image: np.ndarray, noisy: np.ndarray) -> np.ndarray:
        return (
            self.beta[i] * np.sqrt(self.before[i]) * image
            + (1 - self.before[i]) * np.sqrt(1 - self.beta[i]) * noisy
        ) / (1 - self.kept[i])

    def log_bounds(self, i: int) -> tuple[float, float]:
        return np.log(self.posterior[max(i, 1)]), np.log(self.beta[i])


def small_network(**kwargs: Any) -> MoHDiT:
    """A network of pixels whose predictions are those of random weights, not zeros."""
    keras.utils.set_random_seed(0)
    network = MoHDiT(
        **{
            "image_size": 4,
            "patch_size": 2,
            "num_classes": 3,
            "hidden_size": 8,
            "depth": 1,
            "num_heads": 4,
            "num_shared_heads": 1,
            "top_k": 2,
            "num_channels": 2,
        }
        | kwargs
    )
    generator = np.random.default_rng(0)
    for name in ("final", "final_modulation", "block_0_modulation"):
        for weight in network.get_layer(name).weights:
            weight.assign(0.3 * generator.standard_normal(weight.shape))
    return network


def expected_samples(
    network: MoHDiT,
    method: str,
    steps: int,
    clip: bool,
    labels: list[int],
    scale: float,
    batch: int,
) -> np.ndarray:
    spaced, generator = Respaced(steps), np.random.default_rng(7)
    channels, size, samples = network.num_channels, network.image_size, []
    for start in range(0, len(labels), batch):
        some = np.resize(np.array(labels[start : start + batch]), batch)
        x = generator.standard_normal((batch, size, size, channels), "float32").astype("float64")
        for i in reversed(range(steps)):
            both = [
                to_numpy(
                    network.predict_on_batch(
                        {
                            "images": x.astype("float32"),
                            "times": np.full(batch, spaced.times[i], "int32"),
                            "labels": each.astype("int32"),
                        }
                    )
                ).astype("float64")
                for each in (some, np.full(batch, network.num_classes))
            ]
            noise = both[1] + scale * (both[0] - both[1])
            noise, between = noise[..., :channels], both[0][..., channels:]
            image = (x - np.sqrt(1 - spaced.kept[i]) * noise) / np.sqrt(spaced.kept[i])
            if clip:
                image = np.clip(image, -1, 1)
                noise = (x - np.sqrt(spaced.kept[i]) * image) / np.sqrt(1 - spaced.kept[i])
            if method == "ddim":
                x = np.sqrt(spaced.before[i]) * image + np.sqrt(1 - spaced.before[i]) * noise
                continue
            low, high = spaced.log_bounds(i)
            log_variance = high
            if network.learn_sigma:
                log_variance = (between + 1) / 2 * high + (1 - between) / 2 * low
            drawn = generator.standard_normal(x.shape, "float32").astype("float64")
            x = spaced.mean(i, image, x) + (i > 0) * np.exp(log_variance / 2) * drawn
        samples.append(x)
    return np.concatenate(samples)[: len(labels)]


@pytest.mark.parametrize(
    ("method", "clip", "scale", "learn_sigma"),
    [("ddpm", False, 2.5, True), ("ddpm", True, 1.0, False), ("ddim", True, 2.5, True)],
)
def test_samples(method, clip, scale, learn_sigma):
    network = small_network(learn_sigma=learn_sigma)
    labels = [0, 2, 1, 1, 0]
    sampler = DiffusionSampler(network, method, num_steps=6, batch_size=3, clip=clip)
    samples = sampler.sample(labels, scale, seed=7, verbose=0)
    expected = expected_samples(network, method, 6, clip, labels, scale, 3)
    size = np.abs(expected).max()
    np.testing.assert_allclose(samples, expected, rtol=0, atol=1e-4 * max(size, 1))
    assert samples.dtype == "float32"


def test_batches_and_calls_share_one_trace(monkeypatch):
    network, traced = small_network(), []
    sampler = DiffusionSampler(network, "ddpm", num_steps=4, batch_size=2)
    call = type(sampler._step).call

    def counting(self, inputs):
        traced.append(self)
        return call(self, inputs)

    monkeypatch.setattr(type(sampler._step), "call", counting)
    sampler.sample([0, 1, 2], 2.0, verbose=0)
    sampler.sample([2], 3.0, verbose=0)
    steps = 4 * 3  # two batches, and one
    assert len(traced) == (steps if keras.backend.backend() == "torch" else 1)


def test_progress_bar(capsys):
    DiffusionSampler(small_network(), "ddim", num_steps=2, batch_size=2).sample([0, 1, 2])
    assert "4/4" in capsys.readouterr().out


def test_seeds():
    sampler = DiffusionSampler(small_network(), "ddim", num_steps=2, batch_size=2)
    one, same, other = (sampler.sample([1], seed=seed, verbose=0) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert np.abs(one - other).max() > 0.1


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"labels": [4]}, r"labels.*from 0 to 3.*\[4\]"),
        ({"labels": []}, r"labels.*from 0 to 3.*\[\]"),
        ({"labels": [0.5]}, r"labels.*0\.5"),
        ({"labels": [0], "guidance_scale": -1}, "guidance_scale.*-1"),
    ],
)
def test_bad_requests_are_refused(arguments, match):
    sampler = DiffusionSampler(small_network(), num_steps=2)
    with pytest.raises(ValueError, match=match):
        sampler.sample(**arguments)


def test_guidance_needs_the_class_that_is_none():
    network = small_network(label_dropout=0.0)
    sampler = DiffusionSampler(network, num_steps=2)
    with pytest.raises(ValueError, match=r"above 0.*label_dropout=0"):
        network.guided({}, 2)
    with pytest.raises(ValueError, match=r"guidance_scale.*label_dropout=0.*2"):
        sampler.sample([0], 2)
    with pytest.raises(ValueError, match=r"labels.*from 0 to 2"):
        sampler.sample([3])


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"method": "euler"}, "method.*'ddpm' or 'ddim'.*euler"),
        ({"num_steps": 1001}, "num_steps.*from 2 to 1000.*1001"),
        ({"network": None}, "network.*MoHDiT.*None"),
        ({"clip": 1}, "clip.*True or False.*1"),
    ],
)
def test_bad_samplers_are_refused(changes, match):
    with pytest.raises(ValueError, match=match):
        DiffusionSampler(**{"network": small_network()} | changes)


def expected_losses(
    network: MoHDiT, images: np.ndarray, labels: np.ndarray, times: np.ndarray, noise: np.ndarray
) -> np.ndarray:
    from math import erf

    spaced, channels, losses = Respaced(1000), network.num_channels, []
    kept = KEPT[times][:, None, None, None]
    noisy = np.sqrt(kept) * images + np.sqrt(1 - kept) * noise
    inputs = {"images": noisy.astype("float32"), "times": times, "labels": labels}
    predicted = to_numpy(network.predict_on_batch(inputs)).astype("float64")
    for n, t in enumerate(times):
        guess, between = predicted[n, ..., :channels], predicted[n, ..., channels:]
        loss = np.mean((noise[n] - guess) ** 2)
        if network.learn_sigma:
            image = (noisy[n] - np.sqrt(1 - KEPT[t]) * guess) / np.sqrt(KEPT[t])
            mean = spaced.mean(t, image, noisy[n])
            low, high = spaced.log_bounds(t)
            variance = np.exp((between + 1) / 2 * high + (1 - between) / 2 * low)
            if t > 0:
                true_mean, true = spaced.mean(t, images[n], noisy[n]), np.exp(low)
                nats = 0.5 * (
                    np.log(variance / true) + (true + (true_mean - mean) ** 2) / variance - 1
                )
            else:
                cdf = np.vectorize(lambda z: 0.5 * (1 + erf(z / np.sqrt(2))))
                deviation = np.sqrt(variance)
                upper = np.where(
                    images[n] > 0.999, 1, cdf((images[n] - mean + 1 / 255) / deviation)
                )
                lower = np.where(
                    images[n] < -0.999, 0, cdf((images[n] - mean - 1 / 255) / deviation)
                )
                nats = -np.log(np.maximum(upper - lower, 1e-12))
            loss += np.mean(nats) / np.log(2)
        losses.append(loss)
    return np.array(losses)


@pytest.mark.parametrize("learn_sigma", [True, False])
def test_losses(learn_sigma):
    network = small_network(learn_sigma=learn_sigma)
    generator = np.random.default_rng(1)
    times, labels = np.array([0, 0, 1, 500, 999], "int32"), np.array([0, 1, 2, 3, 0], "int32")
    images = np.clip(generator.standard_normal((5, 4, 4, 2)), -1, 1)
    noise = generator.standard_normal(images.shape)
    # Of the first step, nearly right and wrong by far.
    noise[0] *= 0.01
    trainer = DiffusionTrainer(network)
    losses = compiled(
        trainer.loss_of, images.astype("float32"), labels, times, noise.astype("float32")
    )
    expected = expected_losses(network, images, labels, times, noise)
    np.testing.assert_allclose(to_numpy(losses), expected, rtol=2e-3)


def test_fit():
    """Images that are the same all over, of a brightness for each class, are soon learned."""
    labels = np.arange(96, dtype="int32") % 3
    images = np.broadcast_to((labels - 1)[:, None, None, None] * 0.8, (96, 4, 4, 2))
    data = {"images": images.astype("float32"), "labels": labels}
    network = small_network(hidden_size=16, learn_sigma=False)
    trainer = DiffusionTrainer(network, seed=0)
    trainer.compile(keras.optimizers.Adam(1e-2))
    losses = trainer.fit(data, batch_size=16, epochs=40, verbose=0).history["loss"]
    assert losses[-1] < 0.5 * losses[0]
    assert trainer.evaluate(data, verbose=0) < 0.5 * losses[0]
    # The routers' loss is part of it, and is the larger one in the end by no means.
    assert np.isfinite(losses).all()
    sampler = DiffusionSampler(network, "ddim", num_steps=20, batch_size=12, clip=True)
    drawn = sampler.sample([0, 1, 2] * 4, 1.5, seed=0, verbose=0)
    brightness = drawn.mean(axis=(1, 2, 3)).reshape(4, 3).mean(0)
    assert brightness[0] < brightness[1] - 0.3 < brightness[2] - 0.6


def test_variances_learn_from_the_bound_alone():
    """The noise predicted has the gradient of its mean square, as if no variance were learned."""
    from tests.helpers import gradients

    network = small_network()
    trainer = DiffusionTrainer(network)
    generator = np.random.default_rng(2)
    images, noise = generator.standard_normal((2, 2, 4, 4, 2)).astype("float32")
    labels, times = np.array([0, 1], "int32"), np.array([0, 400], "int32")
    kept = KEPT[times][:, None, None, None]
    noisy = (np.sqrt(kept) * images + np.sqrt(1 - kept) * noise).astype("float32")

    def whole() -> Any:
        return ops.sum(trainer.loss_of(images, labels, times, noise))

    def squares() -> Any:
        predicted = network({"images": noisy, "times": times, "labels": labels})
        wrong = predicted[..., :2] - ops.convert_to_tensor(noise)
        return ops.sum(ops.mean(ops.square(wrong), axis=(1, 2, 3)))

    final = network.get_layer("final")
    name = next(n for n in gradients(whole, [], network).weights if n.endswith("final/bias"))
    of_whole, of_squares = (gradients(f, [], network).weights[name] for f in (whole, squares))
    is_noise = np.arange(final.units) % 4 < 2
    np.testing.assert_allclose(of_whole[is_noise], of_squares[is_noise], rtol=1e-3, atol=1e-6)
    assert np.abs(of_whole[~is_noise]).min() > 0
    assert np.abs(of_squares[~is_noise]).max() == 0
