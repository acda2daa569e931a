"""Files that tests keep between runs: compiled kernels, which take ten seconds to make."""

from __future__ import annotations

from pathlib import Path

STORES = Path(__file__).parents[2] / ".cache" / "stores"  # as model.store_dir
KERNELS = STORES.with_name("kernels")
