"""Experts across NVMe, RAM and VRAM: slabs, residency, transfers, forecasts, compute."""
