"""The layout of keys and values in a block."""

from __future__ import annotations

from dataclasses import replace

from edgemoe.families.spec import KVLayout, KVRow


def test_rows_of_unlike_layers_lie_one_after_the_other_on_whole_cache_lines() -> None:
    wide = KVRow(2, 256, 256, "bfloat16")
    odd = KVRow(1, 10, 6, "float32")
    latent = KVRow(1, 576, 512, "bfloat16", values_in_keys=True)
    layout = KVLayout.of([wide, KVRow(), odd, latent])
    assert [row.offset for row in layout.rows] == [0, 32768, 32768, 32768 + 1024]
    assert layout.block_bytes == 32768 + 1024 + 16 * 576 * 2
    assert [row.key_bytes for row in layout.rows] == [16384, 0, 640, 18432]
    assert [row.value_bytes for row in layout.rows] == [16384, 0, 384, 0]


def test_in_int8_each_line_of_a_head_has_a_byte_a_number_and_one_scale() -> None:
    plain = KVRow(4, 128, 128, "bfloat16")
    latent = KVRow(1, 576, 512, "bfloat16", values_in_keys=True)
    coded = KVLayout.of([replace(plain, int8=True), replace(latent, int8=True), KVRow(int8=True)])
    assert [row.key_bytes for row in coded.rows] == [4 * 16 * 132, 16 * 580, 0]
    assert [row.value_bytes for row in coded.rows] == [4 * 16 * 132, 0, 0]
    assert coded.block_bytes / KVLayout.of([plain, latent]).block_bytes < 0.52
