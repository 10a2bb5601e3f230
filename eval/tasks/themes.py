"""Words by theme. A sentence with words of one theme is easy to write, one with words of several is not."""

THEMES: dict[str, tuple[str, ...]] = {
    theme: tuple(words.split())
    for theme, words in {
        "kitchen": "oven bread butter spoon plate flour onion kettle salt soup recipe baker",
        "garden": "seed shovel rose soil fence bucket hedge worm tomato lawn gardener spade",
        "harbour": "boat anchor sailor rope lighthouse net wave captain dock gull harbour fisher",
        "school": "teacher pencil lesson desk notebook pupil chalk exam library bell essay ruler",
        "hospital": "nurse doctor patient bandage ward medicine fever surgeon stretcher needle clinic pulse",
        "farm": "barn tractor cow hay farmer field sheep rooster stable harvest plough goat",
        "travel": "train ticket suitcase station passport map platform luggage hotel tourist bridge taxi",
        "music": "violin song drum concert singer melody piano stage choir guitar trumpet rhythm",
        "winter": "snow sledge scarf glove ice fireplace coat frost skater blanket storm icicle",
        "office": "printer meeting folder manager keyboard invoice stapler clerk deadline contract calendar email",
        "court": "judge lawyer witness verdict jury prison trial thief evidence sentence appeal guard",
        "forest": "pine owl mushroom path fox deer moss hunter stream squirrel cabin beaver",
        "space": "rocket planet astronaut telescope orbit comet satellite moon crater shuttle galaxy meteor",
        "market": "stall coin basket merchant apple price scale customer cheese bargain honey crowd",
        "painting": "canvas brush painter gallery sketch frame colour portrait museum easel varnish palette",
        "chemistry": "acid flask burner crystal vapour beaker reaction chemist copper powder filter gas",
        "castle": "knight tower sword king dungeon moat banner throne armour drawbridge queen torch",
        "sports": "goal referee racket stadium coach medal runner helmet whistle team swimmer trophy",
        "computing": "server password screen program cursor database robot cable virus network file laptop",
        "weather": "thunder cloud rainbow drizzle forecast wind puddle umbrella sunshine fog breeze hail",
    }.items()
}
NEAR = (  # themes of one register
    ("kitchen", "market"), ("garden", "farm"), ("school", "office"), ("forest", "winter"), ("music", "painting"),
    ("court", "castle"), ("space", "computing"), ("hospital", "chemistry"), ("harbour", "travel"), ("sports", "school"),
    ("farm", "market"), ("winter", "weather"),
)  # fmt: skip
