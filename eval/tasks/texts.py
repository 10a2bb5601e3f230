"""Sentences and short dialogues, made from templates."""

from random import Random

from dllm_sampler.eval.tasks.names import GIVEN

PLACES = (
    "the library",
    "the bus station",
    "the town hall",
    "the bakery",
    "the park",
    "the museum",
    "the swimming pool",
)
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
THINGS = ("bicycle", "camera", "tent", "ladder", "toolbox", "guitar", "projector", "sewing machine")
WHY = ("the weather was too bad", "the road was closed", "nobody had a key", "the train was late", "it was a holiday")

SENTENCES = (
    "Because {why}, {a} and {b} had to wait at {place} until {day}.",
    "{a} sold an old {thing} to {b} for {number} pounds last {day}.",
    "Before the meeting on {day}, {a} asked {b} to bring {number} chairs to {place}.",
    "{a} has been looking for a second-hand {thing} for {number} weeks, but {b} found one within a day.",
    "Although {why}, {number} people came to see {a} and {b} at {place}.",
    "If {a} does not return the {thing} by {day}, {b} will have to buy a new one for {number} pounds.",
    "{a} told {b} that {place} would stay closed for {number} days from {day} on.",
    "It took {a} {number} hours to repair the {thing} that {b} had left behind at {place}.",
    "Neither {a} nor {b} noticed that the {thing} had been missing from {place} since {day}.",
    "Every {day}, {a} walks {number} miles to {place} in order to meet {b}.",
)

DIALOGUES = (
    (
        "{a}: Do you still need my {thing}?\n{b}: Only until {day}, then I can bring it back.\n"
        "{a}: That is fine. Shall we meet at {place}?\n{b}: Good idea, I will be there at {number}.",
        "{b} will return {a}'s {thing} on {day} and meets {a} at {place} at {number}.",
    ),
    (
        "{a}: I went to {place}, but {why}.\n{b}: Oh no. Will you try again?\n{a}: Yes, on {day}. Do you want to come?"
        "\n{b}: I would love to. Pick me up at {number}.",
        "{a} could not visit {place} because {why}, so {a} and {b} will go there together on {day} at {number}.",
    ),
    (
        "{a}: How many people are coming on {day}?\n{b}: {number}, as far as I know.\n"
        "{a}: Then we need a bigger room than ours.\n{b}: I will ask whether {place} is free.",
        "{number} people are coming on {day}, so {b} will ask for a room at {place}.",
    ),
    (
        "{a}: Have you seen the {thing}?\n{b}: I lent it to my brother last {day}.\n{a}: I need it in {number} days.\n"
        "{b}: I will call him tonight and get it back in time.",
        "{b} lent the {thing} to a brother and will get it back for {a}, who needs it in {number} days.",
    ),
    (
        "{a}: The {thing} I ordered still has not arrived.\n{b}: When should it have come?\n{a}: Last {day}.\n"
        "{b}: Call the shop, and if they cannot help, mine cost {number} pounds at the store near {place}.",
        "{a}'s {thing} should have arrived last {day}; {b} advises {a} to call the shop or buy one near {place}.",
    ),
)


def _slots(rng: Random) -> dict[str, str]:
    a, b = rng.sample(GIVEN, 2)
    chosen = {"place": PLACES, "day": DAYS, "thing": THINGS, "why": WHY}
    return {"a": a, "b": b, "number": str(rng.randint(3, 9)), **{slot: rng.choice(of) for slot, of in chosen.items()}}


def sentence(rng: Random) -> tuple[str, list[str]]:
    """Draw a sentence, and the names and days in it, which a paraphrase should keep."""
    template, slots = rng.choice(SENTENCES), _slots(rng)
    kept = [slots[slot] for slot in ("a", "b", "day", "number") if f"{{{slot}}}" in template]
    return template.format(**slots), [word for word in kept if not word.isdigit()]


def dialogue(rng: Random) -> tuple[str, str]:
    """Draw a dialogue of four turns, and its summary."""
    (turns, summary), slots = rng.choice(DIALOGUES), _slots(rng)
    return turns.format(**slots), summary.format(**slots)
