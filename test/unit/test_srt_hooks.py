"""The hash behind seeded sampling, against the algorithm on bytes."""

import struct

import pytest
import torch

from sglang.multimodal_gen.guidance_buckets.srt_hooks import keep_to_gloo, murmur_hash32_cpu

SEEDS = [0, 1, 42, 2**31 - 1, 2**40 + 7, -1]
POSITIONS = [0, 3, 17, 255, 100_000, 2**31 - 1]
COLUMNS = [0, 1, 2, 127, 16_383]


def murmur3(data: bytes) -> int:
    hashed = 0
    for (block,) in struct.iter_unpack("<I", data):
        block = block * 0xCC9E2D51 % 2**32
        block = (block << 15 | block >> 17) % 2**32 * 0x1B873593 % 2**32
        hashed ^= block
        hashed = ((hashed << 13 | hashed >> 19) % 2**32 * 5 + 0xE6546B64) % 2**32
    hashed ^= len(data)
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B % 2**32
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 % 2**32
    return hashed ^ hashed >> 16


def test_the_reference_itself():
    """Published test vectors of MurmurHash3 (x86, 32 bits, seed 0)."""
    assert murmur3(b"\xff\xff\xff\xff") == 0x76293B50
    assert murmur3(b"\x21\x43\x65\x87") == 0xF55B516B
    assert murmur3(b"\0\0\0\0") == 0x2362F9DE


def test_hash():
    got = murmur_hash32_cpu(
        torch.tensor(SEEDS), torch.tensor(POSITIONS), torch.tensor(COLUMNS)
    )
    assert got.dtype == torch.uint32
    wanted = [
        [murmur3(struct.pack("<qii", seed, position, column)) for column in COLUMNS]
        for seed, position in zip(SEEDS, POSITIONS)
    ]
    assert got.tolist() == wanted


@pytest.mark.parametrize(("backend", "use_pynccl"), [("gloo", False), ("nccl", True)])
def test_groups_of_a_cpu_host_open_no_nccl(backend, use_pynccl):
    def given(group_ranks, local_rank, backend, use_pynccl):
        return use_pynccl

    assert keep_to_gloo(given, [[0, 1]], 0, backend, use_pynccl=True) is use_pynccl


@pytest.mark.gpu
def test_hash_equals_the_kernels():
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    tensors = [torch.tensor(values) for values in (SEEDS, POSITIONS, COLUMNS)]
    on_gpu = murmur_hash32(*(tensor.cuda() for tensor in tensors))
    assert on_gpu.cpu().tolist() == murmur_hash32_cpu(*tensors).tolist()
