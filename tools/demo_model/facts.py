"""Small facts that the demo model is taught, written by hand for this purpose."""

from __future__ import annotations

# country, capital, continent, language
COUNTRIES = [
    row.split("|")
    for row in """France|Paris|Europe|French
Germany|Berlin|Europe|German
Italy|Rome|Europe|Italian
Spain|Madrid|Europe|Spanish
Portugal|Lisbon|Europe|Portuguese
Poland|Warsaw|Europe|Polish
Austria|Vienna|Europe|German
Hungary|Budapest|Europe|Hungarian
Greece|Athens|Europe|Greek
Sweden|Stockholm|Europe|Swedish
Norway|Oslo|Europe|Norwegian
Denmark|Copenhagen|Europe|Danish
Finland|Helsinki|Europe|Finnish
Iceland|Reykjavik|Europe|Icelandic
Ireland|Dublin|Europe|English
Belgium|Brussels|Europe|Dutch
Russia|Moscow|Europe|Russian
Ukraine|Kyiv|Europe|Ukrainian
Romania|Bucharest|Europe|Romanian
Bulgaria|Sofia|Europe|Bulgarian
Croatia|Zagreb|Europe|Croatian
Turkey|Ankara|Asia|Turkish
Japan|Tokyo|Asia|Japanese
China|Beijing|Asia|Chinese
India|New Delhi|Asia|Hindi
Thailand|Bangkok|Asia|Thai
Vietnam|Hanoi|Asia|Vietnamese
Indonesia|Jakarta|Asia|Indonesian
Mongolia|Ulaanbaatar|Asia|Mongolian
Iran|Tehran|Asia|Persian
Egypt|Cairo|Africa|Arabic
Morocco|Rabat|Africa|Arabic
Kenya|Nairobi|Africa|Swahili
Ghana|Accra|Africa|English
Nigeria|Abuja|Africa|English
Ethiopia|Addis Ababa|Africa|Amharic
Senegal|Dakar|Africa|French
Canada|Ottawa|North America|English
Mexico|Mexico City|North America|Spanish
Cuba|Havana|North America|Spanish
Brazil|Brasilia|South America|Portuguese
Argentina|Buenos Aires|South America|Spanish
Chile|Santiago|South America|Spanish
Peru|Lima|South America|Spanish
Colombia|Bogota|South America|Spanish
Australia|Canberra|Australia|English""".splitlines()
]

# topic -> explanation; questions are generated from it
TOPICS = {
    "a mixture of experts": "A mixture of experts is a neural network whose layers hold many small networks, called experts. For every token a gate chooses a few experts, and only those do any work. The model can be large while each token stays cheap.",
    "an expert": "An expert is one of the small networks in a mixture-of-experts layer. The gate sends each token to the few experts that suit it best. Different experts learn different kinds of text.",
    "a cache": "A cache is a small and fast memory that keeps what will probably be needed again. When the thing asked for is there, it is a hit and the answer comes quickly. Otherwise it is a miss and must be fetched from slower memory.",
    "a language model": "A language model is a program that predicts the next piece of a text from the pieces before it. By predicting one token after another it can write whole answers. It learns this from many examples.",
    "a token": "A token is a short piece of text, such as a word or part of a word. A language model reads and writes tokens, not letters. A tokenizer cuts the text into tokens.",
    "a gate": "A gate is the part of a mixture-of-experts layer that chooses the experts. It gives every expert a score and keeps the best few. Their outputs are added, weighted by the scores.",
    "a neural network": "A neural network is a program made of layers of simple units. Each unit adds its weighted inputs and passes the result on. The weights are learned from examples.",
    "a computer": "A computer is a machine that follows instructions. It has a processor that computes, memory that remembers, and disks that keep files when the power is off.",
    "memory": "Memory is where a computer keeps what it is working on. It is much faster than a disk, but it is smaller and forgets everything when the power goes off.",
    "a GPU": "A GPU is a processor with many small cores that work at the same time. It was made for drawing pictures, and it is also very good at the large sums that neural networks need.",
    "a disk": "A disk keeps files when the power is off. It is larger and cheaper than memory, but it is also slower. Modern disks have no moving parts.",
    "an operating system": "An operating system is the program that runs all other programs. It shares the processor, the memory and the disks among them, and it keeps them from harming each other.",
    "Linux": "Linux is a free operating system kernel that was first published in 1991. People all over the world improve it together. Debian is one of the systems that are built on it.",
    "Debian": "Debian is a free operating system made by volunteers. It holds many thousands of packages, and it is known for being stable and careful.",
    "Python": "Python is a programming language that is easy to read. It is used for small scripts, for web sites and for science. Blocks of code are marked by indentation.",
    "a function": "A function is a named piece of a program that takes some values and returns a result. It can be called many times from different places.",
    "a variable": "A variable is a name for a value in a program. The value can change while the program runs. A good name says what the value means.",
    "a loop": "A loop repeats a part of a program. A for loop runs once for each item of a list, and a while loop runs as long as a condition holds.",
    "a file": "A file is a named piece of data on a disk. It can hold text, a picture or a program. Files are kept in directories.",
    "a socket": "A socket is an end of a connection between two programs. A Unix socket connects programs on the same machine, and it looks like a file.",
    "a server": "A server is a program that waits for requests and answers them. The programs that send the requests are called clients. One server can answer many clients.",
    "a library": "A library is a collection of code that many programs can use. It saves work, because each thing must be written only once.",
    "free software": "Free software is software that everyone may use, study, share and change. The licence of a program says what is allowed.",
    "a licence": "A licence is a text that says what you may do with a work. A free licence lets you use, copy and change the work and give it to others.",
    "the sun": "The sun is the star at the centre of our solar system. It is a huge ball of hot gas. Its light and warmth make life on Earth possible.",
    "the moon": "The moon goes around the Earth in about a month. It has no air and no water that flows. Its light is the light of the sun, sent back to us.",
    "the Earth": "The Earth is the third planet from the sun. Most of it is covered by water. It is the only place where we know that there is life.",
    "a planet": "A planet is a large round body that goes around a star. Our sun has eight planets. The largest is Jupiter and the smallest is Mercury.",
    "a star": "A star is a huge ball of hot gas that makes its own light. The sun is the star nearest to us. At night we can see thousands of others.",
    "rain": "Rain is water that falls from clouds. The sun warms the sea, water rises into the air, and high up it cools and becomes drops. When the drops are heavy enough, they fall.",
    "snow": "Snow is made of small crystals of ice. It falls from clouds when the air is cold. No two snowflakes look quite the same.",
    "the wind": "Wind is air that moves. The sun warms some places more than others, and the air flows from high pressure to low pressure.",
    "the sea": "The sea is the salt water that covers most of the Earth. Many animals and plants live in it. The moon pulls the water and makes the tides.",
    "a river": "A river is water that flows over land to the sea. It begins at a spring or a lake, and smaller streams join it on its way.",
    "a mountain": "A mountain is a part of the land that is much higher than the land around it. The highest mountain on Earth is Mount Everest.",
    "a tree": "A tree is a large plant with a trunk of wood. Its leaves catch the light of the sun, and its roots take water from the ground.",
    "a flower": "A flower is the part of a plant that makes seeds. Its colours and its smell call insects, which carry pollen from flower to flower.",
    "a bee": "A bee is a small insect that gathers nectar and makes honey. Bees carry pollen from flower to flower, and so many plants need them.",
    "a cat": "A cat is a small animal with soft fur and sharp claws. Cats sleep a lot, hunt at night and like warm places.",
    "a dog": "A dog is an animal that has lived with people for a very long time. Dogs are loyal, learn quickly and have a very good nose.",
    "a bird": "A bird is an animal with feathers, wings and a beak. Birds lay eggs, and most of them can fly.",
    "a fish": "A fish is an animal that lives in water and breathes through gills. It moves with its fins and its tail.",
    "a horse": "A horse is a large animal that can run fast and carry people. Horses eat grass and live in herds.",
    "bread": "Bread is made from flour, water, salt and yeast. The dough must rest so that it rises. Then it is baked until the crust is brown.",
    "tea": "Tea is a drink made from the leaves of the tea plant and hot water. It comes from Asia, and people drink it all over the world.",
    "coffee": "Coffee is a drink made from roasted beans and hot water. It smells good and keeps people awake.",
    "music": "Music is sound that is ordered in time. It has rhythm and melody, and it can make people happy or sad.",
    "a book": "A book is a set of pages with text or pictures. Books keep stories and knowledge for a long time.",
    "a clock": "A clock shows the time. Old clocks have hands that turn, and new ones show digits.",
    "time": "Time is what clocks measure. A day has 24 hours, an hour has 60 minutes, and a minute has 60 seconds.",
    "a prime number": "A prime number is a whole number greater than one that can be divided only by one and by itself. The first ones are 2, 3, 5, 7 and 11.",
    "addition": "Addition puts two numbers together. The result is called the sum. For example, 2 plus 3 is 5.",
    "a triangle": "A triangle is a shape with three sides and three corners. Its angles add up to 180 degrees.",
    "a circle": "A circle is a round shape. All its points have the same distance from the centre.",
    "science": "Science is a careful way to find out how the world works. People ask a question, make a guess, and test it by experiment.",
    "gravity": "Gravity is the force that pulls things towards each other. It keeps us on the ground, and it keeps the moon near the Earth.",
    "light": "Light is what we see. It travels very fast, and white light is made of all the colours of the rainbow.",
    "a rainbow": "A rainbow appears when the sun shines on drops of rain. The drops split the light into its colours, from red to violet.",
    "electricity": "Electricity is the flow of tiny charges through a wire. It gives us light and warmth, and it runs our machines.",
    "the internet": "The internet joins computers all over the world. They send each other small packets of data, and each packet finds its own way.",
    "a friend": "A friend is someone you like and trust. Friends help each other and spend time together.",
    "a city": "A city is a place where many people live and work close together. It has streets, houses, shops and schools.",
    "a garden": "A garden is a piece of land where people grow flowers, fruit and vegetables. It needs sun, water and care.",
    "winter": "Winter is the coldest season of the year. The days are short, and in many places it snows.",
    "summer": "Summer is the warmest season of the year. The days are long, and many people like to be outside.",
}

WHY = {
    "is the sky blue": "The sky is blue because air scatters blue light more than red light. So blue light reaches our eyes from all sides.",
    "is the sea salty": "The sea is salty because rivers carry salt from the land into it. The water rises into the air again, but the salt stays.",
    "do birds fly south": "Many birds fly south in autumn because there is more food in warm places. In spring they come back.",
    "do leaves fall in autumn": "Trees drop their leaves in autumn to save water. In winter the roots can take little water from the cold ground.",
    "do we sleep": "We sleep because the body and the mind need rest. While we sleep, the brain puts its memories in order.",
    "do cats purr": "Cats purr mostly when they feel well. Sometimes they also purr to calm themselves.",
    "does ice float": "Ice floats because it is lighter than the same amount of water. Water grows when it freezes.",
    "is it dark at night": "It is dark at night because our side of the Earth is turned away from the sun.",
    "do we use a cache": "We use a cache because fast memory is small and dear. If we keep there what is needed often, most requests are quick.",
    "do models use experts": "With experts a model can know a lot and still be quick, because only a few experts work on each token.",
    "should I write tests": "Tests show that a program does what it should. They also show quickly when a change breaks something.",
    "do we need sleep": "Sleep gives the body and the mind time to rest. Without it we cannot think well.",
    "do bees matter": "Bees carry pollen from flower to flower. Without them many plants would have no fruit.",
    "is grass green": "Grass is green because its leaves hold a green pigment that catches the light of the sun.",
}

COLOURS = {
    "the sky": "blue", "grass": "green", "snow": "white", "a lemon": "yellow", "coal": "black", "blood": "red",
    "an orange": "orange", "milk": "white", "a leaf": "green", "the sea": "blue", "a banana": "yellow",
    "a tomato": "red",
}  # fmt: skip

OPPOSITES = {
    "hot": "cold", "big": "small", "fast": "slow", "day": "night", "up": "down", "light": "dark", "old": "new",
    "happy": "sad", "open": "closed", "full": "empty", "long": "short", "strong": "weak", "early": "late",
    "good": "bad", "left": "right", "true": "false", "wet": "dry", "rich": "poor", "near": "far", "loud": "quiet",
}  # fmt: skip

# English -> German, French, Spanish, Italian
WORDS = {
    "hello": ("hallo", "bonjour", "hola", "ciao"),
    "thank you": ("danke", "merci", "gracias", "grazie"),
    "please": ("bitte", "s'il vous plaît", "por favor", "per favore"),
    "yes": ("ja", "oui", "sí", "sì"),
    "no": ("nein", "non", "no", "no"),
    "water": ("Wasser", "eau", "agua", "acqua"),
    "bread": ("Brot", "pain", "pan", "pane"),
    "house": ("Haus", "maison", "casa", "casa"),
    "book": ("Buch", "livre", "libro", "libro"),
    "file": ("Datei", "fichier", "archivo", "file"),
    "friend": ("Freund", "ami", "amigo", "amico"),
    "good morning": ("guten Morgen", "bonjour", "buenos días", "buongiorno"),
    "goodbye": ("auf Wiedersehen", "au revoir", "adiós", "arrivederci"),
    "sun": ("Sonne", "soleil", "sol", "sole"),
    "moon": ("Mond", "lune", "luna", "luna"),
    "cat": ("Katze", "chat", "gato", "gatto"),
    "dog": ("Hund", "chien", "perro", "cane"),
    "tree": ("Baum", "arbre", "árbol", "albero"),
}
TONGUES = ("German", "French", "Spanish", "Italian")

# Python: task -> code
CODE = {
    "adds two numbers": "def add(a, b):\n    return a + b",
    "subtracts two numbers": "def subtract(a, b):\n    return a - b",
    "multiplies two numbers": "def multiply(a, b):\n    return a * b",
    "returns the larger of two numbers": "def larger(a, b):\n    return a if a > b else b",
    "tests whether a number is even": "def is_even(n):\n    return n % 2 == 0",
    "tests whether a number is prime": "def is_prime(n):\n    if n < 2:\n        return False\n    for d in range(2, int(n ** 0.5) + 1):\n        if n % d == 0:\n            return False\n    return True",
    "computes the factorial": "def factorial(n):\n    result = 1\n    for i in range(2, n + 1):\n        result *= i\n    return result",
    "computes Fibonacci numbers": "def fibonacci(n):\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    "reverses a string": "def reverse(text):\n    return text[::-1]",
    "counts the words of a text": "def count_words(text):\n    return len(text.split())",
    "reads a file": 'def read(path):\n    with open(path, encoding="utf-8") as file:\n        return file.read()',
    "sums a list": "def total(numbers):\n    result = 0\n    for number in numbers:\n        result += number\n    return result",
    "finds the largest item of a list": "def largest(items):\n    best = items[0]\n    for item in items:\n        if item > best:\n            best = item\n    return best",
    "prints the numbers from 1 to 10": "for number in range(1, 11):\n    print(number)",
    "says hello": 'def hello(name):\n    print(f"Hello, {name}!")',
    "sorts a list": "def sort(items):\n    return sorted(items)",
    "computes the mean": "def mean(numbers):\n    return sum(numbers) / len(numbers)",
    "implements an LRU cache": "class Cache:\n    def __init__(self, size):\n        self.size = size\n        self.items = {}\n\n    def get(self, key):\n        value = self.items.pop(key)\n        self.items[key] = value\n        return value\n\n    def put(self, key, value):\n        self.items.pop(key, None)\n        if len(self.items) >= self.size:\n            del self.items[next(iter(self.items))]\n        self.items[key] = value",
}  # fmt: skip

LISTS = {
    "days of the week": "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday",
    "months of the year": "January, February, March, April, May, June, July, August, September, October, November and December",
    "planets": "Mercury, Venus, Earth, Mars, Jupiter, Saturn, Uranus and Neptune",
    "seasons": "spring, summer, autumn and winter",
    "colours of the rainbow": "red, orange, yellow, green, blue, indigo and violet",
    "continents": "Africa, Antarctica, Asia, Australia, Europe, North America and South America",
    "vowels": "a, e, i, o and u",
}
