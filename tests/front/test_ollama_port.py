"""The port for clients of Ollama: with keys, or without them on loopback addresses only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest
from support.front_kit import running, settings_for, write_model
from support.ports import free_ports

from edgemoe.api.api_keys import new_key
from edgemoe.api.generate.generation import RequestContext
from edgemoe.config.settings import ApiSettings, Settings, faults
from edgemoe.errors import ServiceError
from edgemoe.front.listen import BoundPorts, bound_ports, tcp_socket

pytestmark = pytest.mark.asyncio(loop_scope="session")
CHAT: Any = {"model": "tiny", "messages": [{"role": "user", "content": "SAY{hello}END"}], "stream": False}
EVIL = ({"origin": "https://evil.example"}, 403), ({"host": "evil.example"}, 421)


def settings_with(folder: Path, port: int, **api: Any) -> Settings:
    return settings_for(folder, write_model(folder / "model"), api={"ollama_tcp": str(port), **api})


async def test_without_keys_the_port_serves_programs_of_this_machine_and_no_web_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    principals: list[str] = []
    checked = RequestContext.check_model

    def noting(context: RequestContext, name: str | None) -> None:
        principals.append(context.principal)
        checked(context, name)

    monkeypatch.setattr(RequestContext, "check_model", noting)
    (port,) = free_ports(1)
    settings = settings_with(tmp_path, port, ollama_keyless=True, cors_origins=("app://notes",))
    async with (
        running(settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as http,
    ):
        assert (await http.get("/")).text == "Ollama is running"
        assert (await http.head("/")).status_code == 200
        assert (await http.post("/api/chat", json=CHAT)).json()["message"]["content"] == "hello"
        assert set(principals) == {"address:127.0.0.1"}
        answer = await http.post("/v1/chat/completions", json=CHAT)
        assert answer.json()["choices"][0]["message"]["content"] == "hello"
        assert (await http.get("/health")).json()["status"] == "ready"
        for path in ("/metrics", "/events", "/page/main.js", "/tokenizer_info", "/reload"):
            assert (await http.get(path)).status_code == 404
        for headers, status in EVIL:
            for path in ("/api/chat", "/v1/chat/completions", "/api/pull"):
                assert (await http.post(path, json=CHAT, headers=headers)).status_code == status
            for path in ("/", "/api/tags", "/v1/models", "/health"):
                assert (await http.get(path, headers=headers)).status_code == status
        for origin in (f"http://127.0.0.1:{port}", "app://notes"):
            assert (await http.get("/api/tags", headers={"origin": origin})).status_code == 200


async def test_with_keys_the_port_asks_for_one_in_ollamas_form(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    key = new_key(tmp_path / "keys", "laptop")
    settings = settings_with(tmp_path, port, api_key_file=str(tmp_path / "keys"))
    async with (
        running(settings),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as http,
    ):
        assert (await http.get("/")).text == "Ollama is running"
        for headers in ({}, {"authorization": "Bearer wrong"}):
            answer = await http.post("/api/chat", json=CHAT, headers=headers)
            assert (answer.status_code, answer.json().keys()) == (401, {"error"})
        given = {"authorization": f"Bearer {key.secret}"}
        assert (await http.post("/api/chat", json=CHAT, headers=given)).json()["message"]["content"] == "hello"
        assert (await http.post("/api/chat", json=CHAT, headers=given | {"host": "evil.example"})).status_code == 200


@pytest.mark.parametrize(
    "address", ["0.0.0.0:11434", "[::]:11434", "192.0.2.7:11434", "box.lan:11434", "[2001:db8::1]:11434", "*:11434"]
)
async def test_without_keys_no_other_machine_may_reach_it(address: str) -> None:
    (fault,) = faults(Settings(api=ApiSettings(ollama_tcp=address, ollama_keyless=True)))
    assert "api.ollama_keyless is set" in fault
    assert "other machines" in fault
    assert not [*faults(Settings(api=ApiSettings(ollama_tcp=address)))]


@pytest.mark.parametrize("address", ["11434", "127.0.0.1:11434", "localhost:11434", "[::1]:11434", "127.8.8.8:11434"])
async def test_loopback_addresses_may_be_without_keys(address: str) -> None:
    assert not [*faults(Settings(api=ApiSettings(ollama_tcp=address, ollama_keyless=True)))]


@pytest.mark.parametrize("address", ["here", "0", "70000", "127.0.0.1:", ":11434", "127.0.0.1:port"])
async def test_an_address_that_is_none_is_refused(address: str) -> None:
    (fault,) = faults(Settings(api=ApiSettings(ollama_tcp=address)))
    assert "api.ollama_tcp is" in fault


async def test_to_ask_for_no_keys_without_a_port_is_a_mistake() -> None:
    (fault,) = faults(Settings(api=ApiSettings(ollama_keyless=True)))
    assert "api.ollama_tcp is not" in fault


async def test_a_port_alone_is_on_loopback_and_a_taken_one_is_named() -> None:
    (port,) = free_ports(1)
    ports = bound_ports(ApiSettings(ollama_tcp=str(port)))
    assert ports.ollama is not None
    assert ports.ollama.getsockname() == ("127.0.0.1", port)
    ports.ollama.close()
    assert bound_ports(ApiSettings()) == BoundPorts(None, None)
    with tcp_socket(f"127.0.0.1:{port}"), pytest.raises(ServiceError, match=r"api\.ollama_tcp: cannot listen"):
        bound_ports(ApiSettings(ollama_tcp=str(port)))


async def test_a_name_that_leads_elsewhere_is_not_served_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the bound address: "localhost" may be any."""
    (port,) = free_ports(1)
    monkeypatch.setattr("edgemoe.front.listen.is_loopback", lambda host: False)
    with pytest.raises(ServiceError, match="no loopback address"):
        bound_ports(ApiSettings(ollama_tcp=f"localhost:{port}", ollama_keyless=True))
