"""Attention of decoded rows against a plain softmax over each row's own tokens."""

import pytest
import torch

from freewheel.engine.attention import RowAttention
from freewheel.engine.decoder import DecodeInput
from freewheel.engine.kv import KVRows, LayerShape

HEADS, KV_HEADS, DIM, SCALE = 6, 2, 8, 0.3


def _attention(*, with_products):
    attention = RowAttention(
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=DIM,
        scale=SCALE,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    attention._uses_products = with_products
    return attention


def _rows(num_rows, num_columns):
    shape = LayerShape(num_heads=KV_HEADS, key_dim=DIM, value_dim=DIM)
    rows = KVRows(
        (shape,),
        dtype=torch.float32,
        device=torch.device("cpu"),
        num_rows=num_rows,
        num_columns=num_columns,
    )
    rows.joint(0).normal_()  # what is not a row's own must not be seen
    return rows


def _step(attention, rows, lengths):
    """One step; returns what it gives and what it should."""
    qkv = torch.randn(len(lengths), HEADS + 2 * KV_HEADS, DIM)
    attention.begin(DecodeInput(token_ids=[0] * len(lengths), lengths=lengths, rows=rows))
    mixed = attention(0, qkv)
    stop = rows.end + 1
    expected = []
    for row, length in enumerate(lengths):
        keys = rows.keys[0][row, :, stop - length : stop]
        values = rows.values[0][row, :, stop - length : stop]
        assert torch.equal(keys[:, -1], qkv[row, HEADS : HEADS + KV_HEADS])
        queries = qkv[row, :HEADS].view(KV_HEADS, -1, DIM)
        scores = (queries @ keys.transpose(1, 2) * SCALE).softmax(-1)
        expected.append((scores @ values).flatten())
    rows.end = stop
    return mixed, torch.stack(expected)


@pytest.mark.parametrize("with_products", [True, False])
@pytest.mark.parametrize("num_columns", [14, 200])
def test_each_row_sees_its_own_tokens(with_products, num_columns):
    torch.manual_seed(0)
    attention, rows = _attention(with_products=with_products), _rows(5, num_columns)
    rows.end = 6
    lengths = [7, 3, 1, 5]
    for _ in range(3):  # rows grow alike
        torch.testing.assert_close(*_step(attention, rows, lengths))
        lengths = [length + 1 for length in lengths]
    lengths[1] = 1  # another request took the row
    torch.testing.assert_close(*_step(attention, rows, lengths))
    lengths = [lengths[0] + 1]  # the others have left
    torch.testing.assert_close(*_step(attention, rows, lengths))
    rows.end = 6  # laid out anew: the same columns, seen before, are unused now
    torch.testing.assert_close(*_step(attention, rows, [7, 3, 1, 5]))
    torch.testing.assert_close(*_step(attention, rows, [8, 4, 2, 6]))
