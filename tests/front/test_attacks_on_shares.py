"""One key attacks a resource that it shares with another, on the demo model; the other key is served all the same.

Tests count the other's tokens, and do not measure their time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from support.attacks import ATTACKS, client, keys_of, stream, under
from support.front_kit import running, settings_for
from support.kept import STORES
from support.ports import free_ports

from edgemoe.demo import model_path
from edgemoe.front.main import WORKER, Front
from edgemoe.store.packer import ensure_store
from edgemoe.types.request import key_principal

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]
TOKENS = 5


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return keys_of(tmp_path_factory.mktemp("keys") / "api-keys", "bob", "mallory")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def front(keys: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Front]:
    folder = tmp_path_factory.mktemp("f")
    file = folder / "api-keys"
    file.write_text("".join(f"{name} {secret}\n" for name, secret in keys.items()))
    file.chmod(0o600)
    api = {"tcp": f"127.0.0.1:{free_ports(1)[0]}", "api_key_file": str(file)}
    async with running(settings_for(folder, ensure_store(model_path(), STORES), api=api), WORKER) as found:
        yield found


@pytest.mark.parametrize("attack", ATTACKS)
async def test_an_attack_gets_the_share_of_its_key_and_refuses_nobody_else(
    front: Front, keys: dict[str, str], attack: str
) -> None:
    assert front.supervisor is not None
    requests, statuses = front.supervisor.requests.machine, list[int]()
    async with (
        client(front.settings, keys["bob"]) as bob,
        client(front.settings, keys["mallory"]) as mallory,
        under(attack, mallory, statuses),
    ):
        await asyncio.sleep(1)
        for n in range(2):
            answer = await stream(bob, f"bob asks {attack} {n}", TOKENS)
            assert answer.status == 200
            live = Counter(one.identity.principal for one in requests._live.values())
            assert live[key_principal(keys["mallory"])] <= requests.capacity_per_principal
    assert set(statuses) <= {200, 400, 429}


async def test_a_key_learns_nothing_of_another_key_s_prompts(front: Front, keys: dict[str, str]) -> None:
    body = {"prompt": "the secret of the house is a number, and that is 4711, " * 8, "max_tokens": 1}
    async with client(front.settings, keys["bob"]) as bob, client(front.settings, keys["mallory"]) as mallory:
        cached = []
        for http in (bob, bob, mallory, mallory):
            answer = (await http.post("/v1/completions", json=body)).json()
            cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            assert answer["timings"]["cache_n"] == cached[-1]
    assert cached[0] == cached[2] == 0
    assert cached[1] == cached[3] > 0
