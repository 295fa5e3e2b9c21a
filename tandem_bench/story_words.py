"""The words that generated text is made of.

Every list is small on purpose: a word seen thousands of times becomes one token and gets a good
embedding, so the model spends its few parameters on copying and structure instead of vocabulary.
"""

from random import Random


def _split(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _split(
    """Tom Anna Ben Lily Max Mia Sam Ella Jack Rose Leo Nora Finn Ruby Owen Clara Hugo Ivy Noah Zoe
    Eli Maya Luke Emma Adam Sara Paul Lucy Mark Jane Peter Alice Oscar Grace Felix Hazel Simon
    Julia David Helen Carl Vera Ivan Nina Otto Ada Theo Iris Ralph Edith Omar Leila Kofi Amara
    Hiro Yuki Ravi Priya Diego Elena"""
)
CITIES: tuple[str, ...] = _split(
    """Rome Paris London Berlin Madrid Oslo Vienna Prague Dublin Athens Lisbon Cairo Delhi Tokyo
    Lima Boston Chicago Denver Moscow Warsaw Geneva Milan Naples Venice Zurich Kyoto Seoul Hanoi
    Nairobi Sydney Toronto Havana Quito Dallas Austin Miami Bergen Porto Nice York"""
)
ANIMALS: tuple[str, ...] = _split(
    """fox bear rabbit mouse owl cat dog wolf deer duck frog hen goat horse lion tiger monkey
    squirrel turtle hedgehog badger otter crow donkey pig sheep whale robin beaver mole"""
)
COLORS: tuple[str, ...] = _split("red blue green yellow white black brown pink purple orange gray silver golden")
FOODS: tuple[str, ...] = _split(
    """bread soup apple cheese cake honey rice pasta pizza fish salad pie plum pear cherry carrot
    onion potato butter cookie"""
)
JOBS: tuple[str, ...] = _split(
    """teacher baker doctor farmer pilot nurse painter singer writer driver sailor gardener tailor
    judge miner cook"""
)
ADJECTIVES: tuple[str, ...] = _split(
    """little old small brave kind clever quiet lazy happy young gentle curious shy proud tiny
    careful"""
)
PLACES: tuple[str, ...] = _split(
    """forest village garden valley meadow town field cave farm castle island harbor mountain
    river lake bridge mill market tower barn"""
)
OBJECTS: tuple[str, ...] = _split(
    """key ring lamp book box map coin bell hat ball stone feather shell drum flute basket rope
    ladder mirror candle kite boat wheel clock letter"""
)
WEATHER: tuple[str, ...] = _split("sunny rainy windy cold warm cloudy snowy foggy quiet bright")
TIMES: tuple[str, ...] = (
    "One day",
    "One morning",
    "One evening",
    "Late at night",
    "In the spring",
    "On a cold day",
    "Early in the morning",
    "After lunch",
    "Last summer",
    "The next day",
)
KEYS: tuple[str, ...] = _split(
    """amber anchor apple arrow ash autumn badger bamboo barn basil beacon bear bell birch bishop
    bison blossom bolt bridge bronze canyon cedar cherry cliff cloud clover cobalt comet copper coral
    crane crater crystal daisy delta desert diamond dragon eagle ebony echo ember emerald falcon
    feather fern field flame flint forest fox galaxy garden garnet ginger glacier granite grove
    harbor hawk hazel heron hollow honey horizon indigo island ivory ivy jade jasmine jasper
    juniper knight lagoon lantern lark laurel lemon lilac lily lion lotus lunar magnet maple
    marble marsh meadow meteor mint mirror mist monsoon moon mountain nectar nickel nova oak oasis
    ocean olive onyx opal orbit orchid otter panda pearl pebble pepper phoenix pilot pine planet
    prairie quartz rain raven reef ridge river robin rose ruby saffron sage sand sapphire scarlet
    shadow shore silver sky snow spark spruce star stone storm summit sun swan temple thistle
    thunder tiger timber topaz tulip tundra valley velvet violet willow wind winter wolf zephyr
    zinc"""
)
SYLLABLES: tuple[str, ...] = _split(
    """ba be bi bo da de di do fa fe ga ka ki ko la le li lo ma me mi mo na ne no pa pe ra re ri
    ro sa se so ta te ti to va vi vo za ze zo"""
)


def invented_word(rng: Random) -> str:
    """Draw a word that no list has, so that copying must work on pieces too."""
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randint(2, 3)))
