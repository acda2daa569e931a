"""The cache's views of a layout whose layers differ."""

from __future__ import annotations

import torch

from edgemoe.families.spec import KVLayout, KVRow
from edgemoe.model.kv import KVCache


def test_unlike_layers_share_a_block_and_keep_apart() -> None:
    rows = [KVRow(2, 8, 8, "bfloat16"), KVRow(), KVRow(1, 6, 4, "float32"), KVRow(1, 8, 6, "float32", True)]
    cache = KVCache(KVLayout.of(rows), 3)
    assert (cache.blocks, cache.block_bytes) == (3, 1024 + 640 + 512)
    parts = [part for number in (0, 2) for part in cache.layers[number]] + [cache.layers[3].keys]
    for value, part in enumerate(parts):
        part.fill_(value)
    assert [part.unique().tolist() for part in parts] == [[0], [1], [2], [3], [4]]
    assert cache.layers[1].keys.numel() == 0
    assert [tuple(view.shape) for view in cache.layers[3]] == [(3, 1, 16, 8), (3, 1, 16, 6)]


def test_a_value_stored_in_its_key_is_the_keys_first_part() -> None:
    cache = KVCache(KVLayout.of([KVRow(1, 8, 6, "float32", values_in_keys=True)]), 2)
    keys, values = cache.layers[0]
    keys[1, 0, 3] = torch.arange(8.0)
    assert values[1, 0, 3].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


def test_blocks_of_unlike_layers_are_copied_whole() -> None:
    cache = KVCache(KVLayout.of([KVRow(2, 8, 8, "bfloat16"), KVRow(1, 6, 4, "float32")]), 4)
    for part in (*cache.layers[0], *cache.layers[1]):
        part.copy_(torch.randn(part.shape))
    before, rows = cache.data.clone(), cache.gather([3, 1])
    cache.data[[3, 1]] = 0xFF
    cache.scatter([3, 1], rows)
    assert torch.equal(cache.data, before)


def test_in_int8_a_line_is_kept_to_half_a_127th_of_its_largest_number() -> None:
    rows = [KVRow(2, 8, 8, "bfloat16", int8=True), KVRow(int8=True), KVRow(1, 12, 10, values_in_keys=True, int8=True)]
    cache = KVCache(KVLayout.of(rows), 3)
    assert cache.block_bytes == 2 * 2 * 16 * (8 + 4) + 16 * (12 + 4)
    blocks, places = torch.tensor([2, 0, 2]), torch.tensor([15, 3, 1])
    k, v = torch.randn(2, 3, 2, 8).bfloat16()
    k[1, 0] = 0.0
    cache.layers[0].store(blocks, places, k, v)
    latents = torch.randn(3, 1, 12)
    cache.layers[2].store(blocks, places, latents, None)
    rows_of = [
        (cache.layers[0].read_keys, k),
        (cache.layers[0].read_values, v),
        (cache.layers[2].read_keys, latents),
        (cache.layers[2].read_values, latents[..., :10]),
    ]
    most = latents.abs().amax(-1, keepdim=True)
    for read, stored in rows_of:
        found = read(blocks)[torch.arange(3), :, places]
        assert found.dtype == stored.dtype
        bound = (most if stored.shape[-1] > 8 else stored.float().abs().amax(-1, keepdim=True)) * (0.5 / 127)
        bound = bound + stored.float().abs() * (2**-8 if stored.dtype == torch.bfloat16 else 1e-6)
        assert ((found.float() - stored.float()).abs() <= bound).all()
    before, copied = cache.data.clone(), cache.gather([2, 0])
    cache.data[[2, 0]] = 0xFF
    cache.scatter([2, 0], copied)
    assert torch.equal(cache.data, before)
