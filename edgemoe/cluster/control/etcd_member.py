"""The etcd member of this box: how it comes to be one of the voters' members, and is kept running.

The first voter, by name, begins the cluster as its only member, once all voters are present and none is a member yet.
Every other voter has itself added by a member, first as a learner without a vote; a member promotes it when it has
caught up. A voter that lost its disk, or whose data etcd refuses, comes back in the same way.
See docs/design/coordination.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import httpx
import msgspec
from msgspec import Meta

from edgemoe.cluster.control.control_state import ControlState
from edgemoe.cluster.control.coordination.etcd_process import SOCKET, EtcdProcess, MemberPlan, find_program
from edgemoe.cluster.control.coordination.etcd_tls import is_certificate, make_certificate
from edgemoe.cluster.control.etcd_start import OLDER, StartCheck
from edgemoe.cluster.control.membership import Member
from edgemoe.cluster.control.messages import ControlMessage, EtcdCard, EtcdJoin, EtcdMembers, EtcdRun
from edgemoe.cluster.rpc.addresses import bind_host, free_port, round_trip_s
from edgemoe.cluster.rpc.channel import Channel
from edgemoe.config.settings import ClusterSettings
from edgemoe.durable import make_folder, read_plain, remove_tree, rename_file, replace_file
from edgemoe.errors import CoordUnavailable, PeerBusy, PeerError, PeerRefused
from edgemoe.ticking import until_tick
from edgemoe.types.bounds import MAX_NODES, Text, Word

log = logging.getLogger(__name__)
TICK_S = 0.5
ASK_S = 5.0
CALL_S = 2.0
LOOK_S = 10.0  # between two looks at the members, once all vote
FIGURES_S = 30.0  # between two looks at memory and fsyncs
UPKEEP_S = 3600.0  # between two looks at the size of the data
DEFRAGMENT_BYTES = 16 << 20
HEARTBEAT_MS = (100, 1000)  # the least, and the most over a slow link
ROUND_TRIPS = 3  # of the slowest link that fit into a heartbeat
MAX_FILE_BYTES = 64 << 10
REMOVED = "removed from the cluster"
TRIES = 3  # of a start, after which etcd refuses the data
NOT_THE_DATA = (
    "address already in use",
    "cannot assign",
    "no space left",
    "permission denied",
    "too many open",
    "flag",
)


class _Kept(msgspec.Struct):
    """The memory of a member over restarts: `members` are the URLs of all members at its start, by name."""

    host: Text = ""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    token: Word = ""  # of the cluster; "" while this box is no member
    is_new: bool = False  # this box began the cluster
    begun: bool = False  # it has taken part, so its data must be there
    whole: bool = False  # every voter has been a member with a vote
    roster: Word = ""  # identity of the agreed members' cluster; "" before they were agreed
    run: EtcdRun = EtcdRun()  # the last start on the data
    members: Annotated[dict[Text, Text], Meta(max_length=MAX_NODES)] = {}
    certificates: Annotated[dict[Text, str], Meta(max_length=MAX_NODES)] = {}  # of the other voters


class EtcdMember:
    """Makes this box a member, keeps its process running, and helps other voters to become members."""

    def __init__(
        self,
        settings: ClusterSettings,
        state: ControlState,
        channel: Channel[ControlMessage],
        address: str,
        announce: Callable[[EtcdCard], None],
    ) -> None:
        """Calls `announce` with this box's card whenever it changes. Others reach its control channel at `address`."""
        self.blocker: str = "etcd has not been started yet"
        self.is_healthy = False
        self._settings, self._node = settings, settings.node
        self._state, self._channel, self._announce = state, channel, announce
        self._host = address.rpartition(":")[0]
        self._folder = Path(settings.state_dir) / "etcd"
        self._kept, self._certificate = _Kept(), ""
        self._process = EtcdProcess()
        self._bundle = ""  # that the running process trusts
        self._heartbeat_ms = 0
        self._folder_fd = -1
        self._client: httpx.AsyncClient | None = None
        self._adding = asyncio.Lock()
        self._all_vote, self._checked_s = False, 0.0  # every voter is a member with a vote
        self._start = StartCheck(state)
        self._looked_s = self._counted_s = time.monotonic()
        self.resident_bytes, self.fsyncs = 0, 0  # of the process, as last read

    @property
    def _voters(self) -> list[str]:
        return self._state.voters

    @property
    def socket(self) -> str:
        """The path of etcd's socket, short enough for the kernel however deep the state directory is."""
        return f"/proc/self/fd/{self._folder_fd}/{SOCKET}"

    @property
    def has_agreement(self) -> bool:
        """Whether this member takes part, and the agreement has begun: every voter has been a member with a vote."""
        return self.is_healthy and self._kept.whole

    @property
    def process(self) -> EtcdProcess:
        """The child process."""
        return self._process

    async def run(self) -> None:
        """Keeps the member until cancelled; then stops it."""
        said = ""
        try:
            while True:
                try:
                    await self._tick()
                except (CoordUnavailable, PeerError, OSError) as error:
                    self.blocker, self.is_healthy = str(error), False
                except Exception as error:  # caused by another box's message, which must not end the control plane
                    log.exception("the etcd member failed; going on")
                    self.blocker, self.is_healthy = repr(error), False
                if self.blocker != said:
                    said = self.blocker
                    log.log(logging.WARNING if said else logging.INFO, "etcd", extra={"state": said or "takes part"})
                await asyncio.sleep(until_tick(TICK_S))
        finally:
            await self._process.stop()
            if self._client is not None:
                await self._client.aclose()
                os.close(self._folder_fd)

    async def on_join(self, peer: str) -> EtcdMembers:
        """Adds another voter as a learner, in place of an earlier member of its name. Raises PeerError."""
        if peer not in self._voters:
            raise PeerRefused(f"{peer} is no voter here")
        card = self._card_of(peer)
        if not self.is_healthy or card is None:
            raise PeerBusy(f"{self._node} is no working member now: {self.blocker}")
        if card.certificate not in self._bundle:
            raise PeerBusy(f"{self._node} does not trust the certificate of {peer} yet")
        url = self._url_of(peer, card)
        try:
            async with self._adding:
                await self._remove(peer, url)
                await self._call("cluster/member/add", peerURLs=[url], isLearner=True)
                members = {member.get("name") or peer: member["peerURLs"][0] for member in await self._members()}
        except CoordUnavailable as error:
            raise PeerBusy(str(error)) from error
        log.info("a voter is added to etcd", extra={"node": peer, "url": url})
        self._all_vote = False
        return EtcdMembers(self._kept.token, tuple(members.items()), self._kept.whole)

    async def remove_member(self, node: str) -> None:
        """Takes a voter out of etcd's members. Raises CoordUnavailable, also where that would lose the majority."""
        card = self._card_of(node)
        async with self._adding:
            await self._remove(node, self._url_of(node, card) if card is not None else "")

    async def voting(self) -> list[str]:
        """Returns the nodes that vote in etcd, learners left out. Raises CoordUnavailable."""
        return sorted(str(each["name"]) for each in await self._members() if not each.get("isLearner") and each["name"])

    async def _remove(self, node: str, url: str) -> None:
        for member in await self._members():
            if member.get("name") == node or url in member.get("peerURLs", []):
                await self._call("cluster/member/remove", ID=member["ID"])

    def forget(self) -> None:
        """Makes this box no member of etcd, once `run` has ended. Raises OSError."""
        if self._kept.token:
            self._kept.token = ""
            self._keep()

    # --- one step ---------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        if self._client is None:
            await asyncio.to_thread(self._open)
            self._client = httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=self.socket), timeout=CALL_S)
        program = find_program(self._settings.etcd_program)
        if not program:
            raise CoordUnavailable(
                "there is no etcd: install etcd-server (3.4 or newer), or name it in cluster.etcd_program; without it "
                "this box has no vote"
            )
        self._keep_roster()
        self._keep_certificates()
        if not self._kept.token:
            await self._become_member()
        if not self._kept.token:
            return
        if said := self._process.take_death():
            self._on_death(said)
            return
        if self._state.incarnations.is_copy:
            await self._process.stop()
            raise CoordUnavailable(f"no vote: {self._state.incarnations.why_self()}")
        if not self._start.is_done:
            self._confirm_start()
        await self._keep_running(program)
        await self._check_health()
        if self.is_healthy:
            await self._promote()
            await self._upkeep()
            await self._read_figures()

    def _open(self) -> None:
        """Reads the files, and makes the missing ones. Raises CoordUnavailable, OSError."""
        make_folder(self._folder, 0o700)
        try:
            self._kept = msgspec.json.decode(read_plain(self._folder / "member", MAX_FILE_BYTES), type=_Kept)
        except FileNotFoundError:
            pass
        except msgspec.MsgspecError as error:
            log.error("what this etcd member knew is not used", extra={"why": str(error)})
        host = self._host.strip("[]")
        if not host:
            raise CoordUnavailable("no vote: set cluster.address, at which the others reach this box")
        try:
            self._certificate = read_plain(self._folder / "certificate.pem", MAX_FILE_BYTES).decode()
        except FileNotFoundError:
            self._certificate = ""
        if not self._certificate or self._kept.host != host:
            self._certificate = make_certificate(self._folder, self._node, host)
        self._kept.host = host
        self._kept.port = self._settings.etcd_port or self._kept.port or free_port(bind_host(self._settings.listen))
        self._keep()
        self._folder_fd = os.open(self._folder, os.O_PATH | os.O_CLOEXEC)

    def _keep(self) -> None:
        """Writes the memory of this member to disk, and announces its card. Raises OSError."""
        replace_file(self._folder / "member", msgspec.json.encode(self._kept))
        run = self._kept.run if self._start.is_announced else None
        self._announce(EtcdCard(self._kept.port, self._certificate, self._kept.token, run))

    def _confirm_start(self) -> None:
        """Announces the next start on the data, or gives older data up. Raises CoordUnavailable, OSError."""
        if self._start.is_older(self._kept.run, self._voters, self._cards()):
            self._kept.token = ""
            self._keep()
            raise CoordUnavailable(f"no vote: {OLDER}")
        if not self._start.is_announced:
            self._begin_run()
        self._start.wait(self._voters)

    def _begin_run(self) -> None:
        self._kept.run = self._start.begin(self._kept.run)
        self._keep()

    def _keep_roster(self) -> None:
        """Gives up the membership of another cluster than the agreed members'. Raises OSError."""
        roster, kept = self._state.roster, self._kept
        if roster is not None and roster.cluster != kept.roster:
            kept.token = "" if kept.roster and not self._process.is_running else kept.token
            kept.roster = roster.cluster
            self._keep()

    def _keep_certificates(self) -> None:
        """Keeps the certificates of the voters that are let in, and announces this box's card."""
        kept = {node: its for node, its in self._kept.certificates.items() if node in self._state.members}
        for node in self._voters:
            card = self._card_of(node)
            if card is not None and kept.get(node) != card.certificate and is_certificate(card.certificate):
                kept[node] = card.certificate
        if kept != self._kept.certificates:
            self._kept.certificates = kept
            self._keep()

    async def _become_member(self) -> None:
        """Begins the cluster, or has this box added to it, if that is possible now."""
        cards = self._cards()
        tokens = {card.cluster for card in cards.values() if card is not None and card.cluster}
        if len(tokens) > 1:
            raise CoordUnavailable("the other voters are members of different etcd clusters")
        absent = [node for node, card in cards.items() if card is None]
        if tokens:
            await self._join([node for node, card in cards.items() if card is not None and card.cluster])
        elif absent:
            self.blocker = f"no vote before a member, or word of {', '.join(absent)}, is heard"
        elif self._node == self._voters[0]:
            self._become(secrets.token_hex(8), {self._node: self._own_url()}, is_new=True)
        else:
            self.blocker = f"{self._voters[0]} begins the agreement"

    async def _join(self, members: Sequence[str]) -> None:
        failure: PeerError | None = None
        for node in members:
            try:
                answer = await self._channel.ask(node, EtcdJoin(), timeout_s=ASK_S)
            except PeerError as error:
                failure = error
                continue
            assert isinstance(answer.message, EtcdMembers)
            self._become(answer.message.cluster, dict(answer.message.members) | {self._node: self._own_url()})
            self._kept.whole = answer.message.whole
            self._keep()
            return
        self.blocker = f"no vote yet: {failure}"

    def _become(self, token: str, members: dict[str, str], *, is_new: bool = False) -> None:
        """Makes this box a member without data. Raises OSError."""
        self._forget_data()
        self._kept.token, self._kept.members, self._kept.is_new, self._kept.begun = token, members, is_new, False
        self._kept.whole = False
        self._start.is_done = True  # there is no data that could be old
        self._begin_run()

    def _on_death(self, said: str) -> None:
        """Gives up data that etcd refuses, so that this box comes back as a learner. Raises OSError."""
        self.is_healthy = False
        self.blocker = f"etcd has ended: {said[-200:]}"
        members = [node for node in self._voters if (card := self._card_of(node)) is not None and card.cluster]
        removed = REMOVED in said
        refused = self._process.failures >= TRIES and not any(words in said for words in NOT_THE_DATA)
        if removed or (refused and 2 * len(members) > len(self._voters)):
            log.error("this box gives up its data of etcd and comes back as a learner", extra={"why": said})
            self._process.failures = 0
            self._kept.token = ""
            self._keep()

    def _forget_data(self) -> None:
        data, aside = self._folder / "data", self._folder / "data.aside"
        if aside.exists():
            remove_tree(aside)
        if data.exists():
            rename_file(data, aside.name)

    async def _keep_running(self, program: str) -> None:
        """Starts the process if it does not run, and again if it must trust others. Raises OSError."""
        bundle = "".join([self._certificate, *(its for _, its in sorted(self._kept.certificates.items()))])
        if self._process.is_running and bundle == self._bundle:
            return
        if self._process.is_running:
            await self._process.stop()
        if self._kept.begun and not any((self._folder / "data/member/wal").glob("*.wal")):
            self._kept.token = ""  # it would begin a cluster of its own, or vote without its memory
            self._keep()
            raise CoordUnavailable("no vote: the data of etcd is gone; this box comes back as a learner")
        if bundle != self._bundle:
            replace_file(self._folder / "members.pem", bundle.encode())
            self._bundle = bundle
        self._heartbeat_ms = self._heartbeat_ms or await self._measure_heartbeat()
        host = bind_host(self._settings.listen)
        self._kept.members[self._node] = self._own_url()
        plan = MemberPlan(
            program=program,
            name=self._node,
            folder=self._folder,
            listen_url=f"https://{f'[{host}]' if ':' in host else host}:{self._kept.port}",
            members=self._kept.members,
            token=self._kept.token,
            is_new=self._kept.is_new and not self._kept.begun,
            heartbeat_ms=self._heartbeat_ms,
        )
        await self._process.start(plan)

    async def _measure_heartbeat(self) -> int:
        """Returns the interval of etcd's heartbeats, by the slowest link to another voter that answers."""
        found = await asyncio.gather(*(round_trip_s(self._state.members[n].address) for n in self._present()))
        least, most = HEARTBEAT_MS
        return int(min(most, max(least, ROUND_TRIPS * 1000 * max(found, default=0.0))))

    async def _check_health(self) -> None:
        assert self._client is not None
        try:
            answer = (await self._client.get("http://etcd/health")).json()
        except (httpx.HTTPError, OSError, ValueError):
            answer = {}
        if not isinstance(answer, dict) or answer.get("health") != "true":
            self.is_healthy, self.blocker = False, "etcd reaches no majority of the voters"
        elif not self.is_healthy:
            status = await self._call("maintenance/status")
            if status.get("isLearner"):
                self.blocker = "no vote before etcd has caught up"
                return
            if not self._kept.begun:
                self._kept.begun = True
                self._keep()
            self.is_healthy, self.blocker, self._process.failures = True, "", 0
            await self._update_url(str(status["header"]["member_id"]))

    async def _update_url(self, own_id: str) -> None:
        """Tells the other members where this one is, if its address has changed."""
        for member in await self._members():
            if member.get("ID") == own_id and member["peerURLs"] != [self._own_url()]:
                await self._call("cluster/member/update", ID=own_id, peerURLs=[self._own_url()])

    async def _promote(self) -> None:
        """Gives learners that have caught up their vote."""
        if time.monotonic() - self._checked_s < (LOOK_S if self._all_vote else 0.0):
            return
        self._checked_s = time.monotonic()
        members = await self._members()
        for member in members:
            if member.get("isLearner") and member.get("name") and member["name"] not in self._voters:
                await self._call("cluster/member/remove", ID=member["ID"])  # its vote was taken back meanwhile
            elif member.get("isLearner") and member.get("name"):
                with contextlib.suppress(CoordUnavailable):  # it has not caught up
                    await self._call("cluster/member/promote", ID=member["ID"])
                    log.info("a voter has its vote in etcd", extra={"node": member["name"]})
        voting = {member.get("name") for member in members if not member.get("isLearner")}
        self._all_vote = voting >= set(self._voters)
        if self._all_vote and not self._kept.whole:
            self._kept.whole = True
            self._keep()
        missing = ", ".join(sorted(set(self._voters) - voting))
        self.blocker = "" if self._kept.whole else f"the agreement begins when {missing} has its vote"

    async def _upkeep(self) -> None:
        """Gives free pages of the data back to the disk from time to time."""
        if time.monotonic() - self._looked_s < UPKEEP_S:
            return
        self._looked_s = time.monotonic()
        status = await self._call("maintenance/status")
        used, size = int(status.get("dbSizeInUse", 0)), int(status.get("dbSize", 0))
        if size > DEFRAGMENT_BYTES and size > 2 * used:
            await self._call("maintenance/defragment")

    async def _read_figures(self) -> None:
        """Reads the memory and the fsyncs of etcd, for status and metrics."""
        if self.resident_bytes and time.monotonic() - self._counted_s < FIGURES_S:
            return
        self._counted_s = time.monotonic()
        assert self._client is not None
        try:
            text = (await self._client.get("http://etcd/metrics")).text
        except (httpx.HTTPError, OSError) as error:
            raise CoordUnavailable(f"etcd did not answer metrics: {error!r}") from error
        self.resident_bytes = _figure(text, "process_resident_memory_bytes")
        self.fsyncs = _figure(text, "etcd_disk_wal_fsync_duration_seconds_count")

    def _present(self) -> list[str]:
        members = self._state.members
        return [node for node in self._voters if node in members and members.is_alive(node)]

    def _cards(self) -> dict[str, EtcdCard | None]:
        """Returns the cards of the other voters that are present."""
        return {node: self._card_of(node) for node in self._voters if node != self._node}

    def _card_of(self, node: str) -> EtcdCard | None:
        """Returns the card that a voter, if it is present, has announced."""
        if node not in self._state.members or not self._state.members.is_alive(node):
            return None
        member: Member = self._state.members[node]
        fits = member.can_take_part and member.announcement is not None and member.announced_boot == member.boot
        return member.announcement.etcd if fits and member.announcement is not None else None

    def _url_of(self, node: str, card: EtcdCard) -> str:
        return f"https://{self._state.members[node].address.rpartition(':')[0]}:{card.port}"

    def _own_url(self) -> str:
        return f"https://{self._host}:{self._kept.port}"

    # --- etcd -------------------------------------------------------------------------------------------------

    async def _members(self) -> list[dict[str, Any]]:
        found = (await self._call("cluster/member/list")).get("members", [])
        if not isinstance(found, list) or not all(isinstance(each, dict) and each.get("peerURLs") for each in found):
            raise CoordUnavailable("etcd lists its members in another form than expected")
        return found

    async def _call(self, path: str, **body: object) -> dict[str, Any]:
        """Calls the own member. Raises CoordUnavailable."""
        assert self._client is not None
        try:
            response = await self._client.post(f"http://etcd/v3/{path}", json=body)
            answer = response.json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise CoordUnavailable(f"etcd did not answer {path}: {error!r}") from error
        if response.status_code != 200 or not isinstance(answer, dict):
            raise CoordUnavailable(f"etcd refused {path}: {str(answer)[:300]}")
        return answer


def _figure(text: str, name: str) -> int:
    """Returns a figure without labels in Prometheus' text; 0 if it is missing or no number."""
    for line in text.splitlines():
        if line.startswith(f"{name} "):
            try:
                return int(float(line.split()[1]))
            except (ValueError, OverflowError, IndexError):
                return 0
    return 0
