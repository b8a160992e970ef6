"""Batch work: a file with requests in, a file with answers out."""

from .answer_file import AnswerFile
from .request_file import Request, RequestLines
from .run import Totals, Workers, answer_all, count_and_check

__all__ = ["AnswerFile", "Request", "RequestLines", "Totals", "Workers", "answer_all", "count_and_check"]
