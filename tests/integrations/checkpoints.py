"""The golden MoH-LLaMA models as checkpoints in Hugging Face's layout, written by the tests."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.checkpoints import write_safetensors

GOLDENS = Path(__file__).parents[1] / "goldens" / "llama_model"
FILES = sorted(GOLDENS.glob("*.npz"))


class Golden:
    """One golden file."""

    def __init__(self, path: Path) -> None:
        self.arrays = dict(np.load(path))
        self.meta = json.loads(str(self.arrays.pop("meta")))
        self.config: dict[str, Any] = self.meta["config"]

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]

    @property
    def weights(self) -> dict[str, np.ndarray]:
        """The weights by their Hugging Face names."""
        return {
            name.removeprefix("param/"): array
            for name, array in self.arrays.items()
            if name.startswith("param/")
        }


def write_folder(
    folder: Path, config: dict[str, Any], weights: dict[str, np.ndarray], files: int = 2
) -> Path:
    """A folder with a config and weights in that many files; without an index if in one."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_safetensors(folder / "model.safetensors", weights)
        return folder
    names = [f"model-{i + 1:05}-of-{files:05}.safetensors" for i in range(files)]
    places = {name: names[i % files] for i, name in enumerate(weights)}
    for file in names:
        part = {name: array for name, array in weights.items() if places[name] == file}
        write_safetensors(folder / file, part)
    index = {"metadata": {"total_size": 0}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|reserved_special_token_0|>"]


def write_tokenizer(folder: Path, merges_as_lists: bool = False) -> None:
    """A byte-pair tokenizer of the letters `a` to `z`, a space, and two merges of them."""
    letters = [chr(ord("a") + i) for i in range(26)] + ["Ġ"]
    vocabulary = {token: i for i, token in enumerate([*letters, "th", "the"])}
    merges = [["t", "h"], ["th", "e"]]
    tokenizer = {
        "model": {
            "type": "BPE",
            "vocab": vocabulary,
            "merges": merges if merges_as_lists else [" ".join(merge) for merge in merges],
        },
        "added_tokens": [
            {"id": len(vocabulary) + i, "content": token} for i, token in enumerate(SPECIAL)
        ],
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": SPECIAL[0], "eos_token": {"content": SPECIAL[1]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
