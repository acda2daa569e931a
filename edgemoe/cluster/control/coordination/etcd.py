"""The agreement kept by etcd, through its JSON gateway: of an external one, or of this box's own member.

The leader is the key `leader`, held by a lease; `epoch` is a key of its own, which stays. Every change is one
transaction that compares both. Renewals are lease keep-alives.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import ssl
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import httpx
import msgspec

from edgemoe.cluster.control.coordination.coord_store import AgreementView, PlanRef, wait_event
from edgemoe.cluster.rpc.roster import Roster
from edgemoe.errors import CoordUnavailable, PlanConflict, RosterConflict, StaleEpoch
from edgemoe.types.bounds import Count, Word

log = logging.getLogger(__name__)
MAX_ANSWER_BYTES = 1 << 20
MAX_KEYS = 16  # of ours: there are four


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
        self._token = ""
        self._endpoints, self._prefix = list(endpoints), prefix
        self._user, self._password = user, password
        self._client = httpx.AsyncClient(verify=tls or True, timeout=self.lease_s / 3)
        self._event = asyncio.Event()
        self._view = AgreementView()
        self._revisions: dict[str, int] = {}  # of each key's last change
        self._lease = 0
        self._watcher: asyncio.Task[None] | None = None

    @property
    def blocker(self) -> str:
        return ""

    async def start(self) -> None:
        await self._authenticate()
        revision = await self._refresh()
        self._watcher = asyncio.create_task(self._watch(revision + 1), name="etcd watch")

    async def close(self) -> None:
        if self._watcher:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
        await self._client.aclose()

    def view(self) -> AgreementView:
        return self._view

    async def changed(self, timeout_s: float) -> None:
        await wait_event(self._event, timeout_s)

    async def claim(self, node: str, above: int) -> int:
        await self._refresh()
        view = self._view
        if view.leader == node and self._lease:  # a claim whose outcome was unknown
            await self.renew(view.epoch)
            if view.epoch > above:
                return view.epoch
        if view.leader:
            raise StaleEpoch(f"{view.leader} leads already, in epoch {view.epoch}")
        epoch = max(view.epoch, above) + 1
        granted = await self._post("lease/grant", {"TTL": str(int(self.lease_s))})
        with _readable("lease/grant"):
            lease = int(granted["ID"])
        self._lease = lease
        leads = {"requestPut": {"key": self._key("leader"), "value": _encode(node), "lease": str(lease)}}
        rises = {"requestPut": {"key": self._key("epoch"), "value": _encode(str(epoch))}}
        absent = {"key": self._key("leader"), "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
        compare = [absent, self._unchanged("epoch")]
        answer = await self._post("kv/txn", {"compare": compare, "success": [leads, rises]})
        if not answer.get("succeeded"):
            self._lease = 0
            await self._post("lease/revoke", {"ID": str(lease)})
            raise StaleEpoch(f"another box claimed an epoch after {view.epoch} first")
        await self._refresh()
        return epoch

    async def renew(self, epoch: int) -> None:
        if not self._lease:
            raise StaleEpoch(f"epoch {epoch} is not held here")
        answer = await self._post("lease/keepalive", {"ID": str(self._lease)})
        with _readable("lease/keepalive"):
            left_s = int(answer.get("result", {}).get("TTL", 0))
        if left_s <= 0:
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
        leads = {"key": self._key("leader"), "target": "CREATE", "result": "GREATER", "createRevision": "0"}
        holds = {"key": self._key("epoch"), "target": "VALUE", "result": "EQUAL", "value": _encode(str(epoch))}
        put = {"requestPut": {"key": self._key("plan"), "value": _encode(msgspec.json.encode(plan).decode())}}
        compare = [leads, holds, self._unchanged("plan")]
        answer = await self._post("kv/txn", {"compare": compare, "success": [put]})
        await self._refresh()
        if answer.get("succeeded"):
            return
        if self._view.epoch == epoch and self._view.leader:
            raise PlanConflict(f"another plan than {plan.version} was committed in between")
        raise StaleEpoch(f"plan {plan.version} was not committed: epoch {epoch} is over")

    async def change_roster(self, before: Roster | None, after: Roster) -> None:
        """Makes `after` the roster in place of `before`. Raises RosterConflict where there is another one."""
        await self._refresh()
        if self._view.roster == after:  # an earlier try whose outcome was unknown
            return
        if self._view.roster != before:
            raise RosterConflict("other changes of the members were agreed in between; try again")
        put = {"requestPut": {"key": self._key("members"), "value": _encode(msgspec.json.encode(after).decode())}}
        answer = await self._post("kv/txn", {"compare": [self._unchanged("members")], "success": [put]})
        await self._refresh()
        if not answer.get("succeeded"):
            raise RosterConflict("another change of the members was agreed first; try again")

    def _unchanged(self, name: str) -> dict[str, Any]:
        """Returns an etcd comparison: the key is unchanged since our last read."""
        revision = str(self._revisions.get(name, 0))
        return {"key": self._key(name), "target": "MOD", "result": "EQUAL", "modRevision": revision}

    async def _refresh(self) -> int:
        """Reads all keys. Returns the revision that they belong to."""
        end = self._prefix[:-1] + chr(ord(self._prefix[-1]) + 1)
        asked = {"key": _encode(self._prefix), "rangeEnd": _encode(end), "limit": str(MAX_KEYS)}
        answer = await self._post("kv/range", asked)
        with _readable("kv/range"):
            pairs = {_decode(pair["key"]).removeprefix(self._prefix): pair for pair in answer.get("kvs", [])}
            values = {name: _decode(pair.get("value", "")) for name, pair in pairs.items()}
            revisions = {name: int(pair["mod_revision"]) for name, pair in pairs.items()}
            revision = int(answer["header"]["revision"])
            epoch = msgspec.convert(int(values.get("epoch", "0")), Count)
            leader = msgspec.convert(values.get("leader", ""), Word)
        self._revisions = revisions
        self._view = AgreementView(epoch, leader, _plan(values.get("plan")), _roster(values.get("members")))
        self._event.set()
        return revision

    async def _watch(self, revision: int) -> None:
        """Reads all keys again at each change, until cancelled; survives every error."""
        while True:
            try:
                revision = await self._watch_once(revision)
            except (CoordUnavailable, httpx.HTTPError, OSError, ValueError, KeyError) as error:
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
                    with _readable("watch"):
                        events = msgspec.json.decode(line).get("result", {}).get("events")
                    if events:
                        return await self._refresh() + 1
        except httpx.ReadTimeout:
            return await self._refresh() + 1
        except (httpx.HTTPError, OSError):
            self._endpoints.append(self._endpoints.pop(0))
            raise
        return revision

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Makes one call, tried once on every endpoint. A call whose outcome is unknown is not repeated elsewhere."""
        failure: Exception | None = None
        renewed = path == "auth/authenticate"  # its own refusal is final
        for _ in range(len(self._endpoints) + (not renewed)):
            try:
                response = await self._client.post(
                    f"{self._endpoints[0]}/v3/{path}", json=body, headers=self._headers()
                )
                if response.status_code == 401 and self._user and not renewed:
                    renewed = True
                    await self._authenticate()
                    continue
                return _answer(response, path)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                self._endpoints.append(self._endpoints.pop(0))
                failure = error
            except (httpx.HTTPError, OSError) as error:  # ssl.SSLError is not wrapped when the server refuses us
                raise CoordUnavailable(f"etcd at {self._endpoints[0]}: {path}: {error!r}") from error
        raise CoordUnavailable(f"no etcd of {', '.join(self._endpoints)} answers: {failure!r}") from failure

    async def _authenticate(self) -> None:
        self._token = ""
        if self._user:
            asked = {"name": self._user, "password": self._password}
            answer = await self._post("auth/authenticate", asked)
            with _readable("auth/authenticate"):
                self._token = str(answer["token"])

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}

    def _key(self, name: str) -> str:
        return _encode(self._prefix + name)


class OwnMember(Protocol):
    """This box's etcd member, which its agreement is read from."""

    @property
    def socket(self) -> str: ...

    @property
    def has_agreement(self) -> bool: ...

    @property
    def blocker(self) -> str: ...


class MemberStore(EtcdStore):
    """The agreement kept by the members that the voters run, through this box's own."""

    def __init__(self, member: OwnMember, lease_s: float) -> None:
        self._member = member
        super().__init__(["http://etcd"], lease_s=lease_s)

    @property
    def blocker(self) -> str:
        return self._member.blocker

    async def start(self) -> None:
        if not self._member.has_agreement:
            raise CoordUnavailable(self._member.blocker)
        await self._client.aclose()
        transport = httpx.AsyncHTTPTransport(uds=self._member.socket)
        self._client = httpx.AsyncClient(transport=transport, timeout=self.lease_s / 3)
        await super().start()


@contextlib.contextmanager
def _readable(path: str) -> Iterator[None]:
    """Turns an unexpected form of answer into CoordUnavailable: the server may be no etcd."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:  # DecodeError and binascii.Error are ValueErrors
        raise CoordUnavailable(f"etcd answered {path} with something else than expected: {error!r}") from error


def _answer(response: httpx.Response, path: str) -> dict[str, Any]:
    if len(response.content) > MAX_ANSWER_BYTES:
        raise CoordUnavailable(f"etcd answered {path} with {len(response.content)} bytes; {MAX_ANSWER_BYTES} are read")
    try:
        answer = msgspec.json.decode(response.content)
    except msgspec.DecodeError as error:
        answer = f"HTTP {response.status_code}, {response.text[:200]!r}"
        raise CoordUnavailable(f"etcd answered {path} with something that is not JSON: {answer}") from error
    if response.status_code == 404 and path == "lease/revoke":
        return {}
    if response.status_code != 200 or not isinstance(answer, dict):
        raise CoordUnavailable(f"etcd refused {path}: {str(answer)[:300]}")
    return answer


def _plan(value: str | None) -> PlanRef | None:
    try:
        return None if value is None else msgspec.json.decode(value, type=PlanRef)
    except msgspec.DecodeError:
        log.warning("the plan in etcd cannot be read; another program wrote below our prefix")
        return None


def _roster(value: str | None) -> Roster | None:
    try:
        found = None if value is None else msgspec.json.decode(value, type=Roster)
    except msgspec.MsgspecError:
        log.warning("the members in etcd cannot be read; another program wrote below our prefix")
        return None
    return None if found is None or found.fault() else found


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


def _decode(text: str) -> str:
    return base64.b64decode(text).decode(errors="replace")
