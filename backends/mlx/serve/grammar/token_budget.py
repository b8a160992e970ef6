"""Keeps an answer that follows a grammar within its budget of tokens, so that it reaches an end."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from .end_finder import MAX_END, EndFinder, relative_rules

NEAR = 32  # near the budget, at most so many tokens are left besides those of the end, and each token is checked
GROWTH = 8  # by how many tokens one that is not checked may lengthen the end, besides `growth`
MAX_STEPS = 4096  # symbols that one check tries
MAX_ENDS = 64  # ends that one check searches
MAX_COMPARED = 8  # places with which one is compared
REPEATED = 16  # how often a symbol is repeated to compare places


@dataclass
class _Place:
    """A place in a grammar that an answer has reached, or that it may reach.

    - `matcher`: has the grammar over symbols, and is at this place.
    - `after`: the places after the symbols that were tried.
    - `end`: symbols that end the answer from here, and `end_tokens`, the tokens for them. None if none are known.
    - `is_searched`: whether an end was searched.
    - `repeats`: for symbols, what `_repeat` returns.
    """

    matcher: Any
    after: dict[int, _Place] = field(default_factory=dict)
    end: list[int] | None = None
    end_tokens: list[int] | None = None
    is_searched: bool = False
    repeats: dict[int, tuple[int, bool]] = field(default_factory=dict)


class TokenBudget:
    """Keeps one answer within its budget: removes the tokens after which no end would fit.

    - `matcher`: has the grammar over symbols, at the beginning of the answer.
    - `is_text`: where the answer may stop at once, it may also use up its budget, as text before a call does.
    - `growth`: by how many tokens a choice in the grammar may lengthen the end, as the next item of an array does.
      Nearer to the budget than this, each token is checked too.

    Near the budget, all tokens are run over the grammar, and an end is searched for each place that they lead to. The
    model then draws any of the tokens after which an end fits.
    """

    def __init__(self, end_finder: EndFinder, matcher: Any, is_text: bool, growth: int):
        self._end_finder, self._matcher, self._is_text, self._growth = end_finder, matcher, is_text, growth
        self._places: defaultdict[str, list[_Place]] = defaultdict(list)  # by their rules
        self._place: _Place | None = None  # that of the answer, if the last tokens were checked
        self._last = 0  # the last symbol of the answer
        self._run: tuple[_Place, Any, tuple[Any, list[_Place]]] | None = None  # the last result of `_reached`
        self._steps = self._searches = 0  # what is left of MAX_STEPS and MAX_ENDS

    def accept(self, token: int) -> None:
        """Append a token to the answer."""
        for symbol in self._end_finder.symbols(token):
            self._matcher.accept_token(symbol)
            self._place, self._last = self._place and self._place.after.get(symbol), symbol

    def restrict(self, mask: Any, left: int) -> int:
        """Clear the bits of the tokens after which no end fits into the budget, of which `left` tokens are left.

        `mask`, int32 `[words]`, has a bit for each token that the grammar allows. Returns 0 near the budget, and
        elsewhere the number of tokens after which to call this method again.
        """
        import numpy

        always_fits = MAX_END + NEAR + self._growth  # any end that a search finds
        if left > always_fits:
            return left - always_fits
        self._steps, self._searches = MAX_STEPS, MAX_ENDS
        place = self._place
        if place is None or not self._is_at(place, self._matcher, self._last):
            place = self._place = self._find(self._matcher.fork(), self._last)
        end = self._end(place)
        if end is None or self._is_text and len(end) == 1:
            return max(1, left // 8)
        spare = left - len(end)
        if not 0 <= spare <= NEAR + self._growth:
            return max(1, (spare - self._growth) // GROWTH)
        bits = numpy.unpackbits(mask.view(numpy.uint8), bitorder="little").view(bool)
        ids = numpy.flatnonzero(bits)
        bits[ids] = self._fit(place, ids, left - 1, knows_all=spare <= GROWTH)
        bits[end[0]] = True
        mask[:] = numpy.packbits(bits, bitorder="little").view(numpy.int32)
        return int(spare > NEAR)

    def _fit(self, start: _Place, ids: Any, room: int, knows_all: bool) -> Any:
        """Return for each of the tokens `ids` whether an end of at most `room` tokens may follow it.

        - `start`: the place of the answer.
        - `knows_all`: leave out tokens whose end is not known.
        """
        import numpy

        self._follow(start)
        at, places = self._reached(start, ids)
        fits = numpy.full(len(places) + 1, not knows_all)  # the last one is for unknown places
        for number in _distinct(at[at >= 0], len(places)):
            if (end := self._end(places[number])) is not None:
                fits[number] = len(end) <= room
        return fits[at]

    def _reached(self, start: _Place, ids: Any) -> tuple[Any, list[_Place]]:
        """Run tokens over the grammar. Return the number of the place that each reaches, and the places.

        The number is -1 if the place is not known.
        """
        import numpy

        if self._run is not None and self._run[0] is start and numpy.array_equal(self._run[1], ids):
            return self._run[2]  # within a string, the place stays the same
        data, offsets, lengths = self._end_finder.symbols_of_tokens
        size, places, numbers = self._end_finder.symbol_count, [start], {id(start): 0}
        at = numpy.zeros(len(ids), dtype=numpy.int64)
        active = numpy.arange(len(ids))
        for column in range(int(lengths[ids].max(initial=0))):
            active = active[(lengths[ids[active]] > column) & (at[active] >= 0)]
            pairs = at[active] * size + data[offsets[ids[active]] + column]
            after = numpy.full(len(places) * size, -1)
            for pair in _distinct(pairs, len(after)):
                place = self._step(places[pair // size], pair % size)
                if place is not None and numbers.setdefault(id(place), len(places)) == len(places):
                    places.append(place)
                after[pair] = -1 if place is None else numbers[id(place)]
            at[active] = after[pairs]
        self._run = start, ids, (at, places)
        return at, places

    def _follow(self, start: _Place) -> None:
        """Make sure that the first token of the end of `start` fits, whatever end was found for the place after it."""
        first, *others = start.end_tokens
        symbols = self._end_finder.symbols(first)
        place: _Place | None = start
        for symbol in symbols:
            place = self._step(place, symbol)
            if place is None:  # an earlier place on the way was taken for another one
                return
        if (end := self._end(place)) is None or len(end) > len(others):
            place.end, place.end_tokens, place.is_searched = start.end[len(symbols) :], others, True

    def _step(self, place: _Place, symbol: int) -> _Place | None:
        """Return the place after a symbol, or None if it is not known."""
        if symbol not in place.after:
            matcher = place.matcher.fork()
            if not self._steps or not matcher.accept_token(symbol):
                return None
            self._steps -= 1
            end = place.end[1:] if place.end and place.end[0] == symbol else None
            place.after[symbol] = self._find(matcher, symbol, end)
        return place.after[symbol]

    def _find(self, matcher: Any, symbol: int, end: list[int] | None = None) -> _Place:
        """Return the place of a matcher after `symbol`. `end` is an end from there, if one is known."""
        if matcher.is_terminated():
            return _Place(matcher, end=[], end_tokens=[], is_searched=True)
        known = self._places[relative_rules(matcher)]
        for place in known[: -MAX_COMPARED - 1 : -1]:
            self._end(place)
            is_short = place.end is not None and (end is None or len(place.end) <= len(end))
            if is_short and self._is_at(place, matcher, symbol):
                return place
        known.append(_Place(matcher, end=end, is_searched=end is not None))
        return known[-1]

    def _is_at(self, place: _Place, matcher: Any, symbol: int) -> bool:
        """Return whether a matcher after `symbol`, whose rules are those of a place, is at this place.

        The rules do not tell how often something was repeated, and how deeply it is nested. This shows in the shortest
        end, and in how often a symbol may be repeated.
        """
        if not place.end or not _ends(matcher, place.end) or _ends(matcher, place.end[1:]):
            return False
        if symbol not in place.repeats:
            place.repeats[symbol] = _repeat(place.matcher, symbol, place.end)
        return _repeat(matcher, symbol, place.end) == place.repeats[symbol]

    def _end(self, place: _Place) -> list[int] | None:
        """Return tokens that end the answer from a place, or None if none are known."""
        if not place.is_searched and self._searches:
            self._searches -= 1
            end, on_the_way = self._end_finder.end(place.matcher), place
            while on_the_way is not None and not on_the_way.is_searched:
                on_the_way.end, on_the_way.is_searched = end, True
                on_the_way, end = (on_the_way.after.get(end[0]), end[1:]) if end else (None, None)
        if place.end_tokens is None and place.end is not None:
            place.end_tokens = self._end_finder.tokens(place.end)
        return place.end_tokens


def _ends(matcher: Any, symbols: list[int]) -> bool:
    """Return whether `symbols` end the answer."""
    count, is_end = 0, False
    for symbol in symbols:
        if not matcher.accept_token(symbol):
            break
        count += 1
    else:
        is_end = matcher.is_terminated()
    matcher.rollback(count)
    return is_end


def _repeat(matcher: Any, symbol: int, end: list[int]) -> tuple[int, bool]:
    """Return how often a byte may be repeated, at most REPEATED times, and whether `end` may follow."""
    count = 0
    while count < REPEATED and symbol < 256 and matcher.accept_token(symbol):
        count += 1
    result = count, _ends(matcher, end)
    matcher.rollback(count)
    return result


def _distinct(numbers: Any, limit: int) -> list[int]:
    """Return the different ones of `numbers`, which are below `limit`, in ascending order."""
    import numpy

    has = numpy.zeros(limit, dtype=bool)
    has[numbers] = True
    return numpy.flatnonzero(has).tolist()
