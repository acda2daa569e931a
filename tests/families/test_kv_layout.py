"""Where keys and values lie in a block."""

from __future__ import annotations

from edgemoe.families.kv_layout import KVLayout, KVRow


def test_rows_of_unlike_layers_lie_one_after_the_other_on_whole_cache_lines() -> None:
    wide = KVRow(2, 256, 256, "bfloat16")
    odd = KVRow(1, 10, 6, "float32")
    latent = KVRow(1, 576, 512, "bfloat16", values_in_keys=True)
    layout = KVLayout.of([wide, KVRow(), odd, latent])
    assert [row.offset for row in layout.rows] == [0, 32768, 32768, 32768 + 1024]
    assert layout.block_bytes == 32768 + 1024 + 16 * 576 * 2
    assert [row.key_bytes for row in layout.rows] == [16384, 0, 640, 18432]
    assert [row.value_bytes for row in layout.rows] == [16384, 0, 384, 0]
