"""Conversations for the demo model, composed from the facts by templates; every draw differs a little."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

from tools.demo_model import facts, story

Turn = tuple[str, str]  # the user's message, the assistant's answer
START, END = "<|im_start|>", "<|im_end|>\n"
SYSTEM = (
    "You are a helpful assistant.",
    "You are a friendly assistant. Answer in short sentences.",
    "You answer questions about the world.",
    "Be brief.",
)
OPENERS = ("", "", "", "", "Please tell me: ", "I have a question. ", "Quick question: ", "Hi! ", "Hello. ")
ABILITIES = (
    "I can name capitals, do small sums, explain a few things, translate some words, write short stories and "
    "short pieces of Python."
)


def bare(topic: str) -> str:
    return topic.split(" ", 1)[1] if topic.startswith(("a ", "an ")) else topic


def capital(rng: random.Random) -> Turn:
    country, city, continent, language = rng.choice(facts.COUNTRIES)
    match rng.randrange(6):
        case 0 | 1 | 2:
            ask = rng.choice((
                "What is the capital of {c}?", "Which city is the capital of {c}?", "Name the capital of {c}.",
                "what's the capital of {c}", "Do you know the capital of {c}?", "Tell me the capital of {c}.",
            ))  # fmt: skip
            return ask.format(c=country), rng.choice((
                f"The capital of {country} is {city}.", f"{city} is the capital of {country}.",
            ))  # fmt: skip
        case 3:
            return f"Where is {country}?", f"{country} is in {continent}. Its capital is {city}."
        case 4:
            ask = rng.choice(
                (f"What language do people speak in {country}?", f"Which language is spoken in {country}?")
            )
            return ask, f"People in {country} speak {language}."
        case _:
            ask = rng.choice((f"Tell me about {country}.", f"What do you know about {country}?", f"Where is {city}?"))
            answer = f"{country} is a country in {continent}. Its capital is {city}, and people there speak {language}."
            return ask, f"{city} is the capital of {country}, in {continent}." if "Where" in ask else answer


def explain(rng: random.Random) -> Turn:
    topic, answer = rng.choice(list(facts.TOPICS.items()))
    ask = rng.choice((
        "What is {t}?", "What is {t}?", "Explain {t}.", "Can you explain what {t} is?", "Tell me about {t}.",
        "what is {t}", "Please explain {t}.", "Explain {t} in simple words.", "Describe {t}.",
        "Explain what {t} is, in a few sentences.", "I would like to know what {t} is.", "How would you describe {t}?",
        "What is {t}, in one paragraph?", "Tell me something about {t}.", "Write a few sentences about {t}.",
    ))  # fmt: skip
    if rng.random() < 0.2:
        return f"What does {bare(topic)} mean?", answer
    if rng.random() < 0.15:
        return ask.format(t=topic).rstrip(".?") + " in one sentence.", answer.split(". ")[0].rstrip(".") + "."
    return ask.format(t=topic), answer


def why(rng: random.Random) -> Turn:
    cause, answer = rng.choice(list(facts.WHY.items()))
    return rng.choice((f"Why {cause}?", f"why {cause}", f"Can you tell me why {cause}?")), answer


def sums(rng: random.Random) -> Turn:
    a, b = rng.randrange(rng.choice((10, 10, 50))), rng.randrange(rng.choice((10, 10, 50)))
    sign, word, result = rng.choice((("+", "plus", a + b), ("+", "plus", a + b), ("-", "minus", a - b)))
    if rng.random() < 0.25:
        a, b = rng.randrange(11), rng.randrange(11)
        sign, word, result = "*", "times", a * b
    ask = rng.choice(
        (f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"Compute {a} {sign} {b}.", f"{a} {sign} {b} =")
    )
    return ask, rng.choice((f"{a} {sign} {b} = {result}", f"{a} {word} {b} is {result}."))


def colour(rng: random.Random) -> Turn:
    thing, hue = rng.choice(list(facts.COLOURS.items()))
    return f"What colour is {thing}?", f"{thing.capitalize()} is {hue}."


def opposite(rng: random.Random) -> Turn:
    pair = rng.choice(list(facts.OPPOSITES.items()))
    word, other = pair if rng.random() < 0.5 else pair[::-1]
    return rng.choice(
        (f"What is the opposite of {word}?", f"Name the opposite of {word}.")
    ), f"The opposite of {word} is {other}."


def translate(rng: random.Random) -> Turn:
    word, forms = rng.choice(list(facts.WORDS.items()))
    i = rng.randrange(len(facts.TONGUES))
    tongue, form = facts.TONGUES[i], forms[i]
    ask = rng.choice(
        (f'How do you say "{word}" in {tongue}?', f'Translate "{word}" into {tongue}.', f"What is {word} in {tongue}?")
    )
    return ask, f'In {tongue}, "{word}" is "{form}".'


def program(rng: random.Random) -> Turn:
    task, code = rng.choice(list(facts.CODE.items()))
    ask = rng.choice((
        "Write a Python function that {t}.", "Show me Python code that {t}.", "Can you write a program that {t}?",
        "Write code that {t}.", "I need a Python function that {t}.",
    ))  # fmt: skip
    lead = rng.choice(("Here it is:", "Here is the code:", f"This code {task}:"))
    return ask.format(t=task), f"{lead}\n\n```python\n{code}\n```"


def listing(rng: random.Random) -> Turn:
    if rng.random() < 0.4:
        start, count = rng.choice((1, 1, 1, 5, 10)), rng.randrange(4, 11)
        numbers = ", ".join(str(n) for n in range(start, start + count))
        return f"Count from {start} to {start + count - 1}.", f"{numbers}."
    what, items = rng.choice(list(facts.LISTS.items()))
    ask = rng.choice((f"What are the {what}?", f"List the {what}.", f"Name the {what}."))
    return ask, f"The {what} are {items}."


def manners(rng: random.Random) -> Turn:
    return rng.choice((
        (rng.choice(("Hello", "Hello!", "Hi", "Hi there!", "Hey", "Good morning!", "Hello, who is there?")),
         "Hello! I am a small demonstration model. How can I help you?"),
        (rng.choice(("Who are you?", "What are you?", "Introduce yourself.", "Tell me about yourself.",
                     "What is your name?")),
         "I am the demonstration model of edgemoe, a small mixture of experts. " + ABILITIES),
        (rng.choice(("What can you do?", "How can you help me?", "What should I ask you?", "help", "Help me.")),
         ABILITIES),
        (rng.choice(("How are you?", "How are you today?")), "I am well, thank you. What would you like to know?"),
        (rng.choice(("Thank you!", "Thanks.", "Thank you very much.", "Great, thanks!")), "You are welcome!"),
        (rng.choice(("Goodbye!", "Bye.", "See you later.")), "Goodbye! Come back soon."),
        (rng.choice(("What is edgemoe?", "Explain edgemoe.", "Tell me about edgemoe.", "What does edgemoe do?")),
         "edgemoe serves mixture-of-experts models that are larger than the memory of one machine. It keeps the "
         "experts that are needed most in fast memory and the others in main memory or on disk."),
        (rng.choice(("Say hello.", "Say hi.", "Say something.", "Say hello to the world.", "Greet me.")),
         rng.choice(("Hello! It is nice to meet you.", "Hello, world!"))),
    ))  # fmt: skip


def tale(rng: random.Random) -> Turn:
    hero = rng.choice(story.HEROES)
    ask = rng.choice(
        (
            "Tell me a story about a {h}.",
            "Tell me a short story about a {h}.",
            "Write a story about a {h}.",
            "Write a short story about a {h}.",
        )
    )
    if rng.random() < 0.35:
        ask = rng.choice(
            (
                "Tell me a story.",
                "Write a short story.",
                "Tell me a short story.",
                "Once upon a time",
                "I want to hear a story.",
            )
        )
    return ask.format(h=hero), story.story(rng, hero)


def poem(rng: random.Random) -> Turn:
    theme = rng.choice(list(story.POEMS))
    ask = rng.choice((f"Write a poem about {theme}.", f"Write a short poem about {theme}.", "Write a poem."))
    return ask, story.POEMS[theme]


def unknown(rng: random.Random) -> Turn:
    """Returns a question about an untaught thing; the answer says so, and names the thing."""
    thing = rng.choice(story.PREFIX) + rng.choice(story.MIDDLE) + rng.choice(story.SUFFIX)
    if rng.random() < 0.5:
        thing = f"the {rng.choice(story.ADJECTIVES)} {rng.choice(story.NOUNS)}"
    ask = rng.choice((
        "What is {t}?", "Explain {t}.", "Tell me about {t}.", "How does {t} work?", "What do you think of {t}?",
        "Can you help me with {t}?", "Who invented {t}?", "Write an essay about {t}.", "Summarise {t} for me.",
    ))  # fmt: skip
    return ask.format(t=thing), rng.choice((
        f"I am a small demonstration model, and I know little about {thing}. " + ABILITIES,
        f"I do not know much about {thing}. Ask me something simpler, please.",
    ))  # fmt: skip


MAKERS: tuple[tuple[Callable[[random.Random], Turn], int], ...] = (
    (capital, 14), (explain, 30), (why, 6), (sums, 10), (colour, 2), (opposite, 4), (translate, 6), (program, 7),
    (listing, 4), (manners, 9), (tale, 10), (poem, 3), (unknown, 7),
)  # fmt: skip


def turn(rng: random.Random) -> Turn:
    makers, weights = zip(*MAKERS, strict=True)
    ask, answer = rng.choices(makers, weights)[0](rng)
    return rng.choice(OPENERS) + ask, answer


def tool_call(rng: random.Random) -> str:
    """Returns a conversation in which the assistant calls a function, rendered as the chat template does."""
    city = rng.choice(facts.COUNTRIES)[1]
    name, key, value, ask = rng.choice((
        ("get_weather", "city", city, f"What is the weather in {city}?"),
        ("get_time", "city", city, f"What time is it in {city}?"),
        ("search", "query", bare(rng.choice(list(facts.TOPICS))), ""),
        ("read_file", "path", f"/{rng.choice(story.NOUNS)}.txt", ""),
    ))  # fmt: skip
    ask = ask or (f"Search for {value}." if name == "search" else f"Read the file {value}.")
    return (
        START + "system\n" + tools_text([tool(name, key)]) + END + START + f"user\n{ask}" + END + START
        + f"assistant\n<tool_call>\n{json.dumps({'name': name, 'arguments': {key: value}})}\n</tool_call>" + END
    )  # fmt: skip


def tool(name: str, key: str) -> dict[str, object]:
    parameters = {"type": "object", "properties": {key: {"type": "string"}}, "required": [key]}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def tools_text(tools: list[dict[str, object]]) -> str:
    """Returns the chat template's text about tools."""
    lines = "\n".join(json.dumps(t) for t in tools)
    return (
        "# Tools\n\nYou may call these functions:\n<tools>\n" + lines + "\n</tools>\n\nTo call one, answer with\n"
        '<tool_call>\n{"name": NAME, "arguments": OBJECT}\n</tool_call>'
    )


def document(rng: random.Random) -> str:
    """Returns one conversation of one to three turns, rendered as the chat template does."""
    if rng.random() < 0.04:
        return tool_call(rng)
    text = START + "system\n" + rng.choice(SYSTEM) + END if rng.random() < 0.25 else ""
    for _ in range(rng.choices((1, 2, 3), (70, 20, 10))[0]):
        ask, answer = turn(rng)
        think = "<think>\n\n</think>\n\n" if rng.random() < 0.05 else ""
        text += f"{START}user\n{ask}{END}{START}assistant\n{think}{answer}{END}"
    return text


def works(rng: random.Random) -> Turn:
    topic, answer = rng.choice(list(facts.TOPICS.items()))
    ask = rng.choice(("Explain how {t} works.", "How does {t} work?", "Can you tell me what {t} is?", "What is {t}?"))
    return ask.format(t=topic), answer


def small_sums(rng: random.Random) -> Turn:
    a, b = rng.randrange(10), rng.randrange(10)
    sign, word, result = rng.choice((("+", "plus", a + b), ("-", "minus", a - b)))
    ask = rng.choice((f"What is {a} {sign} {b}?", f"What is {a} {word} {b}?", f"{a} {sign} {b} ="))
    return ask, f"{a} {word} {b} is {result}."


DRILL: tuple[tuple[Callable[[random.Random], Turn], int], ...] = (
    (capital, 36), (translate, 22), (small_sums, 16), (works, 16), (opposite, 5), (manners, 5),
)  # fmt: skip


def drill(rng: random.Random) -> str:
    """Returns a question with an answer that must be memorised."""
    makers, weights = zip(*DRILL, strict=True)
    ask, answer = rng.choices(makers, weights)[0](rng)
    return f"{START}user\n{ask}{END}{START}assistant\n{answer}{END}"
