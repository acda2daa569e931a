"""The agreement kept by an external etcd, through its JSON gateway, for clusters that have outgrown the embedded one.

The leader is the key `leader`, held by a lease; the epoch is that key's create_revision, which only rises. Every
change is one transaction that compares it. Renewals are lease keep-alives.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import ssl
from collections.abc import Sequence
from typing import Any

import httpx
import msgspec

from edgemoe.cluster.control.coord import MAX_MEMBERS, PlanRef, View, check_record, wait_event
from edgemoe.errors import CoordUnavailable, PlanConflict, StaleEpoch

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 8 << 20


class EtcdStore:
    """CoordStore over etcd. `endpoints` are tried in turn; `prefix` separates clusters that share an etcd."""

    def __init__(
        self,
        endpoints: Sequence[str],
        prefix: str = "/edgemoe/",
        lease_s: float = 3.0,
        tls: ssl.SSLContext | None = None,
        user: str = "",
        password: str = "",
    ) -> None:
        self.lease_s = float(max(2, round(lease_s)))  # etcd's leases are whole seconds
        self._endpoints, self._prefix = list(endpoints), prefix
        self._user, self._password = user, password
        self._client = httpx.AsyncClient(verify=tls or True, timeout=self.lease_s / 3)
        self._event = asyncio.Event()
        self._view = View()
        self._plan_revision = 0
        self._lease = 0
        self._watcher: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self._authenticate()
        revision = await self._refresh()
        self._watcher = asyncio.create_task(self._watch(revision + 1), name="etcd watch")

    async def close(self) -> None:
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._client.aclose()

    def view(self) -> View:
        return self._view

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self._event, timeout_s)

    async def claim(self, node: str) -> int:
        await self._refresh()
        if self._view.leader == node and self._lease:
            return self._view.epoch
        if self._view.leader:
            raise StaleEpoch(f"{self._view.leader} leads already, in epoch {self._view.epoch}")
        lease = int((await self._post("lease/grant", {"TTL": str(int(self.lease_s))}))["ID"])
        self._lease = lease
        put = {"requestPut": {"key": self._key("leader"), "value": _encode(node), "lease": str(lease)}}
        absent = {"key": self._key("leader"), "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
        answer = await self._post("kv/txn", {"compare": [absent], "success": [put]})
        if not answer.get("succeeded"):
            self._lease = 0
            await self._post("lease/revoke", {"ID": str(lease)})
            raise StaleEpoch(f"another box claimed an epoch after {self._view.epoch} first")
        await self._refresh()
        return int(answer["header"]["revision"])

    async def renew(self, epoch: int) -> None:
        if not self._lease:
            raise StaleEpoch(f"epoch {epoch} is not held here")
        answer = await self._post("lease/keepalive", {"ID": str(self._lease)})
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            self._lease = 0
            raise StaleEpoch(f"the lease of epoch {epoch} has lapsed")

    async def resign(self, epoch: int) -> None:
        if self._lease:
            lease, self._lease = self._lease, 0
            await self._post("lease/revoke", {"ID": str(lease)})
            await self._refresh()

    async def commit_plan(self, epoch: int, plan: PlanRef) -> None:
        await self._refresh()
        present = self._view.plan
        if plan == present and self._view.epoch == epoch:
            return
        if plan.version != (present.version if present else 0) + 1:
            raise PlanConflict(f"plan {plan.version} does not follow the present plan {present and present.version}")
        key = self._key("plan")
        same = {"key": key, "target": "MOD", "result": "EQUAL", "modRevision": str(self._plan_revision)}
        put = {"requestPut": {"key": key, "value": _encode(msgspec.json.encode(plan).decode())}}
        await self._as_leader(epoch, f"plan {plan.version}", put, [same])

    async def set_member(self, epoch: int, node: str, record: str | None) -> None:
        check_record(node, record, self._view.members)
        key = self._key(f"members/{node}")
        if record is None:
            await self._as_leader(epoch, f"member {node}", {"requestDeleteRange": {"key": key}})
        else:
            await self._as_leader(epoch, f"member {node}", {"requestPut": {"key": key, "value": _encode(record)}})

    async def _as_leader(self, epoch: int, what: str, change: dict[str, Any], more: Sequence[Any] = ()) -> None:
        """One change that happens only while `epoch` holds and `more` compares true."""
        leads = {"key": self._key("leader"), "target": "CREATE", "result": "EQUAL", "createRevision": str(epoch)}
        answer = await self._post("kv/txn", {"compare": [leads, *more], "success": [change]})
        await self._refresh()
        if answer.get("succeeded"):
            return
        if self._view.epoch == epoch and self._view.leader:
            raise PlanConflict(f"{what} was changed by another in between")
        raise StaleEpoch(f"{what} was not changed: epoch {epoch} is over")

    async def _refresh(self) -> int:
        """Reads everything anew. Returns the revision that it is true for."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        asked = {"key": _encode(self._prefix), "rangeEnd": _encode(end), "limit": str(MAX_MEMBERS + 16)}
        answer = await self._post("kv/range", asked)
        epoch, leader, plan, members = self._view.epoch, "", None, {}
        self._plan_revision = 0
        for pair in answer.get("kvs", []):
            name, value = _decode(pair["key"]).removeprefix(self._prefix), _decode(pair.get("value", ""))
            if name == "leader":
                epoch, leader = int(pair["create_revision"]), value
            elif name == "plan":
                plan, self._plan_revision = _plan(value), int(pair["mod_revision"])
            elif name.startswith("members/"):
                members[name.removeprefix("members/")] = value
        self._view = View(epoch, leader, plan, members)
        self._event.set()
        return int(answer["header"]["revision"])

    async def _watch(self, revision: int) -> None:
        """Reads anew whenever something changed; goes on for ever, over any error."""
        while True:
            try:
                revision = await self._watch_once(revision)
            except (CoordUnavailable, httpx.HTTPError, ValueError, KeyError) as error:
                log.debug("etcd watch broke off", extra={"why": repr(error)})
                await asyncio.sleep(self.lease_s / 10)

    async def _watch_once(self, revision: int) -> int:
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        created = {"key": _encode(self._prefix), "range_end": _encode(end), "start_revision": str(revision)}
        url = f"{self._endpoints[0]}/v3/watch"
        timeout = httpx.Timeout(self.lease_s, read=self.lease_s)
        asked = {"create_request": created}
        try:
            async with self._client.stream(
                "POST", url, json=asked, headers=self._headers(), timeout=timeout
            ) as response:
                response.raise_for_status()
                async for line in response.aiter_lines():
                    if msgspec.json.decode(line).get("result", {}).get("events"):
                        return await self._refresh() + 1
        except httpx.ReadTimeout:
            return await self._refresh() + 1
        except httpx.HTTPError:
            self._endpoints.append(self._endpoints.pop(0))
            raise
        return revision

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One call, tried once on every endpoint. A call whose outcome is unknown is not repeated elsewhere."""
        failure: Exception | None = None
        for _ in self._endpoints:
            try:
                response = await self._client.post(
                    f"{self._endpoints[0]}/v3/{path}", json=body, headers=self._headers()
                )
                if response.status_code == 401 and self._user:
                    await self._authenticate()
                    continue
                return _answer(response, path)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._endpoints.append(self._endpoints.pop(0))
                failure = error
            except httpx.HTTPError as error:
                raise CoordUnavailable(f"etcd at {self._endpoints[0]}: {path}: {error!r}") from error
        raise CoordUnavailable(f"no etcd of {', '.join(self._endpoints)} answers: {failure!r}") from failure

    async def _authenticate(self) -> None:
        self._token = ""
        if self._user:
            asked = {"name": self._user, "password": self._password}
            self._token = str((await self._post("auth/authenticate", asked))["token"])

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _key(self, name: str) -> str:
        return _encode(self._prefix + name)


def _answer(response: httpx.Response, path: str) -> dict[str, Any]:
    if len(response.content) > MAX_ANSWER_BYTES:
        raise CoordUnavailable(f"etcd answered {path} with {len(response.content)} bytes; {MAX_ANSWER_BYTES} are read")
    try:
        answer = msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        raise CoordUnavailable(f"etcd answered {path} with something that is not JSON") from error
    if response.status_code == 404 and path == "lease/revoke":
        return {}
    if response.status_code != 200 or not isinstance(answer, dict):
        raise CoordUnavailable(f"etcd refused {path}: {str(answer)[:300]}")
    return answer


def _plan(value: str) -> PlanRef | None:
    try:
        return msgspec.json.decode(value, type=PlanRef)
    except msgspec.DecodeError:
        log.warning("the plan in etcd cannot be read; another program wrote below our prefix")
        return None


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
