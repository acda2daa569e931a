"""dspy, over TCP: its language model. The demo model does not follow the forms that its modules ask for."""

from __future__ import annotations

import dspy
import use

model = dspy.LM(f"openai/{use.MODEL}", api_base=use.URL, api_key=use.KEY, temperature=0.0, max_tokens=256, cache=False)


def chat() -> None:
    use.check_answer(model(use.QUESTION)[0])


if __name__ == "__main__":
    use.run(chat=chat)
