"""The state machine of this front's requests: events in, instructions out, no I/O (docs/design/requests.md)."""

from __future__ import annotations

import itertools
import logging
import secrets
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from edgemoe.errors import DeadlineExceeded, EngineCrashed, RequestError
from edgemoe.front import request_events as events
from edgemoe.front.request_table import (
    EVADED_S,
    IN_OFFER,
    OpenOffer,
    PrefillMove,
    RequestRecord,
    RequestState,
    RequestTable,
    RoutingDecision,
    RoutingFacts,
)
from edgemoe.ipc.messages import Cancel
from edgemoe.policy.routing.least_loaded import TargetLoad, node_of, route
from edgemoe.types.request import Emission

log = logging.getLogger(__name__)
RATE_ALPHA = 0.1  # weight of the latest request in the mean duration and length
FIRST_GUESS_TOKENS = 256.0  # expected output before anything has finished
PATIENCE_S = 10.0  # that a suspect waits for the others to end, and that others wait for a suspect
OFFER_S = 20.0  # that the leader has to decide on an offer
FETCH_S = 60.0  # that an engine has to fetch a prompt's KV blocks
ANSWER_S = 5.0  # that its answer may take beyond that
MAX_ASKING = 64  # requests about whose cached part this box's engine is asked at once
MAX_MOVED_ATTEMPTS = 8  # of a request; later attempts stay where they are
MAX_TARGETS = 2  # engines that are asked to fetch the KV blocks of one attempt, one after the other


class RequestStateMachine(RequestTable):
    """Decides about requests. Each accepted one ends exactly once, its tokens in order, even if engines end."""

    def __init__(
        self,
        slots: int,
        capacity: int,
        surroundings: RoutingFacts,
        now: Callable[[], float],
        numbers: Iterator[int] | None = None,
    ) -> None:
        """Takes `numbers` for offers; by default they start at a random number, unlike a former front's."""
        super().__init__(slots, capacity, surroundings, now)
        self.stale = 0  # emissions of an earlier attempt, or of none
        self.gaps = 0  # emissions that skipped an index
        self.resubmitted = 0
        self.blamed = 0  # requests that were given up because engines died of them
        self.forgotten = 0  # requests that another box no longer had
        self.offered = self.granted = self.moved = 0  # moved: from an engine that prefilled to one that decodes
        self.evaded = Counter[str]()  # attempts that were left, by why: still | slow
        self.routed = Counter[tuple[str, str]]()  # submissions, by where to (here | elsewhere) and why
        self.expected_tokens = FIRST_GUESS_TOKENS  # of an answer
        self._numbers = numbers or itertools.count(secrets.randbits(48) + 1)
        self._trial_s = 0.0  # since when somebody is on trial, or the next suspect waits

    # --- events -----------------------------------------------------------------------------------------------

    def handle(self, event: events.RequestEvent) -> list[events.RequestInstruction]:
        """Changes the requests that the event concerns. Returns the instructions to perform, in order."""
        match event:
            case events.RequestsAccepted(requests, timeout_s, emitted):
                for accepted in requests:
                    new = RequestRecord(accepted, self._now(), timeout_s, emitted=list(emitted.get(accepted.id, ())))
                    self._add(new)
                    self._route(new)
            case events.RequestCancelled(request):
                if (record := self._live.get(request)) is not None:
                    self._cancel(record)
            case events.AllRequestsFailed(error):
                while self._live:  # ending one may end others
                    self._cancel(next(iter(self._live.values())), error)
            case events.TimePassed():
                self._on_time()
            case events.EnginesChanged():
                self._on_engines_changed()
            case events.TokensEmitted():
                self._on_tokens(event)
            case events.SubmitArrived():
                self._on_arrived(event)
            case events.SubmitRefused():
                self._on_refused(event)
            case events.RequestsForgotten():
                self._on_forgotten(event)
            case events.LoadReported(node, place):
                self._ours[node] = self._at[place]
            case events.CachedPartReported():
                self._on_cached_part(event)
            case events.OfferAnswered():
                self._on_answered(event)
            case events.OfferUnanswered():
                self._on_unanswered(event)
            case events.OfferGranted():
                self._grant(event)
            case events.PromptEnded():
                self._on_prompt_ended(event)
            case events.PrefixFetched():
                self._on_fetched(event)
            case events.FetchArrived(request, attempt, place):
                if not self.is_fetched_by(request, attempt, place):
                    self._todo.append(events.SendCancel(place, Cancel(request=request, attempt=attempt)))
            case events.FetchRefused():
                self._on_fetch_refused(event)
        todo, self._todo = self._todo, []
        return todo

    def _on_time(self) -> None:
        now_s, others, own = self._now(), self.surroundings.others(), self.surroundings.own_place()
        still = self.surroundings.stands_still()
        for record in list(self._live.values()):
            move = record.move
            if record.state is not RequestState.DONE and record.deadline_s <= now_s:  # another's end may have ended it
                why = f"the request made no progress for {record.timeout_s:g} s (api.request_timeout_s)"
                self._cancel(record, DeadlineExceeded(why))
            elif record.state in IN_OFFER:
                self._check_offer(record)
            elif why := self._reason_to_leave(record, still):
                self._evade(record, why)
            elif move is not None and move.target and (now_s > move.until_s or move.target not in {own, *others}):
                self._fail_target(record, "lost")
        self._try_next()

    def _on_engines_changed(self) -> None:
        """Submits again the requests of engines that are gone, oldest first. Routes the requests that no engine has."""
        places = {self.surroundings.own_place(), *self.surroundings.others()} - {""}
        lost = [record for record in self._live.values() if record.place not in places]
        had_trial, counts, is_resubmission = bool(self._suspects or self._on_trial), self._at.copy(), False
        for record in lost:
            if record.place:
                self.resubmitted += 1
                record.attempts.end_with_engine(alone=counts[record.place] == 1)
                is_resubmission = True
            if record.place or record.state is RequestState.SUSPECT:
                self._set_state(record, RequestState.QUEUED)
            self._on_trial = "" if record.id == self._on_trial else self._on_trial
        for record in lost:
            if record.state is not RequestState.DONE and not record.attempts.allowed:
                self._blame(record)
        self._line_up_suspects([record for record in lost if record.state in {RequestState.QUEUED, RequestState.HELD}])
        if is_resubmission or (self._suspects and not had_trial):
            self._trial_s = self._now()
        for record in lost:
            if record.state is RequestState.QUEUED:
                self._route(record)
            elif record.state in IN_OFFER:
                self._check_offer(record)
        self._try_next()

    def _on_tokens(self, event: events.TokensEmitted) -> None:
        for emission in event.items:
            record = self._live.get(emission.request)
            if record is None or not self._is_current(event.node, emission) or emission.index < len(record.emitted):
                self.stale += 1
            elif emission.index > len(record.emitted):
                self.gaps += 1
                self._send_cancel(record.place, record)
                self._requeue(record, is_started=record.attempts.tokens > 0)
            else:
                self._deliver(record, emission)

    def _on_arrived(self, event: events.SubmitArrived) -> None:
        record = self._current(event.request, event.attempt)
        if record is not None and record.place == event.place:
            record.arrived = True
        else:  # its cancellation may have overtaken it
            self._todo.append(events.SendCancel(event.place, Cancel(request=event.request, attempt=event.attempt)))

    def _on_refused(self, event: events.SubmitRefused) -> None:
        is_elsewhere = bool(node_of(event.place))
        if is_elsewhere:
            self._avoid(event.place)
        record = self._current(event.request, event.attempt)
        if record is None or record.place != event.place:
            return
        if (offer := record.offer) is not None and offer.place and record.attempt == 1:  # the leader counts on it
            offer.closed = "again"
            self._todo.append(events.SendWithdrawal(offer.number))
        if is_elsewhere:
            self._requeue(record)
        else:  # the next EnginesChanged routes it: this box's engine would refuse it again now
            record.attempts.take_back()
            self._set_state(record, RequestState.QUEUED)

    def _on_forgotten(self, event: events.RequestsForgotten) -> None:
        lost = [self._current(*each) for each in event.requests]
        here = [record for record in lost if record is not None and record.place == event.place]
        if here:  # the others have ended meanwhile
            log.warning("requests were forgotten by a box", extra={"place": event.place, "count": len(here)})
            self.forgotten += len(here)
            self._avoid(event.place)
        for record in here:
            self._requeue(record)

    # --- who goes where ---------------------------------------------------------------------------------------

    def _route(self, record: RequestRecord) -> None:
        """Submits a queued request, offers it to the leader, or leaves it queued where no engine takes it."""
        if not record.attempts.allowed:
            self._blame(record)
            return
        if self._on_trial not in ("", record.id) and self._now() < self._trial_s + PATIENCE_S:
            self._set_state(record, RequestState.HELD)
            return
        sampling, own = record.request.sampling, self.surroundings.own_place()
        stays = sampling.prompt_logprobs is not None and not record.emitted and bool(own)  # they may be megabytes
        others = {} if stays else self.surroundings.others()
        loads = self._loads(others)
        reading = [load for load in loads if self._role(load.place) != "decode"] or loads
        unasked = RoutingDecision("", "stays" if stays else "alone")
        if (decision := self._choose(record, reading, others) if others else unasked) is None:
            return
        place = decision.place or route(reading, "least" if self.surroundings.route == "least" else "local")
        if not place and not others and not stays:
            place = own  # has room for all accepted requests
        if place:
            only_prefills = self._role(place) == "prefill" and not stays and record.attempt < MAX_MOVED_ATTEMPTS
            self._submit(record, decision._replace(place=place), learns=bool(others), only_prefills=only_prefills)

    def _submit(self, record: RequestRecord, decision: RoutingDecision, *, learns: bool, only_prefills: bool) -> None:
        place = decision.place
        record.attempt += 1
        record.attempts.begin()
        record.note_progress(self._now())
        record.pace.restart()
        if only_prefills:
            record.move = PrefillMove(record.request.prompt + tuple(record.emitted))
        self._set_state(record, RequestState.PREFILLING if only_prefills else RequestState.RUNNING, place)
        self.routed["elsewhere" if node_of(place) else "here", decision.why] += 1
        message = record.submit_message(self._now(), hand_over=only_prefills, signature=learns and self.uses_signatures)
        self._todo.append(events.SendSubmit(place, message, decision.offer))

    def _choose(
        self, record: RequestRecord, reading: Sequence[TargetLoad], others: Mapping[str, str]
    ) -> RoutingDecision | None:
        """Returns the leader's decision, or the reason to route by load. None: the request is offered now."""
        around, offer = self.surroundings, record.offer
        if around.route == "least":
            return RoutingDecision("", "rule")
        own = next((load.place for load in reading if load.here), "")
        if offer is None:
            if record.attempt:
                return RoutingDecision("", "again")
            return self._choose_first(record, own)
        if offer.closed:
            return RoutingDecision("", offer.closed)
        place, offer.closed = offer.place.removeprefix(f"{around.node}:"), "again"
        if place == own or place in others:
            return RoutingDecision(place, offer.why, offer.number)
        self._todo.append(events.SendWithdrawal(offer.number))
        return RoutingDecision("", "gone")

    def _choose_first(self, record: RequestRecord, own: str) -> RoutingDecision | None:
        """Starts a request at this box's engine if that can begin at once; else offers it. `own` may be ""."""
        around, request, leader = self.surroundings, record.request, self.surroundings.leadership[0]
        at_once = bool(own) and around.starts_at_once(request)
        no_better = around.route == "pull" or (around.route == "eldr" and not around.has_signature(request))
        starts_here = at_once and no_better
        if starts_here and (not leader or around.knows_prompt(request)):
            return RoutingDecision(own, "at once")
        if not leader:
            return RoutingDecision("", "no leader")
        number = next(self._numbers)
        record.offer = OpenOffer(number, around.leadership, self._now() + OFFER_S, starts_here)
        self._by_number[number] = record
        self.offered += 1
        asks = self.uses_signatures and not at_once and bool(own) and self._in[RequestState.ASKING] < MAX_ASKING
        if asks and around.may_have_cached(request):
            self._set_state(record, RequestState.ASKING)
            self._todo.append(events.AskCachedPart(request))
        else:
            self._set_state(record, RequestState.OFFERED)
            self._send_offer(record, record.offer)
        return None

    def _check_offer(self, record: RequestRecord) -> None:
        """Ends an offer that nobody decides on any more."""
        offer = record.offer
        assert offer is not None
        if offer.leadership != self.surroundings.leadership:
            self._end_offer(record, offer, "no leader")
        elif self._now() > offer.until_s:
            self._end_offer(record, offer, "too long")
        elif not self.surroundings.others():
            self._end_offer(record, offer, "alone")

    def _end_offer(self, record: RequestRecord, offer: OpenOffer, why: str) -> None:
        """Withdraws an offer and routes its request without the leader."""
        self._set_state(record, RequestState.QUEUED)
        offer.closed = why
        self._route(record)

    def _on_cached_part(self, event: events.CachedPartReported) -> None:
        record = self._live.get(event.request)
        if record is None or record.state is not RequestState.ASKING or (offer := record.offer) is None:
            return
        if offer.leadership != self.surroundings.leadership:
            self._end_offer(record, offer, "no leader")
        else:
            self._set_state(record, RequestState.OFFERED)
            self._send_offer(record, offer, event.signature)

    def _on_answered(self, event: events.OfferAnswered) -> None:
        record = self._by_number.get(event.number)
        if event.place or (record is not None and record.move is not None):
            self._grant(event)
        elif record is not None and record.offer is not None and record.offer.starts_here:
            self._end_offer(record, record.offer, "at once")

    def _on_unanswered(self, event: events.OfferUnanswered) -> None:
        if (record := self._by_number.get(event.number)) is None:
            return
        if record.move is not None:
            self._todo.append(events.SendWithdrawal(event.number))
            self._choose_target(record, record.move, "")
        elif record.offer is not None:
            self._end_offer(record, record.offer, "unanswered")

    def _grant(self, event: events.OfferAnswered | events.OfferGranted) -> None:
        """Follows the decision of the present leader on an offer that stands; withdraws any other one."""
        number, place, why = event
        record = self._by_number.get(number)
        if record is not None and (move := record.move) is not None:
            self._choose_target(record, move, place if move.leadership == self.surroundings.leadership else "")
        elif record is None or (offer := record.offer) is None:
            self._todo.append(events.SendWithdrawal(number))
        elif offer.leadership != self.surroundings.leadership:
            self._end_offer(record, offer, "no leader")
        else:
            self.granted += 1
            offer.place, offer.why = place, why
            self._set_state(record, RequestState.QUEUED)
            self._route(record)

    # --- from an engine that prefills to one that decodes -----------------------------------------------------

    def _on_prompt_ended(self, event: events.PromptEnded) -> None:
        record = self._current(event.request, event.attempt)
        if record is None or record.state is not RequestState.PREFILLING or node_of(record.place) != event.node:
            return
        assert record.move is not None
        record.move.signature = event.signature
        self._set_state(record, RequestState.CHOOSING)
        self._ask_for_target(record, record.move)

    def _ask_for_target(self, record: RequestRecord, move: PrefillMove) -> None:
        """Asks the leader who decodes; after a failed target, or without a leader, load decides."""
        leader, _ = move.leadership = self.surroundings.leadership
        if self.surroundings.route == "least" or not leader or move.failed:
            self._choose_target(record, move, "")
            return
        move.offer = next(self._numbers)
        self._by_number[move.offer] = record
        told = events.SendOffer(leader, move.offer, record.request, record.waited_ms(self._now()), "decode")
        self._todo.append(told._replace(signature=move.signature))

    def _choose_target(self, record: RequestRecord, move: PrefillMove, granted: str) -> None:
        """Has the granted engine fetch the KV blocks, or the least loaded one; without one the request stays."""
        loads = [load for load in self._loads(self.surroundings.others()) if self._role(load.place) != "prefill"]
        loads = [load for load in loads if load.place not in (record.place, *move.failed)]
        target = granted.removeprefix(f"{self.surroundings.node}:")
        self._by_number.pop(move.offer, None)
        if not any(load.place == target for load in loads):
            if granted:
                self._todo.append(events.SendWithdrawal(move.offer))
            move.offer = 0
            target = route([load for load in loads if not move.failed or load.requests < load.slots], "least")
        if not target:
            self._stay(record)
            return
        now_s = self._now()
        remaining_s = max(0.0, min(FETCH_S, record.deadline_s - now_s))
        self._set_state(record, RequestState.FETCHING)
        move.target, move.until_s = target, now_s + remaining_s + ANSWER_S
        node = node_of(record.place) or self.surroundings.node
        self._todo.append(events.SendFetch(target, record.fetch_message(move, node, remaining_s)))

    def _on_fetched(self, event: events.PrefixFetched) -> None:
        record = self._current(event.request, event.attempt)
        if record is None or (move := record.move) is None or not move.target or node_of(move.target) != event.node:
            return
        if event.why:
            self._fail_target(record, event.why)
        elif any(load.place == move.target for load in self._loads(self.surroundings.others())):
            self._move(record, move)
        else:
            self._fail_target(record, "gone")

    def _move(self, record: RequestRecord, move: PrefillMove) -> None:
        """Submits the request to the engine that has its KV blocks, and cancels it where it is."""
        cancel = events.SendCancel(record.place, Cancel(request=record.id, attempt=record.attempt))
        record.attempts.take_back()
        record.move = None  # so that leaving the state cancels nothing at the target
        self.moved += 1
        self._submit(record, RoutingDecision(move.target, "handed over", move.offer), learns=False, only_prefills=False)
        self._todo.append(cancel)

    def _fail_target(self, record: RequestRecord, why: str) -> None:
        """Has another engine fetch the KV blocks, or leaves the request where it is."""
        move = record.move
        assert move is not None
        log.info("KV blocks were not fetched", extra={"from": record.place, "to": move.target, "why": why})
        move.failed.append(move.target)
        self._set_state(record, RequestState.CHOOSING)
        if len(move.failed) < MAX_TARGETS:
            self._ask_for_target(record, move)
        else:
            self._stay(record)

    def _on_fetch_refused(self, event: events.FetchRefused) -> None:
        if node_of(event.place):
            self._avoid(event.place)
        if self.is_fetched_by(event.request, event.attempt, event.place):
            self._fail_target(self._live[event.request], "lost")

    # --- one request's steps ----------------------------------------------------------------------------------

    def _requeue(self, record: RequestRecord, is_started: bool = True) -> None:
        """Ends an attempt though its engine lives, and routes the request again."""
        if is_started:
            record.attempts.take_back()
        self._set_state(record, RequestState.QUEUED)
        self._route(record)

    def _evade(self, record: RequestRecord, why: str) -> None:
        """Ends an attempt at an engine that stands still or crawls, and routes the request elsewhere."""
        log.warning("a request leaves an engine", extra={"place": record.place, "why": why})
        record.pace.evasions += 1
        self.evaded[why] += 1
        self._avoid(record.place, EVADED_S)
        self._send_cancel(record.place, record)
        self._requeue(record)

    def _deliver(self, record: RequestRecord, emission: Emission) -> None:
        record.note_progress(self._now())
        if emission.token is None and not emission.finish:
            return
        self._todo.append(events.DeliverToken(emission))
        if emission.token is not None:
            record.emitted.append(emission.token)
            record.attempts.add_token()
            record.pace.add_token(self._now())
            if record.id == self._on_trial and not record.attempts.suspect:
                self._try_next()
        if emission.finish:
            self._mean_s += RATE_ALPHA * (self._now() - record.accepted_s - self._mean_s)
            self.expected_tokens += RATE_ALPHA * (len(record.emitted) - self.expected_tokens)
            self._forget(record)

    def _cancel(self, record: RequestRecord, error: RequestError | None = None) -> None:
        """Ends a request before its last token, with this error if there is one."""
        if record.place:
            self._send_cancel(record.place, record)
        self._forget(record)
        if error is not None:
            self._todo.append(events.FailRequest(record.id, error))

    def _forget(self, record: RequestRecord) -> None:
        self._remove(record)
        if record.id == self._on_trial or self._suspects:
            self._try_next()

    def _blame(self, record: RequestRecord) -> None:
        """Gives up a request that engines die of; it explains the deaths that the others saw."""
        self.blamed += 1
        self.quarantine.add(record.request)
        self._todo.append(events.FailRequest(record.id, EngineCrashed(record.attempts.charge)))
        for other in self._live.values():
            other.attempts.explain(bool(other.place))
        self._forget(record)

    # --- suspects ---------------------------------------------------------------------------------------------

    def _try_next(self) -> None:
        """Routes the next suspect once it can be alone, or has waited long enough, and the requests held for it."""
        now_s, tried = self._now(), self._live.get(self._on_trial)
        is_over = tried is None or not tried.attempts.suspect
        if tried is not None and not is_over and tried.place and now_s < self._trial_s + PATIENCE_S:
            return
        if self._on_trial and is_over:
            self._on_trial, self._trial_s = "", now_s
        for held in [each for each in self._live.values() if each.state is RequestState.HELD]:
            if held.state is RequestState.HELD:
                self._set_state(held, RequestState.QUEUED)
                self._route(held)
        while self._suspects and not self._on_trial:
            record = next(iter(self._suspects.values()))
            if record.attempts.suspect:
                if len(self._live) > self._at[""] and now_s < self._trial_s + PATIENCE_S:
                    return
                self._on_trial, self._trial_s = record.id, now_s
            self._set_state(record, RequestState.QUEUED)
            self._route(record)
