"""Sums of a token's rows: right, in a fixed order, with the right gradients, and nothing kept afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_qerl.layers.dispatch import _Collect, _let_go, _Spread, sum_by_token

T, H, MOST = 7, 5, 3


def routed(seed: int, *, every: bool) -> Tensor:
    """Token of each row, sorted by expert; ``every`` token has MOST rows, or up to MOST."""
    generator = torch.Generator().manual_seed(seed)
    experts = torch.stack([torch.randperm(8, generator=generator)[:MOST] for _ in range(T)])
    chosen = torch.zeros(T, 8, dtype=torch.bool).scatter(1, experts, True)
    if not every:  # the experts of one rank
        chosen = chosen[:, :4]
    return chosen.t().nonzero()[:, 1]


@pytest.mark.parametrize("every", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_summed_in_their_order(every: bool, dtype: torch.dtype) -> None:
    tokens = routed(1, every=every)
    rows = torch.randn(len(tokens), H, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = torch.zeros(T, H)
    for i, token in enumerate(tokens.tolist()):
        expected[token] += rows[i].float()
    assert torch.equal(sum_by_token(rows, tokens, T, MOST), expected.to(dtype))
    if not every:
        assert len(tokens.unique()) < T, "some token has no row here"


def test_sixteen_bits_are_rounded_once() -> None:
    rows = torch.tensor([[256.0], [1.0], [-256.0]]).bfloat16()
    assert sum_by_token(rows, torch.zeros(3, dtype=torch.int64), 1, 3).item() == 1.0
    assert (rows[0] + rows[1] + rows[2]).item() == 0.0


def test_no_row_at_all() -> None:
    nothing = torch.empty(0, H, requires_grad=True)
    total = _Collect.apply(nothing, torch.empty(0, dtype=torch.int64), T, MOST)
    assert torch.equal(total, torch.zeros(T, H))
    total.sum().backward()
    assert nothing.grad is not None


def test_gradients_are_those_of_indexing_and_adding() -> None:
    tokens = routed(3, every=False)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(T, H, dtype=torch.float64, generator=generator, requires_grad=True)
    scale = torch.randn(len(tokens), 1, dtype=torch.float64, generator=generator)
    weight = torch.randn(T, H, dtype=torch.float64, generator=generator)

    def through(spread: bool) -> tuple[Tensor, Tensor]:
        rows = hidden[tokens]
        if spread:
            rows = _Spread.apply(hidden, rows.detach(), tokens, MOST)
        rows = scale * rows.square()
        total = (
            _Collect.apply(rows, tokens, T, MOST)
            if spread
            else torch.zeros(T, H, dtype=torch.float64).index_add(0, tokens, rows)
        )
        (gradient,) = torch.autograd.grad((total * weight).sum(), hidden)
        return total.detach(), gradient

    for mine, theirs in zip(through(True), through(False), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-14, atol=1e-14)


def test_the_graph_is_let_go_and_the_rest_stays() -> None:
    class Dispatcher:
        probs: Tensor | None = torch.ones(2, requires_grad=True) * 2

    dispatcher = Dispatcher()
    dispatcher.probs, dispatcher.sizes = torch.ones(2, requires_grad=True) * 2, torch.tensor([1, 2])  # type: ignore[attr-defined]
    _let_go(dispatcher)
    assert dispatcher.probs is None
    assert dispatcher.sizes.tolist() == [1, 2]  # type: ignore[attr-defined]
