"""By how many tokens a symbol may lengthen the shortest end of an answer, from the text of a grammar of xgrammar.

A symbol lengthens the end where it chooses something that the shortest answer does not have: one more item of an array,
an optional property, or one more call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf

# Chains of rules are in the order of the text or in the opposite order, so that few rounds are enough. The limit is for
# the grammars of clients.
MAX_ROUNDS = 64
# A literal, a class of characters, a rule with the least number of its repetitions, a function, or a part of a group.
_PART = re.compile(
    r'"(?P<text>(?:\\.|[^"\\])*)"|\[(?:\\.|[^\]\\])*\](?P<star>\*?)'
    r'|(?P<function>\w+)\((?:"(?:\\.|[^"\\])*"|[^")])*\)'
    r"|(?P<rule>[\w.-]+)(?:\{(?P<least>\d+),[^}]*\})?|(?P<sign>[()|])"
)


@dataclass
class _Rule:
    """A rule of the grammar, or a group in parentheses.

    - `choices`: the sequences from which it chooses: of numbers of tokens, and of rules with the number of their
      repetitions.
    - `groups`: the groups in its choices.
    - `shortest`: the number of tokens of its shortest text.
    - `growth`: by how many tokens its first symbol may lengthen the end.
    """

    choices: list[list[Part]] = field(default_factory=lambda: [[]])
    groups: list[_Rule] = field(default_factory=list)
    shortest: float = inf
    growth: float = 0

    @property
    def largest_growth(self) -> float:
        """The growth of the rule, or of a group in it if this is larger."""
        return max([self.growth, *(group.largest_growth for group in self.groups)])

    def update(self) -> bool:
        """Compute the numbers from those of the other rules. Return whether they changed."""
        before = self.shortest, self.growth
        for group in self.groups:
            group.update()
        lengths = [sum(map(_length, choice)) for choice in self.choices]
        self.shortest = min(lengths, default=inf)
        growths = [
            length - self.shortest + max(map(_growth, _leading(choice)), default=0)
            for length, choice in zip(lengths, self.choices)
            if length < inf
        ]
        self.growth = max(growths, default=0)
        return (self.shortest, self.growth) != before


Part = int | tuple[_Rule, int]


def _length(part: Part) -> float:
    return part if isinstance(part, int) else part[0].shortest * part[1]


def _growth(part: Part) -> float:
    return 0 if isinstance(part, int) else part[0].growth


def _leading(choice: list[Part]) -> Iterator[Part]:
    """Yield the parts of a sequence with which its text may begin."""
    for part in choice:
        yield part
        if _length(part):
            return


def growth(grammar: str, count: Callable[[bytes], int]) -> int:
    """Return by how many tokens a symbol may lengthen the shortest end. `count` returns the tokens of a text."""
    rules: dict[str, _Rule] = {}
    for line in grammar.splitlines():
        name, is_rule, body = line.partition(" ::= ")
        if is_rule:
            _read(body, rules.setdefault(name, _Rule()), rules, count)
    order = [*rules.values()]
    for _ in range(MAX_ROUNDS):
        order.reverse()
        if not any([rule.update() for rule in order]):
            break
    return int(max((rule.largest_growth for rule in order), default=0))


def _read(body: str, rule: _Rule, rules: dict[str, _Rule], count: Callable[[bytes], int]) -> None:
    """Read the choices of a rule. The conditions that may follow them have no effect on the lengths."""
    outer = [rule]
    for part in _PART.finditer(body):
        last = outer[-1].choices[-1]
        if part["sign"] == "(":
            group = _Rule()
            outer[-1].groups.append(group)
            last.append((group, 1))
            outer.append(group)
        elif part["sign"] == "|":
            outer[-1].choices.append([])
        elif part["sign"] == ")":
            outer.pop()
            if len(outer) == 1:
                return
        elif part["rule"]:
            named = rules.setdefault(part["rule"], _Rule())
            least = int(part["least"] or 1)
            if least:
                last.append((named, least))
            if part["least"]:  # there may be one more
                outer[-1].groups.append(_Rule([[], [(named, 1)]]))
                last.append((outer[-1].groups[-1], 1))
        elif part["text"]:
            last.append(count(_bytes(part["text"])))
        elif part["text"] is None and not part["star"]:
            last.append(1)


def _bytes(text: str) -> bytes:
    """Return the bytes of a literal of a grammar."""
    return text.encode("latin-1", "backslashreplace").decode("unicode_escape").encode(errors="replace")
