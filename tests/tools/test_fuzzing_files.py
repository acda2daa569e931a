"""A short run of the fuzzers of files; `tools/fuzz` makes long ones."""

from __future__ import annotations

import pytest

from tools.fuzzing import fuzz_settings, gguf, recordings, store


@pytest.mark.parametrize("what", store.WHATS)
def test_no_store_however_wrong_does_more_than_raise_our_errors(what: str) -> None:
    seen = store.fuzz(what, 120, seed=1)
    assert seen["ok"], seen
    assert len(seen["outcomes"]) > 1


@pytest.mark.parametrize("what", fuzz_settings.WHATS)
def test_no_settings_however_wrong_do_more_than_raise_a_config_error(what: str) -> None:
    seen = fuzz_settings.fuzz(what, 60, seed=1)
    assert seen["ok"], seen
    assert len(seen["outcomes"]) > 1


@pytest.mark.parametrize("what", gguf.WHATS)
def test_no_gguf_however_wrong_does_more_than_raise_our_errors(what: str) -> None:
    seen = gguf.fuzz(what, 300, seed=1)
    assert seen["ok"], seen
    assert len(seen["outcomes"]) > 2


@pytest.mark.parametrize("what", recordings.WHATS)
def test_no_recording_however_wrong_does_more_than_raise_our_errors(what: str) -> None:
    seen = recordings.fuzz(what, 60, seed=1)
    assert seen["ok"], seen
    assert len(seen["outcomes"]) > 1
