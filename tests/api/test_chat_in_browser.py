"""The page's chat in a real browser: Markdown, stop, edit, regenerate, history, files, keyboard."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from support.chromium import DESKTOP, PHONE, WHERE, WITHOUT, Tab
from support.front_kit import KEY, keyed_address, running, settings_for, write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not WHERE, reason=WITHOUT),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]
PICTURES = Path(os.environ.get("PICTURES", "/nowhere"))  # a folder to keep the pictures in
SPOKEN = """\
# Title
Some *soft*, **loud** and `plain` words, [a link](https://example.org/a_(b)) and <b>no tag</b>.

1. one
2. two
   - inner
   - **bold**

> quoted

| a | b |
|---|--:|
| 1 | 2 |

```python
def f(x):
    return x < 1 and "<i>"
```
[bad](javascript:alert(1)) ![image](https://example.org/x.png)
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("c")
    address, api = keyed_address(folder)
    api |= {"aliases": ["other"]}
    async with running(settings_for(folder, write_model(folder / "model"), api=api)):
        yield f"http://{address}/"


@pytest_asyncio.fixture(loop_scope="module")
async def chat(tab: Tab, page: str) -> Tab:
    """The page with its key and an empty memory, on a wide screen."""
    await tab.go("about:blank")
    await tab.shape()
    await tab.go(f"{page}#{KEY}")
    await tab.run("localStorage.clear()")
    await tab.go("about:blank")
    await tab.go(page)
    await tab.until("document.getElementById('state').textContent === 'ready'")
    return tab


async def say(tab: Tab, words: str) -> None:
    await tab.run(f"document.getElementById('words').value = {json.dumps(words)}")
    await tab.run("document.getElementById('ask').requestSubmit()")


async def answered(tab: Tab, count: int) -> None:
    await tab.until(
        f"document.querySelectorAll('.turn.model .tools').length === {count} && !document.querySelector('.busy')"
    )


async def press(tab: Tab, where: str, label: str, which: int = -1) -> None:
    await tab.run(
        f"[...document.querySelectorAll({where!r})].at({which}).querySelectorAll('button').forEach("
        f"(one) => one.textContent === {label!r} && one.click())"
    )


async def texts(tab: Tab, where: str) -> list[str]:
    found: list[str] = await tab.run(f"[...document.querySelectorAll({where!r})].map((one) => one.textContent)")
    return found


async def sent(tab: Tab, does: str) -> Any:
    """Returns the body of the request for an answer that a script causes."""
    await tab.run(
        "window.bodies = []; window.plain ??= window.fetch;"
        "window.fetch = (path, given) => (given?.body && bodies.push(JSON.parse(given.body)), plain(path, given))"
    )
    await tab.run(does)
    await tab.until("bodies.length")
    return await tab.run("bodies[0]")


async def test_markdown_is_shown_and_nothing_in_it_is_run_or_loaded(chat: Tab) -> None:
    await say(chat, f"SAY{{{SPOKEN}}}END")
    await answered(chat, 1)
    shown = ".turn.model .words"
    for tag, text in {
        "h3": "Title",
        "em": "soft",
        "strong": "loud",
        "p > code": "plain",
        "ol > li > ul > li strong": "bold",
        "blockquote p": "quoted",
        "th": "a",
        "td.right": "2",
        "pre code": 'def f(x):\n    return x < 1 and "<i>"',
        ".head span": "python",
    }.items():
        assert (await texts(chat, f"{shown} {tag}"))[0] == text
    links = await chat.run(f"[...document.querySelectorAll('{shown} a')].map((one) => [one.href, one.rel])")
    assert links == [[f"https://example.org/{end}", "noopener noreferrer nofollow"] for end in ("a_(b)", "x.png")]
    words = (await texts(chat, shown))[0]
    assert "<b>no tag</b>" in words
    assert "[bad](javascript:alert(1))" in words
    assert await chat.run(f"document.querySelectorAll('{shown} img, {shown} b, {shown} i').length") == 0
    for size, width in ((DESKTOP, "desktop"), (PHONE, "phone")):
        for scheme in ("dark", "light"):
            await chat.shape(size, scheme)
            await chat.run("document.getElementById('to-chat').click()")
            await chat.run("new Promise((resolve) => setTimeout(resolve, 300))")
            wide, seen = await chat.run("[document.documentElement.scrollWidth, innerWidth]")
            assert wide <= seen, f"{width}: {wide} of {seen} pixels"
            if PICTURES.is_dir():
                await chat.picture(PICTURES / f"chat-{width}-{scheme}.png")


@pytest.mark.parametrize(
    "text",
    ["`" * 30_000, "**a" * 7_000, "[" * 20_000, "> " * 3_000 + "x", "- " * 3_000, "|" * 20_000 + "\n|-|", "_a" * 9_000],
    ids=["ticks", "stars", "brackets", "quotes", "lists", "table", "lines"],
)
async def test_hostile_markdown_is_drawn_in_bounded_steps(chat: Tab, text: str) -> None:
    script = f"import('/page/markdown.js').then((one) => one.render({json.dumps(text)}).textContent.length)"
    assert await chat.run(script) >= 0


async def test_what_came_before_a_stop_stays_and_can_be_gone_on_from(chat: Tab) -> None:
    await say(chat, "HANG@20")
    await chat.until("document.querySelector('.turn.model .words')?.textContent.length > 9")
    await chat.run("document.getElementById('ask').requestSubmit()")
    await answered(chat, 1)
    kept = (await texts(chat, ".turn.model .words"))[0]
    assert (await texts(chat, ".turn.model .after"))[0].startswith("stopped")
    body = await sent(chat, "document.getElementById('words').value = 'SAY{and}END', ask.requestSubmit()")
    assert [one["role"] for one in body["messages"]] == ["user", "assistant", "user"]
    assert body["messages"][1]["content"].strip() == kept.strip()
    await answered(chat, 2)


async def test_a_stop_before_the_first_token_gives_the_words_back(chat: Tab) -> None:
    await say(chat, "HANG@0")
    await chat.until("document.querySelector('.turn.model.busy')")
    await chat.run(
        "document.getElementById('words').dispatchEvent(new KeyboardEvent('keydown', { key: 'Escape', bubbles: true }))"
    )
    await chat.until("document.getElementById('words').value === 'HANG@0'")
    assert await texts(chat, ".turn") == []


async def test_a_stop_before_the_first_token_loses_no_words_that_are_typed_meanwhile(chat: Tab) -> None:
    await say(chat, "HANG@0")
    await chat.until("document.querySelector('.turn.model.busy')")
    await say(chat, "SAY{next}END")  # the button says Stop
    await chat.until("!document.querySelector('.busy')")
    assert await chat.run("document.getElementById('words').value") == "SAY{next}END"
    assert await texts(chat, ".turn.user .words") == ["HANG@0"]
    await chat.run("document.getElementById('ask').requestSubmit()")
    await answered(chat, 1)
    assert await texts(chat, ".turn.user .words") == ["SAY{next}END"]


async def test_a_daemon_that_is_gone_is_said_in_plain_words_and_can_be_asked_again(chat: Tab) -> None:
    network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
    await chat.call("Network.enable")
    await chat.call("Network.emulateNetworkConditions", offline=True, **network)
    await say(chat, "SAY{here}END")
    await answered(chat, 1)
    assert await texts(chat, ".turn.model .after") == ["The daemon does not answer."]
    await chat.call("Network.emulateNetworkConditions", offline=False, **network)
    await chat.call("Network.disable")
    await press(chat, ".turn.model", "Try again")
    await chat.until("document.querySelector('.turn.model .words')?.textContent.trim() === 'here'")


async def test_answers_are_given_again_and_questions_changed(chat: Tab) -> None:
    for number in ("one", "two"):
        await say(chat, f"SAY{{{number}}}END")
        await answered(chat, 1 if number == "one" else 2)
    await press(chat, ".turn.model", "Regenerate", 0)
    await answered(chat, 1)
    assert [one.strip() for one in await texts(chat, ".turn.model .words")] == ["one"]
    await press(chat, ".turn.user", "Edit", 0)
    assert await chat.run("document.getElementById('words').value") == "SAY{one}END"
    await say(chat, "SAY{three}END")
    await answered(chat, 1)
    assert await texts(chat, ".turn.user .words") == ["SAY{three}END"]
    assert [one.strip() for one in await texts(chat, ".turn.model .words")] == ["three"]


async def test_a_failed_answer_can_be_tried_again_and_its_question_is_not_sent_twice(chat: Tab) -> None:
    await say(chat, "FAIL{missing_expert}END")
    await answered(chat, 1)
    assert await chat.run("document.querySelector('.turn.model .after').className") == "after bad"
    body = await sent(chat, "document.getElementById('words').value = 'SAY{fine}END', ask.requestSubmit()")
    assert [one["content"] for one in body["messages"]] == ["SAY{fine}END"]
    await answered(chat, 1)


async def test_conversations_and_the_key_outlive_a_reload_and_can_be_deleted(chat: Tab, page: str) -> None:
    await say(chat, "SAY{kept}END")
    await answered(chat, 1)
    await chat.run("document.getElementById('clear').click()")
    assert await texts(chat, ".turn") == []
    await chat.go("about:blank")
    await chat.go(page)
    await chat.until("document.getElementById('state').textContent === 'ready'")
    assert not await chat.run("document.getElementById('key-dialog').open"), "the tab has the key"
    assert KEY not in await chat.run("document.documentElement.outerHTML + JSON.stringify(localStorage)")
    await chat.run("document.getElementById('to-history').click()")
    await chat.run("document.querySelector('.kept .title').click()")
    assert [one.strip() for one in await texts(chat, ".turn.model .words")] == ["kept"]
    await chat.run("document.getElementById('to-history').click()")
    await press(chat, ".kept li", "Delete", 0)
    assert await chat.run("localStorage.length") == 0
    assert await texts(chat, ".turn") == []
    await chat.run("document.getElementById('history').close()")


async def test_what_else_has_written_into_the_memory_does_no_harm(chat: Tab, page: str) -> None:
    wrong = ["[]", "{", '"x"', '{"at": 1, "messages": [{"role": "system"}]}', '{"at": "x", "messages": []}', "null"]
    await chat.run(f"{json.dumps(wrong)}.forEach((one, at) => localStorage.setItem('edgemoe.chat.' + at, one))")
    await chat.run("localStorage.setItem('edgemoe.settings', '7')")
    await chat.go("about:blank")
    await chat.go(page)
    await chat.run("document.getElementById('to-history').click()")
    assert await texts(chat, ".kept li") == ["None is kept yet."]
    await chat.run("document.getElementById('history').close()")
    await say(chat, "SAY{fine}END")
    await answered(chat, 1)


async def test_settings_go_with_each_request_and_only_those_that_are_set(chat: Tab) -> None:
    plain = await sent(chat, "document.getElementById('words').value = 'SAY{a}END', ask.requestSubmit()")
    assert plain == {"messages": [{"role": "user", "content": "SAY{a}END"}], "stream": True}
    await answered(chat, 1)
    await chat.run("document.getElementById('to-settings').click()")
    await chat.until("document.getElementById('which').options.length === 2")
    given = {"system": "Be brief.", "temperature": "0", "max_tokens": "9", "which": "other"}
    for name, value in given.items():
        await chat.run(f"document.getElementById({name!r}).value = {value!r}")
    if PICTURES.is_dir():
        await chat.picture(PICTURES / "settings.png")
    await chat.run("document.querySelector('#settings-form .main').click()")
    body = await sent(chat, "document.getElementById('words').value = 'SAY{b}END', ask.requestSubmit()")
    assert {name: body[name] for name in ("temperature", "max_tokens", "model")} == {
        "temperature": 0,
        "max_tokens": 9,
        "model": "other",
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."}
    assert "top_p" not in body
    await answered(chat, 2)


async def test_text_files_go_with_a_message_and_others_are_refused(chat: Tab) -> None:
    await chat.run(
        """(() => {
          const given = new DataTransfer();
          given.items.add(new File(["line\\n```\\ninner"], "notes.md"));
          given.items.add(new File([new Uint8Array([0, 255, 254])], "picture.png"));
          const files = document.getElementById("files");
          files.files = given.files;
          files.dispatchEvent(new Event("change"));
        })()"""
    )
    await chat.until("document.querySelector('.chip')")
    assert "picture.png" in await chat.run("document.getElementById('note').textContent")
    body = await sent(chat, "document.getElementById('words').value = 'SAY{read}END', ask.requestSubmit()")
    assert body["messages"][0]["content"] == "SAY{read}END\n\nnotes.md:\n````\nline\n```\ninner\n````"
    await answered(chat, 1)
    assert await texts(chat, ".turn.user summary") == ["notes.md"]
    assert await texts(chat, ".chip") == []


async def test_all_of_it_is_reached_by_keyboard(chat: Tab) -> None:
    await say(chat, "SAY{```\ncode\n```}END")
    await answered(chat, 1)
    await chat.until("document.querySelector('canvas')")
    await chat.run("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        for kind in ("keyDown", "keyUp"):
            await chat.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(
            await chat.run(
                "(document.activeElement.id || document.activeElement.textContent.slice(0, 12) "
                "|| document.activeElement.tagName)"
            )
        )
    wanted = {"clear", "to-history", "to-settings", "talk", "attach", "words", "send", "Copy", "Edit", "Regenerate"}
    assert wanted <= reached, wanted - reached
    assert "CANVAS" in reached
    await chat.run("document.querySelector('canvas').focus()")
    for key in ("ArrowRight", "ArrowDown", "ArrowRight"):
        await chat.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key)
    assert (await chat.run("document.getElementById('tip').textContent")).startswith("Layer 1, expert 1:")
    unnamed = await chat.run(
        "[...document.querySelectorAll('button, input, textarea, select, canvas')].filter((one) => "
        "!(one.textContent.trim() || one.getAttribute('aria-label') || one.labels?.length || one.hidden))"
        ".map((one) => one.outerHTML)"
    )
    assert unnamed == []
