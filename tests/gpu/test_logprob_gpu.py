"""Chunked log-probabilities on a GPU: against float64, in bounded memory, without waiting for the device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from te_extensions.logprob import HeadShard, linear_logprob

pytestmark = pytest.mark.gpu


def case(rows: int, vocab: int, padding: int, hidden: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, HeadShard]:
    generator = torch.Generator("cuda").manual_seed(rows + vocab)
    weight = torch.randn(vocab + padding, hidden, generator=generator, device="cuda") * (3.0 / hidden**0.5)
    weight[vocab:] = 30.0
    states = torch.randn(rows, hidden, generator=generator, device="cuda").to(dtype)
    targets = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    return states, targets, HeadShard(weight.to(dtype), 0, vocab, None)


def exact(states: Tensor, targets: Tensor, head: HeadShard, t: float, upstream: Tensor) -> tuple[Tensor, ...]:
    leaf = states.double().requires_grad_(True)
    full = torch.log_softmax(leaf @ head.weight[: head.vocab_size].double().t() / t, dim=-1)
    picked = full.gather(1, targets[:, None]).squeeze(1)
    (picked * upstream.double()).sum().backward()
    assert leaf.grad is not None
    full = full.detach()
    return picked.detach(), -(full.exp() * full).sum(1), leaf.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("vocab", "padding"), [(50, 0), (5000, 120), (32001, 63), (20000, 9000)])
@pytest.mark.parametrize("chunk", [None, 100])
def test_values_and_gradient(
    dtype: torch.dtype, temperature: float, vocab: int, padding: int, chunk: int | None
) -> None:
    states, targets, head = case(333, vocab, padding, 256, dtype)
    upstream = torch.randn(333, device="cuda")
    leaf = states.clone().requires_grad_(True)
    logprobs, entropy = linear_logprob(leaf, targets, head, temperature=temperature, chunk_rows=chunk)
    (logprobs * upstream).sum().backward()
    picked, spread, grad = exact(states, targets, head, temperature, upstream)
    # Products of BF16 inputs are exact in FP32; what is left is FP32 summation of 256 products and of the vocabulary.
    assert (logprobs.double() - picked).abs().max() <= 1e-4
    assert (entropy.double() - spread).abs().max() <= 1e-4
    assert leaf.grad is not None
    # The gradient of the logits is rounded to the head's dtype before the last product, and the product once more.
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-4
    assert (leaf.grad.double() - grad).norm() <= bound * grad.norm()


def test_a_wrong_target_is_far_outside_the_tolerance() -> None:
    states, targets, head = case(64, 5000, 0, 256, torch.bfloat16)
    right, _ = linear_logprob(states, targets, head)
    wrong, _ = linear_logprob(states, (targets + 1) % 5000, head)
    assert (right - wrong).abs().mean() > 0.1


def test_memory_at_16k_tokens_is_far_below_an_eighth_of_the_logits() -> None:
    """1.5 chunks of 1/32 in backward and the gradient itself: 1/20. A forward that kept two chunks would be at 1/16."""
    rows, vocab, hidden = 16384, 151936, 1024
    logits_bytes = 4 * rows * vocab
    if torch.cuda.mem_get_info()[0] < 4 * 2**30:
        pytest.skip("needs 4 GiB of free GPU memory for a head of 152k rows and one chunk of logits")
    states, targets, head = case(rows, vocab, 128, hidden, torch.bfloat16)
    leaf = states.requires_grad_(True)
    warm, _ = linear_logprob(leaf[:64], targets[:64], head)
    warm.sum().backward()
    leaf.grad = None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, _ = linear_logprob(leaf, targets, head)
    logprobs.sum().backward()
    torch.cuda.synchronize()
    extra = torch.cuda.max_memory_allocated() - before
    assert extra <= logits_bytes / 18, f"{extra / 2**20:.0f} MiB, {extra / logits_bytes:.3f} of the FP32 logits"


def test_nothing_waits_for_the_device_and_a_graph_can_be_captured() -> None:
    states, targets, head = case(256, 5000, 120, 256, torch.bfloat16)
    expected, expected_entropy = linear_logprob(states, targets, head, temperature=0.7, chunk_rows=64)
    leaf = states.clone().requires_grad_(True)
    try:
        torch.cuda.set_sync_debug_mode("error")
        logprobs, _ = linear_logprob(leaf, targets, head, temperature=0.7, chunk_rows=64)
        logprobs.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    static = torch.zeros_like(states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, entropy = linear_logprob(static, targets, head, temperature=0.7, chunk_rows=64)
    static.copy_(states)
    graph.replay()
    # Under capture cuBLAS has another workspace and may choose another order of summation.
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
