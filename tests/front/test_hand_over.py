"""A front's hand-overs: one move each, tokens in order, nobody to blame, nothing left of what has ended."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from edgemoe.front.request_log import RequestLog
from edgemoe.front.routing.hand_over import ANSWER_S, MOST_ATTEMPTS, PULL_S, HandOver, HandOvers
from edgemoe.ipc.messages import Cancel, FetchPrefixKV, LastChunkStarted, PrefixKVFetched, Submit
from edgemoe.types.expert_signatures import ExpertSignature
from edgemoe.types.request import Emission, Request, Sampling

PROMPT = tuple(range(40))
REQUEST = Request(id="r", prompt=PROMPT, sampling=Sampling(max_tokens=50), seed=1, salt=b"of p")


class Boxes:
    """A box that prefills, and one that decodes while it is there."""

    def __init__(self) -> None:
        self.log = RequestLog(8, self.submit, lambda place, message: self.recalled.append((place, message)))
        self.now_s = 0.0
        self.hand_overs = HandOvers(self.log, self, lambda: self.now_s)
        self.log.ended = self.hand_overs.ended
        self.targets, self.gone, self.lost = ["d:1"], False, ""
        self.late: list[Callable[[str, int], None]] | None = None  # those whose answer is still to come
        self.signatures: list[ExpertSignature | None] = []
        self.submitted: list[tuple[str, Submit]] = []
        self.offers: list[int] = []  # by which they were
        self.pulls: list[tuple[str, FetchPrefixKV]] = []
        self.recalled: list[tuple[str, Cancel]] = []
        self.taken_back: list[int] = []  # offers

    def submit(self, message: Submit) -> str:
        place, offer = self.hand_overs.pop_target(message.request.id)
        if not place:
            place = "p:1"
            message = self.hand_overs.expect(message, place, "p")
        self.submitted.append((place, message))
        self.offers.append(offer)
        return place

    def choose_decoder(self, moving: HandOver, then: Callable[[str, int], None]) -> None:
        assert moving.place == "p:1"
        self.signatures.append(moving.signature)
        if self.late is None:
            then(next((place for place in self.targets if place not in moving.failed), ""), 0 if moving.failed else 7)
        else:
            self.late.append(then)

    def is_open(self, place: str) -> bool:
        return place in self.targets and not self.gone

    def is_there(self, place: str) -> bool:
        return place != self.lost

    def send_pull(self, place: str, message: FetchPrefixKV) -> None:
        self.pulls.append((place, message))

    def recall(self, place: str, message: Cancel, offer: int = 0) -> None:
        self.recalled.append((place, message))
        self.taken_back += [offer] if offer else []

    def emit(self, attempt: int, *tokens: int, first: int = 0) -> None:
        numbered = enumerate(tokens, start=first)
        self.log.take([Emission(request="r", attempt=attempt, index=n, token=token) for n, token in numbered])


def test_a_request_moves_with_its_tokens_once_the_other_box_has_its_blocks() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        assert boxes.submitted[0][1].hand_over
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        ((place, pull),) = boxes.pulls
        assert (place, pull.node, pull.prompt, pull.attempt, pull.salt) == ("d:1", "p", PROMPT, 1, REQUEST.salt)
        boxes.emit(1, 7, 8)
        assert len(boxes.submitted) == 1, "it goes on where it is until all is there"
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=2))
        place, moved = boxes.submitted[1]
        assert (place, moved.emitted, moved.attempt, moved.hand_over) == ("d:1", (7, 8), 2, False)
        assert boxes.recalled == [("p:1", Cancel(request="r", attempt=1))]
        assert boxes.offers == [0, 7], "the leader hears by which offer it came"
        boxes.emit(1, 9, first=2)
        boxes.emit(2, 9, first=2)
        assert boxes.log.stale == 1
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert len(boxes.submitted) == 2
        assert (boxes.hand_overs.done, len(boxes.hand_overs)) == (1, 0)
        boxes.log.check_integrity()


def test_a_hand_over_that_fails_leaves_the_request_where_it_is() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=1, why="corrupt"))
        assert boxes.log.place_of("r") == ("p:1", 1)
        assert (len(boxes.submitted), len(boxes.hand_overs)) == (1, 0)
        assert [place for place, _ in boxes.recalled] == ["d:1"]


def lost(boxes: Boxes) -> None:
    boxes.now_s = PULL_S + ANSWER_S + 1


def gone(boxes: Boxes) -> None:
    boxes.lost = "d:1"


FAILURES: dict[str, Callable[[Boxes], None]] = {
    "its engine says so": lambda boxes: boxes.hand_overs.hear(
        "d", PrefixKVFetched(request="r", attempt=1, blocks=1, why="missing")
    ),
    "it was not reached": lambda boxes: boxes.hand_overs.unsent("r", 1, "d:1"),
    "its answer is lost": lost,
    "it has gone": gone,
}


@pytest.mark.parametrize("fail", FAILURES.values(), ids=FAILURES)
def test_blocks_that_one_box_does_not_get_are_fetched_by_a_second_one_and_by_no_third(
    fail: Callable[[Boxes], None],
) -> None:
    boxes = Boxes()
    boxes.targets = ["d:1", "e:1", "f:1"]
    with boxes.log.open([REQUEST], 600.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        boxes.hand_overs.look()
        assert [place for place, _ in boxes.pulls] == ["d:1"]
        fail(boxes)
        boxes.hand_overs.look()
        assert [place for place, _ in boxes.pulls] == ["d:1", "e:1"]
        assert boxes.recalled == [("d:1", Cancel(request="r", attempt=1))], "what it does for nothing, it gives up"
        assert boxes.taken_back == [7], "the leader does not count on it any more"
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert len(boxes.submitted) == 1, "it is too late for that one"
        boxes.hand_overs.hear("e", PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert (boxes.submitted[-1][0], boxes.offers[-1], boxes.hand_overs.done) == ("e:1", 0, 1)
    boxes = Boxes()
    boxes.targets = ["d:1", "e:1", "f:1"]
    with boxes.log.open([REQUEST], 600.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        fail(boxes)
        boxes.hand_overs.look()
        boxes.hand_overs.hear("e", PrefixKVFetched(request="r", attempt=1, blocks=1, why="full"))
        assert [place for place, _ in boxes.pulls] == ["d:1", "e:1"]
        assert (boxes.log.place_of("r"), len(boxes.hand_overs), len(boxes.submitted)) == (("p:1", 1), 0, 1)


def test_what_is_fetched_for_a_request_that_ends_or_runs_again_is_given_up_at_once() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        boxes.log.replay()  # the box that prefilled has died
        assert boxes.recalled == [("d:1", Cancel(request="r", attempt=1))]
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=2))
        boxes.emit(2, *range(49))
        boxes.log.take([Emission(request="r", attempt=2, index=49, token=1, finish="length")])
        assert boxes.recalled[1:] == [("d:1", Cancel(request="r", attempt=2))]
    assert len(boxes.recalled) == 2
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
    assert boxes.recalled[2:] == [("d:1", Cancel(request="r", attempt=1)), ("p:1", Cancel(request="r", attempt=1))]
    assert (boxes.taken_back, len(boxes.hand_overs)) == ([7, 7, 7], 0)


def test_the_end_of_a_prompt_that_is_told_twice_is_heard_once() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        for _ in range(2):
            boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        assert len(boxes.pulls) == 1


def test_a_request_stays_where_it_is_if_the_box_that_has_its_blocks_takes_nothing_any_more() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        boxes.gone = True
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert boxes.log.place_of("r") == ("p:1", 1)
        assert (len(boxes.submitted), len(boxes.hand_overs), boxes.hand_overs.done) == (1, 0, 0)


def test_a_box_that_has_no_part_in_a_hand_over_moves_nothing() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        for node in ("", "d", "x"):
            boxes.hand_overs.hear(node, LastChunkStarted(request="r", attempt=1))
            boxes.hand_overs.hear(node, PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert (boxes.pulls, len(boxes.submitted)) == ([], 1)
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        for why in ("", "missing"):
            boxes.hand_overs.hear("x", PrefixKVFetched(request="r", attempt=1, blocks=2, why=why))
        assert (len(boxes.pulls), len(boxes.submitted), len(boxes.hand_overs)) == (1, 1, 1)


def test_without_a_box_that_decodes_nothing_moves() -> None:
    boxes = Boxes()
    boxes.targets = []
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        assert (boxes.pulls, len(boxes.hand_overs)) == ([], 0)


def test_an_answer_that_comes_once_the_request_is_elsewhere_or_over_moves_nothing() -> None:
    boxes, table = Boxes(), ExpertSignature(40, b"ab")
    boxes.late = []
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1, signature=table))
        boxes.log.turned_away("r", 1)
        boxes.late[0]("d:1", 0)
        assert not boxes.pulls
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=2))
        assert boxes.signatures == [table, None]
    boxes.hand_overs.look()
    boxes.late[1]("d:1", 0)
    assert not boxes.pulls
    assert not len(boxes.hand_overs)


def test_news_of_an_earlier_attempt_move_nothing() -> None:
    """The box that prefilled died meanwhile, and the request is prefilled again."""
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
        boxes.log.replay()
        assert boxes.log.place_of("r") == ("p:1", 2)
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=1, blocks=2))
        assert len(boxes.submitted) == 2
        boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=2))
        boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=2, blocks=2))
        assert boxes.submitted[-1][0] == "d:1"


def test_hand_overs_are_no_fruitless_attempts_and_are_bounded() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        for attempt in range(1, 2 * MOST_ATTEMPTS, 2):
            boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=attempt))
            boxes.hand_overs.hear("d", PrefixKVFetched(request="r", attempt=attempt, blocks=2))
            place, number = boxes.log.place_of("r")
            if place == "d:1":
                boxes.log.turned_away("r", number)  # by the box that decodes
        assert boxes.log.place_of("r")[0] == "p:1"
        assert boxes.log.blamed == 0
        assert not boxes.submitted[-1][1].hand_over
        assert boxes.hand_overs.done <= MOST_ATTEMPTS


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    boxes = Boxes()
    with boxes.log.open([REQUEST], 60.0):
        assert len(boxes.hand_overs) == 1
    boxes.hand_overs.hear("p", LastChunkStarted(request="r", attempt=1))
    boxes.hand_overs.look()
    assert (boxes.pulls, len(boxes.hand_overs)) == ([], 0)
