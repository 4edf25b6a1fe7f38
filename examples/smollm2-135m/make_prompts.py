"""Make the training prompts of SmolLM2-135M-Instruct: eight groups, from lists and from permissively licensed text.

The lists below are written for this project. The texts that are summarised, rewritten and searched are docstrings of
Python's standard library (PSF licence) and short notes filled in by rule. The held-out prompts are written by hand, in
`held_out.jsonl`, with SmolLM2's own answers between the questions of a conversation; a prompt of that file is never
written to the training file.

    python examples/smollm2-135m/make_prompts.py    # writes train.jsonl beside this file

The result depends on the Python version through the docstrings, so `train.jsonl` itself is part of the repository.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import random
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

FOLDER = Path(__file__).parent


def listed(text: str) -> list[str]:
    """The entries of a list that is written as text, separated by semicolons or line ends."""
    return [entry.strip() for entry in re.split(r"[;\n]", text) if entry.strip()]


SCIENCE = listed("""
photosynthesis; gravity; evaporation; plate tectonics; how rainbows form; why the sky is blue; black holes; DNA
the water cycle; natural selection; electric current; magnetism; how vaccines work; the immune system; osmosis
the greenhouse effect; how volcanoes erupt; what causes earthquakes; the phases of the Moon; tides; solar eclipses
the theory of relativity; atoms and molecules; chemical bonds; acids and bases; the periodic table; friction
Newton's laws of motion; kinetic and potential energy; sound waves; how light travels; refraction; static electricity
how the heart pumps blood; how the lungs work; digestion; the nervous system; how muscles grow; sleep cycles; hormones
cell division; bacteria and viruses; antibiotics; food chains; ecosystems; biodiversity; coral reefs; how bees make honey
migration of birds; hibernation; why leaves change color; seed germination; pollination; fossils; dinosaurs; ice ages
nuclear fusion; nuclear fission; half-life; semiconductors; superconductors; lasers; how a battery works; solar panels
wind turbines; hydroelectric dams; the ozone layer; acid rain; ocean currents; El Nino; how clouds form; lightning
comets and asteroids; the life cycle of a star; galaxies; the Big Bang; dark matter; exoplanets; the solar system
""")
TECHNOLOGY = listed("""
how the internet works; what an IP address is; DNS; HTTP and HTTPS; encryption; public key cryptography; passwords
databases; SQL joins; indexes in a database; version control; git branches; recursion; object-oriented programming
functional programming; compilers and interpreters; operating systems; virtual memory; threads and processes; deadlocks
cloud computing; containers; machine learning; neural networks; overfitting; gradient descent; decision trees
reinforcement learning; computer vision; natural language processing; large language models; tokenization
blockchain; 3D printing; GPS; Bluetooth; Wi-Fi; fiber optics; barcodes and QR codes; touch screens; how a camera works
electric cars; hybrid engines; self-driving cars; drones; robots; satellites; how microwaves heat food; refrigerators
binary numbers; hexadecimal; floating point numbers; hash tables; linked lists; binary search; sorting algorithms
big O notation; caching; load balancing; REST APIs; JSON; XML; regular expressions; unit testing; code review
debugging; agile development; open source licenses; backups; phishing; two-factor authentication; firewalls; malware
""")
SOCIETY = listed("""
inflation; supply and demand; compound interest; taxes; budgets; the stock market; insurance; mortgages; credit scores
democracy; the separation of powers; elections; the United Nations; human rights; the Industrial Revolution
the Renaissance; the French Revolution; the Roman Empire; ancient Egypt; the Silk Road; the Cold War; World War I
the printing press; the invention of the wheel; the history of writing; the Olympic Games; the Great Wall of China
the fall of the Berlin Wall; the space race; colonialism; the abolition of slavery; women's suffrage; trade unions
globalization; urbanization; public transport; recycling; renewable energy; fast fashion; tourism; social media
the difference between weather and climate; the difference between a virus and a bacterium; stoicism; utilitarianism
the scientific method; logical fallacies; critical thinking; empathy; motivation; procrastination; habits; stress
mindfulness; growth mindset; the placebo effect; cognitive bias; memory; attention; emotional intelligence; burnout
jazz; classical music; hip hop; impressionism; cubism; haiku; Shakespeare; the novel; mythology; folk tales; opera
photography; architecture; calligraphy; pottery; ballet; chess; football; basketball; tennis; cricket; swimming
vegetarian diets; vitamins; protein; fermentation; baking bread; coffee; tea; chocolate; spices; olive oil; cheese
""")
TOPICS = SCIENCE + TECHNOLOGY + SOCIETY

EXPLAIN = listed("""
Explain {t} in simple terms.; What is {t}?; Can you explain {t} to a ten year old?; Give me a short introduction to {t}.
Why does {t} matter?; Explain {t} in two paragraphs.; Describe {t} with an example.; I don't understand {t}. Help me.
What are the main ideas behind {t}?; How would you explain {t} to a friend?; Tell me about {t}.; Write a short essay about {t}.
What are common misunderstandings about {t}?; Explain step by step: {t}.; What should a beginner know about {t}?
""")
CITIES = listed("""
Paris; London; Tokyo; New York; Rome; Berlin; Madrid; Lisbon; Vienna; Prague; Sydney; Toronto; Cairo; Istanbul; Mumbai
Bangkok; Seoul; Singapore; Mexico City; Buenos Aires; Nairobi; Cape Town; Athens; Dublin; Oslo; Stockholm; Helsinki
""")
NAMES = listed("""
Anna; Ben; Carla; David; Elena; Farid; Grace; Hugo; Ines; Jack; Keiko; Liam; Maria; Noah; Olga; Peter; Qing; Rosa; Sam
Tara; Umar; Vera; Will; Xenia; Yusuf; Zoe; Amir; Bianca; Chen; Diego; Emma; Felix; Gita; Hana; Ivan; Julia; Kofi; Lena
""")
HOBBIES = listed("""
gardening; running; painting; cooking; chess; hiking; reading; photography; playing the guitar; knitting; cycling
swimming; writing; bird watching; pottery; yoga; dancing; fishing; learning languages; woodworking; astronomy; sailing
""")
FOODS = listed("""
pancakes; tomato soup; vegetable curry; fried rice; pasta with garlic; an omelette; lentil stew; apple pie; tacos
a green salad; banana bread; hummus; mashed potatoes; pizza; chicken soup; guacamole; roasted vegetables; a smoothie
""")
JOBS = listed("""
a nurse; a teacher; an electrician; a software engineer; a chef; a journalist; an architect; a pilot; a lawyer
a graphic designer; a data analyst; a farmer; a librarian; a mechanic; a translator; a veterinarian; a firefighter
""")
PROBLEMS = listed("""
I can't sleep at night.; My neighbour plays loud music.; I'm nervous about a job interview tomorrow.
I keep forgetting where I put my keys.; My houseplant is losing its leaves.; I feel tired every afternoon.
I have to give a speech next week.; My computer is very slow.; I want to save more money.; I'm bored this weekend.
I had an argument with my best friend.; I want to start running but I'm out of shape.; My phone battery dies quickly.
I'm moving to a new city alone.; I can't concentrate while studying.; My cat doesn't eat its food.
I need a birthday gift for my father.; I want to drink less coffee.; I don't know what to cook tonight.
I'm learning English and I forget new words.; I have too many emails.; I want to read more books this year.
I'm afraid of flying.; My boss gives me too much work.; I'd like to make new friends.; My child doesn't want to do homework.
I spend too much time on my phone.; My bike makes a strange noise.; I want to learn to cook.; I have back pain from sitting.
""")
OPENERS = listed("""
Hi!; Hello, how are you?; Good morning!; Hey, what can you do?; Who are you?; What's your name?; Thanks for your help!
Tell me a joke.; Tell me a fun fact.; Can you help me with something?; What do you like?; Are you a human?
Sing me a song.; I'm happy today!; I'm a bit sad today.; Say something nice.; What's the meaning of life?; Surprise me.
""")
CHAT = listed("""
What do you think about {h}?; I want to start {h}. Where do I begin?; Why do people enjoy {h}?; Is {h} expensive?
Give me advice on getting better at {h}.; How do I find time for {h}?; What equipment do I need for {h}?
Write a short poem about {h}.; Tell me a short story about someone who loves {h}.
""")
TRAVEL = listed("""
What should I see in {c} in one day?; Is {c} worth a visit?; Plan a weekend in {c}.; What is {c} famous for?
What food should I try in {c}?; When is the best time to visit {c}?; Write a postcard from {c}.
""")
WORK = listed("""
What does {j} do all day?; How do I become {j}?; What skills does {j} need?; Write a short story about {j}.
What are the pros and cons of being {j}?; Interview questions for {j}, please.
""")
COOK = listed("""
How do I make {f}?; Give me a simple recipe for {f}.; What can go wrong when I make {f}?; Is {f} healthy?
What goes well with {f}?; How long does {f} keep in the fridge?
""")
STORIES = listed("""
a dragon who is afraid of fire; a lost dog that finds its way home; a robot that learns to paint; a lighthouse keeper
two friends on a long train journey; a detective and a missing necklace; a village under the sea; a talking tree
a girl who can speak with birds; an old clock that runs backwards; a baker's secret; a storm at sea; the last library
a boy and his kite; a spaceship lost between stars; a cat who runs a bookshop; a letter that arrives too late
""")

CODE_TASKS = listed("""
checks whether a string is a palindrome; computes the factorial of a number; returns the n-th Fibonacci number
reverses a linked list; finds the largest element of a list; removes duplicates from a list but keeps the order
counts the words in a text; counts how often each letter occurs in a string; sorts a list with bubble sort
merges two sorted lists; checks whether a number is prime; computes the greatest common divisor of two numbers
converts Celsius to Fahrenheit; converts a number to Roman numerals; computes the sum of the digits of a number
finds the second largest number in a list; rotates a list by k places; flattens a nested list; transposes a matrix
multiplies two matrices; finds the longest word in a sentence; checks whether two strings are anagrams
generates a random password; validates an email address; reads a CSV file and prints each row; writes a list to a file
downloads a web page; parses a JSON string; computes the average of a list; computes the median of a list
finds all pairs in a list that sum to a target; performs a binary search; implements a stack; implements a queue
implements quicksort; implements merge sort; implements insertion sort; finds the intersection of two lists
capitalizes the first letter of every word; removes vowels from a string; converts a decimal number to binary
converts a binary string to a number; checks whether parentheses are balanced; computes a power without using **
finds the longest common prefix of a list of strings; groups words by their first letter; computes compound interest
prints a multiplication table; draws a triangle of stars; simulates rolling two dice; shuffles a list
splits a list into chunks of size n; zips two lists into a dictionary; inverts a dictionary; merges two dictionaries
finds the most common element of a list; computes the Hamming distance of two strings; encodes text with a Caesar cipher
computes the running total of a list; checks whether a year is a leap year; computes the number of days between two dates
lists all files in a folder; counts the lines of a file; renames all files in a folder; finds the shortest path in a grid
traverses a binary tree in order; computes the depth of a binary tree; inserts a value into a binary search tree
implements breadth-first search; implements depth-first search; memoizes a function; measures how long a function takes
retries a function up to three times; filters even numbers from a list; squares every number of a list
parses a date string; formats a number with thousands separators; pads a string to a given width; truncates a long text
""")
LANGUAGES = ["Python"] * 8 + ["JavaScript"] * 3 + ["Java", "C", "C++", "Go", "Rust", "TypeScript", "Bash", "Ruby"]
CODE = listed("""
Write a {l} function that {k}.; Write {l} code that {k}. Explain how it works.; Give me a {l} function that {k}, with comments.
How do I write a {l} function that {k}?; In {l}, write a function that {k} and show an example of its use.
Write a {l} function that {k}. Only show the code.; Write a {l} function that {k}, and a test for it.
""")
CODE_QUESTIONS = listed("""
What is the difference between a list and a tuple in Python?; What does `self` mean in Python?; How do I read a file in Python?
What is a decorator in Python?; How do list comprehensions work?; What is a lambda function?; How do I handle exceptions in Python?
What is the difference between `==` and `is` in Python?; How do I sort a dictionary by value in Python?; What is a generator?
How do I install a Python package?; What is a virtual environment?; What does `if __name__ == "__main__":` do?
How do I write a for loop in C?; What is a pointer in C?; What is the difference between `let` and `var` in JavaScript?
How do I center a div with CSS?; Write an HTML page with a heading and a list.; Write an HTML form with name and email fields.
Write a SQL query that selects the ten newest orders.; Write a SQL query that counts customers per country.
What does `git rebase` do?; How do I undo the last git commit?; Write a Dockerfile for a small Python app.
Write a regular expression that matches a phone number.; How do I make an HTTP request in JavaScript?
What is a null pointer exception?; How do I declare an array in Java?; What is a class in object-oriented programming?
Write a Makefile with a test target.; Write a bash script that backs up a folder.; What is the purpose of unit tests?
""")

LISTS = listed("""
List five {x}.; Give me ten {x}.; Name three {x} and say why you chose them.; Make a table of four {x} with one column for a short note.
Give me a numbered list of six {x}.; List {x} as bullet points.; Give five {x} as a JSON array of strings.; List some {x}, one per line.
""")
LIST_THINGS = listed("""
healthy breakfast ideas; ways to save water; European capitals; programming languages; animals that live in the sea
musical instruments; tips for better sleep; things to pack for a beach holiday; exercises without equipment; board games
famous inventors; famous painters; books for children; outdoor activities; ideas for a birthday party; vegetables
trees that grow in Europe; planets; chemical elements; ways to say thank you; synonyms of happy; synonyms of big
questions for a job interview; names for a black cat; names for a coffee shop; slogans for a bakery; uses for a brick
ways to reduce stress; tips for public speaking; tips for saving money; kitchen tools; kinds of pasta; spices
things that are round; things that fly; words that rhyme with day; countries in Africa; rivers; mountains; islands
deserts; sports; winter sports; dances; languages spoken in Asia; jobs that need creativity; traffic rules
reasons to learn a language; benefits of walking; causes of the First World War; effects of climate change
gifts for a teacher; hobbies for introverts; apps that help with studying; features of a good password; kinds of clouds
signs of spring; rainy day activities; icebreaker questions; goals for the new year; steps to plant a tree
""")
FORMATS = listed("""
Write an email to {n} to {e}.; Write a short message to {n} to {e}.; Write a formal letter to {n} to {e}.
""")
ERRANDS = listed("""
ask for a day off; cancel a meeting; say thank you for a gift; apologise for being late; invite to a dinner
ask for a recommendation; congratulate on a new job; report a broken heater; order 20 chairs; announce a team lunch
ask about the price of a repair; confirm an appointment; remind of an unpaid bill; ask for feedback on a report
""")
SHAPES = listed("""
Write a haiku about {t}.; Write a limerick about {t}.; Write a slogan about {t}.; Write a quiz with three questions about {t}.
Write a title and three headings for an article about {t}.; Write a tweet about {t}.; Make flash cards about {t}: question and answer.
Write a poem with two stanzas about {t}.; Compare {t} and {u} in a table.; Pros and cons of {t} as two bullet lists.
""")

THINGS = listed("apples; books; pencils; marbles; coins; eggs; stickers; tickets; bottles; cookies; chairs; flowers")
Messages = list[dict[str, str]]


def user(*texts: str) -> Messages:
    return [{"role": "user", "content": text} for text in texts]


def conversation(draw: random.Random) -> Messages:
    kind = draw.randrange(8)
    if kind == 0:
        return user(draw.choice(OPENERS))
    if kind == 1:
        return user(draw.choice(PROBLEMS) + draw.choice(["", " What should I do?", " Any ideas?", " Can you help me?"]))
    if kind == 2:
        return user(draw.choice(TRAVEL).format(c=draw.choice(CITIES)))
    if kind == 3:
        return user(draw.choice(WORK).format(j=draw.choice(JOBS)))
    if kind == 4:
        return user(draw.choice(COOK).format(f=draw.choice(FOODS)))
    if kind == 5:
        return user(
            draw.choice(
                ["Tell me a story about {}.", "Write a short story about {}.", "Once upon a time, there was {}. Go on."]
            ).format(draw.choice(STORIES))
        )
    if kind == 6:
        name, hobby = draw.choice(NAMES), draw.choice(HOBBIES)
        return user(draw.choice([
            f"My name is {name} and I like {hobby}. What should I do this weekend?",
            f"I'm {name}. I work as {draw.choice(JOBS)} and I love {hobby}. Write a short profile of me.",
            f"My friend {name} is into {hobby}. What gift would you suggest?",
        ]))  # fmt: skip
    return user(draw.choice(CHAT).format(h=draw.choice(HOBBIES)))


def explanation(draw: random.Random) -> Messages:
    return user(draw.choice(EXPLAIN).format(t=draw.choice(TOPICS)))


def code(draw: random.Random) -> Messages:
    if draw.random() < 0.1:
        return user(draw.choice(CODE_QUESTIONS))
    if draw.random() < 0.15:
        text = draw.choice(library_texts()[1])
        ask = draw.choice(
            [
                "What does this Python function do?",
                "Explain this code.",
                "Add comments to this code.",
                "Find a bug in this code, if there is one.",
                "Write a docstring for this function.",
            ]
        )
        return user(f"{ask}\n\n```python\n{text}\n```")
    return user(draw.choice(CODE).format(l=draw.choice(LANGUAGES), k=draw.choice(CODE_TASKS)))


def reasoning(draw: random.Random) -> Messages:
    a, b, c = draw.randint(2, 99), draw.randint(2, 40), draw.randint(2, 12)
    n, m, x = draw.choice(NAMES), draw.choice(NAMES), draw.choice(THINGS)
    big, small = max(a, b), min(a, b)
    return user(draw.choice([
        f"What is {a} + {b}?", f"What is {a} times {c}?", f"Calculate {a} * {b} - {c}.", f"What is {a * c} divided by {c}?",
        f"{n} has {big} {x} and gives {small} to {m}. How many {x} does {n} have left?",
        f"{n} buys {c} boxes with {b} {x} each. How many {x} are there in total?",
        f"A train travels {a} km in {c} hours. What is its average speed?",
        f"A shop sells {x} for {c} dollars each. {n} buys {b} and pays with {b * c + small} dollars. How much change does {n} get?",
        f"What is {c * 5}% of {b * 10}?", f"Is {a} a prime number? Explain.", f"Sort these numbers: {a}, {b}, {c}, {a + c}, {b + c}.",
        f"If {n} is older than {m}, and {m} is older than Kim, who is the youngest? Explain.",
        f"Solve for x: {c}x + {b} = {c * small + b}.", f"A rectangle is {a} cm long and {b} cm wide. What is its area and perimeter?",
        f"Today is {draw.choice(['Monday', 'Tuesday', 'Wednesday', 'Thursday', 'Friday', 'Saturday', 'Sunday'])}. What day is it in {a} days?",
        f"What comes next: {c}, {c + small}, {c + 2 * small}, {c + 3 * small}, ...?", f"Convert {a} minutes to hours and minutes.",
        f"{n} runs {c} km every day. How far does {n} run in {b} days? Show your steps.",
        f"How many {x} are there if you have {b} bags and every bag holds {c}?", f"What is the square of {c + 5}?",
        f"{n} is {b} years old. {m} is twice as old. How old will {m} be in {c} years?",
        f"All {x} in the box are red. {n} takes one from the box. What color is it? Explain your reasoning.",
        f"Explain how to add {a}/{c} and {b}/{c}.", f"A recipe for {c} people needs {b * c} grams of flour. How much is needed for {c + 3} people?",
    ]))  # fmt: skip


def summary(draw: random.Random) -> Messages:
    ask = draw.choice(
        listed("""
        Summarize this text in one sentence.; Summarize the following text.; What is this text about?; Give me the key points of this text.
        Write a short summary.; Summarize this for a beginner.; Give this text a title and summarize it.; TL;DR?
    """)
    )
    text = draw.choice(library_texts()[0])
    return user(f"{ask}\n\n{text}" if draw.random() < 0.8 else f"{text}\n\n{ask}")


def rewriting(draw: random.Random) -> Messages:
    if draw.random() < 0.5:
        note, questions = draw.choice(NOTES)(draw)
        ask = draw.choice(questions)
    else:
        note = draw.choice(library_texts()[0])
        ask = draw.choice(
            listed("""
            Rewrite this in simpler words.; Rewrite this text in the past tense.; Make this text shorter.; Fix the grammar of this text.
            Rewrite this as a list of bullet points.; Rewrite this text in a friendly tone.; Rewrite this in a formal tone.
            List the nouns in this text.; Which names appear in this text?; Copy the first sentence of this text.
            Rewrite this text for a child.; Turn this text into questions and answers.; Replace long words by short ones.
        """)
        )
    return user(f"{ask}\n\n{note}")


def formats(draw: random.Random) -> Messages:
    kind = draw.randrange(4)
    if kind == 0:
        return user(draw.choice(FORMATS).format(n=draw.choice(NAMES), e=draw.choice(ERRANDS)))
    if kind == 1:
        return user(draw.choice(SHAPES).format(t=draw.choice(TOPICS), u=draw.choice(TOPICS)))
    return user(draw.choice(LISTS).format(x=draw.choice(LIST_THINGS)))


def several_turns(draw: random.Random) -> Messages:
    first = draw.choice([conversation, explanation, explanation, code, reasoning, formats, rewriting])(draw)[0][
        "content"
    ]
    follow = draw.sample(listed("""
        Can you make that shorter?; Why?; Give me an example.; Explain that in other words.; Thanks! Anything else I should know?
        Are you sure?; Can you write that as a list?; Can you repeat the most important point?; Tell me more about the first point.
        How would I start?; What are the disadvantages?; Translate your answer to simpler English.; What did I ask you first?
        Summarize our conversation so far.; Rewrite your answer as a short poem.; Is there another way?; Please go on.
        Who could help me with this?; Give me two more.; Make it more friendly.; Turn that into three questions.
    """), draw.choice([1, 1, 2]))  # fmt: skip
    return user(first, *follow)


GROUPS: dict[str, tuple[Callable[[random.Random], Messages], int]] = {
    "conversation": (conversation, 700),
    "explanation": (explanation, 1200),
    "code": (code, 900),
    "reasoning": (reasoning, 600),
    "summary": (summary, 410),
    "rewriting": (rewriting, 530),
    "formats": (formats, 650),
    "several_turns": (several_turns, 450),
}


def a_meeting(draw: random.Random) -> tuple[str, list[str]]:
    n, m, c = draw.choice(NAMES), draw.choice(NAMES), draw.choice(CITIES)
    day, hour = draw.randint(1, 28), draw.randint(8, 18)
    month = draw.choice(["January", "March", "April", "June", "August", "October", "December"])
    note = draw.choice([
        f"Hi {n}, the meeting with {m} moves from {hour}:00 to {hour + 1}:30 on {month} {day}. We meet in the {c} office. Please bring the report and two copies of the contract.",
        f"Dear {n}, your flight to {c} leaves on {month} {day} at {hour}:15 from gate {draw.randint(1, 40)}. Please be there an hour before. Your seat is {draw.randint(1, 30)}C. Regards, {m}",
        f"{m} and {n} met in {c} on {month} {day} to talk about the budget. They agreed to spend {draw.randint(2, 90)},000 dollars on training and to meet again at {hour}:00 two weeks later.",
    ])  # fmt: skip
    return note, listed("""
        Which names are in this message?; When and where does it take place? Answer in one line.; List all dates and times.
        Extract the names, the place and the date as JSON.; Rewrite this message politely.; Rewrite this as a short text message.
        Turn this into a to-do list.; Write a reply that confirms everything.; Fill a table: who, where, when.
    """)


def an_order(draw: random.Random) -> tuple[str, list[str]]:
    lines = [
        f"{draw.randint(1, 12)} x {x} at {draw.randint(1, 30)}.{draw.choice(['00', '50', '95'])} dollars"
        for x in draw.sample(THINGS, 3)
    ]
    note = (
        f"Order {draw.randint(1000, 9999)} for {draw.choice(NAMES)} in {draw.choice(CITIES)}: " + "; ".join(lines) + "."
    )
    return note, listed("""
        List the items of this order.; Extract the order number and the customer.; Write this order as JSON.
        Make a table of the items with number and price.; Which item is the most expensive?; Write this as a friendly confirmation email.
    """)


def a_profile(draw: random.Random) -> tuple[str, list[str]]:
    n, j, c, h = draw.choice(NAMES), draw.choice(JOBS), draw.choice(CITIES), draw.sample(HOBBIES, 2)
    note = f"{n} is {draw.randint(20, 70)} years old and lives in {c}. {n} works as {j}, likes {h[0]} and {h[1]}, and can be reached at {n.lower()}@example.com."
    return note, listed("""
        Extract name, age, city and job as JSON.; What is the email address?; Rewrite this in the first person.; Rewrite this as a dating profile.
        List the facts in this text as bullet points.; Where does this person live, and what do they do?; Write three questions that this text answers.
    """)


NOTES = [a_meeting, an_order, a_profile]


def docstrings() -> Iterator[tuple[str, str, str]]:
    """Module, docstring and source of the functions and classes of the standard library that have both, in order."""
    skipped = {
        "antigravity",
        "this",
        "idlelib",
        "lib2to3",
        "test",
        "turtledemo",
        "turtle",
        "tkinter",
        "ensurepip",
        "venv",
    }
    for name in sorted(sys.stdlib_module_names):
        if name.startswith("_") or name in skipped:
            continue
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        names = [name]
        if hasattr(module, "__path__"):
            names += [f"{name}.{sub.name}" for sub in pkgutil.iter_modules(module.__path__) if sub.name[0] != "_"]
        for each in names:
            if (
                each.split(".")[0] in skipped
                or each.endswith("__main__")
                or each.startswith(("distutils", "encodings"))
            ):
                continue
            try:
                module = importlib.import_module(each)
            except Exception:  # modules of other platforms raise what they like
                continue
            yield each, inspect.getdoc(module) or "", ""
            for _, value in sorted(vars(module).items()):
                if getattr(value, "__module__", None) != each or not (
                    inspect.isfunction(value) or inspect.isclass(value)
                ):
                    continue
                try:
                    source = inspect.getsource(value)
                except (OSError, TypeError):
                    source = ""
                yield each, inspect.getdoc(value) or "", source


def prose(text: str) -> Iterator[str]:
    """Stretches of running text of 40 to 110 words, joined from the paragraphs of a docstring."""
    stretch = ""
    for paragraph in re.split(r"\n\s*\n", text):
        words = " ".join(paragraph.split())
        plain = re.match(r"^[A-Z][^>|{}=\\]+[.:]$", words) and not re.search(r">>>|--+|__|\*\*|\w\(\w*,|::", words)
        stretch = f"{stretch} {words}".strip() if plain else ""
        if 40 <= len(stretch.split()) <= 110:
            yield stretch
            stretch = ""
        elif len(stretch.split()) > 110:
            stretch = ""


@functools.cache
def library_texts() -> tuple[list[str], list[str]]:
    """Paragraphs to summarise and rewrite, and functions to explain, from the standard library."""
    paragraphs, functions = set(), set()
    for name, text, source in docstrings():
        paragraphs.update(prose(text))
        if 150 <= len(source) <= 400 and source.startswith("def "):
            functions.add((name, inspect.cleandoc(source)))
    return sorted(paragraphs), [source for _, source in sorted(functions)]


def main() -> None:
    """Writes train.jsonl: groups in turn, no prompt twice, none that is held out."""
    held_out = [json.loads(line)["messages"] for line in (FOLDER / "held_out.jsonl").read_text().splitlines()]
    seen = {json.dumps([message for message in each if message["role"] == "user"]) for each in held_out}
    rows = []
    for group, (make, wanted) in GROUPS.items():
        draw = random.Random(group)
        found: list[Messages] = []
        for _ in range(50 * wanted):
            messages = make(draw)
            key = json.dumps(messages)
            if key not in seen:
                seen.add(key)
                found.append(messages)
            if len(found) == wanted:
                break
        rows += [{"group": group, "messages": messages} for messages in found]
    random.Random(0).shuffle(rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (FOLDER / "train.jsonl").write_text(text, encoding="utf-8")
    for group in GROUPS:
        print(f"{group:15} {sum(row['group'] == group for row in rows)}")
    print(
        f"{len(rows)} prompts, {len(text)} characters; {len(library_texts()[0])} paragraphs, {len(library_texts()[1])} functions read"
    )


if __name__ == "__main__":
    main()
