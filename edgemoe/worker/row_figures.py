"""Tells the numbers of the tier of rows."""

from __future__ import annotations

from edgemoe.store.row_table import RowTable
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named


def row_metrics(table: RowTable) -> dict[str, float]:
    """Returns the numbers for /metrics by their final names. May be called from any thread."""
    metrics: dict[str, float] = {named(names.ROWS_FOUND, where=where): n for where, n in table.found.items()}
    return metrics | {
        names.ROW_TABLE_BYTES: table.table_bytes,
        names.ROW_CACHE_BYTES: table.slots * table.row_bytes,
        names.ROW_SLOTS: table.slots,
        names.ROWS_HELD: table.held,
        names.ROW_READ_BYTES: table.read_bytes,
        names.ROW_WAIT_SECONDS: table.wait_s,
    }
