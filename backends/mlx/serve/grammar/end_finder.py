"""Finds symbols with which an answer that follows a grammar ends."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any

from .growth import growth

# The ranks of symbols. Symbols of a lower rank end JSON sooner. Stop ids have the rank 0.
STOP, QUOTE, BRACKET, COMMA, DIGIT, OTHER = range(6)
OPENING = frozenset(b"{[")
CACHE_BYTES = 64 * 2**20  # of compiled grammars, for each model and compiler
MAX_GROWTHS = 64  # grammars whose growth is kept
MAX_END = 4096  # an answer is not brought to its end while the end takes more symbols than this
MAX_ROUNDS = 256  # how often a search takes a symbol of a low rank at the same place of the grammar's rules
MAX_SEARCH = 4096  # the number of symbols that a search for an end tries


def marker_bytes(id: int) -> bytes:
    """Return bytes for a token without text. They occur in no text, and xgrammar allows no token without bytes."""
    return b"\xff<%d>" % id


class EndFinder:
    """Finds an end of an answer: the stop id, or in a text of JSON quotes, closing brackets, commas and digits first.

    It works on symbols, not on tokens: the 256 bytes, then the tokens without bytes that a grammar may have, which are
    the stop ids and the `markers`. A grammar over few symbols makes a search fast, whatever the size of the vocabulary.
    """

    def __init__(self, tokens: Sequence[bytes], stop_ids: Collection[int], markers: Collection[int] = ()):
        special = [*sorted(stop_ids), *sorted({*markers} - {*stop_ids})]
        self._special = dict(enumerate(special, 256))
        self._symbol_of = {id: symbol for symbol, id in self._special.items()}
        self._stops = range(256, 256 + len(stop_ids))
        self._ranks = (
            *map(_rank, range(256)), *(STOP if symbol in self._stops else OTHER for symbol in self._special)
        )  # fmt: skip
        self._tokens = tokens
        self._growth = lru_cache(MAX_GROWTHS)(partial(growth, count=self._count))

    @cached_property
    def _compiler(self) -> Any:
        import xgrammar

        symbols = [bytes([byte]) for byte in range(256)]
        symbols += [b"" if symbol in self._stops else marker_bytes(symbol) for symbol in self._special]
        info = xgrammar.TokenizerInfo(
            symbols, xgrammar.VocabType.RAW, vocab_size=len(symbols), stop_token_ids=[*self._stops]
        )
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=CACHE_BYTES)

    def compile(self, structure: Any) -> Any:
        """Return the compiled grammar over symbols for a structure, a structural tag of xgrammar."""
        format = self._with_symbols(structure)
        return self._compiler.compile_structural_tag({"type": "structural_tag", "format": format})

    def _with_symbols(self, structure: Any) -> Any:
        """Return a structure with symbols in place of tokens."""
        if isinstance(structure, list):
            return [self._with_symbols(part) for part in structure]
        if not isinstance(structure, dict):
            return structure
        if structure.get("type") == "token":
            return structure | {"token": self._symbol_of[structure["token"]]}
        changed = {key: self._with_symbols(value) for key, value in structure.items()}
        for key in {"trigger_tokens", "exclude_tokens"} & structure.keys():
            changed[key] = [self._symbol_of[token] for token in structure[key]]
        return changed

    def symbols(self, token: int) -> list[int]:
        """Return the symbols of a token."""
        return [self._symbol_of[token]] if token in self._symbol_of else [*self._tokens[token]]

    @property
    def symbol_count(self) -> int:
        return 256 + len(self._special)

    @cached_property
    def symbols_of_tokens(self) -> tuple[Any, Any, Any]:
        """The symbols of all tokens in one array, and for each token the offset and the number of its symbols."""
        import numpy

        texts = [b"\0" if id in self._symbol_of else text for id, text in enumerate(self._tokens)]
        lengths = numpy.array([*map(len, texts)])
        offsets = numpy.cumsum(lengths) - lengths
        data = numpy.frombuffer(b"".join(texts), dtype=numpy.uint8).astype(numpy.uint16)
        for id, symbol in self._symbol_of.items():
            data[offsets[id]] = symbol
        return data, offsets, lengths

    def end(self, matcher: Any, limit: int = MAX_END) -> list[int] | None:
        """Return at most `limit` symbols that end the answer, or None if the search finds none.

        `matcher` has a grammar over symbols and stays as it is. Raises ValueError if the grammar admits no complete
        answer.
        """
        # If a pattern repeats brackets or commas, they lead to no end. A quote always ends a string.
        for highest, opens in ((COMMA, False), (QUOTE, True)):
            search = _Search(self._ranks, highest, opens)
            state = search.start(matcher)
            while state is not None and len(state.symbols) <= limit:
                if state.matcher.is_terminated():
                    return state.symbols
                if not state.next:
                    raise ValueError("the grammar admits no complete answer")
                state = search.step(state, limit)
        return None

    def tokens(self, symbols: Sequence[int]) -> list[int] | None:
        """Return the tokens for symbols: at each place the longest. None if the vocabulary lacks one."""
        tokens: list[int] = []
        place = 0
        while place < len(symbols):
            if symbols[place] in self._special:
                tokens.append(self._special[symbols[place]])
                place += 1
                continue
            length = min(self._longest, len(symbols) - place)
            end = next((i for i in range(place, place + length) if symbols[i] in self._special), place + length)
            text = bytes(symbols[place:end])
            while text and text not in self._ids:
                text = text[:-1]
            if not text:
                return None
            tokens.append(self._ids[text])
            place += len(text)
        return tokens

    def growth(self, compiled: Any) -> int:
        """Return by how many tokens a symbol may lengthen the end of an answer that follows a grammar over symbols."""
        return min(self._growth(str(compiled.grammar)), MAX_END)

    def _count(self, text: bytes) -> int:
        """Return the number of tokens of a text."""
        return len(self.tokens(text) or text)

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: id for id, token in enumerate(self._tokens) if token}

    @cached_property
    def _longest(self) -> int:
        return max(map(len, self._ids))


_POSITION = re.compile(r"rule_start_pos=\w+")


def relative_rules(matcher: Any) -> str:
    """Return the places in the rules of the grammar at which the parser is. Rules that begin here begin at `last`."""
    text = matcher._debug_print_internal_state()  # xgrammar has no other access to the state
    head, _, places = text.partition("Last step")
    count = int(re.search(r"\d+", head)[0])
    return places.replace(f"rule_start_pos={count - 1},", "rule_start_pos=last,")  # as in each round of a repetition


@dataclass(frozen=True)
class _State:
    """A state of a search.

    - `next`: the symbols that may come next, those of the lowest ranks first.
    - `symbols`: the symbols from the start of the search.
    - `before`: the state before the last of them, or None.
    """

    matcher: Any
    next: tuple[int, ...]
    symbols: list[int]
    before: _State | None

    @cached_property
    def rules(self) -> str:
        return relative_rules(self.matcher)

    @cached_property
    def key(self) -> tuple[str, int]:
        """Equal for two states that admit the same texts. It counts rounds of repetitions, as the parser does."""
        count, state = 0, self
        while state is not None:
            count += state.rules == self.rules
            state = state.before
        return self.rules, count


class _Search:
    """A search for an end that takes symbols with a rank of at most `highest` at once where they may come.

    Elsewhere, it finds the fewest symbols after which they may come. `opens`: it also tries to open brackets where
    other symbols may come.
    """

    def __init__(self, ranks: tuple[int, ...], highest: int, opens: bool):
        import numpy

        self._ranks, self._highest, self._opens, self._left = ranks, highest, opens, MAX_SEARCH
        self._mask = numpy.zeros((1, -(-len(ranks) // 32)), dtype=numpy.int32)
        self._useful: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def start(self, matcher: Any) -> _State:
        return self._state(matcher.fork(), [], None)

    def step(self, state: _State, limit: int) -> _State | None:
        """Return a state that is nearer to the end, or None if there is none within the limits."""
        if self._is_near(state):
            if state.key[1] > MAX_ROUNDS:  # a pattern repeats these symbols
                return None
            return self._after(state, state.next[0])
        found, queue = {state.key}, deque([state])
        while queue and len(queue[0].symbols) < limit:
            state = queue.popleft()
            # Symbols that lead from one state to the same one do so from all states of the same rules.
            rules = _POSITION.sub("", state.rules), state.next
            leads_to: dict[tuple[str, int], int] = {}
            for symbol in self._useful.get(rules) or self._candidates(state):
                self._left -= 1
                if self._left < 0:
                    return None
                after = self._after(state, symbol)
                if after.matcher.is_terminated() or self._is_near(after):
                    return after
                leads_to.setdefault(after.key, symbol)
                if after.next and after.key not in found:
                    found.add(after.key)
                    queue.append(after)
            self._useful[rules] = [*leads_to.values()]
        return None

    def _is_near(self, state: _State) -> bool:
        return bool(state.next) and self._ranks[state.next[0]] <= self._highest

    def _candidates(self, state: _State) -> Sequence[int]:
        closed = [symbol for symbol in state.next if symbol not in OPENING]
        return state.next if self._opens or not closed else closed

    def _after(self, state: _State, symbol: int) -> _State:
        matcher = state.matcher.fork()
        matcher.accept_token(symbol)
        return self._state(matcher, [*state.symbols, symbol], state)

    def _state(self, matcher: Any, symbols: list[int], before: _State | None) -> _State:
        if matcher.is_terminated():
            return _State(matcher, (), symbols, before)
        matcher.fill_next_token_bitmask(self._mask)
        is_open = bool(symbols) and symbols[-1] in OPENING
        return _State(matcher, _sorted(self._mask.tobytes(), self._ranks, is_open), symbols, before)


@lru_cache(4096)
def _sorted(mask: bytes, ranks: tuple[int, ...], is_open: bool) -> tuple[int, ...]:
    """Return the symbols of a mask, those of the lowest ranks first."""
    allowed = [symbol for symbol in range(len(ranks)) if mask[symbol // 8] >> symbol % 8 & 1]
    printable = [symbol for symbol in allowed if symbol >= 0x20]
    # After an opening bracket, a quote would begin a new value.
    swapped = {QUOTE: BRACKET, BRACKET: QUOTE} if is_open else {}
    return tuple(sorted(printable or allowed, key=lambda symbol: swapped.get(ranks[symbol], ranks[symbol])))


def _rank(byte: int) -> int:
    """Return the rank of a byte."""
    for rank, bytes_of_rank in ((QUOTE, b'"'), (BRACKET, b"}]"), (COMMA, b","), (DIGIT, b"0123456789")):
        if byte in bytes_of_rank:
            return rank
    return OTHER
