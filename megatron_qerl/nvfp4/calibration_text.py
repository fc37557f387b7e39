"""The built-in calibration text: endless short English and school mathematics, the same for a seed everywhere.

AWQ needs to know which channels a model's activations are large in, and that shows in any varied text of the kind
the model will work on. These documents mix worked arithmetic, word problems, questions with answers, descriptions
and small stories. A user with better data names a JSONL file instead.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

_NAMES = [
    "Ada",
    "Bruno",
    "Chidi",
    "Dana",
    "Elif",
    "Farid",
    "Grace",
    "Hugo",
    "Ines",
    "Jonas",
    "Kira",
    "Liam",
    "Mei",
    "Nadia",
    "Omar",
    "Petra",
    "Quinn",
    "Rosa",
    "Samir",
    "Tara",
    "Uri",
    "Vera",
    "Wen",
    "Yusuf",
    "Zoe",
]
_PLACES = [
    "harbour",
    "village",
    "library",
    "workshop",
    "market",
    "school",
    "valley",
    "station",
    "garden",
    "museum",
    "kitchen",
    "laboratory",
    "farm",
    "island",
    "bridge",
    "theatre",
    "forest",
    "office",
    "bakery",
    "lighthouse",
]
_THINGS = [
    "apples",
    "books",
    "bolts",
    "tickets",
    "stamps",
    "lamps",
    "bottles",
    "chairs",
    "coins",
    "letters",
    "boxes",
    "pencils",
    "shells",
    "bricks",
    "candles",
    "ropes",
    "maps",
    "plates",
    "baskets",
    "seeds",
]
_ADJECTIVES = [
    "quiet",
    "narrow",
    "bright",
    "ancient",
    "careful",
    "heavy",
    "sudden",
    "green",
    "curious",
    "distant",
    "warm",
    "broken",
    "steady",
    "clever",
    "empty",
    "small",
    "wooden",
    "hungry",
    "patient",
    "northern",
]
_ANIMALS = ["fox", "heron", "cat", "otter", "horse", "crow", "goat", "dog", "hare", "turtle", "bee", "owl"]
_VERBS = [
    "carried",
    "counted",
    "found",
    "painted",
    "repaired",
    "borrowed",
    "measured",
    "sold",
    "collected",
    "hid",
    "opened",
    "remembered",
    "described",
    "moved",
    "compared",
    "watched",
]
_REASONS = [
    "because the weather had turned cold",
    "although nobody had asked for it",
    "since the old one no longer worked",
    "while the others were still asleep",
    "so that the work could begin before noon",
    "which surprised everyone in the room",
    "even though the road was closed",
    "until the last visitor had gone home",
]
_FACTS = (
    ("What does a thermometer measure?", "A thermometer measures temperature, usually in degrees Celsius."),
    ("Why does ice float on water?", "Ice is less dense than liquid water, so the water pushes it up."),
    ("What is a prime number?", "A prime is a whole number above one that only one and itself divide."),
    ("How does a lever help?", "A lever trades distance for force: the longer arm moves further and pushes less hard."),
    ("What is a mean?", "Add all the values and divide the sum by how many there are."),
    ("Why do we see the moon?", "The moon makes no light of its own; it reflects the light of the sun."),
    ("What does a compiler do?", "It translates a program from one language into another, often machine code."),
    ("What is a right angle?", "A right angle is a quarter of a full turn, that is, ninety degrees."),
)

Document = Callable[[random.Random], str]


def built_in_text(seed: int) -> Iterator[str]:
    """Endless documents. Python guarantees the generator, so a seed gives the same text on every machine."""
    draw = random.Random(seed)
    kinds: tuple[Document, ...] = (_sums, _shop, _travel, _equation, _share, _story, _scene, _questions, _rule)
    while True:
        yield draw.choice(kinds)(draw)


def _sums(draw: random.Random) -> str:
    lines = []
    for _ in range(draw.randint(3, 8)):
        a, b = draw.randint(2, 999), draw.randint(2, 99)
        lines.append(draw.choice((f"{a} + {b} = {a + b}", f"{a} - {b} = {a - b}", f"{a} * {b} = {a * b}")))
    return "Compute each result.\n" + "\n".join(lines)


def _shop(draw: random.Random) -> str:
    name, thing = draw.choice(_NAMES), draw.choice(_THINGS)
    count, price, paid = draw.randint(2, 30), draw.randint(2, 25), draw.choice((50, 100, 500, 1000))
    cost = count * price
    question = f"Question: {name} buys {count} {thing} at {price} dollars each and pays with {paid} dollars. "
    if cost > paid:
        return question + f"Is that enough?\nAnswer: The {thing} cost {count} * {price} = {cost} dollars, so it is not."
    return question + (
        f"How much comes back?\nAnswer: The {thing} cost {count} * {price} = {cost} dollars. "
        f"The change is {paid} - {cost} = {paid - cost} dollars. The answer is {paid - cost}."
    )


def _travel(draw: random.Random) -> str:
    name, start, end = draw.choice(_NAMES), draw.choice(_PLACES), draw.choice(_PLACES)
    speed, hours = draw.randint(3, 90), draw.randint(2, 9)
    return (
        f"{name} travels from the {start} to the {end} at {speed} kilometres an hour and needs {hours} hours. How far "
        f"is it?\nDistance is speed times time: {speed} * {hours} = {speed * hours}. It is {speed * hours} kilometres."
    )


def _equation(draw: random.Random) -> str:
    a, x, b = draw.randint(2, 12), draw.randint(-12, 12), draw.randint(1, 60)
    return (
        f"Solve {a}x + {b} = {a * x + b} for x.\nSubtract {b} from both sides: {a}x = {a * x}.\n"
        f"Divide both sides by {a}: x = {x}.\nCheck: {a} * ({x}) + {b} = {a * x + b}. So $x = \\boxed{{{x}}}$."
    )


def _share(draw: random.Random) -> str:
    people, each, rest, thing = draw.randint(2, 9), draw.randint(2, 40), draw.randint(0, 1), draw.choice(_THINGS)
    total = people * each + rest
    left = "nothing is left" if rest == 0 else "one is left"
    return (
        f"{people} friends share {total} {thing} equally. First think: {total} / {people} is {each} because {people} * "
        f"{each} = {people * each}. Then {left}. Each friend gets {each} {thing}."
    )


def _story(draw: random.Random) -> str:
    name, other, place = draw.choice(_NAMES), draw.choice(_NAMES), draw.choice(_PLACES)
    sentences = [f"{name} had lived near the {draw.choice(_ADJECTIVES)} {place} for {draw.randint(2, 40)} years."]
    for _ in range(draw.randint(3, 7)):
        who = draw.choice((name, other, f"the {draw.choice(_ADJECTIVES)} {draw.choice(_ANIMALS)}"))
        what = f"{draw.choice(_VERBS)} the {draw.choice(_ADJECTIVES)} {draw.choice(_THINGS)}"
        sentences.append(f"{who[0].upper()}{who[1:]} {what} {draw.choice(_REASONS)}.")
    sentences.append(f'"{draw.choice(("Tomorrow", "Next week", "One day"))}," said {other}, "we will tell them why."')
    return " ".join(sentences)


def _scene(draw: random.Random) -> str:
    first, second = draw.sample(_PLACES, 2)
    lines = [f"The {first} lies between the {second} and the river, and it is {draw.choice(_ADJECTIVES)} in winter."]
    for _ in range(draw.randint(2, 5)):
        near = draw.choice(_PLACES)
        lines.append(
            f"Near the {near} you can see {draw.randint(2, 20)} {draw.choice(_ADJECTIVES)} {draw.choice(_THINGS)} and "
            f"a {draw.choice(_ANIMALS)} that comes back every {draw.choice(('morning', 'evening', 'spring', 'year'))}."
        )
    return " ".join(lines)


def _questions(draw: random.Random) -> str:
    return "\n\n".join(f"Q: {question}\nA: {answer}" for question, answer in draw.sample(_FACTS, draw.randint(2, 4)))


def _rule(draw: random.Random) -> str:
    first, step, length = draw.randint(1, 50), draw.randint(2, 15), draw.randint(5, 9)
    terms = [first + step * i for i in range(length)]
    listed = ", ".join(str(term) for term in terms)
    return (
        f"Consider the sequence {listed}. Each term is {step} more than the one before, so the term after {terms[-1]} "
        f"is {terms[-1] + step}, and term number n is {first} + {step} * (n - 1)."
    )
