"""Writes the quickstart's questions: arithmetic stories from two templates over the small times table.

Comes in: nothing but the word lists below and a seed. Goes out: `recipes/quickstart_data/questions.jsonl`, one
`{"id", "messages"}` a line, all distinct, the same bytes on every run. The family is narrow on purpose: each story comes with one
worked example in its system message, so that a 135M target answers in a steady form and a drafter can learn it in minutes on a CPU.

    python tools/quickstart_questions.py
    python -m dflash_train stage=regenerate recipe=quickstart     # the target's answers: run_dir/regenerate/answers.jsonl
"""

import json
import random
from itertools import product
from pathlib import Path

from dflash_train.atomic import write_text

QUESTIONS = Path(__file__).resolve().parent.parent / "recipes" / "quickstart_data" / "questions.jsonl"
QUESTIONS_PER_TEMPLATE = 220
SEED = 0

NAMES = ("Tom", "Anna", "Ben", "Lucy", "Sam", "Mary")
OBJECTS = ("apple", "book", "pen", "egg", "ball", "card")
CONTAINERS = ("bag", "basket", "box")
FACTORS = range(2, 10)

TOTAL_EXAMPLE = """user: Kim has 3 jars. Each jar holds 4 nuts. How many nuts does Kim have in total?
assistant: Kim has 3 jars. Each jar holds 4 nuts. To find the total number of nuts, we multiply the number of jars by the number \
of nuts: 3 x 4 = 12. So Kim has 12 nuts in total."""
PRICE_EXAMPLE = """user: Kim buys 3 nuts. Each nut costs 4 dollars. How much does Kim pay in total?
assistant: Kim buys 3 nuts. Each nut costs 4 dollars. To find the total cost of the nuts, we multiply the number of nuts by the \
price of one nut: 3 x 4 = 12. So Kim pays 12 dollars in total."""


def total_story(name: str, thing: str, container: str, count: int, each: int) -> str:
    plural = "boxes" if container == "box" else f"{container}s"
    return f"{name} has {count} {plural}. Each {container} holds {each} {thing}s. How many {thing}s does {name} have in total?"


def price_story(name: str, thing: str, count: int, each: int) -> str:
    return f"{name} buys {count} {thing}s. Each {thing} costs {each} dollars. How much does {name} pay in total?"


def questions(per_template: int = QUESTIONS_PER_TEMPLATE, seed: int = SEED) -> list[dict]:
    """`per_template` distinct stories of each template, drawn without replacement, in turns: total, price, total, ..."""
    generator = random.Random(seed)
    totals = generator.sample(list(product(NAMES, OBJECTS, CONTAINERS, FACTORS, FACTORS)), per_template)
    prices = generator.sample(list(product(NAMES, OBJECTS, FACTORS, FACTORS)), per_template)
    rows = []
    for number, (total, price) in enumerate(zip(totals, prices, strict=True), start=1):
        rows.append(_row(f"total-{number:03d}", TOTAL_EXAMPLE, total_story(*total)))
        rows.append(_row(f"price-{number:03d}", PRICE_EXAMPLE, price_story(*price)))
    return rows


def _row(row_id: str, example: str, story: str) -> dict:
    return {"id": row_id, "messages": [{"role": "system", "content": example}, {"role": "user", "content": story}]}


def main() -> None:
    rows = questions()
    QUESTIONS.parent.mkdir(parents=True, exist_ok=True)
    write_text(QUESTIONS, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    print(f"{QUESTIONS}: {len(rows)} questions")


if __name__ == "__main__":
    main()
