"""A client's requests are counted and cached for its key, or its peer, on every endpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from edgemoe.api.api_keys import KeyRing
from edgemoe.api.app import build
from edgemoe.api.resources import Api
from edgemoe.api.text.bounded_text import BoundedText, text_command
from edgemoe.api.text.tokenizer import TextModel
from edgemoe.config.settings import ApiSettings
from edgemoe.errors import QueueFull
from edgemoe.types.model_info import ModelInfo
from edgemoe.types.request import (
    Principal,
    Request,
    RequestLimits,
    address_principal,
    as_told_by,
    cache_salt_of,
    key_principal,
    site_of,
    uid_principal,
)

pytestmark = pytest.mark.asyncio(loop_scope="session")
SECRETS = {"bob": "bob-0123456789abcdef", "mallory": "mallory-0123456789abcdef"}
SIZES = {"context_tokens": 4096, "vocab": 300, "layers": 1, "experts": 4, "top_k": 1, "expert_bytes": 4096}
MODEL = {"id": "tiny", "family": "mixtral", "digest": "0" * 32, "dtype": "float32"} | SIZES
SAY: Any = [{"role": "user", "content": "hello"}]
ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAY},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"messages": SAY, "max_tokens": 5},
}
FIELDS: list[dict[str, Any]] = [
    {field: "bob"}
    for field in (
        "user",
        "safety_identifier",
        "prompt_cache_key",
        "cache_salt",
        "session_id",
        "request_id",
        "user_id",
        "principal",
        "salt",
        "id_slot",
        "priority",
        "service_tier",
    )
] + [{"metadata": {"user_id": "bob"}}, {"store": False}]
HEADERS = [
    {name: "bob"}
    for name in (
        "x-user-id",
        "x-session-id",
        "x-request-id",
        "x-forwarded-for",
        "x-real-ip",
        "forwarded",
        "openai-organization",
        "openai-project",
        "anthropic-user-id",
        "cookie",
    )
]


class Asked:
    """A backend that notes its requests, and answers that it is full: at once for as many choices as `too_many`."""

    state = "ready"

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.wanted: list[tuple[str, int]] = []
        self.too_many = 1000

    async def model(self) -> tuple[ModelInfo, RequestLimits]:
        return ModelInfo(**MODEL), RequestLimits(context_tokens=4096, vocab=300)

    def check_room(self, principal: Principal, wanted: int) -> None:
        self.wanted.append((principal, wanted))
        if wanted >= self.too_many:
            raise QueueFull("no room", retry_after_s=1.0)

    @contextmanager
    def open(self, requests: Sequence[Request], timeout_s: float, emitted: Any = ()) -> Any:
        self.requests += requests
        raise QueueFull("noted", retry_after_s=1.0)
        yield


class Clients:
    """Two keys' clients of one application."""

    def __init__(self, app: Any, backend: Asked) -> None:
        self.backend = backend
        transport = httpx.ASGITransport(app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://edgemoe")

    async def ask(self, name: str, path: str, extra: dict[str, Any], headers: dict[str, str] | None = None) -> Request:
        """Returns the requests that this client's request makes the backend open."""
        auth = {"authorization": f"Bearer {SECRETS[name]}"}
        answer = await self.http.post(path, json=ENDPOINTS[path] | extra, headers=auth | (headers or {}))
        assert answer.status_code == 429, answer.text
        return self.backend.requests.pop()


@asynccontextmanager
async def clients_of(text_model: TextModel, folder: Path, **options: Any) -> AsyncIterator[Clients]:
    file = folder / "api-keys"
    file.write_text("".join(f"{name} {secret}\n" for name, secret in SECRETS.items()))
    file.chmod(0o600)
    backend: Any = Asked()
    prompts = BoundedText(text_command(text_model.directory))
    api = Api(ApiSettings(), backend, text_model, prompts, keys=KeyRing(file), **options)
    clients = Clients(build(api), backend)
    async with clients.http:
        yield clients
    await api.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def clients(text_model: TextModel, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Clients]:
    async with clients_of(text_model, tmp_path_factory.mktemp("keys")) as found:
        yield found


WRONG: dict[str, Any] = {"temperature": ["hot"], "options": 7}  # a body that is worked on is a 400
CHOICES: list[tuple[dict[str, Any], int]] = [
    ({}, 1),
    ({"n": 100}, 100),
    ({"n": 100.0}, 100),
    ({"n": "100"}, 100),
    ({"n_cmpl": 100}, 100),
    ({"extra_body": {"n": 100}}, 100),
    *(({"n": odd}, 1) for odd in (None, 0, -5, 1000, 10**30, 2.5, True, "many", [100], {"n": 100})),
    ({"extra_body": 7}, 1),
]


@pytest.mark.parametrize("path", [*ENDPOINTS, "/completion", "/infill", "/api/chat", "/api/generate", "/api/v1/chat"])
async def test_a_full_principal_is_refused_before_its_body_is_worked_on(clients: Clients, path: str) -> None:
    backend, headers = clients.backend, {"authorization": f"Bearer {SECRETS['bob']}"}
    body = {"model": "tiny", **ENDPOINTS.get(path, {}), **WRONG}
    assert (await clients.http.post(path, json=body, headers=headers)).status_code == 400
    backend.too_many = 1
    try:
        answer = await clients.http.post(path, json=body, headers=headers)
    finally:
        backend.too_many = 1000
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert "no room" in str(answer.json()["error"])
    assert backend.wanted[-1] == (key_principal(SECRETS["bob"]), 1)
    assert not backend.requests


@pytest.mark.parametrize(("fields", "wanted"), CHOICES)
async def test_room_is_looked_for_as_many_choices_as_the_body_asks_for(
    clients: Clients, fields: dict[str, Any], wanted: int
) -> None:
    body = ENDPOINTS["/v1/completions"] | WRONG | fields
    await clients.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {SECRETS['bob']}"})
    assert clients.backend.wanted[-1][1] == wanted


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_field_and_no_header_makes_anybody_another_principal(clients: Clients, path: str) -> None:
    plain = {name: await clients.ask(name, path, {}) for name in SECRETS}
    assert plain["bob"].principal != plain["mallory"].principal
    assert plain["bob"].salt != plain["mallory"].salt
    for extra, headers in [*((field, {}) for field in FIELDS), *(({}, header) for header in HEADERS)]:
        asked = {name: await clients.ask(name, path, extra, headers) for name in SECRETS}
        for name in SECRETS:
            assert asked[name].principal == plain[name].principal == key_principal(SECRETS[name]), (extra, headers)
            assert asked[name].user.startswith(asked[name].principal), (extra, headers)
        assert asked["bob"].user != asked["mallory"].user, "equal names are other users at another principal"
        assert asked["bob"].salt != asked["mallory"].salt, (extra, headers)
        if "cache_salt" not in extra:
            assert asked["bob"].salt == plain["bob"].salt, (extra, headers)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_users_and_cache_salts_divide_a_principal_s_cache(clients: Clients, path: str) -> None:
    plain = await clients.ask("bob", path, {})
    named = [{"user": "anna"}, {"safety_identifier": "anna"}]
    named += [{"metadata": {"user_id": "anna"}}] if path == "/v1/messages" else []
    users = {(await clients.ask("bob", path, one)).user for one in named}
    assert len(users) == 1, "one user, by whatever field"
    assert users != {plain.user}
    assert "anna" not in users.pop(), "names of users stay where they are"
    salts = {(await clients.ask("bob", path, {"cache_salt": salt})).salt for salt in ("a", "b")}
    assert len(salts | {plain.salt}) == 3


@pytest.mark.parametrize("salt", ["", "x" * 513, 5, [], {}])
async def test_a_cache_salt_is_text_that_is_not_empty(clients: Clients, salt: Any) -> None:
    for path, body in ENDPOINTS.items():
        auth = {"authorization": f"Bearer {SECRETS['bob']}"}
        answer = await clients.http.post(path, json=body | {"cache_salt": salt}, headers=auth)
        assert answer.status_code == 400, (path, answer.text)
        assert "cache_salt" in answer.text


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_prefixes_are_shared_only_by_the_setting(path: str, text_model: TextModel, tmp_path: Path) -> None:
    async with clients_of(text_model, tmp_path, shares_prefixes=True) as shared:
        asked = [await shared.ask(name, path, {}) for name in SECRETS]
        assert asked[0].salt == asked[1].salt == b""
        assert asked[0].principal != asked[1].principal, "they are counted apart all the same"
        salted = [await shared.ask(name, path, {"cache_salt": "s"}) for name in SECRETS]
        assert salted[0].salt == salted[1].salt != b""


async def test_a_principal_is_the_same_one_on_two_boxes_only_where_it_is() -> None:
    assert key_principal("0123456789abcdef") == key_principal("0123456789abcdef")
    assert uid_principal(1000, "a") != uid_principal(1000, "b")
    assert address_principal("192.0.2.1", "a") != address_principal("192.0.2.1", "b")
    for principal in (uid_principal(1000, "a"), address_principal("192.0.2.1", "a"), key_principal("0123456789abcdef")):
        assert as_told_by("a", principal) == principal
    assert as_told_by("b", uid_principal(1000, "a")) != uid_principal(1000, "a"), "b speaks for nobody at a"
    assert cache_salt_of(Principal("a"), "b") != cache_salt_of(Principal("ab"))


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("192.0.2.1", "192.0.2.2", False),
        ("192.0.2.1", "::ffff:192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8:0:1::1", "2001:db8:0:2::1", False),
        ("fe80::1%eth0", "fe80::2%eth1", True),
    ],
)
async def test_an_address_counts_as_far_as_its_client_cannot_choose_it(one: str, other: str, same: bool) -> None:
    assert (site_of(one) == site_of(other)) == same
