"""Tokens of invitations: read as printed, and refused in every other form."""

from __future__ import annotations

import base64
import random

import msgspec
import pytest
import xxhash

from edgemoe.cluster.rpc.invite_token import MAX_SEEDS, PREFIX, InviteToken, Seed, read_token, z85_bytes
from edgemoe.cluster.rpc.keys import make_secret
from edgemoe.errors import ConfigError

SECRET = make_secret()
SEED = Seed("a", "192.0.2.7:7540", SECRET.public.decode())
TOKEN = InviteToken("0123456789abcdef", "b", z85_bytes(SECRET.secret), 1e9, (SEED,))


def text_of(packed: bytes) -> str:
    """Returns any bytes as a token with the right checksum."""
    return PREFIX + base64.urlsafe_b64encode(packed + xxhash.xxh32_digest(packed)).decode().rstrip("=")


def test_a_token_is_read_as_it_was_printed_and_shows_its_key_to_nobody() -> None:
    assert read_token(f" {TOKEN.text()}\n") == TOKEN
    assert (TOKEN.key.secret, TOKEN.key.public) == (SECRET.secret, SECRET.public)
    assert SECRET.secret.decode() not in repr(TOKEN)
    assert repr(TOKEN.secret) not in repr(TOKEN)
    many = msgspec.structs.replace(TOKEN, node="n" * 63, seeds=(SEED,) * MAX_SEEDS)
    assert read_token(many.text()) == many


@pytest.mark.parametrize(
    "changed",
    [
        {"node": ""},
        {"node": "../x"},
        {"node": "x" * 64},
        {"secret": b"short"},
        {"until_s": -1.0},
        {"until_s": 1e300},
        {"seeds": ()},
        {"seeds": (SEED,) * (MAX_SEEDS + 1)},
        {"seeds": (Seed("a", "nowhere", SEED.key),)},
        {"seeds": (Seed("a", SEED.address, "short"),)},
        {"cluster": "x" * 65},
    ],
    ids=range(11),
)
def test_a_token_with_an_impossible_part_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        read_token(msgspec.structs.replace(TOKEN, **changed).text())


def test_no_damaged_token_is_taken_and_none_raises_anything_else() -> None:
    text, draw = TOKEN.text(), random.Random(7)
    damaged = [text[:length] for length in range(len(text))]
    damaged += [text + "A", text + " x", text + "é", PREFIX + "A" * 5000, text.replace(PREFIX, "", 1)]
    damaged += [text_of(draw.randbytes(draw.randrange(200))) for _ in range(200)]
    for _ in range(300):
        at = draw.randrange(len(PREFIX), len(text))
        other = draw.choice("ABCxyz019-_")
        damaged += [text[:at] + other + text[at + 1 :]] if text[at] != other else []
    letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_="
    damaged += [text[:-1] + last for last in letters if last != text[-1]]  # of some only bits differ that say nothing
    for each in damaged:
        with pytest.raises(ConfigError):
            read_token(each)
