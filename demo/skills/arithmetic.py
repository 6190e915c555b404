"""Sums, differences, products and quotients of small integers, worked digit by digit in the analysis.

The tokenizer joins up to three digits, so the work writes numbers with their digits apart.
"""

from __future__ import annotations

from random import Random

from antiphon.demo.dialogue import AssistantTurn, Effort, Example, Expect, Split, UserTurn, split_of
from antiphon.demo.phrasing import dress, fill, phrases, pick
from antiphon.demo.words import FIRST_NAMES, WordSource

QUESTIONS = {
    "+": phrases("arithmetic_add"),
    "-": phrases("arithmetic_subtract"),
    "*": phrases("arithmetic_multiply"),
    "/": phrases("arithmetic_divide"),
}
LEADS = {
    "+": "I add the two numbers digit by digit from the right.",
    "-": "I subtract the two numbers digit by digit from the right.",
    "*": "I multiply digit by digit from the right.",
    "/": "I divide digit by digit from the left.",
}


def spaced(number: int) -> str:
    """The decimal digits of a number, one token each."""
    return " ".join(str(number))


def columns(a: int, b: int) -> list[tuple[int, int]]:
    """The digits of two numbers, paired from the right."""
    width = max(len(str(a)), len(str(b)))
    low_first = [str(n).rjust(width, "0")[::-1] for n in (a, b)]
    return [(int(x), int(y)) for x, y in zip(*low_first, strict=True)]


def add_steps(a: int, b: int) -> str:
    """The work of a + b."""
    parts, carry = [], 0
    for x, y in columns(a, b):
        total = x + y + carry
        carried = f"+{carry}" if carry else ""
        carry = total // 10
        parts.append(f"{x}+{y}{carried}={total}" + (f", keep {total % 10} carry {carry}" if carry else ""))
    return f"{spaced(a)} + {spaced(b)}: " + "; ".join(parts) + f". Digits: {spaced(a + b)}. {a}+{b}={a + b}."


def subtract_steps(a: int, b: int) -> str:
    """The work of a - b; the smaller number is always taken from the larger."""
    if a < b:
        return f"{a} is less than {b}, so the result is negative. {subtract_steps(b, a)} {a}-{b}=-{b - a}."
    parts, borrow = [], 0
    for x, y in columns(a, b):
        taken = f"-{borrow}" if borrow else ""
        value = x - y - borrow
        borrow = int(value < 0)
        left = f"{x + 10}" if borrow else f"{x}"
        parts.append(f"{left}-{y}{taken}={value % 10}" + (", borrow 1" if borrow else ""))
    return f"{spaced(a)} - {spaced(b)}: " + "; ".join(parts) + f". Digits: {spaced(a - b)}. {a}-{b}={a - b}."


def multiply_steps(a: int, b: int) -> str:
    """The work of a * b; a two-digit second factor is split into tens and ones."""
    if b > 9:
        tens, ones = b // 10 * 10, b % 10
        first = multiply_steps(a, b // 10)
        text = f"{b} is {tens} and {ones}. {first} So {a}*{tens}={a * tens}."
        if ones == 0:
            return text
        return f"{text} {multiply_steps(a, ones)} {add_steps(a * tens, a * ones)} {a}*{b}={a * b}."
    parts, carry = [], 0
    for digit in str(a)[::-1]:
        product = int(digit) * b
        total = product + carry
        plus = f", +{carry}={total}" if carry else ""
        parts.append(f"{digit}*{b}={product}{plus}")
        carry = total // 10
        if carry:
            parts[-1] += f", keep {total % 10} carry {carry}"
    return f"{spaced(a)} * {b}: " + "; ".join(parts) + f". Digits: {spaced(a * b)}. {a}*{b}={a * b}."


def divide_steps(a: int, b: int) -> str:
    """The work of a / b with a one-digit divisor."""
    parts, rest = [], 0
    for digit in str(a):
        value = rest * 10 + int(digit)
        rest = value % b
        parts.append(f"{value}/{b}={value // b} rest {rest}")
    quotient = a // b
    end = f"{a}/{b}={quotient}" + (f" remainder {rest}." if rest else ".")
    return f"{spaced(a)} / {b}: " + "; ".join(parts) + f". Digits: {spaced(quotient)}. {end}"


def solve(a: int, b: int, operator: str) -> tuple[str, str, str]:
    """(steps, final answer, result as text) of ``a operator b``."""
    if operator == "+":
        return add_steps(a, b), f"{a} + {b} = {a + b}", str(a + b)
    if operator == "-":
        return subtract_steps(a, b), f"{a} - {b} = {a - b}", str(a - b)
    if operator == "*":
        return multiply_steps(a, b), f"{a} * {b} = {a * b}", str(a * b)
    quotient, rest = divmod(a, b)
    result = str(quotient) + (f" remainder {rest}" if rest else "")
    return divide_steps(a, b), f"{a} / {b} = {result}", result


def reply(a: int, b: int, operator: str, effort: Effort) -> AssistantTurn:
    """Thought and answer of one operation."""
    steps, final, result = solve(a, b, operator)
    if effort is not Effort.LOW:
        steps = f"{LEADS[operator]} {steps}"
    if effort is Effort.HIGH:
        steps += f" Every column is done and the digits agree, so the answer is {result}."
    return AssistantTurn(steps, final)


def operands(rng: Random, operator: str) -> tuple[int, int]:
    """Two numbers for an operation, small ones often."""
    if operator in "+-":
        largest = rng.choice((20, 99, 99, 999, 999, 999))
        return rng.randint(0, largest), rng.randint(0, rng.choice((largest, largest, 99)))
    if operator == "*":
        kind = rng.random()
        if kind < 0.45:
            return rng.randint(0, 12), rng.randint(0, 12)
        if kind < 0.9:
            a, b = rng.randint(2, 99), rng.randint(2, 9)
            return (a, b) if rng.random() < 0.7 else (b, a)
        return rng.randint(11, 99), rng.randint(11, 99)
    b = rng.randint(1, 9)
    exact = rng.random() < 0.7
    return (b * rng.randint(0, 99) if exact else rng.randint(1, 300)), b


def operands_of(rng: Random, operator: str, split: Split) -> tuple[int, int]:
    """Operands that belong to a split."""
    while True:
        a, b = operands(rng, operator)
        if split_of(f"arithmetic {a}{operator}{b}") is split:
            return a, b


def arithmetic(rng: Random, split: Split, effort: Effort, words: WordSource) -> Example:
    """One operation on two small integers."""
    operator = rng.choice("++--**/")
    a, b = operands_of(rng, operator, split)
    phrasing = pick(rng, QUESTIONS[operator], split)
    text = fill(phrasing, a=str(a), b=str(b), n=rng.choice(FIRST_NAMES), w=words.word(rng) + "s")
    user = UserTurn(dress(rng, text, split))
    result = solve(a, b, operator)[2]
    keys = (f"arithmetic {a}{operator}{b}", f"arithmetic phrasing {phrasing}")
    return Example(
        "arithmetic",
        (user,),
        reply(a, b, operator, effort),
        Expect(contains=(f"= {result}",)),
        effort,
        keys=keys,
    )
