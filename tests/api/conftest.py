"""One front with a scripted engine, for all tests of the api."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import httpx
import openai
import pytest
import pytest_asyncio
from support.chromium import Tab, browser
from support.front_kit import STORES, http_client, openai_client, running, settings_for, write_model

from edgemoe.api.generate.grammar_trial import grammar_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.demo import model_path
from edgemoe.front.main import WORKER, Front
from edgemoe.store.packer import ensure_store


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def text_model(model_dir: Path) -> TextModel:
    return TextModel(model_dir)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def front(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    settings = settings_for(tmp_path_factory.mktemp("f"), model_dir, api={"max_body_bytes": 1 << 20})
    async with running(settings) as front:
        yield front
        assert front.supervisor is not None
        assert not len(front.supervisor.requests)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def client(front: Front) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai_client(front.settings) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def http(front: Front) -> AsyncIterator[httpx.AsyncClient]:
    async with http_client(front.settings) as client:
        yield client


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def demo(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    """The real application: the demo model on a real engine. Trials of grammars may take half a second of CPU time."""
    settings = settings_for(tmp_path_factory.mktemp("demo"), ensure_store(model_path(), STORES))
    quick = pytest.MonkeyPatch()
    quick.setattr("edgemoe.api.resources.grammar_command", partial(grammar_command, trial_s=0.5))
    async with running(settings, WORKER) as front:
        quick.undo()
        yield front
        assert front.supervisor is not None
        assert front.supervisor.starts == 1, front.supervisor.why


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tab(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Tab]:
    """A tab of a real browser, in which nothing goes wrong."""
    async with browser(tmp_path_factory.mktemp("browser")) as tab:
        yield tab
        assert tab.errors == []
