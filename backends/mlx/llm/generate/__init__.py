"""Runs exported language models: single answers, batches and classification."""
