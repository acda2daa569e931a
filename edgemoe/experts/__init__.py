"""Experts across NVMe, RAM and VRAM: store, arenas, residency, mover, compute."""
