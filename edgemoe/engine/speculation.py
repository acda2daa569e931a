"""Speculative decoding: drafts that a step checks beside each sequence's own token (see docs/design/drafts.md).

Random numbers are a hash of seed, choice and position. So a draft is checked by choosing each token as without drafts,
and comparing: no token differs, whether it is the likeliest or drawn.
"""

from __future__ import annotations

from edgemoe.engine.blocks import BlockManager
from edgemoe.engine.draft_governor import AcceptanceCounts, DraftedStep, DraftGovernor
from edgemoe.engine.fairness import StepShares
from edgemoe.engine.ngram_drafts import Draft, NgramLookup
from edgemoe.engine.scheduler import ScheduledWork
from edgemoe.engine.sequence import Sequence
from edgemoe.engine.steps import CommittedStep, count_active_experts
from edgemoe.telemetry import metrics as names
from edgemoe.telemetry.metrics import named

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
