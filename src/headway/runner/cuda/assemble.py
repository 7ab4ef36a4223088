"""From a model's weights and a few sizes to an executor: every buffer of the device is allocated here, once."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from headway.kernels.cuda.attention import MAX_ROWS, MAX_SEGMENTS, segment_ends
from headway.kernels.cuda.kernels import TritonKernels
from headway.kernels.cuda.launch import Launch, pow2
from headway.kernels.cuda.layout import HEADER_WORDS
from headway.models.cuda import CudaDecoder
from headway.models.params import ModelWeights
from headway.models.spec import ModelSpec
from headway.runner.cuda.executor import CudaExecutor
from headway.runner.cuda.graphs import Graphs
from headway.runner.cuda.kvstore import CudaKVStore
from headway.runner.cuda.packet import PacketShape
from headway.runner.cuda.sampler import DeviceSampler
from headway.runner.cuda.state import DeviceState
from headway.runner.cuda.step import DeviceStep, make_work
from headway.runner.cuda.wire import Wire
from headway.runner.slots import Slots

_EARLY_HIDDEN = (
    2048  # one row of llama-3.2-1b: 1.07 ms with successors that come early; llama-3.1-8b: 4.55, without 4.38
)


@dataclass(frozen=True, slots=True)
class Sizes:
    """What an executor has room for. A step's tokens include one for every decode row."""

    num_rows: int
    num_blocks: int
    max_len: int
    max_tokens: int
    block_size: int = 16
    host_blocks: int = 0
    depth: int = 2
    kv_dtype: torch.dtype | None = None  # None: the activations'


def working_bytes(spec: ModelSpec, num_rows: int, max_tokens: int, itemsize: int) -> int:
    """Device memory that an executor takes beside weights and KV: about, and rather too much."""
    lines = pow2(num_rows)
    per_token = 3 * spec.hidden + 2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate
    sampling = lines * spec.vocab_size * (4 + 4 + itemsize)
    attention = lines * MAX_SEGMENTS * spec.heads * (spec.head_dim + 2) * 4
    return max(max_tokens, lines) * per_token * itemsize + sampling + attention + (1 << 30)


def make_executor(spec: ModelSpec, weights: ModelWeights[torch.Tensor], sizes: Sizes, launch: Launch) -> CudaExecutor:
    """An executor over these weights, which lie on the device that computes."""
    embed = weights["embed"]
    device, lines = embed.device, pow2(sizes.num_rows)
    # Where a layer's weights take long to read, a successor that comes early is in the way.
    launch = replace(launch, is_early=spec.hidden <= _EARLY_HIDDEN)
    kernels = TritonKernels(launch)
    max_tokens = max(sizes.max_tokens, lines)
    decoder = CudaDecoder(
        *(spec, weights, kernels),
        block_size=sizes.block_size,
        max_len=sizes.max_len,
        max_tokens=max_tokens,
        max_samples=lines,
    )
    heads = decoder.heads
    max_blocks = -(-sizes.max_len // sizes.block_size)
    state = DeviceState(num_rows=sizes.num_rows, max_blocks=max_blocks, vocab_size=spec.vocab_size, device=device)
    queries = MAX_ROWS // (heads.num // heads.kv)
    work = make_work(lines, spec.layers, heads, kernels.attention_programs(heads), device)
    shape = PacketShape(
        *(sizes.num_rows, max_tokens, queries, tuple(segment_ends(sizes.max_len))),
        busy=-(-kernels.prefill_programs(heads) // heads.kv),
        parts=work.part_max.numel() // (heads.kv * MAX_ROWS),
        mask=-(-spec.vocab_size // 32),
    )
    slots = pow2(sizes.depth + 2)
    wire = Wire(slots=slots, words=shape.num_words, lines=lines, device=device)
    idle = Wire(slots=slots, words=2 * HEADER_WORDS, lines=lines, device=device)  # its packets stay empty
    kv = CudaKVStore(
        layers=spec.layers,
        num_blocks=sizes.num_blocks,
        heads=heads,
        dtype=sizes.kv_dtype or embed.dtype,
        device=device,
        host_blocks=sizes.host_blocks,
    )
    sampler = DeviceSampler(state, launch, lines=lines, vocab_size=spec.vocab_size)
    step = DeviceStep(
        *(decoder, sampler, state, kv.layers),
        lines=lines,
        max_tokens=max_tokens,
        packet_words=shape.num_words,
        work=work,
        attention_programs=kernels.attention_programs(heads),
    )
    rows = Slots(
        num_rows=sizes.num_rows,
        num_blocks=sizes.num_blocks,
        block_size=sizes.block_size,
        max_len=sizes.max_len,
        vocab_size=spec.vocab_size,
    )
    graphs = Graphs(step, wire, idle, max_rows=sizes.num_rows, max_tokens=max_tokens)
    graphs.compile()
    return CudaExecutor(graphs, state, kv, rows, wire, shape)
