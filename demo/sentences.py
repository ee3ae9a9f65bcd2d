"""A tiny set of sentence pairs with the similarity that a model should give them."""

from typing import Final, NamedTuple


class Pair(NamedTuple):
    """Two sentences and how alike they are, 0 to 1."""

    left: str
    right: str
    similarity: float


PAIRS: Final = (
    Pair("The cat sleeps on the warm stove.", "A cat is asleep on top of the stove.", 0.95),
    Pair(
        "She bought two tickets for the night train.", "She paid for a pair of train tickets.", 0.8
    ),
    Pair("The bridge was closed because of the storm.", "Bad weather shut the bridge.", 0.9),
    Pair("He repairs old radios in his garage.", "Old radios are fixed by him at home.", 0.85),
    Pair("The orchestra tuned for a quarter of an hour.", "Musicians prepared to play.", 0.6),
    Pair("Rain fell all week on the hills.", "It was a wet week up in the hills.", 0.9),
    Pair("The harbour froze in January.", "In winter there was ice in the port.", 0.75),
    Pair("A child draws a boat with chalk.", "A kid is making a chalk picture of a ship.", 0.9),
    Pair("The museum opens at ten.", "Visitors may enter the museum from ten o'clock.", 0.9),
    Pair("Our neighbour grows tomatoes.", "There are tomatoes in the neighbour's garden.", 0.8),
    Pair("The court postponed its decision.", "No verdict was given today.", 0.65),
    Pair("They walked home along the river.", "They went home on foot beside the water.", 0.9),
    Pair("The cat sleeps on the warm stove.", "Interest rates rose again in spring.", 0.0),
    Pair("She bought two tickets for the night train.", "The soup needs more salt.", 0.05),
    Pair("The bridge was closed because of the storm.", "A violin has four strings.", 0.0),
    Pair("He repairs old radios in his garage.", "Penguins cannot fly.", 0.0),
    Pair("The orchestra tuned for a quarter of an hour.", "The tyre lost its air.", 0.05),
    Pair("Rain fell all week on the hills.", "The printer is out of paper.", 0.0),
    Pair("The harbour froze in January.", "My sister studies Portuguese.", 0.05),
    Pair("A child draws a boat with chalk.", "The stock market fell sharply.", 0.0),
    Pair("The museum opens at ten.", "The museum closes at ten.", 0.55),
    Pair("Our neighbour grows tomatoes.", "Our neighbour hates tomatoes.", 0.45),
    Pair("The court postponed its decision.", "The court announced its decision.", 0.4),
    Pair("They walked home along the river.", "They rowed down the river.", 0.5),
)
