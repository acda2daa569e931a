"""Rights of TCP clients: all but the Unix socket's endpoints with a key, /health without."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

import edgemoe
from edgemoe.api.api_keys import KeyRing, new_key, read_keys, remove_key
from edgemoe.api.app import build
from edgemoe.api.resources import Api
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.errors import ServiceError
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import RequestLimits

pytestmark = pytest.mark.asyncio(loop_scope="session")
KEY = {"authorization": "Bearer 0123456789abcdef"}
SIZES = {"context_tokens": 64, "vocab": 300, "layers": 1, "experts": 4, "top_k": 1, "expert_bytes": 4096}
MODEL = {"id": "tiny", "family": "mixtral", "digest": "0" * 32, "dtype": "float32"} | SIZES
PAGE = "https://chat.example.org"


class Ready:
    """A backend that has nothing to do."""

    state = "ready"
    values: dict[str, float] = {}  # noqa: RUF012
    reloads = 0

    asked, told = asyncio.Event(), asyncio.Event()

    async def model(self) -> tuple[ModelInfo, RequestLimits]:
        self.asked.set()
        await self.told.wait()
        return ModelInfo(**MODEL), RequestLimits(context_tokens=64, vocab=300)

    def check_room(self, principal: str, wanted: int) -> None:
        """Refuses no principal, since it has no queue of requests."""

    def open(self, requests: Any, timeout_s: float, emitted: Any = ()) -> Any:
        raise AssertionError("nobody asks")

    async def reload(self) -> str:
        self.reloads += 1
        return "done"

    def metrics(self) -> dict[str, float]:
        return {}

    def describe(self) -> dict[str, Any]:
        return {"status": self.state, "pid": 1}


@pytest.fixture(scope="module")
def backend() -> Ready:
    return Ready()


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "api-keys"
    file.write_text("# two of a former release\nfedcba9876543210\n\n0123456789abcdef\n")
    file.chmod(0o600)
    return file


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def tcp(backend: Ready, text_model: TextModel, key_file: Path) -> AsyncIterator[httpx.AsyncClient]:
    settings = ApiSettings(cors_origins=(PAGE,), aliases=("gpt-4o",))
    prompts = BoundedText(text_command(text_model.directory))
    app = build(Api(settings, backend, text_model, prompts, keys=KeyRing(key_file)))  # type: ignore[arg-type]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://edgemoe") as client:
        yield client
    await prompts.close()


async def test_a_key_is_needed_for_all_but_health(tcp: httpx.AsyncClient) -> None:
    for path in ("/version", "/metrics", "/v1/models", "/tokenizer_info", "/nowhere", "/metrics/", "/v1/models/"):
        assert (await tcp.get(path)).status_code == 401
        assert (await tcp.get(path, headers={"authorization": "Bearer wrong"})).status_code == 401
    assert (await tcp.get("/version", headers=KEY)).json() == {"version": edgemoe.__version__}
    assert (await tcp.get("/version", headers={"x-api-key": "fedcba9876543210"})).status_code == 200


@pytest.mark.parametrize("name", ["authorization", "x-api-key", "api-key"])
async def test_one_valid_key_will_do_wherever_it_is(tcp: httpx.AsyncClient, name: str) -> None:
    heads = {"authorization": "Bearer %s", "x-api-key": "%s", "api-key": "%s"}
    for other in ("wrong", ""):
        given = {one: form % ("fedcba9876543210" if one == name else other) for one, form in heads.items()}
        assert (await tcp.get("/version", headers=given)).status_code == 200
        assert (await tcp.get("/version", headers={name: given[name]})).status_code == 200
        assert (await tcp.get("/version", headers=given | {name: heads[name] % other})).status_code == 401


async def test_a_listed_page_may_be_of_another_network(tcp: httpx.AsyncClient) -> None:
    for origin, allowed in ((PAGE, True), ("https://else.where", False)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        answer = await tcp.options("/v1/messages", headers=asked | {"access-control-request-private-network": "true"})
        assert (answer.status_code == 200) == allowed
        assert answer.headers["access-control-allow-private-network"] == "true" or not allowed


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


async def test_a_client_may_ask_for_the_model_by_an_alias(tcp: httpx.AsyncClient, backend: Ready) -> None:
    backend.told.set()
    listed = (await tcp.get("/v1/models", headers=KEY)).json()["data"]
    assert [(card["id"], card.get("root")) for card in listed] == [("tiny", None), ("gpt-4o", "tiny")]
    assert (await tcp.get("/v1/models/gpt-4o", headers=KEY)).json()["id"] == "tiny"
    refused = await tcp.get("/v1/models/gpt-5", headers=KEY)
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_keys_come_and_go_while_the_daemon_runs_and_keep_their_limits(
    tcp: httpx.AsyncClient, backend: Ready, key_file: Path
) -> None:
    one, other = new_key(key_file, "kiosk", 1), new_key(key_file, "laptop")
    assert "# two of a former release" in key_file.read_text()
    backend.asked.clear()
    backend.told.clear()
    body = {"json": {"prompt": "x", "model": "other"}, "headers": {"x-api-key": one.secret}}
    running = asyncio.ensure_future(tcp.post("/v1/completions", **body))  # type: ignore[arg-type]
    async with asyncio.timeout(60):
        await backend.asked.wait()
    refused = await tcp.post("/v1/completions", **body)  # type: ignore[arg-type]
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue_full")
    assert "'kiosk' has 1 requests" in refused.json()["error"]["message"]
    assert float(refused.headers["retry-after"]) >= 1
    assert (await tcp.get("/version", headers={"x-api-key": one.secret})).status_code == 200
    backend.told.set()
    assert (await running).status_code == 404  # of another model
    assert (await tcp.post("/v1/completions", **body)).status_code == 404  # type: ignore[arg-type]
    remove_key(key_file, "kiosk")
    assert (await tcp.get("/version", headers={"x-api-key": one.secret})).status_code == 401
    key_file.chmod(0o644)
    assert (await tcp.get("/version", headers={"x-api-key": other.secret})).status_code == 401
    key_file.chmod(0o600)
    assert (await tcp.get("/version", headers={"x-api-key": other.secret})).status_code == 200


async def test_a_file_that_is_unfit_to_hold_keys_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    with pytest.raises(ServiceError, match="edgemoe key new"):
        read_keys(file)
    file.touch(mode=0o600)
    for text, why in (
        ("short", "keys:1: needs a key of at least 16"),
        ("a 0123456789abcdef\na 0123456789abcdef", "keys:2: 'a' is there twice"),
        ("a 0123456789abcdef many", "keys:1: write NAME KEY"),
        ("a 0123456789abcdef 1048577", "keys:1: write NAME KEY"),
        ("a 0123456789abcdef ²", "keys:1: write NAME KEY"),
        ("a 0123456789abcdef ٣", "keys:1: write NAME KEY"),
        ("a 0123456789abcdef " + "1" * 5000, "keys:1: write NAME KEY"),
        ("é 0123456789abcdef", "keys:1: write NAME KEY"),
    ):
        file.write_text(text)
        with pytest.raises(ServiceError, match=why):
            read_keys(file)
