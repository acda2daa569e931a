"""Messages between front and engine by which a request that one box has prefilled goes on at another.

    LastChunk     engine -> front   the end of a prompt is computed, or about to be, and its front asked to be told
    PullPrefix    front -> engine   fetch what another engine has for this prompt into the prefix cache
    PrefixPulled  engine -> front   what came of it

Between boxes they travel as Submit and Emissions do.
"""

from __future__ import annotations

from edgemoe.cluster.rpc.messages.choices import SignatureTable
from edgemoe.cluster.rpc.protocol import Message
from edgemoe.types.bounds import Attempt, Milliseconds, Name, Salt, Small, Text, Tokens


class LastChunk(Message, frozen=True, kw_only=True, tag="LastChunk"):
    """Says of a request submitted with `hand_over` that the last of its tokens so far are, or have just been, computed.

    Before they are, where most of the prompt was computed by steps before: by then its signature says enough.
    """

    since = 2
    request: Name
    attempt: Attempt
    signature: SignatureTable | None = None


class PullPrefix(Message, frozen=True, kw_only=True, tag="PullPrefix"):
    """Asks the engine to fetch the blocks of this prompt from a peer's, those that are still computed there too.

    Answered with PrefixPulled, after `remaining_ms` at the latest. Only the prefix cache keeps what comes of it.
    """

    since = 2
    request: Name
    attempt: Attempt
    node: Name  # whose engine has them
    prompt: Tokens
    salt: Salt = b""  # of the request
    remaining_ms: Milliseconds = 60_000.0


class PrefixPulled(Message, frozen=True, kw_only=True, tag="PrefixPulled"):
    """Says how many of a prompt's blocks are here. `why` is "" where all are, else the reason in a word."""

    since = 2
    request: Name
    attempt: Attempt
    blocks: Small = 0
    why: Text = ""
