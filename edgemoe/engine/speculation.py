"""Speculative decoding: drafts that a step checks beside each sequence's own token (see docs/design/drafts.md).

Random numbers are a hash of seed, choice and position. So a draft is checked by choosing each token as without drafts,
and comparing: no token differs, whether it is the likeliest or drawn. A draft is looked up where the last tokens of the
text occurred before. The text is the request's expected text, if it has one, then prompt and output.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Row
from typing import NamedTuple

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.draft_governor import AcceptanceCounts, DraftedStep, DraftGovernor
from edgemoe.engine.fairness import StepShares
from edgemoe.engine.scheduler import ScheduledWork
from edgemoe.engine.sequence import Sequence
from edgemoe.engine.steps import CommittedStep, count_active_experts
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named

LEAST, LONGEST = 2, 32  # tokens of a match, which is not followed further back
LOOKS = 16  # earlier occurrences that are compared
BORDER = -1  # between the expected text and the prompt: no draft crosses it
MOST_INDEXED = 1 << 16  # tokens of a text, its last ones, when the look-up begins


class Draft(NamedTuple):
    """Drafted tokens, and how many tokens before them match the end of the text."""

    tokens: tuple[int, ...]
    match: int


NO_DRAFT = Draft((), 0)


class NgramLookup:
    """Indexes a growing text by pairs of tokens. Each pair leads to its occurrences, the latest one first."""

    def __init__(self, expected: Row[int], text: Row[int]) -> None:
        self._tokens: list[int] = []
        self._latest: dict[tuple[int, int], int] = {}  # pair -> the place behind it
        self._earlier: list[int] = []  # of each place: the one of the same pair before it, or -1
        self._seen = max(0, len(text) - MOST_INDEXED)  # tokens of the text so far
        if expected:
            self._append([*expected[-MOST_INDEXED:], BORDER])
        self.follow(text)

    def follow(self, text: Row[int]) -> None:
        """Indexes the tokens that the text has gained."""
        self._append(text[self._seen :])
        self._seen = len(text)

    def draft(self, most: int) -> Draft:
        """Returns at most `most` tokens that followed the longest match of the text's end, the latest of equals.

        A draft that reaches the text's end goes on periodically.
        """
        tokens, best, place = self._tokens, 0, -1
        if most < 1 or len(tokens) < LEAST:
            return NO_DRAFT
        here = self._latest.get((tokens[-2], tokens[-1]), -1)
        for _ in range(LOOKS):
            if here < 0 or best == LONGEST:
                break
            if tokens[here] != BORDER and (match := self._match(here)) > best:
                best, place = match, here
            here = self._earlier[here]
        if place < 0:
            return NO_DRAFT
        period = len(tokens) - place
        found = [tokens[place + n % period] for n in range(most)]
        if BORDER in found:
            del found[found.index(BORDER) :]
        return Draft(tuple(found), best) if found else NO_DRAFT

    def _append(self, tokens: Iterable[int]) -> None:
        known, latest, earlier = self._tokens, self._latest, self._earlier
        for token in tokens:
            place, before = len(known), -1
            if place >= LEAST:
                pair = known[-2], known[-1]
                before = latest.get(pair, -1)
                latest[pair] = place
            earlier.append(before)
            known.append(token)

    def _match(self, place: int) -> int:
        """Counts the tokens before `place` that equal the text's last ones."""
        tokens, end = self._tokens, len(self._tokens)
        match = LEAST
        while match < min(LONGEST, place) and tokens[place - match - 1] == tokens[end - match - 1] != BORDER:
            match += 1
        return match


MOST_ROWS = 16  # of a step with drafts: kernels and graphs of few rows compute no more
MOST_DRAFTED = 8  # tokens of one draft


class RequestDrafts:
    """One request's look-up and its counts of accepted tokens."""

    def __init__(self, seq: Sequence, overall: AcceptanceCounts) -> None:
        request = seq.request
        expected = (request.prompt[-1], *request.expected) if request.expected else ()  # is drafted from its begin on
        self.lookup = NgramLookup(expected, seq.tokens)
        self.acceptance = AcceptanceCounts(overall)
        self.match = 0  # of the draft in the current step


class Speculation:
    """Drafts for steps that only decode, as far as the governor expects a gain."""

    def __init__(self, blocks: BlockManager, shares: StepShares, context_tokens: int) -> None:
        self.governor = DraftGovernor()
        self.accepted = self.rejected = 0  # drafted tokens in all
        self._blocks, self._shares, self.context_tokens = blocks, shares, context_tokens

    def metrics(self) -> dict[str, float]:
        """Returns its metrics by their final names. May be called from any thread."""
        return {
            named(names.DRAFT_TOKENS, result="accepted"): self.accepted,
            named(names.DRAFT_TOKENS, result="rejected"): self.rejected,
            names.DRAFT_SAVED_SECONDS: self.governor.balance_s,
            names.DRAFT_EXPERT_SECONDS: self.governor.expert_s,
        }

    def add_drafts(self, works: list[ScheduledWork]) -> list[ScheduledWork]:
        """Returns the works with drafts to check, each with places for its keys and values."""
        if not works or len(works) >= MOST_ROWS or not self.governor.is_asked():
            return works
        if not all(work.seq.decoding and not work.seq.missing_expert for work in works):
            return works
        drafts = [self._draft(work.seq) for work in works]
        if not any(draft.tokens for draft in drafts):
            return works
        chances = [
            self._drafts_of(work.seq).acceptance.chances(draft.match, len(draft.tokens))
            for work, draft in zip(works, drafts, strict=True)
        ]
        lengths = self.governor.lengths(chances, len(works), self._room(works))
        return [
            self._with_draft(work, draft, length) if length else work
            for work, draft, length in zip(works, drafts, lengths, strict=True)
        ]

    def observe(self, step: CommittedStep) -> None:
        """Adds a step that only decoded, whose drafts are checked."""
        routing, drafted, right, sure = step.computed.routing, 0, 0, step.experts
        if len(routing.meta.drafted):
            drafted, right = int(routing.meta.drafted.sum()), int(step.accepted.sum())
            sure = count_active_experts(routing.ids[:, routing.meta.sure_rows])
            for work, accepted in zip(step.computed.works, step.accepted.tolist(), strict=True):
                if work.draft:
                    self._observe_draft(work, accepted)
        rows = len(routing.meta.tokens)
        self.governor.observe(DraftedStep(rows, drafted, right, step.experts, sure, step.step_s, routing.stall_s))

    def _observe_draft(self, work: ScheduledWork, right: int) -> None:
        """Counts a checked draft, of which the first `right` tokens were accepted."""
        drafts, count = self._drafts_of(work.seq), len(work.draft)
        drafts.acceptance.observe(drafts.match, count, right)
        self.accepted += right
        self.rejected += count - right
        self._blocks.trim(work.seq)

    def _draft(self, seq: Sequence) -> Draft:
        drafts = self._drafts_of(seq)
        drafts.lookup.follow(seq.tokens)
        ends = min(seq.sampling.max_tokens - seq.emitted, self.context_tokens - len(seq.tokens)) - 1
        return drafts.lookup.draft(min(MOST_DRAFTED, ends))

    def _drafts_of(self, seq: Sequence) -> RequestDrafts:
        if seq.drafts is None:
            seq.drafts = RequestDrafts(seq, self.governor.acceptance)
        return seq.drafts

    def _room(self, works: list[ScheduledWork]) -> int:
        """Returns how many drafted tokens the step may have; fewer where they would lengthen others' streams."""
        most = MOST_ROWS
        if len({work.seq.identity.principal for work in works}) > 1:
            most = min(most, self._shares.tokens_within_stretch(len(works)))
        return most - len(works)

    def _with_draft(self, work: ScheduledWork, draft: Draft, length: int) -> ScheduledWork:
        self._drafts_of(work.seq).match = draft.match
        places = self._blocks.extend(work.seq, length)
        return work._replace(draft=draft.tokens[: max(0, places)])
