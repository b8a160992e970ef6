"""Grammars for answers: which schemas and patterns they follow, the masks of tokens, and the budget of tokens."""

from .grammars import Constraint, GrammarError, Grammars

__all__ = ["Constraint", "GrammarError", "Grammars"]
