"""Very short stories and verses, put together from parts."""

from __future__ import annotations

import random

HEROES = (
    "cat",
    "dog",
    "bird",
    "fox",
    "robot",
    "girl",
    "boy",
    "bear",
    "mouse",
    "fish",
    "king",
    "farmer",
    "baker",
    "sailor",
    "rabbit",
)
NAMES = ("Tom", "Anna", "Max", "Lily", "Ben", "Mia", "Leo", "Nora", "Sam", "Ella", "Finn", "Ida")
PLACES = (
    "in a small house by the sea",
    "at the edge of a forest",
    "in a quiet village",
    "near a wide river",
    "in a big city",
    "on a green hill",
)
TRAITS = ("kind", "curious", "brave", "clever", "shy", "cheerful", "careful", "hungry")
FINDS = (
    "a golden key",
    "an old map",
    "a red ball",
    "a lost letter",
    "a silver ring",
    "a strange door",
    "a warm lamp",
    "a tiny boat",
)
SPOTS = ("under a tree", "behind the house", "in the garden", "by the water", "in an old box", "on the road")
FRIENDS = ("an old owl", "a small mouse", "a friendly neighbour", "a tall stranger", "a little bird", "a wise turtle")
ADVICE = (
    "Take it home and keep it safe",
    "Give it back to its owner",
    "Share it with your friends",
    "Wait until morning and look again",
    "Follow the path behind the hill",
)
DEEDS = (
    "walked all day",
    "ran as fast as the wind",
    "asked everyone on the way",
    "climbed the hill",
    "crossed the bridge",
)
ENDS = (
    "From that day on they were good friends.",
    "That night everyone was happy.",
    "And it was the best day of the year.",
    "They laughed and went home together.",
    "After that, nobody was lonely any more.",
)

POEMS = {
    "the sea": "The sea is wide, the sea is deep,\nit sings the little ships to sleep.\nThe moon looks down, the waves are bright,\nand all the world is still tonight.",
    "winter": "The snow comes down without a sound\nand lays a blanket on the ground.\nThe trees are white, the sky is grey,\nand home is warm at end of day.",
    "spring": "The snow is gone, the fields are green,\nthe brightest days that we have seen.\nThe birds come back, the flowers grow,\nand all the quiet rivers flow.",
    "the moon": "The moon looks in at every door,\nit lays its silver on the floor.\nIt asks for nothing, gives its light,\nand walks alone across the night.",
    "a cat": "My cat is soft, my cat is small,\nshe sleeps beside the garden wall.\nShe dreams of mice and bowls of cream,\nand smiles a little in her dream.",
    "computers": "The small machine is never tired,\nits thoughts are switched, its heart is wired.\nIt counts the hours, it keeps the time,\nand now it even makes a rhyme.",
}  # fmt: skip

PREFIX = (
    "quan",
    "micro",
    "tri",
    "hydro",
    "neo",
    "poly",
    "geo",
    "astro",
    "bio",
    "chro",
    "del",
    "fer",
    "gal",
    "kor",
    "mag",
    "nor",
    "pel",
    "ros",
    "sol",
    "ver",
)
MIDDLE = ("ta", "lo", "mi", "ne", "ri", "so", "va", "du", "ke", "phi", "no", "la")
SUFFIX = ("graphy", "metry", "logy", "nics", "tion", "ism", "ment", "ria", "dex", "lon", "tron", "sis")
ADJECTIVES = (
    "second",
    "old",
    "northern",
    "royal",
    "secret",
    "modern",
    "ancient",
    "public",
    "local",
    "final",
    "great",
    "hidden",
    "common",
    "foreign",
    "linear",
    "civil",
)
NOUNS = (
    "treaty",
    "engine",
    "theorem",
    "museum",
    "bridge",
    "parliament",
    "harvest",
    "market",
    "railway",
    "theory",
    "contract",
    "orchestra",
    "protocol",
    "report",
    "budget",
    "election",
    "temple",
    "archive",
    "festival",
    "recipe",
)


def story(rng: random.Random, hero: str) -> str:
    """Returns six to eight plain sentences with a beginning, a middle and an end."""
    name, trait, find, friend = (rng.choice(x) for x in (NAMES, TRAITS, FINDS, FRIENDS))
    parts = [
        f"Once upon a time there was a {trait} {hero} called {name}.",
        f"{name} lived {rng.choice(PLACES)}.",
        f"One day {name} found {find} {rng.choice(SPOTS)}.",
        rng.choice(
            (f'"What is this?" said {name}.', f"{name} did not know what to do.", f"{name} was very surprised.")
        ),
        f'Then {friend} came by and said: "{rng.choice(ADVICE)}."',
        f"So {name} {rng.choice(DEEDS)}, and in the evening all was well.",
        rng.choice(ENDS),
    ]
    return " ".join(parts)
