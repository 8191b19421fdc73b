"""Write requests of the kinds that people make of assistants, for the target to answer: our own sentences
with slots, filled from our own lists and with random numbers, so that the answers may be shipped.

python scripts/written_prompts.py --number 20000 --seed 1 --out runs/written_prompts.jsonl.gz

The same number and seed give the same bytes. No sentence is taken from a benchmark; where a recipe names
evaluation prompts under `corpus.exclude`, prompts that hold one are not answered all the same.
"""

import argparse
import gzip
import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from drafttrain.utils.writing import whole_file

SLOT = re.compile(r"\{(\w+)\}")


def words(text: str) -> list[str]:
    """Return the entries of a list with commas, however its lines are broken."""
    return [" ".join(entry.split()) for entry in text.split(",") if entry.strip()]


LISTS = {
    "subject": words("""
        volcanoes, honey bees, the printing press, black holes, coral reefs, sourdough bread, chess
        openings, the Silk Road, vaccines, jazz, glaciers, electric cars, sleep, dinosaurs, the stock
        market, bicycles, memory, solar panels, the Roman army, tea, earthquakes, typography, the water
        cycle, owls, inflation, batteries, the moon landing, maps, rainforests, photography,
        lighthouses, antibiotics, chocolate, wind energy, the human heart, libraries, computer viruses,
        desert animals, the Olympic Games, bridges, the ocean floor, recycling, the history of zero,
        dreams, gardening in small spaces, encryption, migrating birds, glass, steam engines, the immune
        system, public transport, mushrooms, cartoons, coffee, satellites, folk tales, urban planning,
        the nervous system, whales, clocks, weather forecasts, origami, renewable energy, fossils, music
        theory, cheese making, robots in hospitals, tides, pottery"""),
    "concept": words("""
        gravity, osmosis, supply and demand, natural selection, compound interest, recursion, friction,
        a hash table, the greenhouse effect, democracy, opportunity cost, plate tectonics, a neural
        network, irony, DNA replication, entropy, the scientific method, probability, an API, cognitive
        bias, diffusion, a constitution, electric current, prime numbers, metabolism, sound waves, a
        mortgage, refraction, version control, symbiosis, statistical significance, acids and bases, a
        firewall, herd immunity, momentum, a metaphor, machine translation, the food chain, a black box
        test, standard deviation, evaporation, nuclear fusion, federalism, a derivative, a linked list,
        mitosis, relativity, cloud storage, catalysts, the placebo effect, inertia, an algorithm,
        object-oriented programming, buoyancy"""),
    "place": words("""
        Lisbon, a small village in the mountains, Kyoto, a busy harbour, Nairobi, the Scottish
        Highlands, a night train, Buenos Aires, an old bookshop, Montreal, a fishing town, Marrakesh, a
        research station in Antarctica, Prague, a rooftop garden, Hanoi, a desert camp, Reykjavik, a
        county fair, Cape Town, an underground lake, Athens, a space station, Mexico City, a snowed-in
        airport, Bergen, a quiet island, Istanbul, a railway museum, Cusco, a vineyard, Dublin, a bakery
        at dawn, Jaipur, a flooded valley"""),
    "role": words("""
        a patient piano teacher, a ship's captain, a detective from the 1920s, a travel agent, a head
        chef, a career coach, a museum guide, a weather presenter, a medieval blacksmith, a science
        journalist, a librarian, a football coach, an astronaut, a kind nurse, a comedian, a
        gardener, a judge, a software tester, a park ranger, a history professor, a barista, a hotel
        receptionist, a wise fox, a personal trainer, an architect, a radio host, a philosopher, a
        beekeeper, a tax adviser, a robot"""),
    "reader": words("""
        a ten-year-old, a busy manager, a new student, my grandmother, a tourist, someone who hates
        science, a class of beginners, an engineer from another field, a curious teenager, a voter, a
        new colleague"""),
    "person": words("""
        my landlord, a customer, the head of my department, an old friend, my neighbour, a professor,
        the city council, a job applicant, my team, the parents of my pupils, a supplier, my sports
        club, the editor of a newspaper, an insurance company, a new client, my flatmate"""),
    "matter": words("""
        a broken heating, a delayed delivery, a change of the meeting time, a day off next week, loud
        music at night, a wrong invoice, a summer party, a lost parcel, a missed deadline, a new
        recycling plan, a rise in prices, a cancelled event, help with moving, a lost key, an
        internship, a late payment, the new dress code, a mistake in a report, a donation, the timetable
        for next term, a bug in our app"""),
    "goal": words("""
        learn to play the guitar, run ten kilometres, save money for a trip, sleep better, read more
        books, learn Spanish, write a first novel, grow tomatoes on a balcony, prepare for an exam, find
        new friends in a new city, spend less time on my phone, cook at home more often, start a small
        online shop, organise my desk, overcome stage fright, keep a diary, train a puppy, plan a
        wedding on a budget, get better at chess, give a good presentation, repair an old bicycle,
        change careers, meditate, make my flat warmer in winter, host a game night, learn to swim as an
        adult, start a vegetable garden"""),
    "occasion": words("""
        a birthday party for children, a rainy weekend, a school project about energy, a team meeting, a
        picnic in autumn, a gift for a teacher, a family reunion, a blog about cooking, a charity run, a
        long train ride, a winter holiday, a neighbourhood festival, an escape room, a science fair, a
        podcast about history, a class trip, a farewell for a colleague, a photo competition"""),
    "thing": words("""
        electric and petrol cars, cats and dogs as pets, living in a city and in the country, tea and
        coffee, working at home and in an office, paper books and e-books, a laptop and a tablet, buses
        and trains, renting and buying a flat, public and private schools, wood and concrete as building
        materials, running and swimming, frogs and toads, stocks and bonds, cash and cards, Python and
        JavaScript, plants and fungi, a republic and a monarchy, the sun and other stars, film and
        theatre, novels and short stories, team sports and single sports, gas and induction cookers"""),
    "thesis": words("""
        homework should be abolished, zoos should be closed, every pupil should learn to program,
        museums should be free, voting should be compulsory, cars should be banned from city centres,
        social media does more harm than good, space travel is worth its cost, school should begin
        later, robots will create more jobs than they destroy, everyone should learn a second language,
        tourists should pay a tax, plastic bags should be forbidden, remote work is good for cities"""),
    "kind": words("""
        short story, poem, fairy tale, blog post, newspaper article, speech, diary entry, dialogue,
        haiku, product description, song text, letter, monologue, review, advertisement, summary of a
        film, riddle, limerick, opening paragraph of a novel, scene of a play, podcast script,
        recipe as a story"""),
    "hero": words("""
        a shy dragon, two sisters, a retired postman, a lighthouse keeper, a girl who can talk to trees,
        a taxi driver, an old robot, a lost dog, a clockmaker, twins who share a secret, a baker's
        apprentice, a young inventor, a cat in a library, a tired superhero, a music teacher, an
        explorer, a ghost who is afraid of people, a farmer, an astronaut, a street artist, a chess
        player, a beetle"""),
    "event": words("""
        finds a letter without a sender, misses the last bus, wins a strange prize, wakes up in another
        century, has to keep a promise, learns to fly, discovers a hidden door, loses a voice, must
        choose between two friends, saves a village, forgets a name, receives a map, sees snow for the
        first time, repairs a broken clock, meets an older self, gets lost in a fog, plants a strange
        seed"""),
    "style": words("""
        in a humorous tone, in at most 100 words, in simple language, in the style of a legend, in
        rhymes, in about 200 words, in the first person, in a formal tone, with a surprising end, in
        three paragraphs, for a website, with vivid details, in plain English, with short sentences, in
        a friendly tone"""),
    "language": words("Python, JavaScript, Java, C++, Go, Rust, C, TypeScript, Ruby, Kotlin"),
    "task": words("""
        reverses the words of a sentence, checks whether a string is a palindrome, counts vowels in a
        text, merges two dictionaries, removes duplicates from a list and keeps its order, computes a
        moving average, finds the longest word in a text, converts Celsius to Fahrenheit, validates an
        email address, sorts a list of people by age, finds all prime numbers below n, rotates a matrix
        by 90 degrees, counts the lines of a file, parses a CSV line with quotes, flattens a nested
        list, computes factorials without recursion, checks whether brackets are balanced, groups words
        by their first letter, finds the second largest number, converts a number to Roman numerals,
        computes the greatest common divisor, searches a sorted list by bisection, shuffles a deck of
        cards, counts how often each word occurs, finds the missing number in a range, encodes a text
        with a Caesar cipher, adds two matrices, splits a list into chunks, computes the distance of two
        points, finds anagrams in a list of words, implements a stack with push and pop, implements a
        queue with two stacks, draws a triangle of stars, simulates a dice game, compresses a string by
        run lengths, checks a password's strength, finds the shortest path in a grid, computes the nth
        triangular number, transposes a table, downloads a page and counts its links, reads a JSON file
        and prints its keys, measures running time, converts seconds to hours and minutes, finds the
        intersection of two lists, inverts a binary tree, traverses a tree in level order, detects a
        cycle in a linked list, caches results of a slow function"""),
    "tool": words("""
        a decorator, a class for a bank account, a unit test, an SQL query with a join, a regular
        expression for dates, a shell script that renames files, a Dockerfile, a list comprehension, a
        web page with a button that counts clicks, a CSS rule that centres a box, an HTML table of
        prices, a git branch, a generator, an exception of its own, a small HTTP server, a command line
        parser, a SELECT with GROUP BY, a binary search, a recursive function, an interface, an async
        function, a context manager"""),
    "name": words("""
        Ana, Ben, Chidi, Dara, Emil, Fatima, Greta, Hugo, Ines, Jonas, Keiko, Liam, Mara, Nils, Olga,
        Pablo, Quinn, Rosa, Samir, Tess, Uma, Victor, Wanda, Yusuf, Zoe"""),
    "item": words("""
        apples, notebooks, tickets, stamps, marbles, cookies, pencils, books, chairs, bottles, candles,
        eggs, postcards, shirts, batteries, cups, lamps, photos, tiles, oranges, boxes, plants, coins,
        balls"""),
    "feeling": words("joy, envy, homesickness, courage, boredom, hope, anger, surprise, pride, calm, regret"),
    "phrase": words("""
        break the ice, a piece of cake, under the weather, once in a blue moon, cost an arm and a leg,
        hit the books, let the cat out of the bag, on thin ice, the last straw, a blessing in disguise,
        bite the bullet, call it a day, cut corners, get out of hand, miss the boat, pull someone's leg,
        speak of the devil"""),
    "foreign": words("French, Spanish, German, Italian, Portuguese, Dutch, Swedish"),
    "sentence": [
        "Where is the nearest station, please?",
        "I would like a table for two at eight.",
        "The weather will be better tomorrow.",
        "Could you repeat that more slowly?",
        "My sister works in a hospital near the river.",
        "We have lost our luggage at the airport.",
        "This is the best soup that I have ever eaten.",
        "The shop closes in ten minutes.",
        "He has been learning the violin for six years.",
        "Please send me the documents before Friday.",
    ],
    "wrong": [
        "Me and him was going to the shop when it start raining.",
        "The informations in this reports is not correct.",
        "She don't know where did he put there keys.",
        "Their is many reason why peoples likes this city.",
        "I have went there yesterday and buyed two bread.",
        "If I would have more time, I will learn the piano since long.",
        "The childrens was playing in the garden, its a nice day.",
        "He is more taller then his brother but less stronger as me.",
    ],
    "opinion": [
        "The room was clean, but the street outside is noisy all night.",
        "Best headphones I have owned. The battery lasts for days!",
        "Arrived late, and one of the cups was broken.",
        "It does what the box promises. Nothing special.",
        "The staff were friendly and the soup was wonderful, though a bit expensive.",
        "I returned it after a week: the screen flickers.",
        "My children love it and ask for it every day.",
        "The app crashes whenever I open the settings.",
        "Good value, but the manual is impossible to understand.",
        "We waited an hour for cold pizza and nobody said sorry.",
    ],
}

# by kind: sentences whose slots are lists, {a} to {d} numbers
REQUESTS: dict[str, list[str]] = {
    "stories": [
        "Write a {kind} about {hero} who {event}.",
        "Write a {kind} about {hero} in {place}, {style}.",
        "Tell me a story about {hero} who {event}, {style}.",
        "Write the first page of a novel that is set in {place} and begins with {feeling}.",
        "Write a {kind} about {subject}, {style}.",
        "Describe {place} on a cold morning {style}.",
        "Invent a character: {hero} from {place}. What do they want, and what do they fear?",
        "Write a dialogue between {role} and {hero} about {subject}.",
    ],
    "messages": [
        "Write an email to {person} about {matter}.",
        "Write a polite reply to {person}, who has complained about {matter}.",
        "Draft a short text message to {person} about {matter}, {style}.",
        "Help me to apologise to {person} for {matter}.",
        "Write an announcement about {matter} for a notice board.",
        "Write a letter to {person} in which I ask for a decision about {matter}, {style}.",
    ],
    "explanations": [
        "What is {concept}?",
        "Explain {concept} to {reader}.",
        "Explain {concept} with an example from everyday life.",
        "How are {concept} and {concept} related?",
        "What is the most common misunderstanding about {concept}?",
        "Explain {concept} step by step, {style}.",
        "Why does {concept} matter? Give {few} reasons.",
        "Tell me {few} surprising facts about {subject}.",
        "What should everyone know about {subject}?",
        "Give me a short history of {subject}.",
        "How have people's ideas of {subject} changed over time?",
        "Which jobs have to do with {subject}?",
    ],
    "comparisons": [
        "What are the differences between {thing}?",
        "Compare {thing} in a table with {few} rows.",
        "I have to choose between {thing}. Which questions should I ask myself?",
        "List advantages and disadvantages of {thing}.",
        "Which is better for {reader}: {thing}? Give reasons.",
    ],
    "plans": [
        "How can I {goal}?",
        "Make a plan of {few} weeks to {goal}.",
        "I want to {goal}, but I have only {a} minutes a day. What do you suggest?",
        "What are the most common mistakes of people who want to {goal}?",
        "Give me {few} ideas for {occasion}.",
        "Write a checklist for {occasion}.",
        "Plan {few} days in {place} for {reader}.",
        "Suggest a budget of {a} dollars for {occasion}.",
        "Give me a quiz of {few} questions about {subject}, with the answers at the end.",
        "Make a lesson plan about {subject} for {reader}.",
    ],
    "arguments": [
        "Do you agree that {thesis}?",
        "Give {few} arguments for and against the claim that {thesis}.",
        "Write a short speech which says that {thesis}, {style}.",
        "How would {role} answer someone who says that {thesis}?",
        "What would have to be true for the claim that {thesis} to be wrong?",
        "Write an essay outline on the question whether {thesis}.",
    ],
    "roles": [
        "You are {role}. Introduce yourself and tell me about {subject}.",
        "Act as {role}. I want to {goal}; what is your advice?",
        "Answer as {role}: what is {concept}?",
        "You are {role} in {place}. Describe your day, {style}.",
        "Speak to me as {role} would to {reader} and explain {concept}.",
        "Let us play a game: you are {role}, and I have to guess your job. Give me the first hint.",
    ],
    "code": [
        "Write a {language} function that {task}.",
        "Write a {language} program that {task}, and explain how it works.",
        "Show me an example of {tool} and explain each line.",
        "Write a function in {language} that {task}. Add a test.",
        "What is {tool}, and when should I use one?",
        "How would you find the error in {language} code that {task} but is too slow?",
        "Describe in words, without code, how a function works that {task}.",
        "Write a docstring for a function that {task}.",
        "Which cases should a test cover for a function that {task}?",
    ],
    "sums": [
        "{name} has {a} {item} and gives {b} of them to {name}. How many are left?",
        "A box holds {a} {item}. How many boxes are needed for {c} of them?",
        "What is {a} percent of {c}?",
        "{name} buys {a} {item} for {b} dollars each and pays with {c} dollars. Is it enough?",
        "Solve for x: {b}x + {a} = {c}. Show your steps.",
        "A train travels {c} kilometres in {b} hours. What is its average speed?",
        "What is the area of a rectangle of {a} by {b} metres, and how long is its border?",
        "Compute {a} * {b} - {c} and explain each step.",
        "{name} runs {b} kilometres every day. How far is that in {a} days?",
        "The price of {item} rises from {c} to {d} dollars. By how many percent is that?",
        "What is the average of {a}, {b}, {c} and {d}?",
        "Is {d} a prime number? Explain how you know.",
        "A bag holds {a} red and {b} blue balls. What is the probability of drawing a red one?",
        "Write the first {few} terms of a sequence that begins with {a} and grows by {b}.",
    ],
    "puzzles": [
        "{name} is older than {name}. {name} is younger than both. Who is the oldest?",
        "There are {a} {item} on a table. You take away {b}. How many do you have?",
        "If all {item} are heavy and some heavy things are blue, are some {item} blue?",
        "{name} says that {name} is wrong. {name} says that both are right. Who can be right?",
        "What comes next: {a}, {a} + {b}, {a} + 2 * {b}? Compute the numbers first.",
        "Which of these does not belong to the others: {item}, {item}, {item}, {concept}? Why?",
        "{name} walks {a} steps north, {b} steps east and {a} steps south. How far is it back?",
        "Yesterday was {a} days before {name}'s birthday. How many days are left today?",
        "Give me a riddle about {item}, and its answer.",
    ],
    "texts": [
        'Correct the mistakes in this sentence and explain them: "{wrong}"',
        'Translate into {foreign}: "{sentence}"',
        'Is this review positive, negative or mixed? Answer in one word and give a reason. "{opinion}"',
        'Rewrite this politely: "{opinion}"',
        'What does the phrase "{phrase}" mean? Give {few} examples.',
        "Find {few} synonyms of {feeling} and use each in a sentence.",
        "Sort these by the alphabet: {item}, {item}, {name}, {item}, {name}.",
        "Return a JSON object for {name} from {place}, who is {b} years old and sells {item}.",
        'Sum up these reviews in one sentence: "{opinion}" "{opinion}" "{opinion}"',
        "Give this list as a Markdown table with prices: {item} {a}, {item} {b}, {item} {c}.",
        'Write {few} questions about this sentence: "{sentence}"',
        "Suggest {few} titles for a text about {subject}, {style}.",
        'Which names and places occur here? "{name} met {name} in {place} and bought {item}."',
    ],
}


def numbers(draw: random.Random) -> dict[str, Callable[[], str]]:
    """Return functions that draw the numbers of slots; a and b are below c and d."""
    return {
        "a": lambda: str(draw.randint(11, 60)),
        "b": lambda: str(draw.randint(2, 10)),
        "c": lambda: str(draw.randint(61, 400)),
        "d": lambda: str(draw.randint(401, 999)),
        "few": lambda: draw.choice(["two", "three", "four", "five", "six", "seven"]),
    }


def fill(request: str, draw: random.Random) -> str:
    """Fill the slots of a request. A list's entry is not named twice; a number is, if its slot is."""
    made, taken = {slot: make() for slot, make in numbers(draw).items()}, set()

    def entry(match: re.Match) -> str:
        slot = match[1]
        if slot in made:
            return made[slot]
        chosen = draw.choice([one for one in LISTS[slot] if one not in taken])
        taken.add(chosen)
        return chosen

    return SLOT.sub(entry, request)


def prompts(number: int, seed: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, request) pairs: kinds in rotation, each until it has no new requests, each request once.

    Args:
        number: of requests.
    """
    draw, seen, kinds = random.Random(seed), set(), list(REQUESTS)
    while number and kinds:
        for kind in tuple(kinds):
            for _ in range(50):  # a kind with few slots may have none left
                if (request := fill(draw.choice(REQUESTS[kind]), draw)) not in seen:
                    break
            else:
                kinds.remove(kind)
                continue
            seen.add(request)
            yield kind, request
            number -= 1
            if not number:
                return


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--number", type=int, required=True, help="of prompts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, gzipped")
    args = parser.parse_args(argv)
    if args.number < 1:
        parser.error(f"--number: must be >= 1, got {args.number}")
    rows = [
        {"id": f"written-{kind}-{args.seed}-{i}", "conversations": [{"from": "human", "value": request}]}
        for i, (kind, request) in enumerate(prompts(args.number, args.seed))
    ]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows)
    with whole_file(args.out) as file:
        file.write(gzip.compress(text.encode(), 9, mtime=0))
    print(f"{args.out}: {len(rows)} prompts")


if __name__ == "__main__":
    main()
