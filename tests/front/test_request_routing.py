"""The engine chosen for a request, and its move from a prefilling to a decoding one: one example of each."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.request_world import OWN, TABLE, World

from edgemoe.config.settings import Route
from edgemoe.front import request_events as events
from edgemoe.front.request_state import ANSWER_S, FETCH_S, MAX_ASKING, MAX_MOVED_ATTEMPTS, OFFER_S
from edgemoe.front.request_table import AVOID_S, RequestState
from edgemoe.ipc.messages import Cancel
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission

LED = Cancel(request="r", attempt=1)


def apart(*decoders: str, route: Route = "pull") -> World:
    """Builds a world in which this box prefills and the others decode."""
    world = World(route, dict.fromkeys(decoders, "decode"))
    world.engines[OWN].role = "prefill"
    return world


def prefilled(world: World, offer: int = 1) -> None:
    """Accepts a request, starts it here, by an offer if it has a number, and ends its prompt."""
    world.accept("r")
    if offer:
        world.happen(events.OfferGranted(offer, f"{OWN}:boot1", "granted"))
    world.happen(events.PromptEnded("", "r", 1, TABLE))


def decide(world: World, place: str) -> None:
    """Has the leader decide on the only open offer."""
    (number,) = [number for number in world.offers if number not in world.used]
    world.happen(world.decide(number, place))


def fetches(world: World) -> list[str]:
    return [told.place for told in world.all_of(events.SendFetch)]


def cancels(world: World) -> list[tuple[str, Cancel]]:
    return [(told.place, told.message) for told in world.all_of(events.SendCancel)]


def emit(world: World, attempt: int, *tokens: int, node: str = "", first: int = 0, finish: str = "") -> None:
    items = [Emission(request="r", attempt=attempt, index=first + n, token=one) for n, one in enumerate(tokens)]
    if finish:
        last = items.pop()
        items.append(Emission(request="r", attempt=attempt, index=last.index, token=last.token, finish=finish))
    world.happen(events.TokensEmitted(node, items))


def tokens(count: int, first: int = 0) -> list[int]:
    return [10_000 * (1 + ord("r") % 1000) + first + n for n in range(count)]


# --- moves


def test_a_request_moves_with_its_tokens_once_the_other_box_has_its_blocks() -> None:
    world = apart("d")
    prefilled(world)
    assert world.submitted[0][1].hand_over
    decide(world, "d:boot1")
    (fetch,) = world.all_of(events.SendFetch)
    message = fetch.message
    assert (fetch.place, message.node, message.prompt, message.attempt) == ("d:boot1", OWN, (1, 2, 3), 1)
    assert message.salt == b"of p"
    emit(world, 1, *tokens(2))
    assert len(world.submitted) == 1, "it goes on where it is until all is there"
    for _ in range(2):
        world.happen(events.PrefixFetched("d", "r", 1))
    place, moved, offer = world.submitted[1]
    assert (place, moved.emitted, moved.attempt, moved.hand_over) == ("d:boot1", tuple(tokens(2)), 2, False)
    assert offer == 2, "the leader hears by which offer it came"
    assert cancels(world) == [("boot1", LED)]
    emit(world, 1, *tokens(1, 2), first=2)
    emit(world, 2, *tokens(1, 2), node="d", first=2)
    assert (world.machine.stale, world.machine.moved, len(world.submitted)) == (1, 1, 2)
    assert dict(world.machine.routed) == {("here", "granted"): 1, ("elsewhere", "handed over"): 1}


FAILURES: dict[str, Callable[[World], None]] = {
    "its engine says so": lambda world: world.happen(events.PrefixFetched("d", "r", 1, "missing")),
    "it was not reached": lambda world: world.happen(events.FetchRefused("r", 1, "d:boot1")),
    "its answer is lost": lambda world: pass_time(world, FETCH_S + ANSWER_S + 1),
    "it has gone": lambda world: world.die("d", is_back=False),
}


def pass_time(world: World, seconds: float = 0.0) -> None:
    world.now_s += seconds
    world.happen(events.TimePassed())


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_blocks_that_one_box_does_not_get_are_fetched_by_a_second_one_and_by_no_third(
    fail: Callable[[World], None],
) -> None:
    for second in ("", "full"):
        world = apart("d", "e", "f")
        prefilled(world)
        decide(world, "d:boot1")
        pass_time(world)
        assert fetches(world) == ["d:boot1"]
        fail(world)
        pass_time(world)
        assert fetches(world) == ["d:boot1", "e:boot1"]
        assert cancels(world) == [("d:boot1", LED)], "what it does for nothing, it gives up"
        assert world.all_of(events.SendWithdrawal) == [(2,)], "the leader does not count on it any more"
        world.happen(events.PrefixFetched("d", "r", 1))
        assert len(world.submitted) == 1, "it is too late for that one"
        world.happen(events.PrefixFetched("e", "r", 1, second))
        assert fetches(world) == ["d:boot1", "e:boot1"]
        if second:
            assert (world.machine.place_of("r"), world.machine.count_moving()) == (("boot1", 1), 0)
        else:
            assert (world.submitted[-1][0], world.submitted[-1][2], world.machine.moved) == ("e:boot1", 0, 1)


@pytest.mark.parametrize("running", [0, 2])
def test_only_a_box_with_a_free_slot_is_a_second_target(running: int) -> None:
    world = apart("d", "e")
    prefilled(world)
    decide(world, "d:boot1")
    world.loads["e"] = running
    world.happen(events.FetchRefused("r", 1, "d:boot1"))
    assert fetches(world) == ["d:boot1"] + ["e:boot1"] * (not running)


def test_fetches_for_an_ended_or_restarted_request_are_given_up_at_once() -> None:
    world = apart("d")
    prefilled(world)
    decide(world, "d:boot1")
    world.die(OWN, is_back=True)
    world.happen(events.EnginesChanged())
    assert cancels(world) == [("d:boot1", LED)]
    world.happen(events.PromptEnded("", "r", 2, TABLE))
    decide(world, "d:boot1")
    emit(world, 2, *tokens(3), finish="length")
    assert cancels(world)[1:] == [("d:boot1", Cancel(request="r", attempt=2))]
    world = apart("d")
    prefilled(world)
    decide(world, "d:boot1")
    world.cancel("r")
    assert sorted(cancels(world), key=str) == [("boot1", LED), ("d:boot1", LED)]
    assert world.all_of(events.SendWithdrawal) == [(2,)]


def test_the_end_of_a_prompt_that_is_told_twice_is_heard_once() -> None:
    world = apart("d")
    prefilled(world)
    world.happen(events.PromptEnded("", "r", 1, TABLE))
    assert [told.stage for told in world.all_of(events.SendOffer)] == ["prefill", "decode"]


def test_a_request_stays_where_it_is_if_the_box_that_has_its_blocks_takes_nothing_any_more() -> None:
    world = apart("d")
    prefilled(world)
    decide(world, "d:boot1")
    world.engines["d"].is_up = False
    world.happen(events.PrefixFetched("d", "r", 1))
    assert (world.machine.place_of("r"), world.machine.state_of("r")) == (("boot1", 1), RequestState.RUNNING)
    assert (len(world.submitted), world.machine.moved) == (1, 0)


def test_a_box_that_has_no_part_in_a_move_moves_nothing() -> None:
    world = apart("d", "e")
    world.accept("r")
    world.happen(events.OfferGranted(1, f"{OWN}:boot1"))
    for node in ("d", "x"):
        world.happen(events.PromptEnded(node, "r", 1))
        world.happen(events.PrefixFetched(node, "r", 1))
    assert world.machine.state_of("r") is RequestState.PREFILLING
    world.happen(events.PromptEnded("", "r", 1))
    decide(world, "d:boot1")
    for why in ("", "missing"):
        world.happen(events.PrefixFetched("e", "r", 1, why))
    assert (fetches(world), world.machine.state_of("r")) == (["d:boot1"], RequestState.FETCHING)


def test_without_a_box_that_decodes_nothing_moves() -> None:
    world = World("pull", {"d": "prefill"})
    world.engines[OWN].role = "prefill"
    prefilled(world)
    decide(world, "x:boot1")
    assert (fetches(world), world.machine.state_of("r")) == ([], RequestState.RUNNING)
    assert world.all_of(events.SendWithdrawal) == [(2,)], "of a place that is none"


def test_a_box_that_the_leader_did_not_name_decodes_by_no_offer() -> None:
    world = apart("d")
    prefilled(world)
    decide(world, "x:boot9")
    world.happen(events.PrefixFetched("d", "r", 1))
    assert [(place, offer) for place, _, offer in world.submitted] == [("boot1", 1), ("d:boot1", 0)]


def test_an_answer_that_comes_once_the_request_is_elsewhere_or_over_moves_nothing() -> None:
    world = apart("d")
    prefilled(world)
    world.die(OWN, is_back=True)
    world.happen(events.EnginesChanged())
    world.happen(events.OfferAnswered(2, "d:boot1"))
    world.happen(events.PrefixFetched("d", "r", 1))
    assert (fetches(world), len(world.submitted)) == ([], 2)
    world.happen(events.PromptEnded("", "r", 2, ExpertSignature(3, b"cd")))
    assert [told.signature for told in world.all_of(events.SendOffer)][1:] == [TABLE, ExpertSignature(3, b"cd")]
    world.cancel("r")
    world.happen(events.OfferAnswered(3, "d:boot1"))
    assert not fetches(world)


def test_moves_are_no_fruitless_attempts_and_are_bounded() -> None:
    world = apart("d", route="least")
    world.accept("r")
    for _ in range(2 * MAX_MOVED_ATTEMPTS):
        place, attempt = world.machine.place_of("r")
        if place == "boot1":
            world.happen(events.PromptEnded("", "r", attempt))
            world.happen(events.PrefixFetched("d", "r", attempt))
        else:
            world.happen(events.SubmitRefused("r", attempt, place))
            pass_time(world, AVOID_S + 1)
    assert world.machine.place_of("r")[0] == "boot1"
    assert (world.machine.blamed, world.submitted[-1][1].hand_over) == (0, False)
    assert world.machine.moved <= MAX_MOVED_ATTEMPTS


# --- offers


def offered(**known: bool) -> World:
    """Builds a world with one request, and a leader elsewhere."""
    world = World("pull", {"d": "both"})
    for name, value in known.items():
        setattr(world, name, value)
    world.accept("r")
    return world


def test_a_request_waits_for_a_leader_only_while_that_leads_in_the_same_epoch() -> None:
    world = offered()
    world.happen(events.EnginesChanged())
    assert world.machine.state_of("r") is RequestState.OFFERED
    world.lead("lead")
    world.happen(events.EnginesChanged())
    assert world.machine.place_of("r") == ("boot1", 1)
    assert dict(world.machine.routed) == {("here", "no leader"): 1}
    assert len(world.all_of(events.SendOffer)) == 1


def test_a_request_waits_for_a_leader_for_so_long_and_takes_its_offer_back() -> None:
    world = offered()
    pass_time(world, OFFER_S - 0.1)
    assert world.machine.state_of("r") is RequestState.OFFERED
    pass_time(world, 0.2)
    assert dict(world.machine.routed) == {("here", "too long"): 1}
    assert world.all_of(events.SendWithdrawal) == [(1,)]


def test_the_word_of_an_epoch_that_is_over_is_not_followed() -> None:
    world = offered()
    world.lead("lead")
    world.happen(events.OfferGranted(1, "d:boot1"))
    assert world.machine.place_of("r") == ("boot1", 1)
    assert world.all_of(events.SendWithdrawal) == [(1,)]


def test_the_leaders_word_is_followed_at_once_and_a_later_one_is_not() -> None:
    world = offered()
    world.happen(events.OfferAnswered(1))
    world.happen(events.OfferGranted(1, "d:boot1", "nearest"))
    assert (world.machine.place_of("r"), world.submitted[0][2]) == (("d:boot1", 1), 1)
    assert dict(world.machine.routed) == {("elsewhere", "nearest"): 1}
    world.happen(events.OfferAnswered(1))
    assert not world.all_of(events.SendWithdrawal), "the answer came after the decision"
    world.happen(events.OfferGranted(7, "d:boot1"))
    assert world.all_of(events.SendWithdrawal) == [(7,)], "nobody waits for that"


def test_an_engine_that_was_granted_and_has_gone_is_given_back_and_another_one_takes_the_request() -> None:
    world = offered()
    world.happen(events.OfferGranted(1, "d:boot0"))
    assert world.all_of(events.SendWithdrawal) == [(1,)]
    assert (world.machine.place_of("r"), dict(world.machine.routed)) == (("boot1", 1), {("here", "gone"): 1})


@pytest.mark.parametrize("told", [TABLE, None])
def test_a_waiting_request_is_offered_with_its_cached_part_s_signature(told: ExpertSignature) -> None:
    world = offered(cached=True)
    assert world.machine.state_of("r") is RequestState.ASKING
    assert not world.all_of(events.SendOffer)
    for _ in range(2):
        world.happen(events.CachedPartReported("r", told))
    assert [offer.signature for offer in world.all_of(events.SendOffer)] == [told]


def test_no_request_is_held_for_a_question_that_would_be_of_no_use() -> None:
    """A request that could start at once, one without an engine, and one whose leader reads no signatures."""
    for route, at_once, is_up in (("eldr", True, True), ("pull", False, False), ("gimbal", False, True)):
        world = World(route, {"d": "both"})  # type: ignore[arg-type]
        world.cached = world.alike = True
        world.at_once, world.engines[OWN].is_up = at_once, is_up
        world.accept("r")
        assert world.machine.state_of("r") is RequestState.OFFERED, route


def test_requests_that_end_during_the_question_are_not_offered_and_questions_are_bounded() -> None:
    world = World("pull", {"d": "both"})
    world.machine.capacity, world.cached = 4 * MAX_ASKING, True
    names = [f"r{n}" for n in range(MAX_ASKING + 2)]
    world.accept(*names)
    asked = world.all_of(events.AskCachedPart)
    assert (len(asked), len(world.all_of(events.SendOffer))) == (MAX_ASKING, 2)
    world.cancel("r0")
    world.happen(events.CachedPartReported("r0", TABLE))
    assert len(world.all_of(events.SendOffer)) == 2


def test_a_request_starts_here_at_once_if_our_engine_knows_its_prompt_or_there_is_no_leader() -> None:
    world = offered(at_once=True, knows=True)
    assert dict(world.machine.routed) == {("here", "at once"): 1}
    world = World("pull", {"d": "both"})
    world.lead("")
    world.at_once = True
    world.accept("r")
    assert dict(world.machine.routed) == {("here", "at once"): 1}


def test_a_prompt_that_our_engine_does_not_know_goes_where_the_leader_says_or_starts_here_after_its_answer() -> None:
    world = offered(at_once=True)
    (offer,) = world.all_of(events.SendOffer)
    assert offer.starts_here
    world.happen(events.OfferAnswered(1))
    assert dict(world.machine.routed) == {("here", "at once"): 1}
    assert world.all_of(events.SendWithdrawal) == [(1,)], "whatever it grants later"
    world = offered(at_once=True)
    world.happen(events.OfferUnanswered(1))
    assert dict(world.machine.routed) == {("here", "unanswered"): 1}


@pytest.mark.parametrize("alike", [True, False])
def test_by_expert_clusters_only_a_request_of_unknown_experts_may_stay_unasked(alike: bool) -> None:
    world = World("eldr", {"d": "both"})
    world.at_once = world.knows = True
    world.alike = alike
    world.accept("r")
    assert (world.machine.state_of("r") is RequestState.OFFERED) == alike


# --- engines


def test_an_engine_that_turned_something_away_is_asked_again_a_moment_later() -> None:
    world = World("least", {"d": "both"})
    world.engines[OWN].is_up = False
    world.accept("r")
    world.happen(events.SubmitRefused("r", 1, "d:boot1"))
    assert world.machine.state_of("r") is RequestState.QUEUED
    pass_time(world, AVOID_S / 2)
    world.happen(events.EnginesChanged())
    assert world.machine.state_of("r") is RequestState.QUEUED
    pass_time(world, AVOID_S)
    world.happen(events.EnginesChanged())
    assert world.machine.place_of("r") == ("d:boot1", 2)


def test_a_request_that_waits_for_the_leaders_word_has_no_engine_looked_at_for_it() -> None:
    """Each beat checks hundreds of such requests."""
    world = offered()
    world.looked_at = 0
    world.happen(events.EnginesChanged())
    pass_time(world)
    assert world.looked_at == 0


def test_refused_requests_are_not_counted_as_routed() -> None:
    world = World("pull", {})
    world.engines[OWN].is_up = False
    world.accept("r")
    world.happen(events.EnginesChanged())
    assert not world.machine.routed
    world.engines[OWN].is_up = True
    world.happen(events.EnginesChanged())
    assert dict(world.machine.routed) == {("here", "alone"): 1}


@pytest.mark.parametrize("role", ["both", "prefill"])
def test_a_request_for_its_prompts_log_probabilities_stays_here_while_there_is_an_engine(role: str) -> None:
    world = World("pull", {"d": "both"})
    world.engines[OWN].role = role  # type: ignore[assignment]
    world.hosted = 64
    world.accept("r", prompt_logprobs=0)
    assert world.machine.state_of("r") is RequestState.QUEUED, "ours is full"
    world.hosted = 0
    world.happen(events.EnginesChanged())
    assert (world.machine.place_of("r"), world.submitted[0][1].hand_over) == (("boot1", 1), False)
    world.die(OWN, is_back=False)
    world.happen(events.EnginesChanged())
    assert world.machine.place_of("r") == ("d:boot1", 2)


def test_another_boxs_load_is_its_report_plus_our_requests_since() -> None:
    world = World("least", {"d": "both"}, slots=4)
    world.hosted = 2
    world.loads["d"] = 1
    world.accept("r", "s", "t")  # 2/4 here, 1/4 there
    assert [place for place, _, _ in world.submitted] == ["d:boot1", "boot1", "d:boot1"]
    world.loads["d"] = 3
    world.happen(events.LoadReported("d", "d:boot1"))
    world.accept("u")
    assert world.submitted[-1][0] == "boot1"


def test_an_answer_after_giving_up_is_cancelled() -> None:
    """A long frame: short messages may overtake it."""
    world = offered()
    world.happen(events.OfferGranted(1, "d:boot1"))
    world.cancel("r")
    world.happen(events.SubmitArrived("r", 1, "d:boot1"))
    world.happen(events.FetchArrived("r", 1, "d:boot1"))
    assert cancels(world) == [("d:boot1", LED)] * 3


def test_patience_ends_though_engines_are_looked_at_at_each_beat() -> None:
    """A fatal request beside endless others, in a cluster that checks all requests at each beat."""
    world = World("least", {})
    world.accept("old", "new")
    world.happen(world.emit("boot1", "old", 20) or events.TimePassed())
    world.die(OWN, is_back=True)
    world.happen(events.EnginesChanged())
    assert world.machine.state_of("new") is RequestState.SUSPECT
    for _ in range(40):
        world.now_s += 0.4
        world.happen(events.EnginesChanged())
    assert world.machine.state_of("new") is RequestState.RUNNING


def test_only_the_box_that_confirmed_the_present_attempt_is_asked_for_it() -> None:
    world = World("least", {"d": "both", "e": "both"})
    world.engines[OWN].is_up = False
    world.accept("r")
    assert world.machine.arrived() == {}
    world.happen(events.SubmitArrived("r", 1, "d:boot1"))
    assert world.machine.arrived() == {"d:boot1": [("r", 1)]}
    world.happen(events.SubmitRefused("r", 1, "d:boot1"))
    assert world.machine.place_of("r") == ("e:boot1", 2)
    assert world.machine.arrived() == {}
