"""Every Triton kernel compiles ahead of time, for devices that are not there.

What is compiled is what `torch_triton` launches: its launches are recorded, with their arguments,
by running it on a CPU. The interpreter accepts code that the compiler does not, so that these tests
are for a process without it.
"""

import functools
import re
import subprocess
from typing import Any, NamedTuple

import keras
import pytest

from tests.conftest import is_installed

if keras.backend.backend() != "torch" or not is_installed("triton"):
    pytest.skip("of another backend, or without its extra", allow_module_level=True)

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from keras_moh.implementations import torch_triton, triton_kernels
from keras_moh.implementations.spec import Options
from keras_moh.implementations.triton_blocks import Blocks

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.bool: "*i1",
}


class Usage(NamedTuple):
    """What a program takes of a device."""

    registers: int  # of a thread
    spilled: int  # bytes of a thread, or registers on AMD's, that do not fit into them
    shared: int  # bytes of shared memory


# What is allowed, by kernel, target and width of a head: what Triton 3.7.1 needs, and a little more
# room in registers.
CEILINGS = {
    ("forward_kernel", "sm_80", 64): Usage(224, 0, 49152),
    ("forward_kernel", "sm_80", 128): Usage(192, 0, 57344),
    ("forward_kernel", "sm_90", 64): Usage(168, 0, 65536),
    ("forward_kernel", "sm_90", 128): Usage(248, 0, 131072),
    ("forward_kernel", "gfx942", 64): Usage(172, 0, 32768),
    ("forward_kernel", "gfx942", 128): Usage(236, 0, 49152),
    ("backward_query_kernel", "sm_80", 64): Usage(212, 0, 49152),
    ("backward_query_kernel", "sm_80", 128): Usage(255, 0, 53248),
    ("backward_query_kernel", "sm_90", 64): Usage(156, 0, 81920),
    ("backward_query_kernel", "sm_90", 128): Usage(240, 0, 163840),
    ("backward_query_kernel", "gfx942", 64): Usage(244, 0, 32768),
    ("backward_query_kernel", "gfx942", 128): Usage(280, 0, 20480),
    ("backward_key_value_kernel", "sm_80", 64): Usage(255, 0, 29188),
    ("backward_key_value_kernel", "sm_80", 128): Usage(255, 0, 74756),
    ("backward_key_value_kernel", "sm_90", 64): Usage(232, 0, 66564),
    ("backward_key_value_kernel", "sm_90", 128): Usage(240, 0, 98820),
    ("backward_key_value_kernel", "gfx942", 64): Usage(332, 0, 12288),
    ("backward_key_value_kernel", "gfx942", 128): Usage(512, 0, 20480),
}


# The same of a step of decoding, which splits the keys.
CEILINGS_OF_DECODING = {
    ("forward_kernel", "sm_80", 64): Usage(168, 0, 73728),
    ("forward_kernel", "sm_80", 128): Usage(168, 0, 73728),
    ("forward_kernel", "sm_90", 64): Usage(168, 0, 73728),
    ("forward_kernel", "sm_90", 128): Usage(168, 0, 73728),
    ("forward_kernel", "gfx942", 64): Usage(128, 0, 18432),
    ("forward_kernel", "gfx942", 128): Usage(168, 0, 34816),
    ("combine_kernel", "sm_80", 64): Usage(64, 0, 2048),
    ("combine_kernel", "sm_80", 128): Usage(64, 0, 2048),
    ("combine_kernel", "sm_90", 64): Usage(64, 0, 2048),
    ("combine_kernel", "sm_90", 128): Usage(64, 0, 2048),
    ("combine_kernel", "gfx942", 64): Usage(64, 0, 2048),
    ("combine_kernel", "gfx942", 128): Usage(64, 0, 2048),
}


def options(**changes: Any) -> Options:
    defaults = {"is_causal": False, "causal_offset": 0, "sliding_window": None}
    return Options(**{"mask": None, **defaults, **changes}, scale=0.1)


VARIANTS = {
    "all": options(),
    "causal": options(is_causal=True),
    "causal window": options(is_causal=True, sliding_window=100),
    "window": options(sliding_window=100),
    "mask of keys": options(mask=torch.ones(2, 1, 1, 256, dtype=torch.bool)),
    "mask of pairs": options(mask=torch.ones(1, 1, 256, 256, dtype=torch.bool)),
}
DECODING = {
    "decoding": options(is_causal=True, causal_offset=4095),
    "decoding, mask": options(mask=torch.ones(2, 1, 1, 4096, dtype=torch.bool)),
}


class Launch(NamedTuple):
    kernel: str
    sizes: Blocks
    arguments: dict[str, Any]


@functools.cache
def launches(
    target: str, widths: tuple[int, int], dtype: torch.dtype, variant: str = "causal"
) -> dict[str, Launch]:
    """What a call and its gradients launch on the target, by kernel."""
    recorded: dict[str, Launch] = {}

    def record(name: str, grid: Any, sizes: Blocks, arguments: dict[str, Any]) -> None:
        recorded[name] = Launch(name, sizes, arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_triton, "_target", lambda device: target)
        patch.setattr(torch_triton, "_launch", record)
        queries, keys = (1, 4096) if variant in DECODING else (256, 256)
        query, key, value = (
            torch.zeros(2, length, heads, width, dtype=dtype, requires_grad=True)
            for length, heads, width in (
                *((queries, 8, widths[0]), (keys, 4, widths[0]), (keys, 4, widths[1])),
            )
        )
        heads = torch.arange(4).expand(2, queries, 4)
        output, _ = torch_triton.attend(
            *(query, key, value, heads, torch.ones(heads.shape)), (VARIANTS | DECODING)[variant]
        )
        output.sum().backward()
    return recorded


def build(launch: Launch, target: str) -> Any:
    """The compiled kernel, with all that a launch would tell of its arguments."""
    kernel = getattr(triton_kernels, launch.kernel)
    signature, constants, attributes = {}, {}, {}
    sizes = {"BLOCK_M": launch.sizes.rows, "BLOCK_N": launch.sizes.keys}
    for index, parameter in enumerate(kernel.params):
        x = (launch.arguments | sizes)[parameter.name]
        if parameter.is_constexpr or x is None:
            signature[parameter.name], constants[index,] = "constexpr", x
        elif isinstance(x, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if isinstance(x, int) else TYPES[x.dtype]
            aligned = (
                x % 16 == 0 and not parameter.do_not_specialize if isinstance(x, int) else True
            )
            if aligned:
                attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    how = {"num_warps": launch.sizes.warps, "num_stages": launch.sizes.stages}
    return triton.compile(source, target=TARGETS[target], options=how)


def usage(built: Any, target: str) -> Usage:
    if target.startswith("gfx"):
        numbers = dict(re.findall(r"\.(\w+):\s*(\d+)$", built.asm["amdgcn"], re.MULTILINE))
        return Usage(
            int(numbers["vgpr_count"]), int(numbers["vgpr_spill_count"]), built.metadata.shared
        )
    assembly = built.asm["ptx"]
    (architecture,) = re.findall(r"^\.target (\w+)", assembly, re.MULTILINE)
    report = subprocess.run(
        [
            triton.knobs.nvidia.ptxas.path,
            "-v",
            f"--gpu-name={architecture}",
            "-",
            "-o",
            "/dev/null",
        ],
        input=assembly,
        capture_output=True,
        check=True,
        text=True,
    ).stderr
    (registers,) = re.findall(r"Used (\d+) registers", report)
    spilled = re.findall(r"(\d+) bytes spill", report)
    assert len(spilled) == 2  # stores and loads
    return Usage(int(registers), sum(map(int, spilled)), built.metadata.shared)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile, whatever was compiled before."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "target", "width"), CEILINGS)
def test_builds(name: str, target: str, width: int, dtype: torch.dtype) -> None:
    built = build(launches(target, (width, width), dtype)[name], target)
    found, ceiling = usage(built, target), CEILINGS[name, target, width]
    assert all(x <= most for x, most in zip(found, ceiling, strict=True)), found
    if target == "sm_90":
        assert "wgmma.mma_async" in built.asm["ptx"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "target", "width"), CEILINGS_OF_DECODING)
def test_decoding_builds(name: str, target: str, width: int, dtype: torch.dtype) -> None:
    launch = launches(target, (width, width), dtype, "decoding")[name]
    assert launch.arguments["splits"] > 1
    found = usage(build(launch, target), target)
    ceiling = CEILINGS_OF_DECODING[name, target, width]
    assert all(x <= most for x, most in zip(found, ceiling, strict=True)), found


KERNELS = ("forward_kernel", "backward_query_kernel", "backward_key_value_kernel")


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_build(variant: str, name: str) -> None:
    build(launches("sm_90", (64, 64), torch.bfloat16, variant)[name], "sm_90")


@pytest.mark.parametrize("name", ["forward_kernel", "combine_kernel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(16, 24), (256, 256)], ids=str)
def test_variants_of_decoding_build(widths: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    built = build(launches("sm_80", widths, dtype, "decoding, mask")[name], "sm_80")
    assert built.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(16, 24), (256, 256)], ids=str)
def test_widths_build(widths: tuple[int, int], dtype: torch.dtype, name: str) -> None:
    """The narrowest and the widest, which have the least and the most to keep in registers."""
    built = build(launches("sm_80", widths, dtype)[name], "sm_80")
    assert built.metadata.shared <= 99 * 1024  # what the smallest of its kin has
