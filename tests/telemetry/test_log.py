from __future__ import annotations

import io
import json
import logging

from edgemoe.config.settings import LogSettings
from edgemoe.telemetry.log import configure


def lines(settings: LogSettings, *, journal: bool = False) -> list[str]:
    stream = io.StringIO()
    configure(settings, stream=stream, journal=journal)
    log = logging.getLogger("edgemoe.test")
    log.debug("detail")
    log.info("engine ready", extra={"boot": "ab", "start_s": 3.25, "note": 'two "words"'})
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble %d", 7)
    try:
        raise ValueError("why")
    except ValueError:
        log.exception("engine.failed")
    return stream.getvalue().splitlines()


def test_text_has_time_level_event_and_fields() -> None:
    found = lines(LogSettings())
    assert found[0].endswith(' INFO engine ready boot=ab start_s=3.25 note="two \\"words\\""')
    assert found[1].endswith(" WARNING trouble 7")
    assert found[2].endswith(" ERROR engine.failed")
    assert found[-1] == "ValueError: why"


def test_json_is_one_object_a_line() -> None:
    rows = [json.loads(line) for line in lines(LogSettings(format="json", level="debug"))]
    assert [row["event"] for row in rows] == ["detail", "engine ready", "trouble 7", "engine.failed"]
    assert rows[1] | {"time": ""} == {
        "time": "",
        "level": "info",
        "logger": "edgemoe.test",
        "event": "engine ready",
        "boot": "ab",
        "start_s": 3.25,
        "note": 'two "words"',
    }
    assert "ValueError: why" in rows[3]["traceback"]


def test_the_level_is_settable() -> None:
    assert len(lines(LogSettings(level="warning", format="json"))) == 2


def test_under_systemd_every_line_carries_its_priority_and_no_time() -> None:
    found = lines(LogSettings(), journal=True)
    assert found[0].startswith("<6>engine ready ")
    assert found[-1] == "<3>ValueError: why"
