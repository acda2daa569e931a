"""What clients by TCP may do: everything with a key, but for what is the Unix socket's; a look at /health without."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

import edgemoe
from edgemoe.api.app import Api, build
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import RequestLimits

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = {"authorization": "Bearer 0123456789abcdef"}
PAGE = "https://chat.example.org"


class Ready:
    """A backend that has nothing to do."""

    state = "ready"
    values: dict[str, float] = {}  # noqa: RUF012
    reloads = 0

    async def model(self) -> tuple[ModelInfo, RequestLimits]:
        raise AssertionError("nobody asks")

    def open(self, requests: Any, timeout_s: float) -> Any:
        raise AssertionError("nobody asks")

    async def reload(self) -> str:
        self.reloads += 1
        return "done"

    def describe(self) -> dict[str, Any]:
        return {"status": self.state, "pid": 1}


@pytest.fixture(scope="module")
def backend() -> Ready:
    return Ready()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tcp(backend: Ready, text_model: TextModel) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings(cors_origins=(PAGE,))
    app = build(Api(settings, backend, text_model, keys=(b"fedcba9876543210", b"0123456789abcdef")))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edgemoe") as client:
        yield client


async def test_a_key_is_needed_for_all_but_health(tcp: httpx.AsyncClient) -> None:
    for path in ("/version", "/metrics", "/v1/models", "/tokenizer_info", "/nowhere", "/health/"):
        assert (await tcp.get(path)).status_code == 401
        assert (await tcp.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
    assert (await tcp.get("/version", headers=KEY)).json() == {"version": edgemoe.__version__}
    assert (await tcp.get("/version", headers={"x-api-key": "fedcba9876543210"})).status_code == 200


async def test_health_says_a_word_without_a_key_and_all_with_one(tcp: httpx.AsyncClient, backend: Ready) -> None:
    assert (await tcp.get("/health")).json() == {"status": "ready"}
    assert (await tcp.get("/health", headers=KEY)).json() == {"status": "ready", "pid": 1}


async def test_reloading_is_for_the_unix_socket(tcp: httpx.AsyncClient, backend: Ready) -> None:
    answer = await tcp.post("/reload", headers=KEY)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "http_404")
    assert backend.reloads == 0


async def test_pages_of_listed_origins_may_call(tcp: httpx.AsyncClient) -> None:
    asking = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = await tcp.options("/v1/chat/completions", headers={"origin": PAGE, **asking})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, PAGE)
    assert (await tcp.get("/health", headers={"origin": PAGE})).headers["access-control-allow-origin"] == PAGE
    other = await tcp.options("/v1/chat/completions", headers={"origin": "https://evil.example", **asking})
    assert other.status_code == 400
    assert "access-control-allow-origin" not in other.headers


async def test_the_tokenizer_tells_of_itself(tcp: httpx.AsyncClient) -> None:
    about = (await tcp.get("/tokenizer_info", headers=KEY)).json()
    assert about["eos_token"] == "<|im_end|>"
    assert "<|im_start|>" in about["chat_template"]
    assert about["vocab_size"] > 300
