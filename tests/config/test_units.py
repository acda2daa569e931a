from __future__ import annotations

import pytest

from edgemoe.config.sizes import format_rate, format_size, parse_rate, parse_size
from edgemoe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [("4096", 4096), ("12GiB", 12 << 30), ("1.5 GB", 1_500_000_000), ("640 MiB", 640 << 20), ("3kB", 3000)],
)
def test_a_size_is_read_as_people_write_it(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "rate"), [("8GB/s", 8e9), ("25Gbit/s", 25e9 / 8), ("1000", 1000.0), ("2 GiB/s", 2**31)]
)
def test_a_rate_is_read_as_people_write_it(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "12Gib", "-1GiB", "12 apples", "1e9", "8Gbit"])
def test_nonsense_is_not_a_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_sizes_and_rates_print_in_their_own_powers() -> None:
    assert [format_size(n) for n in (812, 12 << 30, 640 << 20)] == ["812 B", "12.0 GiB", "640 MiB"]
    assert [format_rate(n) for n in (500, 8e9, 1.3e9, 999e9)] == ["500.0 B/s", "8.0 GB/s", "1.3 GB/s", "999.0 GB/s"]
